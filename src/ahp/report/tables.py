"""A forecast as tables and bars for the terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ahp.cluster.cells import place
from ahp.cluster.model import Cluster
from ahp.cluster.plain_groups import plain_groups
from ahp.plan import Forecast, Parallelism, Plan
from ahp.report import glossary
from ahp.words import gib, of_gib, part_words, percent, seconds

BAR_CHARS = 28
"""A line with its name, amount and share then fits into 80 columns."""
LEAST_SHARE = 0.0005
"""A smaller share would read as 0.0 %."""
ROUNDING = 1e-9
"""Share of the whole below which a part is nothing but rounding."""
PLAIN_WIDTH = 10_000
"""Columns if the output is not a terminal: a file or a pipe has no edge to wrap at, unless $COLUMNS gives one."""
LEAST_WORDS = 20
"""Least columns of a hanging line, however narrow the terminal."""
LEAST_WIDTH = 80
"""Least columns of an output: a narrower terminal wraps the lines itself, so that no figures are cut off."""
Titles = tuple[str, str, str]
TITLES: Titles = ("the plan", "the other", "difference")
"""Column titles of two forecasts side by side."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader is gone (``ahp plan ... | head``): left to the command line, as rich's own method would end the program with 1."""
        raise BrokenPipeError


def console(file: IO[str] | None = None, *, least_width: int = LEAST_WIDTH) -> Console:
    """A console on stdout (or ``file``) that does not wrap what goes into a file or a pipe."""
    found = _Console(file=file, highlight=False)
    has_edge = found.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return _Console(file=file, highlight=False, width=max(found.width, least_width) if has_edge else PLAIN_WIDTH)


_CLAUSE = re.compile(r"(?<=[,;:.]) +")
_QUANTITY = re.compile(r"(?<=\d) (?=(?:%|s|ms|us|h|min|days|[kMBT]|[KMGT]iB|[GT]b/s|[GTP]?FLOP(?:/s)?|of|x)(?![\w]))")
_KEPT_SPACE = "\N{NO-BREAK SPACE}"


def unbroken(words: str) -> str:
    """The words with no-break spaces before units."""
    return _QUANTITY.sub(_KEPT_SPACE, words)


def lines_of(words: str, width: int) -> list[str]:
    """A sentence in lines of ``width`` columns, broken between clauses if these fit on a line; no figure loses its unit."""
    lines = [""]
    for clause in _CLAUSE.split(unbroken(words)):
        longer = f"{lines[-1]} {clause}".lstrip()
        if len(longer) <= width:
            lines[-1] = longer
        elif len(clause) <= width and lines[-1]:
            lines.append(clause)
        else:
            lines[-1:] = wrap(longer, width, break_long_words=False, break_on_hyphens=False) or [""]
    return [line.replace(_KEPT_SPACE, " ") for line in lines]


def time_bar(forecast: Forecast) -> RenderableType:
    """Where the time of a step goes: one bar for each part of the slowest rank, with seconds and share."""
    rows = bars(forecast.step, forecast.step_time_s)
    title = Text(f"step {seconds(forecast.step_time_s)} (90 % band {band(forecast)})", style="bold")
    return Group(title, _Bars(rows, seconds))


def memory_bar(forecast: Forecast, capacity: int) -> RenderableType:
    """Where the bytes of the fullest rank go: one bar for each part against ``capacity`` bytes."""
    rows = bars(forecast.memory, capacity)
    free = capacity - forecast.needed_bytes
    if free != 0:
        rows.append(("free" if free > 0 else "too much", abs(free), abs(free) / capacity))
    fits = f"fits with probability {forecast.fit_words}"
    title = Text(f"memory {of_gib(forecast.needed_bytes, capacity)}, {fits}", style="bold")
    return Group(title, _Bars(rows, gib))


def meanings(forecast: Forecast) -> RenderableType:
    """The meaning of each part that the bars show, in their order."""
    shown = _largest_first(forecast.step, forecast.step_time_s) + _largest_first(forecast.memory, 1.0)
    rows = [(part_words(part), words) for part, words in glossary.lines(shown)]
    return Hanging([*rows, ("MFU", f"share of {forecast.mfu_peak}")])


@dataclass(frozen=True)
class Hanging:
    """Lines with a lead before each; wrapped text does not run under the lead."""

    rows: Sequence[tuple[str, str]]
    gap: int = 2
    """Columns between the two."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        longest = max((len(lead) for lead, _ in self.rows), default=0)
        for lead, words in self.rows:
            margin = max(options.max_width - longest - self.gap, LEAST_WORDS)
            for number, line in enumerate(lines_of(words, margin)):
                before = f"{lead if number == 0 else '':<{longest + self.gap}}"
                yield Text(f"{before}{line}".rstrip(), no_wrap=True, overflow="ignore")


@dataclass(frozen=True)
class Unpadded:
    """A table without spaces at the ends of its lines."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in console.render_lines(self.table, options, pad=False):
            while line and not line[-1].text.rstrip():
                line.pop()
            yield from line[:-1]
            for last in line[-1:]:
                yield Segment(last.text.rstrip(), last.style)
            yield Segment.line()


def bulleted(lines: Iterable[str], mark: str = "  -") -> Hanging:
    """Lines with a mark before each."""
    return Hanging([(mark, line) for line in lines], gap=1)


def part_by_part(other: Forecast, forecast: Forecast, titles: Titles = TITLES) -> Table:
    """The step of two forecasts side by side, and the difference of each part in seconds, the largest first."""
    table = _beside(titles)
    parts = dict.fromkeys([*other.step, *forecast.step])
    rows = [(part, forecast.step.get(part, 0.0), other.step.get(part, 0.0)) for part in parts]
    for part, mine_s, its_s in sorted(rows, key=lambda row: -abs(row[2] - row[1])):
        if max(mine_s, its_s) > ROUNDING * forecast.step_time_s:
            more_s = its_s - mine_s if abs(its_s - mine_s) > ROUNDING * forecast.step_time_s else 0.0
            table.add_row(part_words(part), seconds(mine_s), seconds(its_s), _signed(more_s))
    whole = (seconds(forecast.step_time_s), seconds(other.step_time_s))
    table.add_row("step", *whole, _signed(other.step_time_s - forecast.step_time_s), style="bold")
    return table


def memory_by_part(
    other: Forecast, forecast: Forecast, capacity: int, its_capacity: int | None = None, titles: Titles = TITLES
) -> Table:
    """The fullest ranks of two forecasts side by side, and the difference of each part, the largest first."""
    table = _beside(titles)
    parts = dict.fromkeys([*other.memory, *forecast.memory])
    rows = [(part, forecast.memory.get(part, 0), other.memory.get(part, 0)) for part in parts]
    for part, mine, its in sorted(rows, key=lambda row: -abs(row[2] - row[1])):
        if max(mine, its) > ROUNDING * capacity:
            table.add_row(part_words(part), gib(mine), gib(its), _signed(its - mine, gib))
    mine, its = forecast.needed_bytes, other.needed_bytes
    of = gib(capacity) if its_capacity in (None, capacity) else f"{gib(capacity)} and {gib(its_capacity)}"
    table.add_row(f"of {of}", gib(mine), gib(its), _signed(its - mine, gib), style="bold")
    return table


def _beside(titles: Titles) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("part", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _signed(value: float, words: Callable[[float], str] = seconds) -> str:
    text = words(value)
    if not re.search("[1-9]", text):
        return words(0.0)  # neither +0 nor -0
    return f"+{text}" if value > 0 else text


def bars(parts: Mapping[str, float], whole: float) -> list[tuple[str, float, float]]:
    """(words, amount, share of the whole) of each part above rounding, the largest first."""
    return [(part_words(part), parts[part], parts[part] / whole) for part in _largest_first(parts, whole)]


def _largest_first(parts: Mapping[str, float], whole: float) -> list[str]:
    return sorted((part for part in parts if parts[part] > ROUNDING * whole), key=lambda part: -parts[part])


def share_words(share: float) -> str:
    """A part's share of the whole."""
    return percent(share) if share >= LEAST_SHARE else "< 0.1 %"


@dataclass(frozen=True)
class _Bars:
    """One line for each part: name, amount, share, and a bar as long as the share."""

    rows: Sequence[tuple[str, float, float]]
    words: Callable[[float], str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        full, half = ("-", "") if options.ascii_only else ("\u2501", "\u2578")
        longest = max((len(name) for name, _, _ in self.rows), default=0)
        for name, amount, share in self.rows:
            halves = round(2 * BAR_CHARS * min(share, 1.0))
            bar = full * (halves // 2) + half * (halves % 2)
            figures = f"{name:<{longest}} {self.words(amount):>9} {share_words(share):>7}"
            style = {"free": "dim", "too much": "red"}.get(name, "cyan")
            yield Text.assemble(figures, (f"  {bar}" if bar else "", style), no_wrap=True, overflow="ignore")


def band(forecast: Forecast) -> str:
    """``6.1 .. 7.2 s``: where the measured step time should lie nine times out of ten."""
    low, high = seconds(forecast.step_time_low_s), seconds(forecast.step_time_high_s)
    if low.split(" ")[1] == high.split(" ")[1]:
        low = low.split(" ")[0]
    return f"{low} .. {high}"


def capacity_bytes(plan: Plan) -> int:
    """Memory of the device that holds the fullest rank."""
    return capacity_of(plan, plan.parallelism, plan.priced)


def capacity_of(plan: Plan, layout: Parallelism, forecast: Forecast) -> int:
    """Memory of the device that would hold the fullest rank of another layout on the plan's cluster."""
    assert plan.cluster is not None, "a plan of the search has a cluster"
    groups = plain_groups(plan.cluster)
    if len(groups) == 1:
        return groups[0]["device"]["memory_bytes"]
    name = place(Cluster.resolve(plan.cluster), layout).group_of(forecast.fullest_rank)
    return next(group["device"]["memory_bytes"] for group in groups if group["name"] == name)
