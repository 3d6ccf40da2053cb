"""What ranks send each other in a step, against what the forecast prices: every collective of a run, by its bytes.

Only layouts in which no collective hides behind another one, since the forecast gives the seconds that are waited for.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from ahp.forecast.communication import CollectiveKind, Network
from ahp.forecast.group import Group
from ahp.forecast.step import price
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from tests.forecast.conftest import make_cluster
from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB, batch
from tests.runtime.test_equality import world_size
from tests.runtime.workers import Pool
from tests.search.families import build

KINDS: dict[str, tuple[CollectiveKind, int]] = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send_recv", 0),
}
"""Operators of torch.distributed, and which argument is the whole tensor."""

ENGINE = EngineChoice(name="ahp", compile=False)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_degree": 2},
    "tensor-selective": {"tensor_parallel_degree": 2, "activation_checkpoint": "selective"},
    "sequence-full": {
        "tensor_parallel_degree": 2, "enable_sequence_parallel": True, "activation_checkpoint": "full",
    },
    "heads-selective": {
        "context_parallel_degree": 2, "context_parallel_method": "all-to-all", "activation_checkpoint": "selective",
    },
    "ring-full": {"context_parallel_degree": 2, "context_parallel_method": "ring", "activation_checkpoint": "full"},
    "replicas": {"data_parallel_replicate_degree": 2},
    "zero1": {"data_parallel_shard_degree": 2, "zero_stage": 1},
    "zero2": {"data_parallel_shard_degree": 2, "zero_stage": 2},
    "zero3-replicas": {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2, "zero_stage": 3},
    "experts": {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "zero_stage": 3},
    "experts-full": {
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "zero_stage": 3, "activation_checkpoint": "full",
    },
    "experts-selective": {
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "zero_stage": 3, "activation_checkpoint": "selective",
    },
}  # fmt: skip
CASES = {
    ("tensor", "llama"): 1.002, ("tensor", "gpt2"): 1.002, ("tensor-selective", "llama"): 1.002, ("sequence-full", "llama"): 1.06,
    ("heads-selective", "llama"): 1.002, ("ring-full", "llama"): 1.002, ("replicas", "llama"): 1.004, ("zero1", "llama"): 1.004,
    ("zero2", "gpt2"): 1.002, ("zero3-replicas", "llama"): 1.002, ("tensor", "mixtral"): 1.01, ("tensor-selective", "mixtral"): 1.01, ("tensor", "qwen3_moe"): 1.01,
    ("experts", "qwen3_moe"): 1.02, ("experts-full", "qwen3_moe"): 1.03, ("experts-selective", "qwen3_moe"): 1.02,
}  # fmt: skip
"""By how much a run may send more: norms of gradients and the loss; under sequence parallelism the ends (docs/decisions/rows-of-a-tokens-experts.md)."""


def sent_bytes(kind: CollectiveKind, num_bytes: float, ranks: int) -> float:
    """Bytes that a rank sends, where collectives go round a ring."""
    if kind == "send_recv":
        return num_bytes
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * num_bytes


class Sent(TorchDispatchMode):
    """Adds up what this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (name := func.overloadpacket.__name__) in KINDS:
            kind, at = KINDS[name]
            tensors = args[at] if isinstance(args[at], list) else [args[at]]
            group = next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.num_bytes += sent_bytes(kind, whole, group.size())
        return func(*args, **(kwargs or {}))


def built(model: str) -> nn.Module:
    torch.manual_seed(0)
    return BUILDERS[model]() if model in BUILDERS else build(model, device="cpu")


def sent_in_a_step(rank: int, world: int, model: str, layout: dict[str, Any]) -> float:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(
        built(model), {"job": JOB, "parallelism": layout, "engine": ENGINE.model_dump()}, device="cpu"
    )
    parallel.step(parallel.shard(batch(0)))  # may make what stays, such as buffers of a model
    data = parallel.shard(batch(1))
    with Sent() as sent:
        parallel.step(data)
    dist.barrier()
    return sent.num_bytes


def priced_bytes(model: str, layout: dict[str, Any]) -> float:
    """The forecast where a byte takes a second and all else next to nothing."""

    def time_s(self: Network, kind: CollectiveKind, num_bytes: float, group: Group) -> float:
        return sent_bytes(kind, num_bytes, group.size)

    job = Job(**JOB)
    graph = analyze(built(model), job)
    with mock.patch.object(Network, "time_s", time_s):
        cluster = make_cluster(per_node=world_size(layout))
        step = price(graph, cluster, job, Parallelism(**layout), ENGINE).forecast.step
    return sum(seconds for part, seconds in step.items() if part != "slowest_rank")


@pytest.mark.parametrize(("layout", "model"), cases([*CASES], fast=[("tensor", "mixtral")]))
def test_a_run_sends_what_is_priced(pool: Pool, layout: str, model: str) -> None:
    keys = {**LAYOUTS[layout], "micro_batch_size": 2}
    sent = pool.run(sent_in_a_step, world_size(keys), model, keys)[0]
    priced = priced_bytes(model, keys)
    assert 0.999 * priced < sent < CASES[layout, model] * priced
