"""Text to batches: what is read, what is cached, in which order it is handed out."""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.errors import BadInput
from ahp.job import Job
from ahp.runtime.data import corpus as corpora
from ahp.runtime.data import text
from ahp.runtime.data.batches import NOT_SCORED, PADDING, Batches, Masking
from ahp.runtime.data.corpus import Corpus, Damaged, prepare
from ahp.runtime.data.documents import conversation
from ahp.runtime.data.job_batches import batches_for, validation_batches_for
from ahp.runtime.data.tokenizer import END_OF_TEXT, MASK, end_of_text, mask, opened, save_for_transformers
from ahp.runtime.run.texts import Texts

VOCABULARY = 300


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"document {number}: " + "def call(x): return x + 1\n" * (3 + number))
    return folder


def flipped(content: bytes, place: int) -> bytes:
    """With one bit of one byte flipped."""
    return content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]


def made_of(lengths: list[int]) -> Corpus:
    """Documents of the given lengths; every token is its own position, so that it says where it came from."""
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    return Corpus(Path(), np.arange(sum(lengths), dtype=np.uint32), starts, "")


def test_standard_library_is_the_same_real_python_each_time() -> None:
    first, second = text.find("python-stdlib"), text.find("python-stdlib")
    assert first == second
    assert first.fingerprint() == second.fingerprint()
    assert 1_000_000 < first.num_bytes <= text.STDLIB_LIMIT_BYTES
    names = {file.name for file in first.files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any(part in text.STDLIB_LEFT_OUT for file in first.files for part in file.parts[-2:-1])


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "one"}) + "\n\n" + json.dumps({"text": "two", "id": 3}) + "\n")
    found = list(text.find(str(file)).documents(template))
    assert [document.text for document in found] == ["one", "two"]
    assert sum(document.source_bytes for document in found) == file.stat().st_size - 1  # all but the empty line


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"body": "x"}', '{"text": 3}', '{"messages": [{"content": "x"}]}', "[" * 100_000]
)
def test_jsonl_faults_name_file_and_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(BadInput, match=r"job\.data: .*a\.jsonl line 2"):
        list(text.find(str(file)).documents(template))


LATIN = "Stra\N{LATIN SMALL LETTER SHARP S}e".encode("latin-1")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b"plain " + LATIN, r"a\.txt: byte 0xdf at offset 10 is not UTF-8.*LATIN1"),
        ("a.txt", "text".encode("utf-16"), r"a\.txt: byte 0xff at offset 0 .*UTF-16"),
        ("a.txt", "Gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n".encode() + b"\0\1", r"a\.txt: byte 0x00 at offset 5 is no text.*UTF-16LE"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "' + LATIN + b'"}\n', r"a\.jsonl line 2: byte 0xdf at offset 31 "),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "ab\\ud800"}\n', r"a\.jsonl line 2: \\ud800 at character 2 is half of a pair"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_text_are_refused_with_their_place(
    folder: Path, name: str, content: bytes, told: str
) -> None:
    """They were read with signs for what could not be, and trained on."""
    (folder / name).write_bytes(content)
    for data, key in ((folder, "job.data"), (folder / name, "job.validation")):
        with pytest.raises(BadInput, match=rf"^{key}: .*" + told):
            prepare(str(data), VOCABULARY, key=key)


def test_the_mark_at_the_beginning_of_a_file_is_no_text(tmp_path: Path) -> None:
    """Editors on Windows write it; a mark at another place is a character."""
    for name, content in (("a.txt", "one\ufeff"), ("b.jsonl", '{"text": "two"}\n{"text": "\ufeffthree"}\n')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    found = text.find(str(tmp_path)).documents(template)
    assert [document.text for document in found] == ["one\ufeff", "two", "\ufeffthree"]


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Path, *args: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    source = text.find(str(folder))
    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(BadInput, match=r"^job\.data: .*0\.txt: cannot be read \(Input/output error\)"):
        list(source.documents(template))
    monkeypatch.setattr(Path, "open", broken)
    with pytest.raises(BadInput, match=r"^job\.data: .*0\.txt: cannot be read \(Input/output error\)"):
        source.fingerprint()


def test_a_field_is_read_where_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "title", "body": "words"}) + "\n")
    assert [d.text for d in text.find(str(file), "body").documents(template)] == ["words"]
    assert text.find(str(file), "body").fingerprint() != text.find(str(file)).fingerprint()
    with pytest.raises(BadInput, match=r"job\.data_field = 'boody'.*a\.jsonl line 1 .*valid: text, body"):
        list(text.find(str(file), "boody").documents(template))


def template(messages: list[dict[str, Any]], opens_answer: bool) -> str:
    """ChatML, as Qwen and others write it."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n" * opens_answer


def forgetful(messages: list[dict[str, Any]], opens_answer: bool) -> str:
    """Keeps the reasoning of the last turn alone, as templates of reasoning models do."""
    kept = [{**m, "content": m["content"].split("</think>")[-1]} for m in messages[:-1]]
    return template([*kept, *messages[-1:]], opens_answer)


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>two twos</think>4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]


def test_only_answers_of_a_conversation_are_scored(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n")
    (document,) = text.find(str(file)).documents(template)
    assert document.text == template(TALK, False)
    assert document.ended
    assert [piece.text for piece in document.pieces if piece.scored] == [
        "<think>two twos</think>4<|im_end|>\n",
        "6<|im_end|>\n",
    ]


def test_answers_that_a_template_rewrites_later_stand_alone() -> None:
    first, second = conversation(TALK, forgetful)
    assert "".join(piece.text for piece in first) == template(TALK[:3], False)
    assert [piece.text for piece in first if piece.scored] == ["<think>two twos</think>4<|im_end|>\n"]
    assert "think" not in "".join(piece.text for piece in second)
    with pytest.raises(BadInput, match="opens an answer otherwise"):
        list(conversation(TALK, lambda messages, opens: "?" if opens else template(messages, False)))


def test_completions_are_scored_up_to_the_end_and_prompts_are_not(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"count to {n}: ", "completion": " ".join(map(str, range(n)))} for n in range(3, 9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = prepare(str(file), VOCABULARY)
    tokenizer, end = corpus.tokenizer(), corpus.tokenizer().token_to_id(END_OF_TEXT)
    assert corpus.scored is not None
    for packing in ("packed", "padded"):
        batches = Batches(corpus, sequence_length=32, global_batch_size=2, seed=0, packing=packing)
        for step in range(batches.num_sequences // 2):
            for row in batches(step)["labels"]:
                written = [t for t in row[row != NOT_SCORED].tolist() if t != end]
                assert "count" not in tokenizer.decode(written)
    padded = Batches(corpus, sequence_length=64, global_batch_size=6, seed=0, packing="padded")(0)["labels"]
    answers = {tokenizer.decode(row[row != NOT_SCORED].tolist(), skip_special_tokens=False) for row in padded}
    assert answers == {row["completion"] + END_OF_TEXT for row in rows}


def with_template(trained: Path, folder: Path) -> Path:
    """A tokenizer's folder as transformers saves it, with a template."""
    from tokenizers import Tokenizer

    save_for_transformers(Tokenizer.from_file(str(trained)), folder)
    turn = "{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}"
    opening = "{% if add_generation_prompt %}assistant: {% endif %}"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}" + turn + "{% endfor %}" + opening)
    return folder / "tokenizer.json"


def test_conversations_use_the_template_beside_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": TALK[1:3]}) + "\n")
    with pytest.raises(BadInput, match="no chat template"):
        prepare(str(file), VOCABULARY)
    tokenizer_file = with_template(prepare(str(folder), VOCABULARY).folder / "tokenizer.json", tmp_path / "hf")
    corpus = prepare(str(file), VOCABULARY, tokenizer_file=tokenizer_file)
    assert corpus.scored is not None
    decode = functools.partial(corpus.tokenizer().decode, skip_special_tokens=False)
    expected = f"user: 2+2?{END_OF_TEXT}assistant: <think>two twos</think>4{END_OF_TEXT}"
    assert decode(corpus.tokens.tolist()) == expected
    assert decode(corpus.tokens[corpus.scored].tolist()) == f"<think>two twos</think>4{END_OF_TEXT}"
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ raise_exception('no') }}")
    with pytest.raises(BadInput, match=r"job\.data: .*a\.jsonl line 1: the chat template refuses a conversation.*: no"):
        prepare(str(file), VOCABULARY, tokenizer_file=tokenizer_file)


def test_a_conversation_without_messages_is_no_document(folder: Path, tmp_path: Path) -> None:
    """It ended in a trace: transformers writes none."""
    tokenizer_file = with_template(prepare(str(folder), VOCABULARY).folder / "tokenizer.json", tmp_path / "hf")
    file = tmp_path / "a.jsonl"
    rows = [{"messages": []}, {"messages": TALK[1:3]}, {"prompt": [], "completion": []}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(prepare(str(file), VOCABULARY, tokenizer_file=tokenizer_file).starts) == 1


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (TALK[2:], "the conversation begins with an answer of the role assistant"),
        (
            [{"role": "user", "content": 3}],
            r"refuses a conversation of \['user'\]: TypeError: can only concatenate str",
        ),
        ([{"role": "user", "tool_calls": []}], r"refuses a conversation of \['user'\]: UndefinedError"),
        (
            [{"role": "user", "contents": "a"}],
            r"every message needs a role, and a content or tool_calls; this one is \{'role",
        ),
    ],
)
def test_a_conversation_that_the_template_does_not_write_is_refused_with_its_place(
    folder: Path, tmp_path: Path, messages: list[dict[str, Any]], told: str
) -> None:
    """A template is a program: what it raised besides its own errors ended in a trace, and its own errors named no line."""
    tokenizer_file = with_template(prepare(str(folder), VOCABULARY).folder / "tokenizer.json", tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    )
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in (TALK[1:2], messages)))
    with pytest.raises(BadInput, match=rf"^job\.validation: .*a\.jsonl line 2: .*{told}"):
        prepare(str(file), VOCABULARY, key="job.validation", tokenizer_file=tokenizer_file)


def test_parquet_rows_are_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"job\.data.*pyarrow.*'adaptive-hybrid-parallelism\[data\]'"):
        text.find(str(file))
    monkeypatch.undo()
    texts = [f"document {n}" for n in range(5)]
    give_pyarrow(monkeypatch, texts)
    found = list(text.find(str(file)).documents(template))
    assert [document.text for document in found] == texts
    assert sum(document.source_bytes for document in found) == pytest.approx(file.stat().st_size)
    file.write_bytes(b"rubbish")
    with pytest.raises(BadInput, match=r"a\.parquet: not a parquet file.*no magic"):
        list(text.find(str(file)).documents(template))
    file.write_bytes(b"PAR1")
    for error in (OSError("Corrupt snappy compressed data."), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")):
        give_pyarrow(monkeypatch, texts, error)
        with pytest.raises(
            BadInput, match=r"job\.data: .*a\.parquet: not a parquet file.*(Corrupt snappy|'utf-8' codec)"
        ):
            list(text.find(str(file)).documents(template))


def give_pyarrow(monkeypatch: pytest.MonkeyPatch, texts: list[str], error: Exception | None = None) -> None:
    """The real library where it is installed would do as well; this one reads two rows at a time. ``error``: raised by the second read, as the
    library does for pages that are damaged (OSError) and text that is not UTF-8."""

    class ArrowException(Exception):
        pass

    class ParquetFile:
        def __init__(self, path: Path) -> None:
            if path.read_bytes() != b"PAR1":
                raise ArrowException("no magic")
            self.metadata = SimpleNamespace(num_rows=len(texts))

        def iter_batches(self, batch_size: int) -> Iterator[Any]:
            for first in range(0, len(texts), 2):
                if first and error is not None:
                    raise error
                rows = [{"text": t} for t in texts[first : first + 2]]
                yield SimpleNamespace(to_pylist=lambda rows=rows: rows)

    fake, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    fake.__spec__ = ModuleSpec("pyarrow", None)
    fake.ArrowException, fake.parquet = ArrowException, parquet  # type: ignore[attr-defined]
    parquet.ParquetFile = ParquetFile  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)


class HubRows(list[dict[str, Any]]):
    """What ``datasets.load_dataset`` returns, as far as it is used."""

    def __init__(self, rows: list[dict[str, Any]], file: Path) -> None:
        super().__init__(rows)
        file.write_text(json.dumps(rows))
        self.cache_files = [{"filename": str(file)}]


def test_hub_data_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, configuration: str | None, split: str) -> HubRows:
        asked.append((path, configuration, split))
        if path == "no/such":
            raise ConnectionError("offline")
        return HubRows([{"text": "one"}, {"text": ""}, {"text": "two"}], tmp_path / "x.arrow")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    source = text.find("hub:owner/name/small@validation")
    assert [document.text for document in source.documents(template)] == ["one", "two"]
    whole = text.find("hub:owner/name")
    assert asked == [("owner/name", "small", "validation"), ("owner/name", None, "train")]
    # The library keeps the rows of both in the same files.
    parts = [text.find(f"hub:owner/name@train{part}") for part in ("", "[:50%]", "[50%:]")]
    assert len({part.fingerprint() for part in parts}) == 3
    assert parts[0].fingerprint() == whole.fingerprint()
    with pytest.raises(BadInput, match=r"job\.data = 'hub:no/such'.*ConnectionError: offline"):
        text.find("hub:no/such")
    monkeypatch.setattr(HubRows, "cache_files", [], raising=False)
    monkeypatch.setattr(HubRows, "__init__", lambda self, rows, file: None)
    with pytest.raises(BadInput, match="it lies in no file"):
        text.find("hub:owner/name")
    with pytest.raises(BadInput, match="expected hub:owner/name"):
        text.find("hub:")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"library datasets.*'adaptive-hybrid-parallelism\[data\]'"):
        text.find("hub:owner/name")


def test_data_that_is_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    for data, rule in [
        ("no/such", "no such file"),
        ("", "it names no text"),  # the text of the current folder was read
        (str(tmp_path / "a.csv"), r"\.csv"),
        (str(tmp_path / "empty"), "holds no file"),
    ]:
        with pytest.raises(BadInput, match=rf"job\.data = .*{rule}"):
            text.find(data)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(BadInput, match="holds no text"):
        prepare(str(tmp_path / "blank.txt"), VOCABULARY)


def test_tokens_give_the_documents_back_each_ended(folder: Path) -> None:
    corpus = prepare(str(folder), VOCABULARY)
    tokenizer = corpus.tokenizer()
    assert tokenizer.get_vocab_size() <= VOCABULARY
    assert corpus.tokens.dtype == np.uint16
    end = tokenizer.token_to_id(END_OF_TEXT)
    ends = np.append(corpus.starts[1:], len(corpus.tokens)) - 1
    assert (corpus.tokens[ends] == end).all()
    assert (corpus.tokens == end).sum() == len(corpus.starts) == 6
    for number, (first, last) in enumerate(zip(corpus.starts, ends, strict=True)):
        assert tokenizer.decode(corpus.tokens[first:last].tolist()) == (folder / f"{number}.txt").read_text()


def test_second_call_reads_the_cache(folder: Path) -> None:
    said: list[str] = []
    first = prepare(str(folder), VOCABULARY, say=said.append)
    assert len(said) == 2
    second = prepare(str(folder), VOCABULARY, say=said.append)
    assert len(said) == 2
    assert second.folder == first.folder
    assert second.fingerprint == first.fingerprint


def test_other_text_or_vocabulary_is_another_entry(folder: Path) -> None:
    first = prepare(str(folder), VOCABULARY)
    assert prepare(str(folder), VOCABULARY + 1).folder != first.folder
    (folder / "0.txt").write_text("other words")
    assert prepare(str(folder), VOCABULARY).fingerprint != first.fingerprint


@pytest.mark.parametrize("name", ["tokens.bin", "starts.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damaged_entry_is_rebuilt_and_said_to_be(folder: Path, name: str, damage: str) -> None:
    whole = prepare(str(folder), VOCABULARY)
    tokens, file = whole.tokens.tolist(), whole.folder / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:-3] if damage == "cut" else flipped(content, len(content) // 2))
    with pytest.raises(Damaged, match="start the command again"):
        corpora.read(whole.folder)
    said: list[str] = []
    again = prepare(str(folder), VOCABULARY, say=said.append)
    told = {"cut": f"{name} is cut", "flipped": f"{name} has changed since it was written", "gone": "is missing"}
    assert said[0].startswith(f"cache entry {str(whole.folder)!r}: ")
    assert said[0].endswith("; it is made again")
    assert name == "meta.json" or told[damage] in said[0]
    assert again.tokens.tolist() == tokens
    assert again.fingerprint == whole.fingerprint
    assert len(list(whole.folder.parent.iterdir())) == 1


def test_a_flipped_bit_anywhere_in_the_list_of_files_is_found(folder: Path) -> None:
    """A smaller number of tokens or documents made a smaller corpus of the same fingerprint."""
    whole = prepare(str(folder), VOCABULARY)
    file = whole.folder / "meta.json"
    content = file.read_bytes()
    for place in range(len(content)):
        file.write_bytes(flipped(content, place))
        with pytest.raises(Damaged):
            corpora.read(whole.folder, verify=False)
    file.write_bytes(content)
    assert corpora.read(whole.folder).fingerprint == whole.fingerprint


def test_a_flipped_bit_is_found_by_who_verifies_alone(folder: Path) -> None:
    whole = prepare(str(folder), VOCABULARY)
    texts = Texts((str(whole.folder),), None, whole.fingerprint)
    texts.check(verify=True)
    file = whole.folder / "tokens.bin"
    file.write_bytes(flipped(file.read_bytes(), 5))
    texts.check(verify=False)
    with pytest.raises(Damaged, match=r"tokens\.bin has changed"):
        texts.check(verify=True)


def test_many_at_once_end_with_one_entry(folder: Path, own_cache: Path) -> None:
    results: list[str] = []
    workers = [
        threading.Thread(target=lambda: results.append(prepare(str(folder), VOCABULARY).fingerprint)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert len(list((own_cache / "corpora").iterdir())) == 1


def test_tokenizer_of_the_model_is_used_or_refused(folder: Path, tmp_path: Path) -> None:
    trained = prepare(str(folder), VOCABULARY)
    file = trained.folder / "tokenizer.json"
    size = trained.tokenizer().get_vocab_size()
    assert prepare(str(folder), size, tokenizer_file=file).tokens.tolist() == trained.tokens.tolist()
    with pytest.raises(BadInput, match=f"it has token ids up to {size - 1}, and the model's vocab_size is {size - 1}"):
        prepare(str(folder), size - 1, tokenizer_file=file)
    with pytest.raises(BadInput, match=r"not a tokenizer\.json"):
        prepare(str(folder), size, tokenizer_file=folder / "0.txt")
    with pytest.raises(BadInput, match="at least 257"):
        prepare(str(folder), 256)


def test_the_end_of_a_document_is_no_tag_of_html() -> None:
    """Gemma's tokens have both."""
    from tokenizers import Tokenizer, models

    words = {"<eos>": 0, "</s>": 1, "a": 2}
    assert end_of_text(Tokenizer(models.WordLevel(words, unk_token="a"))) == 0
    del words["<eos>"]
    assert end_of_text(Tokenizer(models.WordLevel(words, unk_token="a"))) == 1


def test_truncation_and_padding_in_a_tokenizers_file_are_passed_over(folder: Path, tmp_path: Path) -> None:
    """They cut each document, and filled the shorter ones up. transformers does neither."""
    expected = prepare(str(folder), VOCABULARY)
    tokenizer = expected.tokenizer()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = prepare(str(folder), VOCABULARY, tokenizer_file=tmp_path / "tokenizer.json")
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.starts.tolist() == expected.starts.tolist()
    assert len(opened(tmp_path / "tokenizer.json").encode("word " * 20).ids) > 12


def test_the_largest_id_of_a_token_counts(folder: Path, tmp_path: Path) -> None:
    """A tokenizer whose ids have gaps has fewer tokens than the model must embed: it was taken, and its last token has no row."""
    file = tmp_path / "tokenizer.json"
    content = json.loads((prepare(str(folder), VOCABULARY).folder / "tokenizer.json").read_text())
    words: dict[str, int] = content["model"]["vocab"]
    far = 70_000
    words[max(words, key=words.__getitem__)] = far
    file.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=f"it has token ids up to {far}, and the model's vocab_size is {far}; enlarge"):
        prepare(str(folder), far, tokenizer_file=file)
    found = prepare(str(folder), far + 1, tokenizer_file=file)
    assert found.tokens.dtype == np.uint32
    assert found.tokens.max() == far


def test_transformers_reads_the_saved_tokenizer(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = prepare(str(folder), VOCABULARY).tokenizer()
    save_for_transformers(tokenizer, tmp_path / "hf")
    words = "def call(x): return x"
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(words)["input_ids"] == tokenizer.encode(words).ids


def test_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "file"))
    with pytest.raises(BadInput, match="AHP_CACHE"):
        prepare(str(folder), VOCABULARY)


def test_a_limit_of_file_sizes_is_told_with_the_way_on(folder: Path, own_cache: Path) -> None:
    """It was an internal error."""
    resource = pytest.importorskip("resource")
    numbers = np.random.default_rng(0).integers(10**9, size=20_000)
    (folder / "long.txt").write_text(" ".join(map(str, numbers)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(
            BadInput, match=r"cannot be written \(File too large\); raise the limit of a file's size \(ulimit -f\)"
        ):
            prepare(str(folder), VOCABULARY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((own_cache / "corpora").iterdir()) == []


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=4, max_size=30),
    sequence_length=st.integers(2, 16),
    global_batch_size=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_every_epoch_hands_out_every_sequence_once(
    lengths: list[int], sequence_length: int, global_batch_size: int, seed: int
) -> None:
    corpus = made_of(lengths)
    if len(corpus.tokens) // sequence_length < global_batch_size:
        return
    batches = Batches(corpus, sequence_length=sequence_length, global_batch_size=global_batch_size, seed=seed)
    count = batches.num_sequences
    places = [batches._sequence(i) for i in range(3 * count)]
    for epoch in range(3):
        assert sorted(places[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_labels_leave_out_only_the_first_token_of_a_document() -> None:
    corpus = made_of([5, 3, 9, 1, 2])
    batches = Batches(corpus, sequence_length=4, global_batch_size=5, seed=1)
    batch = batches(0)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert ids == list(range(ids[0], ids[0] + 4))
        assert labels == [NOT_SCORED if i in (0, 5, 8, 17, 18) else i for i in ids]


def test_order_depends_on_seed_and_step_alone() -> None:
    corpus = made_of([400])

    def ids(step: int, seed: int = 7) -> list[list[int]]:
        batches = Batches(corpus, sequence_length=4, global_batch_size=6, seed=seed)
        return batches(step)["input_ids"].tolist()

    alone = [ids(step) for step in range(40)]
    batches = Batches(corpus, sequence_length=4, global_batch_size=6, seed=7)
    assert [batches(step)["input_ids"].tolist() for step in range(40)] == alone
    assert ids(0, seed=8) != ids(0)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=4, max_size=12),
    packing=st.sampled_from(["packed", "padded"]),
    degree=st.sampled_from([2, 4]),
)
def test_parts_of_a_batch_make_up_the_batch(lengths: list[int], packing: Any, degree: int) -> None:
    batches = Batches(made_of([*lengths, 40]), sequence_length=8, global_batch_size=4, seed=1, packing=packing)
    whole, share = batches(3), 4 // degree
    parts = [batches(3, range(rank * share, (rank + 1) * share)) for rank in range(degree)]
    for key in whole:
        assert torch.cat([part[key] for part in parts]).equal(whole[key])


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=4, max_size=12))
def test_positions_start_again_at_each_document(lengths: list[int]) -> None:
    settings = {"sequence_length": 8, "global_batch_size": 4, "seed": 1}
    batch = Batches(made_of([*lengths, 40]), **settings, document_mask=True)(2)
    starts = {0, *np.cumsum(lengths).tolist()}
    for ids, places in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
        expected = []
        for i, token in enumerate(ids):  # every token is its own place in the corpus
            expected.append(0 if i == 0 or token in starts else expected[-1] + 1)
        assert places == expected
    assert "position_ids" not in Batches(made_of([*lengths, 40]), **settings)(2)


def test_padded_sequences_hold_one_document_each_and_lose_nothing() -> None:
    lengths = [5, 3, 9, 1, 4]
    batches = Batches(made_of(lengths), sequence_length=4, global_batch_size=8, seed=1, packing="padded")
    assert batches.num_sequences == 2 + 1 + 3 + 1 + 1
    batch = batches(0)
    seen = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        filled = max((i + 1 for i in range(4) if ids[i] != PADDING), default=1)
        assert ids[:filled] == list(range(ids[0], ids[0] + filled))
        assert labels == [NOT_SCORED if i in (0, 5, 8, 17, 18) else i for i in ids[:filled]] + [NOT_SCORED] * (
            4 - filled
        )
        seen += ids[:filled]
    assert sorted(seen) == list(range(sum(lengths)))


def test_text_without_a_scored_token_is_refused() -> None:
    """Conversations without an answer: the loss was 0 at each step, and so was that of held-out text."""
    corpus = replace(made_of([40] * 10), scored=np.arange(400) < 320)
    assert batches_for(Job(sequence_length=8, global_batch_size=2), [corpus], masked=False)
    job = Job(sequence_length=8, global_batch_size=2, validation=0.2)
    with pytest.raises(BadInput, match=r"job\.validation = 0\.2: none of its tokens is scored.*answer of the role"):
        validation_batches_for(job, [corpus], None, masked=False)
    with pytest.raises(BadInput, match=r"job\.data = 'python-stdlib': none of its tokens is scored"):
        batches_for(job, [replace(corpus, scored=np.zeros(400, dtype=bool))], masked=False)


def test_held_out_documents_are_the_last_and_not_trained_on() -> None:
    corpus = made_of([40] * 10)
    job = Job(sequence_length=8, global_batch_size=2, validation=0.2)
    train, held_out = (
        batches_for(job, [corpus], masked=False),
        validation_batches_for(job, [corpus], None, masked=False),
    )
    assert held_out is not None
    assert isinstance(train, Batches)
    assert isinstance(held_out, Batches)
    assert (train.num_sequences, held_out.num_sequences) == (40, 10)
    for batches, tokens in ((train, range(320)), (held_out, range(320, 400))):
        batch = [batches(step) for step in range(batches.num_sequences // 2)]
        assert sorted(torch.cat([b["input_ids"] for b in batch]).flatten().tolist()) == list(tokens)
        unscored = sum((b["labels"] == NOT_SCORED).sum().item() for b in batch)
        assert unscored == len(tokens) // 40  # the first token of each document
    other = validation_batches_for(
        job.model_copy(update={"validation": "b.txt"}), [corpus], made_of([80]), masked=False
    )
    assert other is not None
    assert other.num_sequences == 10
    assert validation_batches_for(Job(), [corpus], None, masked=False) is None
    with pytest.raises(BadInput, match=r"job\.validation = 0\.1: .*fewer than one batch"):
        validation_batches_for(
            job.model_copy(update={"validation": 0.1, "global_batch_size": 6}), [corpus], None, masked=False
        )


@pytest.mark.parametrize(("lengths", "share"), [([400], 0.2), ([400], 0.6), ([300, 100], 0.2), ([200, 200], 0.8)])
def test_the_last_tokens_are_held_out_where_documents_are_too_few(lengths: list[int], share: float) -> None:
    """One long file has no last document to hold out: it is cut, and what is left of a document is one."""
    job = Job(sequence_length=8, global_batch_size=2, validation=share)
    corpus, first = made_of(lengths), 400 - round(share * 400)
    train, held_out = (
        batches_for(job, [corpus], masked=False),
        validation_batches_for(job, [corpus], None, masked=False),
    )
    assert held_out is not None
    seen = []
    for batches, tokens in ((train, range(first)), (held_out, range(first, 400))):
        batch = [batches(step) for step in range(batches.num_sequences // 2)]
        assert sorted(torch.cat([b["input_ids"] for b in batch]).flatten().tolist()) == list(tokens)
        seen.append(sum((b["labels"] == NOT_SCORED).sum().item() for b in batch))
    assert seen == [1 + sum(0 < start < first for start in corpus.starts), 1 + sum(corpus.starts > first)]
    with pytest.raises(BadInput, match=r"job\.validation = 0\.01: its 4 tokens make 0 sequences"):
        validation_batches_for(job.model_copy(update={"validation": 0.01}), [corpus], None, masked=False)


def test_less_text_than_one_batch_is_refused() -> None:
    with pytest.raises(BadInput, match=r"job\.data.*3 sequences.*fewer than one batch of job\.global_batch_size 4"):
        Batches(made_of([15]), sequence_length=4, global_batch_size=4, seed=0)


def test_masked_model_sees_hidden_tokens_and_is_scored_on_them_alone() -> None:
    corpus = made_of([40_000])
    size = {"sequence_length": 100, "global_batch_size": 100, "seed": 3}
    plain = Batches(corpus, **size)(5)["input_ids"]
    batches = Batches(corpus, **size, masking=Masking(token=-7, vocab_size=50))
    batch = batches(5)
    ids, labels = batch["input_ids"], batch["labels"]
    scored = labels != NOT_SCORED
    assert (labels[scored] == plain[scored]).all()
    assert (ids[~scored] == plain[~scored]).all()
    hidden = (ids[scored] == -7).float().mean().item()
    kept = (ids[scored] == plain[scored]).float().mean().item()
    # Bands of about five standard deviations of shares of 10,000 tokens, of which 1,500 are scored.
    assert scored.float().mean().item() == pytest.approx(0.15, abs=0.018)
    assert hidden == pytest.approx(0.8, abs=0.05)
    assert kept == pytest.approx(0.1, abs=0.04)
    assert batches(5)["input_ids"].equal(ids)
    assert not batches(6)["labels"].ne(NOT_SCORED).equal(scored)
    assert batches(5, range(7, 9))["input_ids"].equal(ids[7:9])


@pytest.mark.parametrize(
    ("rows", "packing", "rule"),
    [
        ([{"text": "def call(x): return x + 1"}] * 9, "padded", r"job\.packing = 'padded'.*padding"),
        ([{"prompt": "def", "completion": " call(x): return x"}] * 9, "packed", r"job\.data = .*no prompt to read"),
    ],
)
def test_what_does_not_suit_a_masked_model_is_refused(tmp_path: Path, rows: Any, packing: Any, rule: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = Job(data=str(file), packing=packing, sequence_length=4, global_batch_size=1)
    with pytest.raises(BadInput, match=rule):
        batches_for(job, [prepare(str(file), VOCABULARY, masked=True)], masked=True)


def test_tokenizer_of_a_masked_model_can_hide(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = prepare(str(folder), VOCABULARY, masked=True).tokenizer()
    assert tokenizer.id_to_token(mask(tokenizer)) == MASK
    save_for_transformers(tokenizer, tmp_path / "hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").mask_token == MASK
    with pytest.raises(BadInput, match="hidden word"):
        mask(prepare(str(folder), VOCABULARY).tokenizer())
