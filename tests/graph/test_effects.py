"""Blocks that do what a graph of torch's operators does not: refused where a layout needs the graph, with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.host_numbers import Generators
from ahp.graph.outline import outline, why_uncuttable
from ahp.search.slicing.model import slice_model
from tests.runtime.models import Block, Custom


class DrawsFromPython(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if random.random() < 0.5 else 1.0)


class DrawsFromNumpy(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * np.random.random()


class Counts(Block):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Hooks(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return y


class Data(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + 0.1 * y.data


class Branches(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


def of_blocks(block: Callable[[int, int], nn.Module]) -> Custom:
    module = Custom()
    module.blocks = nn.Sequential(*(block(32, 4) for _ in range(2)))
    return module


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (DrawsFromPython, "block DrawsFromPython draws numbers from random, of which its graph would hold those of one call"),
        (DrawsFromNumpy, "block DrawsFromNumpy draws numbers from numpy.random, of which"),
        (Counts, r"block Counts changes its attribute calls, .* \(a buffer may change\)"),
        (Hooks, "block Hooks registers a hook on the gradient of a tensor, which its graph would not run"),
    ],
)  # fmt: skip
def test_blocks_that_do_more_than_their_graph_are_not_sliced(block: type[Block], told: str) -> None:
    with pytest.raises(BadInput, match=rf"tensor_parallel_degree = 2: {told}.* \(valid: 1\)"):
        slice_model(of_blocks(block), 2)


def test_data_of_a_tensor_is_that_tensor_without_a_gradient() -> None:
    (captured,) = outline(of_blocks(Data), batch_size=1, sequence_length=8).captures
    assert not isinstance(captured, BadInput)
    assert torch.ops.aten.detach.default in [node.target for node in captured.nodes]


def test_control_flow_that_depends_on_data_is_named() -> None:
    told = "model = Custom: what the model's forward does next depends on the values of a tensor"
    with pytest.raises(BadInput, match=told):
        outline(of_blocks(Branches), batch_size=1, sequence_length=8)


class DropsLayers(Custom):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        for block in self.blocks:
            if not self.training or random.random() < 0.9:
                x = block(x)
        return self.head(self.norm(x))


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_may_leave_out_blocks_is_not_cut_whichever_it_runs_now(training: bool) -> None:
    """Training runs it in training mode, though ``from_pretrained`` gives it in that of evaluation."""
    module = DropsLayers().train(training)
    before = random.getstate()
    for _ in range(3):
        reason = why_uncuttable(module, sequence_length=8)
        assert reason == "the model draws numbers from random outside of its blocks, and may leave out blocks by them"
        assert outline(module, batch_size=1, sequence_length=8).uncuttable == reason
    assert random.getstate() == before
    assert module.training == training


def test_generators_go_on_from_where_they_were() -> None:
    generators = Generators()
    state, from_state, seeded, drawn_since = (
        generators.state,
        generators.from_state,
        generators.seeded,
        generators.drawn_since,
    )
    start = state()
    assert drawn_since(start) is None
    with seeded(3):
        numbers = random.random(), np.random.random()
    assert drawn_since(start) is None
    with seeded(3):
        again = state()
    with from_state(again):
        assert (random.random(), np.random.random()) == numbers
    assert drawn_since(start) is None
    with from_state(start):
        np.random.random()
        assert drawn_since(start) == "numpy.random"
        random.random()
        assert drawn_since(start) == "random"
