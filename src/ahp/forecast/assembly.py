"""How stages become a step: what forecasts of plain and of mixed clusters share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from ahp.arrays import Ints
from ahp.cluster.model import NodeGroup
from ahp.engines import steps
from ahp.engines.traits import Traits
from ahp.forecast.constants import margins
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.groups import expert_shards, num_expert_ranks
from ahp.forecast.segment import Recompute
from ahp.forecast.stage import StageCost
from ahp.forecast.units import Units
from ahp.job import Job
from ahp.plan import Parallelism
from ahp.schedule.descriptor import PipelineSchedule
from ahp.schedule.makespan import Makespan, makespan, makespan_of_order
from ahp.schedule.orders import given_order
from ahp.schedule.registry import get, of_ranks
from ahp.schedule.simulate import StageTimes

NORMAL_90 = 1.645
"""Half width of the central 90 % of a normal distribution, in standard errors."""


def flop_convention(job: Job) -> str:
    """Words for what counts as a step's model FLOPs."""
    whole = "the traced forward FLOPs (matrix products and attention, all S x S scores of causal attention), recompute not counted"
    return f"3 x {whole}" if job.lora is None else f"2 x {whole}: frozen weights have no gradient"


def passes_behind(parallelism: Parallelism, stage: int) -> int:
    """Backward passes that a rank computes between the last one of ``stage`` and the last one of its next stage: they hide what
    ``stage`` still sends; the next stage's last pass hides that stage's own."""
    if given_order(parallelism) is not None:
        return 0
    return _schedule(parallelism).passes_behind(stage, parallelism.pipeline_parallel_degree)


def _schedule(parallelism: Parallelism) -> PipelineSchedule:
    return of_ranks(parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree)


def pipeline_span(
    parallelism: Parallelism, micro_batches: int, times: Sequence[StageTimes], replica: int = 0
) -> Makespan:
    """How long one replica's schedule takes."""
    if (order := given_order(parallelism, replica)) is not None:
        return makespan_of_order(order, times)
    p, v = parallelism.pipeline_parallel_degree, parallelism.virtual_stages_per_rank
    return makespan(_schedule(parallelism).name, p, v, micro_batches, times)


def unrun(parallelism: Parallelism, micro_batches: int) -> Makespan:
    """The schedule without times, for memory: what ranks keep does not depend on them."""
    p, v, order = parallelism.pipeline_parallel_degree, parallelism.virtual_stages_per_rank, given_order(parallelism)
    name = _schedule(parallelism).name if order is None else order.name
    none = (0.0,) * p
    return Makespan(name, p, v, micro_batches, (), 0.0, none, none, none, none, none, order)


def message_bytes(parallelism: Parallelism, traits: Traits, units: Units) -> float:
    """Bytes that one rank sends to the next stage for one micro-batch."""
    whole = not parallelism.enable_sequence_parallel and traits.pipeline.sends_split_by_tensor
    return units.hidden_bytes / (parallelism.tensor_parallel_degree if whole else 1)


def step_flops(job: Job, parallelism: Parallelism, units: Units) -> float:
    """Model FLOPs of one step, as ``flop_convention`` counts them."""
    return (3 if job.lora is None else 2) * units.forward_flops * (job.global_batch_size / parallelism.micro_batch_size)


def step_error(nodes: NodeGroup) -> float:
    """Standard error of the log of the step time on such nodes: larger where no published steps cover the device."""
    device = nodes.device
    if nodes.calibration is not None:
        return margins.value("step_error_cpu_calibrated" if is_cpu(device) else "step_error_calibrated")
    if is_cpu(device):
        return margins.value("step_error_cpu_sensed" if nodes.measured is None else "step_error_cpu")
    if nodes.measured is not None:
        return margins.value("step_error_measured")
    published = device.name in margins.all["step_error_published"].devices
    limit, rated = device.power_limit_w, device.rated_power_w
    limited = limit is not None and rated is not None and limit < rated  # a law from two pairs of devices
    return margins.value("step_error_published" if published and not limited else "step_error_catalogue")


def band_s(step_s: float, error: float, *, centred: bool = False) -> tuple[float, float]:
    """Lower and upper bound in seconds on nine of ten steps that are forecast to take ``step_s``; ``error``: standard error of the log.

    ``centred``: calibrated by runs on the same nodes, so that the band reaches as far above the forecast as below, on a log scale.
    """
    width, above = 2 * NORMAL_90 * error, 0.5 if centred else margins.value("band_above")
    return step_s * math.exp(-(1.0 - above) * width), step_s * math.exp(above * width)


def slowest_share(num_ranks: int) -> float:
    """Share of the mean step by which the slowest of ``num_ranks`` lags behind: the expected maximum of that many normal draws
    (Blom's approximation, within 1 %: Statistical estimates and transformed beta-variables, 1958)."""
    return steps.value("rank_spread") * NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


def num_groups(parallelism: Parallelism, folded_experts: bool = False) -> int:
    """How many process groups' communicators a rank holds: those of the mesh with more than one rank, and that of all ranks.
    ``folded_experts``: see ``ExpertTraits``."""
    p = parallelism
    degrees = [
        p.weight_replicas, p.weight_shards,
        p.context_parallel_degree, p.tensor_parallel_degree, p.pipeline_parallel_degree, p.world_size,
    ]  # fmt: skip
    if p.expert_parallel_degree > 1:
        # The ranks that hold the same experts are another group than those that hold the same dense weights.
        shards = expert_shards(p, folded_experts)
        alike = num_expert_ranks(p, folded_experts) // p.expert_parallel_degree // shards
        degrees += [p.expert_parallel_degree, shards, alike if alike != p.weight_replicas else 1]
    return sum(degree > 1 for degree in degrees)


def recompute_of(activation_checkpoint: str, traits: Traits, units: Units) -> Recompute:
    """The kind of recompute that ``activation_checkpoint`` means on an engine, for a model with these blocks.

    Fused attention has no core to recompute: norms and activation functions are recomputed instead (Megatron's
    ``--recompute-modules``).
    """
    if activation_checkpoint == "full":
        return "read" if traits.recompute.stops_at_last_read else "full"
    if activation_checkpoint != "selective":
        return "none"
    if traits.recompute.selective != "core":
        return traits.recompute.selective
    return "core" if any(unit.memory.saved_in_core for unit in units.blocks) else "chains"


def own_stages(span: Makespan) -> Ints:
    """[p, V] The stages of each pipeline rank."""
    if span.order is not None:
        return np.argsort(span.order.stage_rank, kind="stable").reshape(span.p, span.v)
    return get(span.name).placement.rank_stages(span.p, span.v)


def whole_step(
    span: Makespan,
    stages: tuple[StageCost, ...],
    tied_s: float,
    update_s: float,
    offload_s: float,
    slowest_share: float,
) -> tuple[float, dict[str, float]]:
    """Seconds of a step, and those of each part (``step_parts``, and what comes after the schedule)."""
    step_s = span.makespan_s + tied_s + (update_s + offload_s)
    slowest_s = step_s * slowest_share
    step = step_parts(span, stages, tied_s) | {"optimizer": update_s}
    if offload_s:
        step["offload"] = offload_s
    if slowest_s:
        step["slowest_rank"] = slowest_s
    return step_s + slowest_s, step


def step_parts(span: Makespan, stages: tuple[StageCost, ...], tied_s: float) -> dict[str, float]:
    """Seconds of the rank that ends last, by part; without the optimizer. Parts of 0 are left out."""
    rank = max(range(span.p), key=lambda r: (span.ends_s[r], span.busy_s[r]))
    slowed_s, waited_s, tail_s = span.slowed_s[rank], span.gathering_s[rank], span.reducing_s[rank]
    parts: dict[str, float] = {}
    for cost in (stages[s] for s in own_stages(span)[rank]):
        counted = (cost.forward, span.m), (cost.backward, span.m), (cost.first_forward, 1), (cost.last_backward, 1)
        for times, count in counted:
            for part, seconds in times.items():
                parts[part] = parts.get(part, 0.0) + count * seconds
    if span.splits_backward:
        # The two halves can wait for the host and for tensor-parallel ranks where the whole backward would not.
        own = [stages[s] for s in own_stages(span)[rank]]
        shown_s = span.m * sum(c.input_gradient["tensor_parallel"] - c.backward["tensor_parallel"] for c in own)
        more_s = span.busy_s[rank] - slowed_s - sum(parts.values())
        parts["tensor_parallel"] += min(shown_s, more_s)
        parts["host"] += more_s - min(shown_s, more_s)
    parts["gradient_reduce"] = parts.get("gradient_reduce", 0.0) + tied_s + slowed_s
    if waited_s:
        parts["weight_gather"] = parts.get("weight_gather", 0.0) + waited_s
    parts["gradient_reduce"] += tail_s
    parts["bubble"] = span.idle_s[rank] - waited_s - tail_s
    # The rest of sums that cancel is rounding, not time.
    return {part: seconds for part, seconds in parts.items() if seconds > 1e-12 * span.makespan_s}
