"""Ranks numbered along the mesh axes in another order: they lie as the plan says, and compute what one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workers import JOIN_TIMEOUT_S
from tests.runtime.models import JOB, MODELS, batch
from tests.runtime.test_equality import assert_same_curve, assert_same_weights
from tests.runtime.workers import Pool

STEPS, SAVED = 4, 2
DEGREES = {
    "data_parallel_shard_degree": 2,
    "tensor_parallel_degree": 2,
    "pipeline_parallel_degree": 2,
    "micro_batch_size": 2,
}
ORDER = ("tp", "dp_shard", "pp")
"""The usual one turned round: neighbouring ranks are stages of one pipeline."""


def groups(rank: int, world: int, layout: dict[str, Any]) -> dict[str, list[int]]:
    import torch
    import torch.distributed as dist

    from ahp.plan import Parallelism
    from ahp.runtime.ranks.mesh import AXES, build_mesh

    mesh = build_mesh(Parallelism(**layout), torch.device("cpu"))
    return {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in (*AXES, "ep") if mesh.size(axis) > 1}


def limits(rank: int, world: int, layout: dict[str, Any]) -> set[float]:
    """Seconds that the collectives of each axis wait."""
    import torch

    from ahp.plan import Parallelism
    from ahp.runtime.ranks.mesh import AXES, build_mesh
    from ahp.runtime.ranks.torch_compat import time_limit

    mesh = build_mesh(Parallelism(**layout), torch.device("cpu"))
    groups = [mesh.data.get_group(), *map(mesh.group, (*AXES, "ep", "efsdp"))]
    return {time_limit(mesh.device, group).total_seconds() for group in groups}


def test_every_axis_waits_as_long_as_the_job(pool: Pool) -> None:
    """A DeviceMesh's groups wait thirty minutes under gloo, whatever the job's own was told."""
    layout = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "tensor_parallel_degree": 2}
    assert pool.run(limits, 4, layout) == [{JOIN_TIMEOUT_S}] * 4


def test_neighbours_differ_in_the_last_axis(pool: Pool) -> None:
    degrees = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "expert_parallel_degree": 2}
    found = pool.run(groups, 4, {**degrees, "mesh_order": ("dp_shard", "dp_replicate")})
    assert found[0] == {"dp_replicate": [0, 1], "dp_shard": [0, 2], "ep": [0, 2]}
    assert found[3] == {"dp_replicate": [2, 3], "dp_shard": [1, 3], "ep": [1, 3]}


def train_and_move(rank: int, world: int, model: str, folder: str) -> dict[str, Any]:
    """Some steps in ``ORDER``, and the rest from its checkpoint in yet another order."""
    from ahp.runtime.parallel import parallelize

    first = parallelize(MODELS[model](), {"job": JOB, "parallelism": {**DEGREES, "mesh_order": ORDER}})
    results = [first.step(first.shard(batch(step))) for step in range(SAVED)]
    first.save(folder)
    then = parallelize(
        MODELS[model](), {"job": JOB, "parallelism": {**DEGREES, "mesh_order": ("dp_shard", "pp", "tp")}}
    )
    then.load(folder)
    results += [then.step(then.shard(batch(step))) for step in range(SAVED, STEPS)]
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "weights": {name: then.state.layout.whole(name, p.detach()) for name, p in sorted(then.parameters.items())},
    }


@pytest.mark.parametrize("model", ["gpt2"])  # its first and last stage share the embedding
def test_any_order_equals_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], tmp_path: Path, model: str
) -> None:
    results = pool.run(train_and_move, 8, model, str(tmp_path / "checkpoint"))
    expected = plain_run(model, STEPS)
    for result in results:
        assert result["losses"] == results[0]["losses"]
        assert result["norms"] == results[0]["norms"]
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


def test_replicas_within_shards_equal_one_process(pool: Pool, plain_run: Callable[..., dict[str, Any]]) -> None:
    from tests.runtime.test_equality import train

    degrees = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "pipeline_parallel_degree": 2}
    layout = {**degrees, "zero_stage": 2, "mesh_order": ("dp_shard", "pp", "dp_replicate")}
    results = pool.run(train, 8, "llama", layout, STEPS, JOB)
    expected = plain_run("llama", STEPS)
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)
