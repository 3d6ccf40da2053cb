"""A loss that is no number is traced to the module and the rank that made it first, and no weight follows it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.marks import cases
from tests.runtime.averages import How, averaging
from tests.runtime.models import JOB, MODELS, batch
from tests.runtime.test_equality import world_size
from tests.runtime.weights.test_checkpoint import PLANS
from tests.runtime.workers import Pool

FAULTS = {
    "weight": ("model.layers.3.mlp.up_proj.weight", r"model\.layers\.3\.mlp"),
    "gradient": ("model.layers.2.mlp.down_proj.weight", r"all outputs are numbers.*: model\.layers\.2\.mlp\.down_proj\.weight"),
}  # fmt: skip
RANKS = {("weight", "1f1b"): 1, ("gradient", "1f1b"): 0}
"""Of five layers the second stage has the last two, whole on its rank."""


def spoiled(rank: int, world: int, kind: str, layout: dict[str, Any]) -> tuple[str, bool]:
    """What is said of a weight, or of a gradient, that is no number; and whether the step left all weights alone."""
    from ahp.runtime.parallel import parallelize
    from ahp.runtime.torch_compat import local_tensor

    name = FAULTS[kind][0]
    module = MODELS["llama"]()
    if kind == "weight":
        with torch.no_grad():
            module.get_parameter(name)[0, 0] = float("inf")
    parallel = parallelize(module, {"job": JOB, "parallelism": layout})
    if kind == "gradient":
        gradients = parallel.state.local.gradients

        def poisoned() -> dict[str, torch.Tensor]:
            found = gradients()
            if name in found:
                found[name].fill_(float("nan"))
            return found

        parallel.state.local.gradients = poisoned  # type: ignore[method-assign]
    before = {n: local_tensor(p.detach()).clone() for n, p in parallel.parameters.items()}
    part = parallel.shard(batch(0))
    result = parallel.step(part)
    assert result.failed
    assert not result.skipped
    same = all(local_tensor(p.detach()).equal(before[n]) for n, p in parallel.parameters.items())
    return parallel.find_fault(part, result), same


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("weight", "1f1b"),
        ("gradient", "1f1b"),
        pytest.param("weight", "zero3-x-tp", marks=pytest.mark.wide),
        pytest.param("gradient", "zero3-x-tp", marks=pytest.mark.slow),
        pytest.param("weight", "zero3-x-tp-x-pp", marks=pytest.mark.slow),
    ],
)
def test_first_module_that_is_no_number_is_named(pool: Pool, kind: str, plan: str) -> None:
    results = pool.run(spoiled, world_size(PLANS[plan]), kind, PLANS[plan])
    assert len({said for said, _ in results}) == 1
    said, _ = results[0]
    assert all(same for _, same in results)
    rank = RANKS.get((kind, plan))
    told = FAULTS[kind][1]
    if "tp" in plan and kind == "weight":  # a block is one graph there
        told = r"model\.layers\.3[ ,]"
    assert re.search(told, said), said
    if rank is not None:
        assert said.endswith(f"(rank {rank})")
    if kind == "weight" and plan == "1f1b":
        assert "up_proj, whose weight is not a number either" in said


def looked_at(rank: int, world: int, how: How, layout: dict[str, Any]) -> None:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(averaging(how), {"job": JOB, "parallelism": layout})
    result = parallel.step(part := parallel.shard(batch(0)))
    before = {name: buffer.clone() for name, buffer in parallel.state.buffers.tensors().items()}
    parallel.find_fault(part, result)
    after = parallel.state.buffers.tensors()
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())


@pytest.mark.parametrize(
    ("how", "plan"), cases([("assigned", "zero3-x-tp"), ("batch norm", "1f1b")], wide=[("batch norm", "1f1b")])
)
def test_the_look_writes_no_buffer(pool: Pool, how: How, plan: str) -> None:
    """Moving averages went on, so that a loop of one's own that went on too had another curve."""
    pool.run(looked_at, world_size(PLANS[plan]), how, PLANS[plan])
