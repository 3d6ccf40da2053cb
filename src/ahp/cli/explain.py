"""Where a plan's time and memory go, what binds it, what would move it, and why not another layout.

--why-not takes the keys that should differ, such as "tp=8 pp=1"; the rest of that layout is searched. Short names:
dp_replicate dp_shard zero tp sp pp schedule virtual layers cp ep mb recompute; the full names are understood too.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ahp.cli.following import after
from ahp.cluster.model import (
    AttentionSample,
    Cluster,
    CollectiveSample,
    ElementWiseSample,
    MatmulSample,
    Measurements,
    MemorySample,
    NodeGroup,
)
from ahp.config import Constraints, parse_yaml
from ahp.errors import BadInput, NotExpressible, NothingFits, bad_input
from ahp.job import Record
from ahp.plan import Forecast, Parallelism, Plan, validated
from ahp.words import of_gib, part_words, percent, seconds

if TYPE_CHECKING:
    from ahp.search.problem import Problem

SHORT_NAMES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "zero": "zero_stage",
    "tp": "tensor_parallel_degree",
    "sp": "enable_sequence_parallel",
    "pp": "pipeline_parallel_degree",
    "schedule": "pipeline_parallel_schedule",
    "virtual": "virtual_stages_per_rank",
    "layers": "layers_per_stage",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
    "mb": "micro_batch_size",
    "recompute": "activation_checkpoint",
}

FASTER = 2.0
"""How much faster a piece of hardware is made to see whether the step would notice."""


@dataclass(frozen=True)
class Arguments:
    plan: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PLAN")]
    """plan.yaml, or a run's folder."""
    why_not: Annotated[str | None, tyro.conf.arg(metavar="KEYS")] = None
    """Another layout to price beside the plan's, such as "tp=8 pp=1"."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Alternative:
    """Another layout beside the plan's."""

    layout: Parallelism
    forecast: Forecast
    reason: str


def run(argv: list[str]) -> int:
    """``ahp explain PLAN``. Returns the exit code; raises AhpError."""
    arguments = tyro.cli(Arguments, args=argv, prog="ahp explain", description=__doc__)
    plan = Plan.load(arguments.plan)
    subject = _subject(plan)
    forecast = plan.forecast or subject.price(plan.parallelism)
    plan = plan.model_copy(update={"forecast": forecast, "cluster": subject.cluster.plain()})
    moves = what_would_move(subject, plan.parallelism)
    other = why_not(subject, forecast, arguments.why_not) if arguments.why_not is not None else None
    if arguments.json:
        print(json.dumps(_as_json(plan, moves, other)))
    else:
        _show(plan, arguments.plan, moves, other)
    return 0


def _subject(plan: Plan) -> Problem:
    """The plan's model, cluster and job, ready to price other layouts."""
    from ahp.graph.trace import analyze
    from ahp.search.problem import problem

    if plan.cluster is None:
        raise BadInput("cluster = None: the plan names no cluster to explain it on; write it with: ahp plan")
    graph = analyze(plan.model, plan.job, attention=plan.engine.attention)
    return problem(graph, Cluster.resolve(plan.cluster), plan.job, None, plan.engine)


def why_not(subject: Problem, best: Forecast, words: str) -> Alternative | str:
    """The best layout with the given keys beside the plan's; or, in words, why there is none.

    Raises BadInput when ``words`` are not keys of a layout.
    """
    from ahp.search.misfit import nearest
    from ahp.search.ranking import search
    from ahp.search.reasons import does_not_fit, slower_because

    constraints = parse_why_not(words)
    try:
        found = search(
            subject.graph, subject.cluster, subject.job, constraints=constraints, engine=subject.engine, keep=1
        )
    except NothingFits:
        from dataclasses import replace

        miss = nearest(replace(subject, constraints=constraints))
        assert miss is not None, "the search found legal layouts, none of which fits"
        return Alternative(miss.layout, miss.forecast, does_not_fit(miss.forecast, subject.capacity_bytes))
    except (BadInput, NotExpressible) as refusal:
        return f"not possible: {refusal}"
    other = found.best
    assert other.forecast is not None
    if other.forecast.step_time_s < best.step_time_s:
        gain = percent(1 - other.forecast.step_time_s / best.step_time_s)
        return Alternative(other.parallelism, other.forecast, f"it is {gain} faster than the plan, by today's forecast")
    return Alternative(other.parallelism, other.forecast, slower_because(other.forecast, best))


def parse_why_not(words: str, option: str = "--why-not") -> Constraints:
    """``tp=8 pp=1`` as constraints. Raises BadInput for what is not KEY=VALUE, or no key of a layout."""
    data: dict[str, Any] = {}
    for word in re.split(r"[,\s]+(?![^\[]*\])", words.strip()):  # a comma within brackets belongs to the value
        key, equals, value = word.partition("=")
        name = SHORT_NAMES.get(key, key.replace("-", "_"))
        if not equals or name not in Constraints.model_fields:
            raise bad_input(option, word, "must be KEY=VALUE, separated by spaces", [*SHORT_NAMES])
        data[name] = parse_yaml(value)
    return validated(Constraints, data, option)


def what_would_move(subject: Problem, layout: Parallelism) -> list[tuple[str, float]]:
    """Step time of the same layout with one piece of the hardware twice as fast, the most useful first."""
    found = []
    for words, groups in _faster(subject.cluster.groups):
        faster = subject.on(subject.cluster.model_copy(update={"groups": groups}))
        found.append((words, faster.price(layout).step_time_s))
    return sorted(found, key=lambda pair: pair[1])


def _faster(groups: tuple[NodeGroup, ...]) -> list[tuple[str, tuple[NodeGroup, ...]]]:
    """The groups with one piece of hardware ``FASTER`` times as fast, in the figures and in what was measured."""

    def device(group: NodeGroup, **figures: Any) -> NodeGroup:
        return group.model_copy(update={"device": group.device.model_copy(update=figures)})

    def arithmetic(group: NodeGroup) -> NodeGroup:
        peaks = {precision: FASTER * peak for precision, peak in group.device.peak_flops_per_s.items()}
        return _remeasured(device(group, peak_flops_per_s=peaks), _is_arithmetic)

    def memory(group: NodeGroup) -> NodeGroup:
        bandwidth = FASTER * group.device.memory_bandwidth_bytes_per_s
        return _remeasured(device(group, memory_bandwidth_bytes_per_s=bandwidth), _is_streaming)

    def network(group: NodeGroup) -> NodeGroup:
        def link(old: Any) -> Any:
            return (
                None
                if old is None
                else old.model_copy(
                    update={
                        "bandwidth_bytes_per_s": FASTER * old.bandwidth_bytes_per_s,
                        "latency_s": old.latency_s / FASTER,
                    }
                )
            )

        links = {"intra_node": link(group.intra_node), "inter_node": link(group.inter_node)}
        return _remeasured(group.model_copy(update=links), lambda sample: isinstance(sample, CollectiveSample))

    pieces = (("arithmetic", arithmetic), ("memory bandwidth", memory), ("network", network))
    return [(f"{words} twice as fast", tuple(map(change, groups))) for words, change in pieces]


def _is_arithmetic(sample: Record) -> bool:
    """Products, fused attention, and operators that take an exponential of every element."""
    silu = isinstance(sample, ElementWiseSample) and sample.kind == "silu"
    return silu or isinstance(sample, (MatmulSample, AttentionSample))


def _is_streaming(sample: Record) -> bool:
    """Streams, and operators that do next to nothing with what they read."""
    add = isinstance(sample, ElementWiseSample) and sample.kind == "add"
    return add or isinstance(sample, MemorySample)


def _remeasured(group: NodeGroup, improves: Callable[[Record], bool]) -> NodeGroup:
    """The group with those of its samples ``FASTER`` times as fast which the piece of hardware improves."""
    if group.measured is None:
        return group

    def again(sample: Any) -> Any:
        if not improves(sample):
            return sample
        if isinstance(sample, MemorySample):
            return sample.model_copy(update={"bytes_per_s": FASTER * sample.bytes_per_s})
        return sample.model_copy(update={"seconds": sample.seconds / FASTER})

    tables = {name: tuple(map(again, getattr(group.measured, name))) for name in Measurements.model_fields}
    return group.model_copy(update={"measured": group.measured.model_copy(update=tables)})


def _show(plan: Plan, path: str, moves: list[tuple[str, float]], other: Alternative | str | None) -> None:
    from ahp.report import tables
    from ahp.search.slice_telling import told_of

    console, forecast = tables.console(), tables.forecast_of(plan)
    console.print(f"{plan.parallelism.short()} for {_model_name(plan)}\n", markup=False)
    console.print(tables.time_bar(forecast))
    console.print()
    console.print(tables.memory_bar(forecast, tables.capacity_bytes(plan)))
    console.print("\nWhat would move it")
    for words, step_s in moves:
        saved = 1 - step_s / forecast.step_time_s
        console.print(f"  - {words}: {seconds(step_s)} a step, {percent(saved)} less", markup=False)
    if lines := told_of(plan):
        console.print("\nHow tensor parallelism splits the weights")
        for line in lines:
            console.print(f"  - {line}", markup=False)
    if plan.why:
        console.print("\nWhy this one")
        for reason in plan.why:
            console.print(f"  - {reason}", markup=False)
    if plan.rejected:
        console.print("\nWhy not the others")
        console.print(tables.rejected(plan))
    if other is not None:
        console.print()
        _show_alternative(other, plan)
    following = [f"ahp simulate {shlex.quote(path)} --trace trace.json", *after(path, plan.engine.name)]
    console.print(f"\nNext: {'    '.join(following)}", markup=False)


def _show_alternative(other: Alternative | str, plan: Plan) -> None:
    from ahp.report import tables

    console, forecast = tables.console(), tables.forecast_of(plan)
    if isinstance(other, str):
        console.print(f"Why not: {other}", markup=False)
        return
    console.print(f"Why not {other.layout.short()}: {other.reason}", markup=False)
    capacity = tables.capacity_bytes(plan)
    memory = of_gib(sum(other.forecast.memory.values()), capacity)
    console.print(
        f"  {seconds(other.forecast.step_time_s)} a step ({tables.band(other.forecast)}), memory {memory}", markup=False
    )
    console.print(tables.part_by_part(other.forecast, forecast))


def _model_name(plan: Plan) -> str:
    return plan.model if isinstance(plan.model, str) else str(plan.model.get("model_type", "the given config"))


def _as_json(plan: Plan, moves: list[tuple[str, float]], other: Alternative | str | None) -> dict[str, Any]:
    from ahp.report import tables
    from ahp.search.slice_telling import told_of

    told: Any = other
    if isinstance(other, Alternative):
        told = {
            "parallelism": other.layout.model_dump(mode="json"),
            "forecast": other.forecast.model_dump(mode="json"),
            "reason": other.reason,
        }
    forecast = tables.forecast_of(plan)
    return {
        "parallelism": plan.parallelism.model_dump(mode="json"),
        "forecast": forecast.model_dump(mode="json"),
        "capacity_bytes": tables.capacity_bytes(plan),
        "binds": {"step": part_words(max(forecast.step, key=forecast.step.__getitem__))},
        "what_would_move_it": [{"change": words, "step_time_s": step_s} for words, step_s in moves],
        "slicing": told_of(plan),
        "why": list(plan.why),
        "why_not": told,
    }
