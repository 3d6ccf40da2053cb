"""Whatever lies in a user's file: it is read, or refused with one line and exit code 2, and quickly."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ahp.cli.layout_words import constraints_of
from ahp.cli.overrides import split_overrides
from ahp.cluster.model import Cluster
from ahp.cluster.parse import from_file
from ahp.config import load_config
from ahp.errors import BadInput
from ahp.plan import Plan
from ahp.yaml_text import NotYaml, parse_yaml
from tests import mutations

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "config": (mutations.CONFIG, load_config),
    "plan": (mutations.PLAN, Plan.load),
    "cluster": (mutations.CLUSTER, from_file),
}
LONGEST_MESSAGE = 4000


def refusal(read: Callable[[], Any]) -> str | None:
    """What is said of a file, None where it is read."""
    try:
        read()
    except BadInput as error:
        return str(error)
    return None


def is_short(said: str | None) -> bool:
    return said is None or ("\n" not in said and len(said) < LONGEST_MESSAGE)


@pytest.mark.parametrize("kind", READERS)
def test_mutated_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, seeds=range(100))


@pytest.mark.wide
@pytest.mark.parametrize("kind", READERS)
def test_many_mutated_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, seeds=range(100, 4000))


def check(kind: str, folder: Path, seeds: range) -> None:
    text, read = READERS[kind]
    file = folder / f"{kind}.yaml"
    file.write_text(text)
    assert refusal(lambda: read(file)) is None
    refused = 0
    for seed in seeds:
        file.write_bytes(mutations.mutated(text, random.Random(seed)).encode("utf-8", "surrogatepass"))
        said = refusal(lambda: read(file))
        refused += said is not None
        assert is_short(said), said
    assert refused > len(seeds) // 2


@pytest.mark.parametrize("value", mutations.VALUES)
def test_a_value_on_the_command_line_is_read_or_refused(value: str) -> None:
    said = refusal(lambda: load_config(None, split_overrides(["--job.steps", value or "''"])[0]))
    assert is_short(said), said


CHAIN = "x0: &x0 [1]\n" + "\n".join(f"x{i}: &x{i} [*x{i - 1}]" for i in range(1, 2000))
REFUSED = {
    "extra:\n" + mutations.aliases(9): "aliases that stand for more than 200,000 values",
    "extra:\n" + mutations.aliases(9, form="map"): "aliases that stand for more than 200,000 values",
    "extra:\n" + mutations.aliases(9, form="merge"): "aliases that stand for more than 200,000 values",
    CHAIN: "more than 100 deep",
    "[" * 100_000: "more than 100 deep in each other",
    "- " * 100_000: "more than 100 deep in each other",
    "a: &a [*a]": "an alias of a value that contains the alias",
    "a: &a {b: {c: *a}}": "an alias of a value that contains the alias",
    "a: " + "9" * 4301: "a number of 4,301 characters",
    "a: 0x" + "f" * 9999: "a number of 10,001 characters",
    "a: !!int abc": "invalid literal for int",
    "a: !!bool 7": "'7' is neither true nor false",
    "a: !!set {b}": "could not determine a constructor for the tag",
    "a: !!python/name:os.abort": "could not determine a constructor for the tag",
    "[1]: 2": "a key must be a word",
    "{a: 1}: 2": "a key must be a word",
    "a: 1\na: 2": "the key 'a' is given twice (line 2, column 1)",
    "a: [1": "expected ',' or ']'",
    "x" * 4_000_001: "4,000,001 characters",
}
"""Text, and what is said of it."""


@pytest.mark.parametrize("text", REFUSED, ids=list(REFUSED.values()))
def test_what_no_file_of_ours_holds_is_refused_in_one_line(text: str) -> None:
    """Of these some took minutes, some ended as an internal error."""
    with pytest.raises(NotYaml) as error:
        parse_yaml(text)
    assert REFUSED[text] in str(error.value)
    assert "\n" not in str(error.value)


def test_what_people_write_is_read() -> None:
    shared = "base: &base {a: 1}\nmore: {<<: *base, b: 2}\nlist: [*base, *base]\nwhen: 2026-99-99\nday: 2026-01-01\nrate: 1e-3\nyes: no\n"
    assert parse_yaml(shared) == {
        "base": {"a": 1}, "more": {"a": 1, "b": 2}, "list": [{"a": 1}, {"a": 1}], "when": "2026-99-99", "day": "2026-01-01", "rate": 1e-3, True: False,
    }  # fmt: skip
    assert parse_yaml("") is None


def test_of_many_faults_the_first_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {track: [" + "x, " * 5000 + "x]}")
    with pytest.raises(BadInput, match=r"run\.track\.0 = 'x'.*; and 4991 more$"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "words", ["tp=[1", "tp=&a [*a]", "dp=\u00b2", "dp=" + "9" * 5000, "dp=2x", "dp=0", "tp=" + "9" * 5000]
)
def test_a_layout_on_the_command_line_is_refused_in_one_line(words: str) -> None:
    with pytest.raises(BadInput):
        constraints_of(words)


def test_a_cluster_of_more_digits_than_python_reads_is_refused() -> None:
    with pytest.raises(BadInput, match="has 5000 digits"):
        Cluster.parse("9" * 5000 + "xH100-SXM-80GB")
