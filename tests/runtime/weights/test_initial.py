"""A start from random weights: every layout begins with the very values of one process, and no rank makes what it does not hold."""

from __future__ import annotations

import math
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.runtime.weights.allocate import initial_weights, materialize
from tests.runtime.models import JOB, MODELS
from tests.runtime.test_equality import world_size
from tests.runtime.weights.test_checkpoint import PLANS
from tests.runtime.workers import Pool

SEED = 5
CASES = [
    ("1f1b", "gpt2"),
    ("zero3-x-tp", "gpt2"),
    ("zero3-x-tp-x-pp", "llama"),
    ("interleaved", "gpt2"),
    ("zero0", "llama"),
]
FAST = [("1f1b", "gpt2")]


def on_meta(model: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[model]()


@cache
def alone(model: str) -> dict[str, torch.Tensor]:
    module = on_meta(model)
    materialize(module, seed=SEED)
    return {name: p.detach() for name, p in module.named_parameters()}


def start(rank: int, world: int, model: str, layout: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights that this rank's group begins with, and the names of those that this rank made."""
    from ahp.runtime.parallel import parallelize
    from ahp.runtime.weights import initial

    torch.manual_seed(rank)  # what the ranks drew before must not matter
    made: list[str] = []
    values = initial._Part.values

    def noted(part: Any, seed: int) -> dict[str, torch.Tensor]:
        made.extend(part.parameters)
        return values(part, seed)

    with mock.patch.object(initial._Part, "values", noted):
        parallel = parallelize(on_meta(model), {"job": {**JOB, "seed": SEED}, "parallelism": layout})
    return {
        name: parallel.state.layout.whole(name, p.detach()) for name, p in sorted(parallel.parameters.items())
    }, made


@pytest.mark.parametrize(
    ("layout", "model"), [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_values_are_those_of_one_process_and_only_ones_own_are_made(pool: Pool, layout: str, model: str) -> None:
    expected = alone(model)
    results = pool.run(start, world_size(PLANS[layout]), model, PLANS[layout])
    assert set().union(*(weights for weights, _ in results)) == set(expected)
    for weights, made in results:
        assert sorted(made) == sorted(weights)
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name


def test_values_follow_the_models_own_rules() -> None:
    """GPT-2 draws its matrices twice: each alone, then those before residual sums again, with another spread."""
    found = alone("gpt2")
    for name, weight in found.items():
        if weight.ndim == 1:
            assert torch.equal(
                weight, torch.ones_like(weight) if ".ln_" in f".{name}" and "weight" in name else 0 * weight
            )
            continue
        spread = 0.02 / math.sqrt(2 * 5) if "c_proj" in name else 0.02
        assert weight.std().item() == pytest.approx(spread, rel=0.1), name
    assert not torch.equal(found["transformer.h.0.mlp.c_fc.weight"], found["transformer.h.1.mlp.c_fc.weight"])
    other = on_meta("gpt2")
    materialize(other, seed=SEED + 1)
    assert not torch.equal(other.get_parameter("transformer.wte.weight"), found["transformer.wte.weight"])
    llama = alone("llama")["model.embed_tokens.weight"]
    assert not llama[3].any()  # the row of the padding is zero, all others drawn
    assert llama[[2, 4]].std().item() == pytest.approx(0.02, rel=0.3)


class Leaves(nn.Module):
    """Its own parameter has no value after ``reset_parameters``."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.scale, self.shift, self.reads = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3)), reads

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        if self.reads and self.scale[0].item() > 0:
            nn.init.zeros_(self.shift)


@pytest.mark.parametrize(("reads", "told"), [(False, "leaves out shift"), (True, "cannot run on the meta device")])
def test_what_has_no_values_is_refused(reads: bool, told: str) -> None:
    with torch.device("meta"):
        module = Leaves(reads=reads)
    with pytest.raises(BadInput, match=f"module: its initialisation {told}"):
        initial_weights(module, seed=0)


def test_parameters_that_are_made_together_are_kept_together() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.other = (nn.Parameter(torch.empty(4)) for _ in range(3))

        def reset_parameters(self) -> None:
            nn.init.normal_(self.one)
            nn.init.normal_(self.other)
            with torch.no_grad():
                self.two.copy_(2 * self.one)

    with torch.device("meta"):
        module = Shares()
    found = initial_weights(module, seed=0)
    assert sorted(sorted(part.parameters) for part in found.parts) == [["one", "two"], ["other"]]
    (two,) = (value for _, value in found.values({"two"}))
    values = dict(found.values({"one", "other"}))
    assert torch.equal(two, 2 * values["one"])
    assert not torch.equal(values["other"], values["one"])
