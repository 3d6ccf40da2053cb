"""The ranked table of plans: one line for each if it fits with its reason, else the reason on a line below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.text import Text

from ahp.plan import Parallelism, Plan
from ahp.report.tables import band, capacity_bytes, lines_of
from ahp.words import count, of_gib, percent, seconds

Columns = dict[str, list[str]]

INDENT = 4
"""Columns before a reason on a line of its own."""
GAP = 2
"""Spaces between columns; one less if the terminal is narrow."""


@dataclass(frozen=True)
class Ranked:
    """Plans best first: the degrees, what they cost, and why all except the first lost. Every plan has a forecast."""

    plans: Sequence[Plan]
    values: Sequence[str] = ()
    """What each plan is worth by the objective; empty if that is the step time itself."""
    title: str = ""
    """Title of that column."""
    beside: str = ""
    """What the table leaves out, on a line of its own below it."""
    wide: bool = False
    """Every column and the reason on the row's own line, however narrow the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        reasons = ["why not #1", "chosen", *("; ".join(plan.why) for plan in self.plans[1:])]
        if same := self._same():
            yield from _wrapped(f"All rows: {', '.join(f'{title} {cell}' for title, cell in same.items())}", options)
        lines = _lines(self._columns(narrow=False), GAP)
        if self.wide or len(lines[0]) + GAP + max(map(len, reasons)) <= options.max_width:
            lines = [f"{line}{' ' * GAP}{reason}" for line, reason in zip(lines, reasons, strict=True)]
            for rank, line in enumerate(lines):
                yield _line(line, "bold" if rank == 1 else "")
        else:
            yield from self._two_lines_each(reasons, options.max_width)
        if self.beside:
            yield from _wrapped(self.beside, options)
        yield from _wrapped(self._caption(), options)

    def _two_lines_each(self, reasons: list[str], width: int) -> Iterator[Text]:
        columns = self._columns(narrow=True)
        lines = _lines(columns, GAP - 1)
        if len(lines[0]) > width:
            del columns["90 % band"]
            lines = _lines(columns, GAP - 1)
        yield _line(lines[0], "")
        same = self._same()
        for rank, (plan, line) in enumerate(zip(self.plans, lines[1:], strict=True)):
            yield _line(line, "bold" if rank == 0 else "")
            schedule = "" if "pp" in same else _schedule(plan.parallelism)
            words = "; ".join(filter(None, [schedule, reasons[rank + 1] if rank else ""]))
            for part in lines_of(words, max(width - INDENT, INDENT)) if words else ():
                yield _line(" " * INDENT + part, "dim")

    def _columns(self, *, narrow: bool) -> Columns:
        """Title -> cells; empty columns are left out."""
        layouts = [plan.parallelism for plan in self.plans]
        forecasts = [plan.priced for plan in self.plans]
        speeds = [f.tokens_per_s_per_device * layout.world_size for f, layout in zip(forecasts, layouts, strict=True)]
        columns = {"#": [str(rank + 1) for rank in range(len(self.plans))]}
        if len({layout.world_size for layout in layouts}) > 1:
            columns["devices"] = [str(layout.world_size) for layout in layouts]
        same = self._same()
        degrees = _degrees(layouts, narrow=narrow)
        columns |= {title: cells for title, cells in degrees.items() if title not in same}
        columns["step"] = [seconds(forecast.step_time_s) for forecast in forecasts]
        bands = [band(forecast) for forecast in forecasts]
        columns["90 % band"] = [words.replace(" .. ", "-") for words in bands] if narrow else bands
        columns["tok/s"] = [count(speed) for speed in speeds]
        if not narrow:
            columns["tok/s/device"] = [f"{forecast.tokens_per_s_per_device:,.0f}" for forecast in forecasts]
        columns["MFU"] = [percent(forecast.mfu) for forecast in forecasts]
        columns["GiB"] = self._memory()
        if self.values:
            columns[self.title] = list(self.values)
        return columns

    def _same(self) -> dict[str, str]:
        """The degrees that all rows have in common, shown once above the table."""
        if self.wide or len(self.plans) < 2:
            return {}
        degrees = _degrees([plan.parallelism for plan in self.plans], narrow=False)
        return {title: cells[0] for title, cells in degrees.items() if len(set(cells)) == 1}

    def _memory(self) -> list[str]:
        """What the fullest rank needs; with its device's memory, unless this is the same for all plans (the caption has it then)."""
        needs = [plan.priced.needed_bytes for plan in self.plans]
        if (room := self._room()) is not None:
            return [of_gib(need, room).split()[0] for need in needs]
        return [
            of_gib(need, capacity_bytes(plan)).removesuffix(" GiB")
            for need, plan in zip(needs, self.plans, strict=True)
        ]

    def _room(self) -> int | None:
        """Memory of the fullest rank's device in all plans; None if it differs."""
        rooms = {capacity_bytes(plan) for plan in self.plans}
        return rooms.pop() if len(rooms) == 1 else None

    def _caption(self) -> str:
        room = self._room()
        of = "" if room is None else f", of {of_gib(room, room).split()[0]}"
        said = f"dp = replicate x shard degree, mb = micro-batch, GiB = memory of the fullest rank{of}"
        return f"{said}; MFU against {self.plans[0].priced.mfu_peak}"


def _wrapped(words: str, options: ConsoleOptions) -> Iterator[Text]:
    for line in lines_of(words, options.max_width):
        yield _line(line, "")


def _line(text: str, style: str) -> Text:
    return Text(text.rstrip(), style=style, no_wrap=True, overflow="ignore")


def _lines(columns: Columns, gap: int) -> list[str]:
    """The title line, and one for each row."""
    widths = [max(len(title), *map(len, cells)) for title, cells in columns.items()]
    rows = [list(columns), *(list(row) for row in zip(*columns.values(), strict=True))]
    return [(" " * gap).join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _degrees(layouts: Sequence[Parallelism], *, narrow: bool) -> Columns:
    """The columns that describe the layouts; context and expert degrees and the order only if some layout uses them."""
    columns = {
        "dp": [f"{p.data_parallel_replicate_degree}x{_each(shard for shard, _ in p.widths)}" for p in layouts],
        "zero": [str(p.zero_stage) for p in layouts],
        "tp": [
            _each(tensor for _, tensor in p.widths) + ("+sp" if p.enable_sequence_parallel else "") for p in layouts
        ],
        "pp": [_pipeline(p) if narrow else f"{_pipeline(p)} {_schedule(p)}".strip() for p in layouts],
        "cp": [str(p.context_parallel_degree) for p in layouts],
        "ep": [str(p.expert_parallel_degree) for p in layouts],
        "mb": [str(p.micro_batch_size) for p in layouts],
        "recompute": [p.activation_checkpoint for p in layouts],
        "order": ["usual" if p.mesh_order is None else ">".join(p.mesh_order) for p in layouts],
    }
    plain = {"cp": {"1"}, "ep": {"1"}, "order": {"usual"}}
    return {title: cells for title, cells in columns.items() if set(cells) != plain.get(title)}


def _each(degrees: Iterable[int]) -> str:
    """``4|1``: each degree once, if stages differ."""
    return "|".join(map(str, dict.fromkeys(degrees)))


def _pipeline(layout: Parallelism) -> str:
    virtual = f"x{layout.virtual_stages_per_rank}" if layout.virtual_stages_per_rank > 1 else ""
    return f"{layout.pipeline_parallel_degree}{virtual}"


def _schedule(layout: Parallelism) -> str:
    return layout.pipeline_parallel_schedule if layout.pipeline_parallel_degree > 1 else ""
