"""Where a plan's time and memory go, what binds it, what would move it, and why not another layout.

The option --why-not takes the keys that should differ, such as "tp=8 pp=1"; the rest of that layout is searched. Short names:
dp_replicate dp_shard zero tp sp pp schedule virtual layers cp ep mb recompute, and dp for the replicas (8, or 2x4); the
full names are understood too, and a layout as the tables print it: "dp2x4 zero3 tp8 mb1 full".
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ahp.cli.following import can_follow, show_next
from ahp.cli.json_alone import print_alone
from ahp.cli.layout_words import constraints_of
from ahp.cli.options import options_of
from ahp.cli.waiting import waiting
from ahp.config import Constraints
from ahp.errors import AhpError, BadInput, NotExpressible, NothingFits
from ahp.optional import Flag, OptionalText
from ahp.plan import Forecast, Parallelism, Plan, Rejected
from ahp.words import percent, seconds

if TYPE_CHECKING:
    from ahp.report.schedules import ComparedSchedules
    from ahp.search.problem import Problem
    from ahp.search.sensitivity import Move


@dataclass(frozen=True)
class Arguments:
    plan: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PLAN")]
    """plan.yaml, or a run's folder."""
    why_not: Annotated[OptionalText, tyro.conf.arg(metavar="KEYS")] = None
    """Another layout to price next to the plan's, such as "tp=8 pp=1"."""
    json: Flag = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Alternative:
    """Another layout, to compare with the plan's."""

    layout: Parallelism
    forecast: Forecast
    reason: str


def run(argv: list[str]) -> int:
    """``ahp explain PLAN``. Returns the exit code; raises AhpError."""
    from ahp.cluster.sources import stands_on
    from ahp.forecast.documents import attention_words
    from ahp.report.binding import what_binds
    from ahp.report.schedules import compared_schedules
    from ahp.report.tables import capacity_bytes
    from ahp.search.sensitivity import sensitivity
    from ahp.search.slicing.explain import lines_of as slicing_lines

    arguments = options_of(Arguments, argv, "ahp explain", __doc__)
    plan = Plan.load(arguments.plan)
    alternatives = None if arguments.why_not is None else constraints_of(arguments.why_not)
    subject = _subject(plan)
    forecast = subject.price(plan.parallelism)
    _note_older_forecast(plan.forecast, forecast)
    plan = plan.model_copy(update={"forecast": forecast, "cluster": subject.cluster.plain()})
    with waiting("searching for the other layout"):
        other = None if alternatives is None else why_not(subject, plan, alternatives)
    print("searching again with 10 % more of each piece of hardware ...", file=sys.stderr)
    moves = sensitivity(subject, plan.parallelism, waiting)
    part, _, sentence = what_binds(forecast, capacity_bytes(plan))
    binds, schedules = (part, sentence), compared_schedules(subject.any_pricer, plan.parallelism)
    layout = subject.decided(plan.parallelism)
    documents = attention_words(subject.graph, subject.cluster.groups, plan.job, layout, subject.engine)
    with waiting("slicing the model's blocks"):
        sliced = slicing_lines(plan)
    if arguments.json:
        answer = _as_json(plan, arguments.plan, binds, moves, other) | {"stands_on": stands_on(subject.cluster)}
        plain = None if schedules is None else schedules.plain()
        print_alone(json.dumps({**answer, "slicing": sliced, "documents": documents, "schedules": plain}))
    else:
        _show(plan, arguments.plan, binds, moves, other, schedules, documents, sliced)
    return 0


def _note_older_forecast(kept: Forecast | None, today: Forecast) -> None:
    """Say on stderr that a plan's own forecast is not that of its keys: they were edited, or AHP forecasts otherwise since."""
    if kept is None or math.isclose(kept.step_time_s, today.step_time_s, rel_tol=1e-6):
        return
    then, now = seconds(kept.step_time_s), seconds(today.step_time_s)
    older = f"note: the plan stores a forecast of {then} a step, its keys are forecast at {now} now: the file was edited, or AHP is another version"
    print(f"{older}; the reasons below are the stored ones", file=sys.stderr)


def _subject(plan: Plan) -> Problem:
    """The plan's model, cluster and job with what its user had fixed, ready to price other layouts."""
    from ahp.cli.simulate import announce
    from ahp.search.problem import problem_of

    if plan.cluster is None:
        raise BadInput(
            f"cluster = None: the plan names no cluster to explain it on; add one, such as {{device: H100, devices_per_node: {plan.parallelism.world_size}}}, "
            "or write a plan with: ahp plan MODEL CLUSTER"
        )
    announce(plan)
    return problem_of(plan)


def why_not(subject: Problem, plan: Plan, alternatives: list[Constraints]) -> Alternative | str:
    """The best layout that keeps to one of ``alternatives``, compared with the plan's; or, in words, why there is none."""
    from ahp.search.by_speed import ranking_by_speed
    from ahp.search.found_orders import with_own_orders
    from ahp.search.method import Method
    from ahp.search.problem import problem
    from ahp.search.ties import TIED

    found: list[Plan] = []
    refusals: list[AhpError] = []
    for keys in alternatives:
        try:
            asked = problem(subject.graph, subject.cluster, subject.job, keys, subject.engine)
            # Without remedies: finding what would make it fit takes longer than the rest.
            ranking = ranking_by_speed(asked, 1, None, Method(), TIED, remedies=False)
            found.append(with_own_orders(asked, ranking, 1).best)
        except (NothingFits, BadInput, NotExpressible) as refusal:
            refusals.append(refusal)
    if not found:
        misses = [keys for keys, no in zip(alternatives, refusals, strict=True) if isinstance(no, NothingFits)]
        return _nearest(subject, misses) if misses else f"not possible: {refusals[0]}"
    best = min(found, key=lambda one: one.priced.step_time_s)
    used, there = best.parallelism.world_size, subject.cluster.num_devices
    fewer = "" if used == there else f", on {used} of {there} devices"
    return Alternative(best.parallelism, best.priced, _verdict(best, plan) + fewer)


def _verdict(other: Plan, plan: Plan) -> str:
    """Why the plan is better; or that it is not."""
    from ahp.search.reasons import slower_because

    if other.parallelism == plan.parallelism:
        return "it is the plan: no layout with these keys is faster"
    if other.priced.step_time_s >= plan.priced.step_time_s:
        return slower_because(other.priced, plan.priced)
    gain = percent(1 - other.priced.step_time_s / plan.priced.step_time_s)
    fixed = f", which was searched with {', '.join(plan.fixed)} fixed" if plan.fixed else ", by today's forecast"
    return f"it is {gain} faster than the plan{fixed}"


def _nearest(subject: Problem, misses: list[Constraints]) -> Alternative:
    """The layout that needs the least memory, among those that do not fit."""
    from ahp.search.misfit import nearest
    from ahp.search.reasons import does_not_fit

    near = [miss for keys in misses if (miss := nearest(replace(subject, constraints=keys))) is not None]
    layout, forecast = min(near, key=lambda miss: miss[1].needed_bytes)
    return Alternative(layout, forecast, does_not_fit(forecast, subject.capacity_bytes))


def _show(
    plan: Plan,
    path: str,
    binds: tuple[str, str],
    moves: list[Move],
    other: Alternative | str | None,
    schedules: ComparedSchedules | None,
    documents: list[str],
    sliced: list[str],
) -> None:
    from ahp.cluster.model import Cluster
    from ahp.cluster.sources import stands_on
    from ahp.report import tables

    console, forecast = tables.console(), plan.priced

    def section(title: str, lines: Iterable[str]) -> None:
        console.print()
        console.print(tables.Hanging([("", title)], gap=0), style="bold")
        console.print(tables.bulleted(lines))

    heading = f"{plan.parallelism.short()} for {_model_name(plan)}, run by {plan.engine.words()}"
    figures = f"The forecast stands on: {stands_on(Cluster.resolve(plan.cluster or {}))}"
    console.print(tables.Hanging([("", heading), ("", figures)], gap=0))
    console.print()
    console.print(tables.time_bar(forecast))
    console.print()
    console.print(tables.memory_bar(forecast, tables.capacity_bytes(plan)))
    section("What binds", [binds[1]])
    section("What would move it (each searched again)", (move.words() for move in moves))
    if schedules is not None:
        section(
            "Schedule (F forward, B backward, I and W its two parts; small letters: the rank's higher stages)",
            [schedules.words],
        )
        for name, lines in schedules.drawings().items():
            console.print(f"  {name}", markup=False)
            for line in lines:
                console.print(f"    {line}", markup=False, no_wrap=True, overflow="crop")
    if documents:
        section("How attention keeps documents apart", documents)
    if sliced:
        section("How tensor parallelism splits the weights", sliced)
    if plan.why:
        section("Why this one", plan.why)
    if plan.rejected:
        console.print("\nWhy not the others", style="bold")
        console.print(tables.bulleted(f"{loser.parallelism.short()}: {_lost(loser)}" for loser in plan.rejected))
    if other is not None:
        console.print()
        _show_alternative(other, plan)
    show_next(console, _following(plan, path))


def _lost(loser: Rejected) -> str:
    took = "" if loser.step_time_s is None else f"{seconds(loser.step_time_s)} a step, "
    return f"{took}{loser.reason}"


def _following(plan: Plan, path: str) -> list[str]:
    return [f"ahp simulate {shlex.quote(path)} --trace trace.json", *can_follow(plan, path)]


def _show_alternative(other: Alternative | str, plan: Plan) -> None:
    from ahp.report import tables

    console, forecast = tables.console(), plan.priced
    if isinstance(other, str):
        console.print(tables.Hanging([("", f"Why not: {other}")], gap=0))
        return
    console.print(tables.Hanging([("", f"Why not {other.layout.short()}: {other.reason}")], gap=0))
    console.print(tables.part_by_part(other.forecast, forecast))
    console.print()
    console.print(tables.memory_by_part(other.forecast, forecast, tables.capacity_bytes(plan)))


def _model_name(plan: Plan) -> str:
    return plan.model if isinstance(plan.model, str) else str(plan.model.get("model_type", "the given config"))


def _as_json(
    plan: Plan, path: str, binds: tuple[str, str], moves: list[Move], other: Alternative | str | None
) -> dict[str, Any]:
    from ahp.report import tables

    forecast = plan.priced
    other_layout: Any = other
    if isinstance(other, Alternative):
        other_layout = {
            "parallelism": other.layout.model_dump(mode="json"),
            "forecast": other.forecast.model_dump(mode="json"),
            "reason": other.reason,
            "more": {
                "step": more_by_part(other.forecast.step, forecast.step),
                "memory": more_by_part(other.forecast.memory, forecast.memory),
            },
        }
    return {
        "parallelism": plan.parallelism.model_dump(mode="json"),
        "engine": plan.engine.model_dump(mode="json"),
        "fixed": plan.fixed,
        "forecast": forecast.model_dump(mode="json"),
        "capacity_bytes": tables.capacity_bytes(plan),
        "binds": {"part": binds[0], "words": binds[1]},
        "sensitivity": [move.plain() for move in moves],
        "why": list(plan.why),
        "rejected": [loser.model_dump(mode="json") for loser in plan.rejected],
        "why_not": other_layout,
        "next": _following(plan, path),
    }


def more_by_part(other: Mapping[str, float], mine: Mapping[str, float]) -> dict[str, float]:
    """How much more ``other`` takes for each part, the largest difference first."""
    found = {part: other.get(part, 0) - mine.get(part, 0) for part in dict.fromkeys([*other, *mine])}
    return dict(sorted(found.items(), key=lambda item: -abs(item[1])))
