"""What keeps a layout from being faster, or from fitting, and which of its neighbours would change that.

The neighbours are few and follow from the part that binds; they are priced, not searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ahp.errors import BadInput, NotExpressible
from ahp.plan import DEGREE, Forecast, Parallelism, Plan, validated
from ahp.report.tables import LEAST_SHARE, capacity_bytes, capacity_of
from ahp.schedule.orders import under_pattern
from ahp.words import compared, gib, of_gib, part_words, percent, seconds

if TYPE_CHECKING:
    from ahp.cluster.model import Cluster
    from ahp.graph.operators import ModelGraph

COMPUTATION = ("forward", "backward")
NEGLIGIBLE = 0.01
"""A part below this share is not worth a change: no forecast tells layouts apart by so little."""
LIGHTER = {"full": ("selective", "none"), "selective": ("none",)}
"""Recomputing less, the nearest first."""
NOT_OURS = ("allocator_slack", "communicators", "context")
"""Memory that follows from the rest, or that no layout changes."""
NO_LAYOUT_CHANGES = ("slowest_rank",)
"""Time that follows from the devices."""
FOLLOWS = {
    "layers_per_stage": ("pipeline_parallel_degree", "virtual_stages_per_rank"),
    "recomputed_layers_per_stage": ("pipeline_parallel_degree", "virtual_stages_per_rank", "activation_checkpoint"),
    "stages": ("pipeline_parallel_degree", "virtual_stages_per_rank", "data_parallel_replicate_degree"),
    "micro_batches_per_replica": ("data_parallel_replicate_degree", "data_parallel_shard_degree", "micro_batch_size"),
    "pipeline_parallel_order": (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "pipeline_parallel_degree",
        "pipeline_parallel_schedule",
        "virtual_stages_per_rank",
        "micro_batch_size",
    ),
    "mesh_order": tuple(DEGREE.values()),
}
"""Keys whose values depend on other keys: if those change, these are left out, which means the default."""

Price = Callable[[Parallelism], Forecast]
Change = dict[str, Any]
Capacity = Callable[[Parallelism, Forecast], int]
"""Memory of the device that holds the fullest rank of a layout."""


@dataclass(frozen=True)
class Neighbour:
    """A layout that differs in what binds, and the verdict on it."""

    change: str
    part: str
    """The part that it would relieve."""
    verdict: str
    forecast: Forecast | None
    """None if the layout is refused."""
    helps: bool
    """Whether it fits and is faster; if the layout itself does not fit, whether it fits."""


@dataclass(frozen=True)
class Binding:
    """What binds a layout."""

    part: str
    """``memory``, ``compute``, or a part of ``Forecast.step``."""
    share: float
    """Share of the step, or of the device's memory if that binds."""
    sentence: str
    memory: str
    neighbours: tuple[Neighbour, ...]
    """Neighbours for the part that binds; if no neighbour helps, also for the next largest part, and so on."""

    @property
    def relief(self) -> Neighbour | None:
        """The fastest neighbour that helps."""
        helping = [(n.forecast.step_time_s, n) for n in self.neighbours if n.helps and n.forecast is not None]
        return min(helping, key=lambda pair: pair[0])[1] if helping else None


def binding_of(graph: ModelGraph, cluster: Cluster, plan: Plan) -> Binding:
    """What binds a plan that has a forecast, on its cluster."""
    from ahp.forecast.step import forecast

    def price(layout: Parallelism) -> Forecast:
        return forecast(graph, cluster, plan.job, layout, plan.engine)

    def capacity(layout: Parallelism, found: Forecast) -> int:
        return capacity_of(plan, layout, found)

    return binding(plan.parallelism, plan.priced, capacity_bytes(plan), price, capacity)


def what_binds(forecast: Forecast, capacity_bytes: int) -> tuple[str, float, str]:
    """What binds a layout (``Binding.part``), its share, and both in a sentence."""
    if forecast.fits:
        return _slowest(forecast)
    return "memory", forecast.needed_bytes / capacity_bytes, _too_much(forecast, capacity_bytes)


def binding(
    layout: Parallelism, forecast: Forecast, capacity_bytes: int, price: Price, capacity_of: Capacity
) -> Binding:
    """What binds ``layout``, and its neighbours. ``price`` raises BadInput or NotExpressible for a layout that cannot run."""
    if forecast.fits:
        changes = [(part, change) for part in _relievable(forecast) for change in _faster(layout, part)]
    else:
        part = _largest_memory(forecast)
        changes = [(part, change) for change in _smaller(layout, part)]
    tried: list[Neighbour] = []
    for part, change in changes:
        if any(one.helps and one.part != part for one in tried):
            break
        change = _with_followers(layout, change)
        if all(one.change != _words(change) for one in tried):
            tried.append(_tried(layout, forecast, part, change, capacity_of, price))
    return Binding(*what_binds(forecast, capacity_bytes), _headroom(forecast, capacity_bytes), tuple(tried))


def _relievable(forecast: Forecast) -> list[str]:
    """The parts of the step that a layout can relieve, the largest first, and ``compute``."""
    fixed = (*COMPUTATION, *NO_LAYOUT_CHANGES)
    least_s = NEGLIGIBLE * forecast.step_time_s
    parts = [part for part, part_s in forecast.step.items() if part not in fixed and part_s >= least_s]
    return [*sorted(parts, key=lambda part: -forecast.step[part]), "compute"]


def _slowest(forecast: Forecast) -> tuple[str, float, str]:
    step_s, largest = forecast.step_time_s, _relievable(forecast)[0]
    compute_s = sum(forecast.step.get(part, 0.0) for part in COMPUTATION)
    largest_s = forecast.step.get(largest, 0.0)
    if largest_s > compute_s:
        share = largest_s / step_s
        name = part_words(largest)
        words = f"{name[:1].upper()}{name[1:]}: {percent(share)} of the step ({seconds(largest_s)})"
        return largest, share, f"{words}; computation is {percent(compute_s / step_s)}."
    words = f"Computation: forward and backward are {percent(compute_s / step_s)} of the step"
    if largest == "compute":
        words += f", nothing else that a layout decides reaches {percent(NEGLIGIBLE)}."
    else:
        lost = f"{part_words(largest)}, {percent(largest_s / step_s)} ({seconds(largest_s)})"
        words += f". Of what else a layout decides, most is {lost}."
    return "compute", compute_s / step_s, words


def _largest_memory(forecast: Forecast) -> str:
    """The largest part of the memory that a layout can change."""
    return max((part for part in forecast.memory if part not in NOT_OURS), key=forecast.memory.__getitem__)


def _too_much(forecast: Forecast, capacity_bytes: int) -> str:
    used, part = forecast.needed_bytes, _largest_memory(forecast)
    holds = f"{part_words(part)} ({gib(forecast.memory[part])})"
    if used > capacity_bytes:
        return f"Memory: {of_gib(used, capacity_bytes)}; {holds} would have to shrink by {gib(used - capacity_bytes)}."
    return (
        f"Memory: {of_gib(used, capacity_bytes)} leaves a probability of {forecast.fit_words} to fit, 0.95 is "
        f"asked for; {holds} would have to shrink."
    )


def _headroom(forecast: Forecast, capacity_bytes: int) -> str:
    """What is free, and what would have to shrink for more."""
    used, part = forecast.needed_bytes, _largest_memory(forecast)
    largest = f"most is {part_words(part)}, {gib(forecast.memory[part])}"
    if used > capacity_bytes:
        return f"{of_gib(used, capacity_bytes)}, {gib(used - capacity_bytes)} too much; {largest}"
    return f"{of_gib(used, capacity_bytes)}, {gib(capacity_bytes - used)} free; {largest}"


def _tried(
    layout: Parallelism, forecast: Forecast, part: str, change: Change, capacity_of: Capacity, price: Price
) -> Neighbour:
    words = _words(change)
    try:
        neighbour = validated(Parallelism, layout.model_dump() | change, "parallelism")
        other = price(neighbour)
    except (BadInput, NotExpressible) as refusal:
        return Neighbour(words, part, f"not possible: {_without_key(str(refusal), change)}", None, False)
    used = of_gib(other.needed_bytes, capacity_of(neighbour, other))
    if not other.fits:
        verdict = f"does not fit: {used}, probability {other.fit_words}"
        return Neighbour(words, part, verdict, other, False)
    less = 1 - other.step_time_s / forecast.step_time_s
    difference = compared(less, "less", "more", "as long", LEAST_SHARE)
    helps = less > 0 or not forecast.fits
    return Neighbour(words, part, f"{seconds(other.step_time_s)} a step, {difference}; {used}", other, helps)


def _with_followers(layout: Parallelism, change: Change) -> Change:
    """The change, with None for keys that depend on what it changes; an order that is dropped becomes a fixed pattern."""
    gone = {
        key: None for key, leads in FOLLOWS.items() if getattr(layout, key) is not None and set(leads) & set(change)
    }
    if "pipeline_parallel_order" in gone:
        change = {"pipeline_parallel_schedule": under_pattern(layout).pipeline_parallel_schedule} | change
    return change | gone


def _words(change: Change) -> str:
    return ", ".join(f"{key} {'null' if value is None else value}" for key, value in change.items())


def _without_key(refusal: str, change: Change) -> str:
    """A refusal without the key and the value that are shown next to it already."""
    for key, value in change.items():
        refusal = refusal.removeprefix("parallelism: ").removeprefix(f"{key} = {value!r}: ")
    return refusal


def _faster(layout: Parallelism, part: str) -> list[Change]:
    """Changes that take time off a part of the step, the nearest first."""
    changes = {
        "compute": _more_at_once,
        "tensor_parallel": _less_tensor,
        "context_parallel": lambda one: _fewer(one, "context_parallel_degree"),
        "expert_parallel": _fewer_expert_ranks,
        "bubble": _less_bubble,
        "recompute": lambda one: ({"activation_checkpoint": how} for how in LIGHTER.get(one.activation_checkpoint, ())),
        "weight_gather": _shard_less,
        "gradient_reduce": _shard_less,
        "optimizer": _shard_more,
        "offload": _shard_more,
    }
    return list(changes.get(part, _more_at_once)(layout))


def _smaller(layout: Parallelism, part: str) -> list[Change]:
    """Changes that take bytes off a part of the memory, the nearest first."""
    if part in ("activations", "temporaries", "pipeline_buffers"):
        heavier = {"none": ("selective", "full"), "selective": ("full",)}
        found: list[Change] = [{"activation_checkpoint": how} for how in heavier.get(layout.activation_checkpoint, ())]
        if layout.tensor_parallel_degree > 1 and not layout.enable_sequence_parallel:
            found.append({"enable_sequence_parallel": True})
        return [*found, *_fewer(layout, "micro_batch_size"), *_more_tensor(layout)]
    return [*_shard_more(layout), *_more_tensor(layout)]


def _more_at_once(layout: Parallelism) -> Iterator[Change]:
    """Larger operators, and less often the work done for each micro-batch."""
    yield {"micro_batch_size": 2 * layout.micro_batch_size}
    for how in LIGHTER.get(layout.activation_checkpoint, ()):
        yield {"activation_checkpoint": how}


def _less_tensor(layout: Parallelism) -> Iterator[Change]:
    if not layout.enable_sequence_parallel:
        yield {"enable_sequence_parallel": True}
    yield from _fewer(layout, "tensor_parallel_degree")


def _more_tensor(layout: Parallelism) -> Iterator[Change]:
    key = _data_key(layout)
    if getattr(layout, key) % 2 == 0:
        yield {"tensor_parallel_degree": 2 * layout.tensor_parallel_degree, key: getattr(layout, key) // 2}


def _fewer_expert_ranks(layout: Parallelism) -> Iterator[Change]:
    yield {"expert_parallel_degree": layout.expert_parallel_degree // _factor(layout.expert_parallel_degree)}


def _less_bubble(layout: Parallelism) -> Iterator[Change]:
    yield from _fewer(layout, "micro_batch_size")
    if layout.pipeline_parallel_schedule != "ZBVZeroBubble":
        more = 2 * layout.virtual_stages_per_rank
        yield {"pipeline_parallel_schedule": "Interleaved1F1B", "virtual_stages_per_rank": more}
        yield {"pipeline_parallel_schedule": "ZBVZeroBubble", "virtual_stages_per_rank": 2}
    yield from _fewer(layout, "pipeline_parallel_degree")


def _shard_less(layout: Parallelism) -> Iterator[Change]:
    """Gather and reduce less often."""
    if layout.zero_stage > 1:
        yield {"zero_stage": layout.zero_stage - 1}
    yield {"micro_batch_size": 2 * layout.micro_batch_size}


def _shard_more(layout: Parallelism) -> Iterator[Change]:
    """Shard states over more ranks, or shard more of the states."""
    replicas, shards = layout.data_parallel_replicate_degree, layout.data_parallel_shard_degree
    if replicas > 1:
        whole = {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": replicas * shards}
        yield {**whole, "zero_stage": max(1, layout.zero_stage)}
    elif shards * layout.context_parallel_degree > 1 and layout.zero_stage < 3:
        yield {"zero_stage": layout.zero_stage + 1}


def _fewer(layout: Parallelism, key: str) -> Iterator[Change]:
    """A degree, or the micro-batch, divided by its smallest factor; the devices go to data parallelism."""
    degree = getattr(layout, key)
    if degree == 1:
        return
    factor = _factor(degree)
    change: Change = {key: degree // factor}
    if key != "micro_batch_size":
        data = _data_key(layout)
        change[data] = getattr(layout, data) * factor
    if key == "pipeline_parallel_degree" and degree == factor:  # no pipeline is left
        change |= {"pipeline_parallel_schedule": "1F1B", "virtual_stages_per_rank": 1}
    yield change


def _data_key(layout: Parallelism) -> str:
    """The data axis that grows or shrinks with the others."""
    sharded = layout.zero_stage > 0
    return "data_parallel_shard_degree" if sharded else "data_parallel_replicate_degree"


def _factor(number: int) -> int:
    return next(k for k in range(2, number + 1) if number % k == 0)
