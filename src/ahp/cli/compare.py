"""Two plans, runs or layouts side by side: which is faster, by which parts of the step and of the memory, and which settings differ.

A and B are plan.yaml files or run folders. B may also be a layout in words ("tp=8 pp=1 dp=1x8 zero=3") for A's model, job, cluster and
engine. Both are forecast again. For a run, the output has what it measured next to the forecast.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ahp.cli.explain import more_by_part
from ahp.cli.following import show_next
from ahp.cli.json_alone import print_alone
from ahp.cli.options import options_of
from ahp.cli.simulate import price
from ahp.errors import BadInput, bad_input
from ahp.optional import Flag
from ahp.plan import Forecast, Plan

if TYPE_CHECKING:
    from ahp.report.run_sections import RunFiles

TITLES = ("A", "B", "B - A")


@dataclass(frozen=True)
class Arguments:
    first: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="A")]
    """plan.yaml, or a run's folder."""
    second: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="B")]
    """The same, or a layout for A's job: "tp=8 pp=1 dp=1x8 zero=3"."""
    json: Flag = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Side:
    """One side of the comparison."""

    said: str
    """The user's words for it."""
    plan: Plan
    """With today's forecast, after ``_with_forecast``."""
    run: RunFiles | None
    """What it measured, if it is a run with steps."""

    @property
    def forecast(self) -> Forecast:
        return self.plan.priced

    @property
    def tokens_per_s(self) -> float:
        """Forecast tokens/s of all its devices together."""
        return self.plan.job.tokens_per_step / self.forecast.step_time_s

    @property
    def measured_s_per_token(self) -> float | None:
        """None if it is not a run, or has no steps."""
        return self.run.median_s / self.plan.job.tokens_per_step if self.run and self.run.median_s else None

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        from ahp.report.tables import capacity_bytes

        run = self.run
        return {
            "said": self.said,
            "parallelism": self.plan.parallelism.model_dump(mode="json"),
            "engine": self.plan.engine.model_dump(mode="json"),
            "forecast": self.forecast.model_dump(mode="json"),
            "capacity_bytes": capacity_bytes(self.plan),
            "measured": None
            if run is None
            else {"step_time_s": run.median_s, "mfu": run.mfu, "peak_bytes": run.peak_bytes},
        }


def run(argv: list[str]) -> int:
    """``ahp compare A B``. Returns the exit code; raises AhpError."""
    from ahp.report.differences import differences

    arguments = options_of(Arguments, argv, "ahp compare", __doc__)
    given = _given(arguments.first)
    other = _given(arguments.second, given.plan)  # read before the first is forecast, which may have to trace its model
    first, second = _with_forecast(given), _with_forecast(other)
    differ = differences([first.plan, second.plan])
    lines, following = list(_verdict(first, second)), _following(first, second)
    if arguments.json:
        result = {
            "a": first.plain(),
            "b": second.plain(),
            "verdict": lines,
            "difference": {
                "step": more_by_part(second.forecast.step, first.forecast.step),
                "memory": more_by_part(second.forecast.memory, first.forecast.memory),
            },
            "settings": {key: list(values) for key, values in differ},
            "next": following,
        }
        print_alone(json.dumps(result))
    else:
        _show(first, second, lines, [(key, *values) for key, values in differ], following)
    return 0


def _given(said: str, other: Plan | None = None) -> Side:
    """A side as its files have it. ``other``: the plan that a layout in words is for. Raises BadInput for anything else."""
    from ahp.report.run_sections import RunFiles

    path, run = Path(said), None
    if said and os.path.isdir(said) and (path / "plan.yaml").is_file():
        run = RunFiles.read(path)
        plan = run.plan
    elif not said or os.path.exists(said) or other is None or said.endswith((".yaml", ".yml")):
        plan = Plan.load(said)
    else:
        plan = other.model_copy(update={"parallelism": _layout(said)})
    return Side(said, plan, run if run is not None and run.metrics else None)


def _with_forecast(side: Side) -> Side:
    """The side, forecast again. Raises BadInput if that is not possible."""
    from ahp.cluster.model import Cluster

    try:
        priced = price(side.plan)
    except BadInput as refusal:
        raise BadInput(f"{side.said}: {refusal}") from refusal
    assert side.plan.cluster is not None, "price refuses a plan without one"
    cluster = Cluster.resolve(side.plan.cluster).plain()
    updated = {"forecast": priced.forecast, "parallelism": priced.parallelism, "cluster": cluster}
    return replace(side, plan=side.plan.model_copy(update=updated))


def _layout(said: str) -> Any:
    from ahp.cli.layout_words import is_printed, layout_of

    if "=" not in said and " " not in said.strip() and not is_printed(said.strip()):
        rule = "neither a plan, nor a run's folder, nor a layout in words"
        raise bad_input("B", said, rule, ["plan.yaml", "runs/demo", "tp=8 dp=1x8 zero=3"])
    return layout_of(said, "B")


def _verdict(first: Side, second: Side) -> Iterator[str]:
    """Which is better, in sentences."""
    from ahp.report.tables import capacity_bytes
    from ahp.search.reasons import does_not_fit
    from ahp.words import number_of, percent, times

    for name, side in (("A", first), ("B", second)):
        if not side.forecast.fits:
            yield f"{name} {does_not_fit(side.forecast, capacity_bytes(side.plan))}."
    if first.plan.job.tokens_per_step == second.plan.job.tokens_per_step:
        yield _which_is_faster(first, second)
    else:
        more = _tokens(second.tokens_per_s / first.tokens_per_s)
        yield f"B trains {more} per second; their steps do not have the same number of tokens."
    devices = first.plan.parallelism.world_size, second.plan.parallelism.world_size
    if devices[0] != devices[1]:
        each = _tokens(second.forecast.tokens_per_s_per_device / first.forecast.tokens_per_s_per_device)
        yield f"B has {number_of(devices[1], 'device')}, A {devices[0]}: each of B's trains {each} per second."
    if first.measured_s_per_token and second.measured_s_per_token:
        ratio = second.measured_s_per_token / first.measured_s_per_token
        if ratio > 2 or abs(ratio - 1) < 0.0005:
            more = f"{f'{times(ratio)} ' if ratio > 2 else ''}as long for each token as"
        else:
            more = f"{percent(abs(ratio - 1))} {'more' if ratio >= 1 else 'less'} time for each token than"
        yield f"Measured, B takes {more} A."


def _tokens(ratio: float) -> str:
    from ahp.words import percent, times

    return (
        f"{times(ratio)} as many tokens"
        if ratio > 2 or ratio < 0.005  # 100 % fewer would be none
        else f"{percent(abs(ratio - 1))} {'more' if ratio >= 1 else 'fewer'} tokens"
    )


def _which_is_faster(first: Side, second: Side) -> str:
    """For two sides with the same number of tokens per step."""
    from ahp.search.reasons import is_slower_because
    from ahp.search.ties import TIED, complexity

    (_, fast), (slow_name, slow) = sorted([("A", first), ("B", second)], key=lambda one: one[1].forecast.step_time_s)
    if slow.forecast.step_time_s > fast.forecast.step_time_s * (1 + TIED):
        return f"{slow_name} {is_slower_because(slow.forecast, fast.forecast)}."
    words = "The forecast cannot tell them apart"
    one, other = complexity(first.plan.parallelism), complexity(second.plan.parallelism)
    if one == other:
        return f"{words} (less than {100 * TIED:.0f} %)."
    return f"{words} (less than {100 * TIED:.0f} %); {'A' if one < other else 'B'} is the simpler layout."


def _show(
    first: Side, second: Side, verdict: list[str], differ: list[tuple[object, ...]], following: list[str]
) -> None:
    from rich.table import Table

    from ahp.report import tables

    console = tables.console()
    heads = [
        (name, f"{side.said}: {side.plan.parallelism.short()}, run by {side.plan.engine.words()}")
        for name, side in zip("AB", (first, second), strict=True)
    ]
    console.print(tables.Hanging(heads))
    console.print()
    console.print(tables.bulleted(verdict))
    console.print("\nWhere the time goes, by the forecast", style="bold")
    console.print(tables.part_by_part(second.forecast, first.forecast, TITLES))
    console.print("\nWhere the memory of the fullest rank goes", style="bold")
    capacities = tables.capacity_bytes(first.plan), tables.capacity_bytes(second.plan)
    console.print(tables.memory_by_part(second.forecast, first.forecast, *capacities, TITLES))
    if rows := list(_measured(first, second)):
        console.print("\nMeasured against the forecast", style="bold")
        console.print(_table(Table(box=None, pad_edge=False, padding=(0, 2)), ("", "A", "B"), rows))
    console.print("\nWhat differs", style="bold")
    if differ:
        console.print(_table(Table(box=None, pad_edge=False, padding=(0, 2)), ("", "A", "B"), differ))
    else:
        console.print("  nothing: model, cluster, job, layout and engine are the same")
    show_next(console, following)


def _table(table: Any, titles: tuple[str, ...], rows: list[tuple[object, ...]]) -> Any:
    from ahp.report.tables import Unpadded

    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(_word(value) for value in row))
    return Unpadded(table)


def _word(value: object) -> str:
    """A setting in words: ``21 14``, ``yes``, ``{group: a, layers: 8}``; empty if a plan leaves it open."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_word(own)}' for key, own in value.items() if own is not None)}}}"
    if isinstance(value, float):
        return f"{value:.10g}"  # two that differ are not to look alike
    return " ".join(_word(one) for one in value) if isinstance(value, (tuple, list)) else str(value)


def _measured(first: Side, second: Side) -> Iterator[tuple[object, ...]]:
    """The runs' figures next to the forecast, one row for each figure."""
    reached = [_reached(side) for side in (first, second)]
    for name in dict.fromkeys([*reached[0], *reached[1]]):
        yield name, *(of.get(name) for of in reached)


def _reached(side: Side) -> dict[str, str]:
    """Figures of a run in words, keyed by name; empty for a plan."""
    from ahp.report.run_sections import against, predicted_peak_bytes
    from ahp.words import gib, number_of, percent, seconds

    run, forecast, found = side.run, side.forecast, dict[str, str]()
    if run is None:
        return found
    if run.median_s:
        found["step"] = f"{seconds(run.median_s)}, {against(run.median_s, side.plan)}"
    if run.mfu is not None:
        found["MFU"] = f"{percent(run.mfu)}, predicted {percent(forecast.mfu)}"
    if run.peak_bytes is not None:
        found["peak memory"] = f"{gib(run.peak_bytes)}, predicted {gib(predicted_peak_bytes(side.plan))}"
    if run.losses:
        found["last loss"] = f"{run.losses[-1]:.4f} after {number_of(run.steps_done, 'step')}"
    return found


def _following(first: Side, second: Side) -> list[str]:
    if first.run is not None and second.run is not None:
        return [f"ahp report {shlex.quote(first.said)} {shlex.quote(second.said)}"]
    if os.path.exists(second.said):
        return [f"ahp explain {shlex.quote(said)}" for said in dict.fromkeys((first.said, second.said))]
    return [f"ahp explain {shlex.quote(first.said)} --why-not {shlex.quote(second.said)}"]
