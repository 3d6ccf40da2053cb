"""A mixture of texts: which row is from which is a function of the seed and the row alone, and each has its share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ahp.errors import BadInput
from ahp.job import Job, WeightedData
from ahp.plan import Plan, validated
from ahp.runtime.data.corpus import Corpus
from ahp.runtime.data.job_batches import batches_for, fingerprint_of, validation_batches_for
from ahp.runtime.data.mixture import DEALT, Mixture, shares
from ahp.runtime.run.texts import prepare_texts
from tests.runtime.data.test_data import made_of
from tests.runtime.run.test_trainer import MODEL

APART = 100_000
"""Tokens of the second text count from here, so that each says where it is from."""


def texts() -> list[Corpus]:
    first, second = made_of([40] * 20), made_of([40] * 5)
    tokens = second.tokens + np.uint32(APART)
    return [first, Corpus(second.folder, tokens, second.starts, "second")]


def mixture(weights: tuple[float, float] = (0.7, 0.3), **more: Any) -> Mixture:
    data = [{"path": path, "weight": weight} for path, weight in zip("ab", weights, strict=True)]
    job = validated(Job, {"data": data, "sequence_length": 8, "global_batch_size": 4, **more}, "job")
    found = batches_for(job, texts(), masked=False)
    assert isinstance(found, Mixture)
    return found


def test_each_text_has_its_share_and_is_read_in_epochs_of_its_own() -> None:
    found = mixture()
    rows = [found(step) for step in range(DEALT // 4)]
    ids = torch.cat([row["input_ids"] for row in rows])
    from_second = ids[:, 0] >= APART
    assert int(from_second.sum()) == 300
    for mine, sequences in ((ids[~from_second], 100), (ids[from_second] - APART, 25)):
        firsts = (mine[:, 0] // 8).tolist()
        for epoch in range(len(firsts) // sequences):
            assert sorted(firsts[epoch * sequences : (epoch + 1) * sequences]) == list(range(sequences))
        assert firsts[:sequences] != firsts[sequences : 2 * sequences]
    # Not in turns: somewhere three rows in a row are from the second text.
    assert "111" in "".join(str(int(which)) for which in from_second.tolist())


def test_a_step_depends_on_nothing_but_the_seed() -> None:
    one, other = mixture(), mixture()
    for step in (700, 3, 249, 250, 3):
        whole = one(step)
        for key, value in whole.items():
            assert other(step)[key].equal(value)
            assert other(step, range(1, 3))[key].equal(value[1:3])
    assert not mixture(seed=1)(3)["input_ids"].equal(one(3)["input_ids"])
    assert set(mixture(document_mask=True)(0)) == {"input_ids", "labels", "position_ids"}


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8))
def test_shares_are_the_nearest_and_add_up(weights: list[float]) -> None:
    found = shares(weights)
    assert sum(found) == DEALT
    for rows, weight in zip(found, weights, strict=True):
        assert rows >= 1
        assert abs(rows - weight / sum(weights) * DEALT) <= len(weights)


def test_a_place_counts_the_rows_before_it() -> None:
    found, seen = mixture((0.35, 0.65)), Counter[int]()
    for number in range(2 * DEALT + 7):
        part, index = found.place(number)
        assert index == seen[part]
        seen[part] += 1


def test_each_text_holds_out_its_last_documents() -> None:
    data = (WeightedData(path="a", weight=1), WeightedData(path="b", weight=1))
    job = Job(data=data, sequence_length=8, global_batch_size=4, validation=0.2)
    trained = batches_for(job, texts(), masked=False)
    held_out = validation_batches_for(job, texts(), None, masked=False)
    assert held_out is not None
    for batches, first, second in ((trained, range(640), range(160)), (held_out, range(640, 800), range(160, 200))):
        ids = torch.cat([batches(step)["input_ids"] for step in range(20)]).flatten().tolist()
        assert {i for i in ids if i < APART} <= set(first)
        assert {i - APART for i in ids if i >= APART} <= set(second)


def test_a_text_of_a_mixture_may_be_less_than_a_batch_but_not_less_than_a_sequence() -> None:
    mixture(global_batch_size=64)
    with pytest.raises(
        BadInput, match=r"job\.data = 'b': its 200 tokens make 0 sequences of job\.sequence_length 256; give"
    ):
        mixture(sequence_length=256)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], r"job\.data = \[\]: names no text"),
        ([{"path": "a", "weight": 1}, {"path": "a", "weight": 2}], r"'a' is in the list twice"),
        (
            [{"path": "a", "weight": 1}, {"path": "b", "weight": 0.0001}],
            r"weight 0\.0001 of 'b' is less than a thousandth",
        ),
        ([{"path": "a", "weight": 0}], r"weight"),
        ([{"path": "a"}], r"weight"),
    ],
)
def test_what_is_refused(data: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        validated(Job, {"data": data}, "job")


def test_texts_are_prepared_with_one_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    for name, words in (("a.txt", "plain words, some of them "), ("b.txt", "def other(text): return text\n")):
        (tmp_path / name).write_text(words * 400)
    data = [{"path": str(tmp_path / name), "weight": 1} for name in ("a.txt", "b.txt")]
    job = {"sequence_length": 8, "global_batch_size": 1, "steps": 1, "data": data}
    plan = validated(Plan, {"model": MODEL, "job": job, "parallelism": {}}, "plan")
    found = prepare_texts(plan)
    tokenizers = [(Path(folder) / "tokenizer.json").read_text() for folder in found.corpora]
    assert len(found.corpora) == 2
    assert tokenizers[0] == tokenizers[1]
    assert found.fingerprint.count("+") == 1
    assert prepare_texts(plan) == found
    assert plan.job.data_words == f"0.5 {data[0]['path']} + 0.5 {data[1]['path']}"
    assert fingerprint_of([made_of([4])]) == ""
