"""The compute graph of a model: operators, FLOPs, bytes moved and saved, per part; forward, loss and backward.

The model is built from its config alone and traced without data: no weights, no GPU, no memory. docs/graph.md explains
the figures and their conventions.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ahp.cli.following import show_next
from ahp.cli.json_alone import print_alone
from ahp.cli.options import options_of
from ahp.cli.planning_job import LONGEST_DEFAULT_SEQUENCE
from ahp.errors import BadInput
from ahp.job import Job, Precision
from ahp.optional import Flag, OptionalNumber
from ahp.plan import validated
from ahp.words import count, number_of, percent

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

    from ahp.graph.operators import ModelGraph, Operator, Segment

TOP = 8
"""How many kinds of operator calls the table of the heaviest shows."""


@dataclass(frozen=True)
class Arguments:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Catalogue name, folder or file of a Hugging Face config.json, or pkg.mod:factory."""
    sequence_length: OptionalNumber = None
    """Tokens of one sequence; not given: the model's context, at most 8192."""
    micro_batch_size: int = 1
    """Sequences of one micro-batch."""
    precision: Precision = "bf16"
    """What matrix products compute in."""
    attention: Literal["flash", "math"] = "flash"
    """One fused operator, or scores that are written to memory."""
    json: Flag = False
    """Print the whole graph as one JSON object."""
    dot: Flag = False
    """Print the data dependencies in graphviz' DOT."""


def run(argv: list[str]) -> int:
    """``ahp analyze MODEL``. Returns the exit code; raises AhpError."""
    arguments = options_of(Arguments, argv, "ahp analyze", __doc__)
    if arguments.json and arguments.dot:
        raise BadInput("--json, --dot: give only one")
    from ahp.graph.export import to_dot, to_json
    from ahp.graph.kept import analyze

    length = arguments.sequence_length
    chosen = default_length(arguments.model) if length is None else length
    job = validated(Job, {"sequence_length": chosen, "precision": arguments.precision}, "job")
    started = time.perf_counter()
    graph = analyze(arguments.model, job, micro_batch_size=arguments.micro_batch_size, attention=arguments.attention)
    print(f"analyzed in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if arguments.json:
        print_alone(to_json(graph))
    elif arguments.dot:
        print(to_dot(graph), end="")
    else:
        _show(graph, arguments, given=length is not None)
    return 0


def default_length(model: str) -> int:
    """The model's own context, with the same upper limit as in ``ahp plan``; the job's default if the model does not state it."""
    from ahp.graph.kept import context_of

    context = context_of(model)
    return Job().sequence_length if context is None else min(context, LONGEST_DEFAULT_SEQUENCE)


def _show(graph: ModelGraph, arguments: Arguments, *, given: bool) -> None:
    from ahp.report import tables

    console = tables.console()
    console.print(tables.Hanging(heading(graph, arguments.attention, given=given)))
    console.print("\nParts, with the figures of one instance", style="bold")
    console.print(_parts_table(graph))
    console.print("\nHeaviest operators, over the whole model", style="bold")
    console.print(Heaviest(heaviest(graph), max(graph.flops(), 1)))
    console.print()
    console.print(tables.Hanging(six_n(graph)))
    show_next(console, [f"ahp plan {shlex.quote(arguments.model)} CLUSTER"])


def heading(graph: ModelGraph, attention: str, *, given: bool) -> list[tuple[str, str]]:
    """Lines about the model and what was traced, each with its title."""
    kinds = len(graph.blocks)
    layers = number_of(graph.num_layers, "layer") + (f" of {kinds} kinds" if kinds > 1 else " alike" if kinds else "")
    tied = f", {len(graph.tied)} tied" if graph.tied else ""
    note = "" if given else "; length chosen, not given"
    sequences = f"{graph.micro_batch_size} x {graph.sequence_length} tokens"
    return [
        ("Model", f"{graph.name}, {count(graph.num_parameters)} parameters ({graph.num_parameters:,}{tied}), {layers}"),
        ("Traced", f"{sequences}, {graph.dtype}, {attention} attention; forward, loss, backward{note}"),
    ]


def repeated(graph: ModelGraph) -> Iterator[tuple[Segment, int]]:
    """Each part once, with how often it occurs in the model."""
    yield graph.embedding, 1
    for kind, block in enumerate(graph.blocks):
        yield block, graph.layers.count(kind)
    yield graph.head, 1


def _parts_table(graph: ModelGraph) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("part", "times", "params", "ops", "forward", "backward", "moved", "saved"):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    totals = [0, 0, 0, 0, 0, 0]
    for part, times in repeated(graph):
        figures = [
            part.num_parameters,
            len(part.operators),
            part.flops("forward"),
            part.flops("backward"),
            sum(o.bytes_read + o.bytes_written for o in part.operators),
            part.saved_bytes,
        ]
        table.add_row(part.name, str(times), *_figures(figures))
        totals = [total + times * figure for total, figure in zip(totals, figures, strict=True)]
    table.add_row("whole", "", *_figures(totals), style="bold")
    return table


def _figures(figures: list[int]) -> list[str]:
    parameters, operators, forward, backward, moved, saved = figures
    sizes = [_metric(forward, "FLOP"), _metric(backward, "FLOP"), _metric(moved, "B"), _metric(saved, "B")]
    return [count(parameters), f"{operators:,}", *sizes]


Call = tuple["Operator", str, int, int, int]


@dataclass(frozen=True)
class Heaviest:
    """Shows the calls of ``heaviest``: each on one line, with its part, module and input shapes on the next."""

    calls: list[Call]
    whole: int
    """FLOPs of the model."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        from ahp.report.tables import lines_of

        rows = [("operator", "phase", "calls", "FLOPs", "FLOP/B"), *map(self._row, self.calls)]
        longest = max(len(row[0]) for row in rows)
        for number, (name, phase, *figures) in enumerate(rows):
            cells = "".join(f"  {figure:>6}" for figure in figures)
            yield Text(f"{name:<{longest}}  {phase:<8}{cells}", no_wrap=True, overflow="ignore")
            if number:
                operator, part, *_ = self.calls[number - 1]
                shapes = " ".join("x".join(map(str, tensor.shape)) for tensor in operator.inputs)
                for line in lines_of(f"{part}: {operator.module}; {shapes}", options.max_width - 4):
                    yield Text(f"    {line}", style="dim", no_wrap=True, overflow="ignore")

    def _row(self, call: Call) -> tuple[str, ...]:
        operator, _, calls, flops, moved = call
        short = operator.name.removeprefix("aten.").removeprefix("_").replace("_for_cpu", "")
        return short, operator.phase, str(calls), percent(flops / self.whole), f"{flops / moved:,.0f}" if moved else ""


def heaviest(graph: ModelGraph) -> list[Call]:
    """Calls grouped by name, phase, module and shapes, most FLOPs first: one call, its part, number of calls, FLOPs, bytes moved."""
    groups: dict[Any, Call] = {}
    for part, times in repeated(graph):
        for operator in part.operators:
            key = (part.name, operator.name, operator.phase, operator.module, operator.inputs)
            first, name, calls, flops, moved = groups.get(key, (operator, part.name, 0, 0, 0))
            bytes_moved = operator.bytes_read + operator.bytes_written
            groups[key] = first, name, calls + times, flops + times * operator.flops, moved + times * bytes_moved
    return sorted(groups.values(), key=lambda group: -group[3])[:TOP]


def six_n(graph: ModelGraph) -> list[tuple[str, str]]:
    """The rule of thumb of 6 FLOPs per parameter and token, compared with the traced FLOPs."""
    tokens = graph.micro_batch_size * graph.sequence_length
    attention = sum(
        times * o.flops for part, times in repeated(graph) for o in part.operators if "scaled_dot_product" in o.name
    )
    traced, rule = graph.flops(), 6 * graph.num_parameters * tokens
    share = percent(attention / traced) if traced else "0 %"
    of_it = f"of it {share} in fused attention (the full square)"
    ratios = f"traced / 6 N = {traced / rule:.3f}, without attention {(traced - attention) / rule:.3f}"
    lines = [
        ("FLOP", f"{_metric(traced, 'FLOP')} a micro-batch, {_metric(traced / tokens, 'FLOP')} a token, {of_it}"),
        ("6 N", f"6 x {count(graph.num_parameters)} x {tokens} tokens = {_metric(rule, 'FLOP')}; {ratios}"),
    ]
    if graph.config.get("num_experts"):
        visited = graph.config.get("num_experts_per_token", "?")
        lines.append(("Experts", f"a token visits {visited} of {graph.config['num_experts']}"))
    return lines


def _metric(number: float, unit: str) -> str:
    """``492 TFLOP``, ``95.7 GB``: three figures, in powers of 1000."""
    sizes = (("P", 1e15), ("T", 1e12), ("G", 1e9))
    prefix, size = next(((p, s) for p, s in sizes if number >= 0.9995 * s), ("M", 1e6))
    return f"{number / size:.3g} {prefix}{unit}" if number else "0"
