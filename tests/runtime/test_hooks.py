"""What a model tells autograd by itself, and hooks of the user's: they do what they do on one process, or the layout is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ahp.errors import BadInput
from tests.runtime.models import BUILDERS, JOB, Block, Custom
from tests.runtime.test_equality import LAYOUTS, assert_same_curve, train, world_size
from tests.runtime.workers import Pool

STEPS = 2


class Quarter(torch.autograd.Function):
    """The identity; in backward a quarter of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 0.25


class OwnFunction(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Quarter.apply(x))


class OwnHook(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.25)
        return super().forward(y)


class Rechecked(Block):
    """Recomputes by itself what its backward needs, by torch's older way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


def model(kind: type[Block] = Block, hooked: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    module = Custom(layers=2)
    module.blocks = nn.Sequential(*(kind(32, 4) for _ in range(2)))
    for block in module.blocks:
        up = block.up
        if hooked == "block":
            block.register_forward_pre_hook(lambda _, given: (given[0] * 1.5,))
            block.register_forward_hook(lambda _, given, out: out * 0.5)
        elif hooked == "module":
            up.register_forward_hook(lambda _, given, out: out * 0.5)
        elif hooked == "module backward":
            up.register_full_backward_hook(lambda _, to, of: tuple(gradient * 0.25 for gradient in to))
        elif hooked == "parameter":
            up.weight.register_hook(lambda gradient: gradient * 0.25)
        elif hooked == "accumulated":
            up.weight.register_post_accumulate_grad_hook(shrink)
    return module


def shrink(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.25)


HOOKED = ("block", "module", "module backward", "parameter", "accumulated")
MODELS = {
    "own function": partial(model, OwnFunction),
    "own hook": partial(model, OwnHook),
    "recomputed": partial(model, Rechecked),
    **{hooked: partial(model, hooked=hooked) for hooked in HOOKED},
}
BUILDERS.update({f"hooks: {name}": build for name, build in MODELS.items()})


def train_hooked(rank: int, world: int, name: str, layout: str) -> dict[str, Any]:
    """Runs in each worker, which finds the models by importing this file."""
    return train(rank, world, f"hooks: {name}", LAYOUTS[layout], STEPS, JOB)


@pytest.mark.parametrize(("name", "layout"), [("block", "tp"), ("module", "tp"), ("module", "sequence")])
def test_hooks_of_a_forward_run_once_around_sliced_blocks(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], name: str, layout: str
) -> None:
    for found in pool.run(train_hooked, world_size(LAYOUTS[layout]), name, layout):
        assert_same_curve(found, plain_run(f"hooks: {name}", STEPS))


def why_refused(rank: int, world: int, name: str, layout: str) -> str:
    from ahp.runtime.parallel import parallelize

    with pytest.raises(BadInput) as refused:
        parallelize(MODELS[name](), {"job": JOB, "parallelism": LAYOUTS[layout]})
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "layout", "told"),
    [
        ("own function", "tp", "Quarter has a backward of its own"),
        ("recomputed", "tp", "CheckpointFunction has a backward of its own"),
        ("module backward", "tp", "has a backward of its own"),
        ("parameter", "tp", "blocks.0.up.weight has a hook"),
        ("accumulated", "tp", "blocks.0.up.weight has a hook"),
        ("parameter", "zero3", "blocks.0.up.weight has a hook"),
        ("accumulated", "zero1", "blocks.0.up.weight has a hook"),
        ("parameter", "zero-bubble", "blocks.0.up.weight has a hook"),
    ],
)
def test_a_backward_that_a_layout_would_leave_out_is_refused(pool: Pool, name: str, layout: str, told: str) -> None:
    """Training would go on with other gradients."""
    for message in pool.run(why_refused, world_size(LAYOUTS[layout]), name, layout):
        assert told in message
        assert "valid: " in message


@pytest.mark.parametrize("name", ["own function", "own hook", "module backward", "parameter"])
@pytest.mark.parametrize("layout", ["zero0", "1f1b"])
def test_layouts_that_run_the_modules_own_forward_keep_its_backward(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], name: str, layout: str
) -> None:
    for found in pool.run(train_hooked, world_size(LAYOUTS[layout]), name, layout):
        assert_same_curve(found, plain_run(f"hooks: {name}", STEPS))
