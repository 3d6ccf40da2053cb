"""Why one layout was chosen and the others lost, in words with numbers, from their forecasts."""

from __future__ import annotations

from ahp.forecast.mesh import axis_group
from ahp.plan import Forecast, Parallelism
from ahp.search.ties import TIED
from ahp.words import gib, of_gib, part_words, percent, seconds, slower

TIE = 0.005
"""Step times that differ by less than this share are called equal: it is far inside the error band of any forecast."""

CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tensor", ("tensor_parallel_degree",)),
    ("sequence", ("enable_sequence_parallel",)),
    ("context", ("context_parallel_degree",)),
    ("experts", ("expert_parallel_degree",)),
    ("pipeline", ("pipeline_parallel_degree",)),
    ("schedule", ("pipeline_parallel_schedule", "virtual_stages_per_rank")),
    ("data", ("data_parallel_replicate_degree", "data_parallel_shard_degree", "zero_stage")),
    ("order", ("mesh_order",)),
    ("micro-batch", ("micro_batch_size",)),
    ("recompute", ("activation_checkpoint",)),
)
"""The decisions that a layout consists of, each with its keys."""


def decides(layout: Parallelism, name: str) -> bool:
    """Whether a layout has this decision to make: without a pipeline a schedule orders nothing, one device shares no data, and stages of
    different widths are several decisions."""
    if layout.has_unlike_widths and name in ("tensor", "sequence", "data"):
        return False
    if name == "schedule":
        return layout.pipeline_parallel_degree > 1
    if name == "order":
        return len(layout.axes) > 1
    if name == "data":
        return layout.world_size > 1
    return name != "sequence" or layout.tensor_parallel_degree > 1


def differences(other: Forecast, best: Forecast) -> list[tuple[str, float]]:
    """How many more seconds each part of the step takes in ``other`` than in ``best``, the largest first."""
    parts = dict.fromkeys([*other.step, *best.step])
    gaps = [(part, other.step.get(part, 0.0) - best.step.get(part, 0.0)) for part in parts]
    return sorted(gaps, key=lambda gap: -gap[1])


def slower_because(other: Forecast, best: Forecast) -> str:
    """The one reason why a layout that fits lost: ``8 % slower: tensor-parallel collectives 0.62 s, 0.60 s more``.

    A tied layout is marked as tied: it may be faster by the forecast, but lost to a simpler one.
    """
    more_share = other.step_time_s / best.step_time_s - 1
    if more_share <= -TIE:
        faster = f"{percent(1 - other.step_time_s / best.step_time_s)} faster by the forecast"
        return f"tied, {faster}" if best.step_time_s <= other.step_time_s * (1 + TIED) else faster
    if more_share < TIE:
        more = other.needed_bytes - best.needed_bytes
        amount = f", {gib(more)} more memory" if more > 0 else ""
        within = f" within {percent(abs(more_share))}" if abs(more_share) >= 0.0005 else ""
        return f"as fast{within}{amount}"
    part, more_s = differences(other, best)[0]
    whole_s = other.step.get(part, 0.0)
    if part == "bubble":
        what = f"{part_words(part)} {percent(whole_s / other.step_time_s)} of the step"
    else:
        what = f"{part_words(part)} {seconds(whole_s)}"
    gap = f", {seconds(more_s)} more" if whole_s > more_s * (1 + TIE) else ""
    return f"{'tied, ' if more_share <= TIED else ''}{slower(other.step_time_s / best.step_time_s)}: {what}{gap}"


def is_slower_because(other: Forecast, best: Forecast) -> str:
    """``slower_because`` with a verb: ``is 8 % slower: ...``, or ``takes 3.8 times as long: ...``."""
    takes = slower(other.step_time_s / best.step_time_s).endswith("as long")
    return f"{'takes' if takes else 'is'} {slower_because(other, best)}"


def on_a_node(layout: Parallelism, devices_per_node: int) -> str:
    """``a node holds tp 2 x pp 4``: how many ranks of each axis share a node."""
    groups = {axis: axis_group(layout, axis, devices_per_node) for axis in reversed(layout.axes)}
    return "a node holds " + " x ".join(f"{axis} {group.local}" for axis, group in groups.items() if group.local > 1)


def does_not_fit(forecast: Forecast, capacity_bytes: int) -> str:
    """``does not fit: 91.2 of 80.0 GiB, most of it activations 60.3 GiB``."""
    part, amount = max(forecast.memory.items(), key=lambda item: item[1])
    need = of_gib(forecast.needed_bytes, capacity_bytes)
    if forecast.needed_bytes <= capacity_bytes:
        return f"may not fit: {need}, probability {forecast.fit_words}"
    return f"does not fit: {need}, most of it {part_words(part)} {gib(amount)}"


def choice_words(layout: Parallelism, name: str) -> str:
    """One decision of a layout in words, such as ``ZeRO-3 over 8, 2 replicas``."""
    if name == "tensor":
        return f"tensor parallel {layout.tensor_parallel_degree}"
    if name == "sequence":
        return "sequence parallelism" if layout.enable_sequence_parallel else "no sequence parallelism"
    if name in ("context", "experts"):
        kind = "context" if name == "context" else "expert"
        degree = layout.context_parallel_degree if name == "context" else layout.expert_parallel_degree
        return f"{kind} parallel {degree}" if degree > 1 else f"no {kind} parallelism"
    if name == "pipeline":
        return f"pipeline {layout.pipeline_parallel_degree}" if layout.pipeline_parallel_degree > 1 else "no pipeline"
    if name == "schedule":
        virtual = layout.virtual_stages_per_rank
        return layout.pipeline_parallel_schedule + (f" with {virtual} stages per rank" if virtual > 1 else "")
    if name == "data":
        if layout.data_parallel_degree == layout.weight_shards == 1:
            return "no data parallelism"
        replicas = f"{layout.data_parallel_replicate_degree} replicas"
        if layout.zero_stage == 0:
            return replicas
        shard, context = layout.data_parallel_shard_degree, layout.context_parallel_degree
        over = f"{context} context ranks" if shard == 1 < context else str(shard)
        sharded = f"ZeRO-{layout.zero_stage} over {over}"
        return sharded if layout.data_parallel_replicate_degree == 1 else f"{sharded}, {replicas}"
    if name == "order":
        return f"mesh order {' > '.join(layout.axes)}"
    if name == "micro-batch":
        return f"micro-batch {layout.micro_batch_size}"
    return "no recompute" if layout.activation_checkpoint == "none" else f"{layout.activation_checkpoint} recompute"
