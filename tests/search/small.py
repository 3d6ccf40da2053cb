"""Small problems of every kind that the tests of the search draw from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

from hypothesis import strategies as st

from ahp.cluster.model import (
    Calibration,
    Cluster,
    CollectiveSample,
    Device,
    Host,
    Link,
    MatmulSample,
    Measurements,
    MemorySample,
    NodeGroup,
)
from ahp.divisors import divisors
from ahp.engines.registry import names
from ahp.graph.kept import analyze
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import Parallelism
from ahp.search.choices import DEEPEST_UNEVEN_VIRTUAL, RECOMPUTE
from ahp.search.problem import Problem, problem

SEQUENCE = 64
_SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
TRAINED = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}  # fmt: skip
"""Layers of a size that is trained, those of Llama 3 8B."""

SHORT = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
"""Layers whose kernels take less time than their launches."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"model_type": "llama", "num_hidden_layers": 4},
    "tied gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 5, "n_head": 4, "vocab_size": 512, "n_positions": 128},
    "two kinds of blocks": _SIZES
    | {
        "model_type": "gemma3_text", "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
    },
    "experts": _SIZES
    | {"model_type": "mixtral", "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    "layers before those with experts": _SIZES
    | {
        "model_type": "deepseek_v3", "num_hidden_layers": 5, "first_k_dense_replace": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 256, "num_key_value_heads": 4,
        "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip
CLUSTERS = (
    "1xH100-SXM-80GB",
    "3xH100-SXM-80GB",
    "4xA100-SXM-40GB",
    "2x2xH100-SXM-80GB",
    "2x4xA100-SXM-80GB",
    "2x4xA100-SXM-64GB",  # without a switch
    "2x3xB200",
)


LORA = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
"""The layers that all models have except GPT-2 and DeepSeek-V3."""


@cache
def graph(name: str, *, adapted: bool = False, packed: bool = False) -> ModelGraph:
    """``packed``: the documents of a sequence do not see each other."""
    job = {"sequence_length": SEQUENCE, "lora": LORA if adapted else None, "document_mask": packed}
    return analyze(MODELS[name], job)


def small(
    model: str = "llama",
    cluster: str | Cluster = "4xH100-SXM-80GB",
    *,
    engine: str = "ahp",
    batch: int = 8,
    constraints: Any = None,
    memory_bytes: int | None = None,
    optimizer: str = "adamw",
    loss_chunk_tokens: int | None = None,
    offload: bool = False,
    compiled: bool = False,
    precision: str = "bf16",
    dtype: str = "fp32",
    pieces: bool | None = None,
    step_ratio: float | None = None,
    adapted: bool = False,
    packed: bool = False,
) -> Problem:
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if memory_bytes is not None:
        where = with_memory(where, memory_bytes)
    if step_ratio is not None:
        known = Calibration(step_ratio=step_ratio, runs=1, source="a test")
        where = where.model_copy(
            update={"groups": tuple(g.model_copy(update={"calibration": known}) for g in where.groups)}
        )
    asked = {"sequence_length": SEQUENCE, "global_batch_size": batch, "optimizer": optimizer, "precision": precision}
    job = Job.model_validate(asked | {"dtype": dtype, "lora": LORA if adapted else None, "document_mask": packed})
    choice = {
        "name": engine, "loss_chunk_tokens": loss_chunk_tokens, "offload_optimizer": offload, "compile": compiled,
        "enable_async_tensor_parallel": pieces,
    }  # fmt: skip
    return problem(graph(model, adapted=adapted, packed=packed), where, job, constraints, choice)


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    """The cluster with so much memory on every device, none of it taken by a driver."""
    group = cluster.groups[0]
    device = group.device.model_copy(update={"memory_bytes": memory_bytes, "reserved_memory_bytes": 0})
    return Cluster(groups=(group.model_copy(update={"device": device}),))


def cpu_workers(workers: int, cores: int, *, precisions: Sequence[str] = ("fp32", "bf16")) -> Cluster:
    """One node of so many workers, measured while all compute on so many cores, all precisions as fast."""
    shapes = ((64, 64, 64), (256, 256, 256), (1024, 1024, 1024))
    products = tuple(
        MatmulSample(m=m, n=n, k=k, dtype=dtype, workers=workers, seconds=1e-6 + m * n * k / 2e10)
        for m, n, k in shapes
        for dtype in precisions
    )
    collectives = tuple(
        CollectiveSample(kind=kind, workers=workers, bytes=size, seconds=2e-4 + size / 2e9)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
        for size in (4096, 2**24)
    )
    measured = Measurements(
        matmul=products, memory=(MemorySample(workers=workers, bytes_per_s=5e9),), collectives=collectives
    )
    device = Device(
        name="cpu",
        memory_bytes=4 * 2**30,
        memory_bandwidth_bytes_per_s=5e9,
        peak_flops_per_s=dict.fromkeys(precisions, 4e10),
    )
    link = Link(bandwidth_bytes_per_s=2e9, latency_s=2e-4)
    host = Host(cores=cores)
    nodes = NodeGroup(nodes=1, devices_per_node=workers, device=device, intra_node=link, host=host, measured=measured)
    return Cluster(groups=(nodes,))


RESOURCES = ("arithmetic", "memory bandwidth", "host", "links in a node", "links between nodes", "latency")


def times_faster(cluster: Cluster, by: dict[str, float]) -> Cluster:
    """The cluster with each of ``RESOURCES`` so many times as fast."""
    group = cluster.groups[0]
    device = group.device
    peaks = {precision: by.get("arithmetic", 1.0) * peak for precision, peak in device.peak_flops_per_s.items()}
    bandwidth = by.get("memory bandwidth", 1.0) * device.memory_bandwidth_bytes_per_s
    launch_s = device.kernel_launch_s / by.get("host", 1.0)
    figures = {
        "peak_flops_per_s": peaks, "memory_bandwidth_bytes_per_s": bandwidth, "kernel_launch_s": launch_s
    }  # fmt: skip

    def link(found: Link | None, which: str) -> Link | None:
        if found is None:
            return None
        latency_s = found.latency_s / by.get("latency", 1.0)
        bandwidth = by.get(which, 1.0) * found.bandwidth_bytes_per_s
        return found.model_copy(update={"bandwidth_bytes_per_s": bandwidth, "latency_s": latency_s})

    links = {
        "intra_node": link(group.intra_node, "links in a node"),
        "inter_node": link(group.inter_node, "links between nodes"),
    }
    return Cluster(groups=(group.model_copy(update={"device": device.model_copy(update=figures)} | links),))


@st.composite
def problems(
    draw: st.DrawFn,
    clusters: tuple[str, ...] = CLUSTERS,
    *,
    constrained: bool = False,
    engines: list[str] | None = None,
) -> Problem:
    """Any model, cluster, engine and batch; devices with little memory among them, else everything fits."""
    given = {}
    if constrained:
        free = {
            "tensor_parallel_degree": st.just(1),
            "micro_batch_size": st.sampled_from([1, 2]),
            "zero_stage": st.sampled_from([1, 3]),
            "activation_checkpoint": st.sampled_from(["none", "full"]),
            "data_parallel_replicate_degree": st.just(1),
        }
        given = draw(st.fixed_dictionaries({}, optional=free))
    engine = draw(st.sampled_from(engines or names()))
    own = engine == "ahp"  # which alone has them
    optimizer = draw(st.sampled_from(["adamw", "muon"] if own else ["adamw"]))
    return small(
        draw(st.sampled_from(list(MODELS))),
        draw(st.sampled_from(clusters)),
        engine=engine,
        optimizer=optimizer,
        offload=own and optimizer == "adamw" and draw(st.booleans()),
        loss_chunk_tokens=draw(st.sampled_from([None, 24] if own else [None])),
        compiled=own and draw(st.booleans()),
        pieces=draw(st.sampled_from([None, True])) if engine == "megatron" else None,
        step_ratio=draw(st.sampled_from([None, None, 0.6])),
        batch=draw(st.sampled_from([1, 4, 6, 16])),
        constraints=given,
        memory_bytes=draw(st.sampled_from([None, None, 2_000_000_000, 2_010_000_000, 2_050_000_000])),
    )


def pipes(asked: Problem, p: int) -> list[tuple[str, int]]:
    """Schedules with virtual stages, written out."""
    if p == 1:
        return [("1F1B", 1)]
    layers, most = asked.graph.num_layers, asked.most_stages
    depths = [
        v
        for v in range(2, max(most // p, 1) + 1)
        if v <= DEEPEST_UNEVEN_VIRTUAL or layers % (p * v) == 0 or most % (p * v) == 0
    ]
    found = [("GPipe", 1), ("1F1B", 1), ("InterleavedZeroBubble", 1), ("ZBVZeroBubble", 2), ("DualPipeV", 2)]
    return found + [(name, v) for name in ("Interleaved1F1B", "InterleavedZeroBubble") for v in depths]


def everything(asked: Problem) -> list[Parallelism]:
    """Every combination whose degrees multiply to the number of devices, legal or not."""
    world, batch = asked.cluster.num_devices, asked.job.global_batch_size
    experts = asked.graph.config.get("num_experts")
    found = []
    for r, s, t, p, c in product(divisors(world), repeat=5):
        if r * s * t * p * c != world:
            continue
        for (name, v), zero, sequence, e, mb, kind in product(
            pipes(asked, p),
            [1, 2, 3] if s > 1 else [0, 1, 2, 3] if c > 1 else [0],
            [False, True] if t > 1 else [False],
            divisors(experts) if isinstance(experts, int) else [1],
            divisors(batch),
            RECOMPUTE,
        ):
            found.append(
                Parallelism(
                    data_parallel_replicate_degree=r,
                    data_parallel_shard_degree=s,
                    zero_stage=zero,
                    tensor_parallel_degree=t,
                    enable_sequence_parallel=sequence,
                    pipeline_parallel_degree=p,
                    pipeline_parallel_schedule=name,  # type: ignore[arg-type]
                    virtual_stages_per_rank=v,
                    context_parallel_degree=c,
                    expert_parallel_degree=e,
                    micro_batch_size=mb,
                    activation_checkpoint=kind,  # type: ignore[arg-type]
                )
            )
    return found
