"""Two traces give the graph of every micro-batch size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.errors import BadInput
from ahp.graph.growth import _Law
from ahp.graph.trace import analyze
from tests.graph.small import CONFIGS, SEQUENCE, Plain, marked, traced

JOB = {"sequence_length": SEQUENCE}


BASES = [*(marked(name, 1) for name in CONFIGS if name != "mixtral"), ("llama", 2)]


@pytest.mark.parametrize(("name", "base"), [*BASES, pytest.param("mixtral", 1, marks=pytest.mark.slow)])
def test_at_equals_a_true_trace(name: str, base: int) -> None:
    assert traced(name, batch=base).at(4) == traced(name, batch=4)


def test_what_at_gives_can_grow_again() -> None:
    graph = traced("llama")
    assert graph.at(6).at(3) == graph.at(3)
    assert graph.at(1) is graph


def test_each_size_is_made_once_and_a_bool_is_none() -> None:
    graph = traced("llama", batch=2)
    assert graph.at(1) is graph.at(1)
    with pytest.raises(BadInput, match="micro_batch_size"):
        graph.at(True)


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_a_size_that_is_none(size: int) -> None:
    with pytest.raises(BadInput, match="micro_batch_size"):
        traced("llama").at(size)


def test_a_graph_without_its_pair_says_what_to_do() -> None:
    graph = replace(traced("llama"), larger=None)
    with pytest.raises(BadInput, match="analyze it with micro_batch_size=4"):
        graph.at(4)


class AcrossTheBatch(Plain):
    """Sequences look at each other: [B, B] similarities, which grow with the square of the batch."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        flat = x.flatten(1)
        return self.out(x + ((flat @ flat.T) @ flat).view_as(x))


def test_products_across_the_batch_grow_with_its_square() -> None:
    assert analyze(AcrossTheBatch(), JOB).at(5) == analyze(AcrossTheBatch(), JOB, micro_batch_size=5)


class DependsOnTheBatch(Plain):
    """Does something else for every size of the batch, so that no law holds."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for _ in range(input_ids.shape[0]):
            x = torch.relu(x)
        return self.out(x)


def test_a_model_that_changes_with_the_batch_is_traced_for_one_size_only() -> None:
    graph = analyze(DependsOnTheBatch(), JOB, micro_batch_size=3)
    assert sum(o.name == "aten.relu" for o in graph.embedding.operators) == 3
    with pytest.raises(BadInput, match="other operators"):
        graph.at(2)


@settings(deadline=None)
@given(
    small=st.integers(1, 8), gap=st.integers(1, 4), size=st.integers(1, 64),
    constant=st.integers(0, 10**9), slope=st.integers(0, 10**9), square=st.integers(0, 10**6),
)  # fmt: skip
def test_the_law_is_exact_on_lines_and_on_parabolas_through_zero(
    small: int, gap: int, size: int, constant: int, slope: int, square: int
) -> None:
    law = _Law(small, small + gap, size)

    def line(b: int) -> int:
        return constant + slope * b

    def parabola(b: int) -> int:
        return slope * b + square * b * b

    assert law.number(line(small), line(small + gap)) == line(size)
    assert law.number(parabola(small), parabola(small + gap), square=True) == parabola(size)
