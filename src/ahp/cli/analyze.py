"""The compute graph of a model: operators, FLOPs, bytes moved and saved, per part; forward, loss and backward.

The model is built from its config alone and traced without data: no weights, no GPU, no memory. docs/graph.md explains
the figures and their conventions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ahp.cli.planning_job import LONGEST_DEFAULT_SEQUENCE
from ahp.errors import BadInput
from ahp.job import Job, Precision
from ahp.plan import validated
from ahp.words import count, percent

if TYPE_CHECKING:
    from ahp.graph.operators import ModelGraph, Operator, Segment

TOP = 8
"""Kinds of operator calls that the table of the heaviest shows."""


@dataclass(frozen=True)
class Arguments:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Catalogue name, folder or file of a Hugging Face config.json, or pkg.mod:factory."""
    sequence_length: int | None = None
    """Tokens of one sequence; not given: the model's context, at most 8192."""
    micro_batch_size: int = 1
    """Sequences of one micro-batch."""
    precision: Precision = "bf16"
    """What matrix products compute in."""
    attention: Literal["flash", "math"] = "flash"
    """One fused operator, or scores that are written to memory."""
    json: bool = False
    """Print the whole graph as one JSON object."""
    dot: bool = False
    """Print the data dependencies in graphviz' DOT."""


def run(argv: list[str]) -> int:
    """``ahp analyze MODEL``. Returns the exit code; raises AhpError."""
    arguments = tyro.cli(Arguments, args=argv, prog="ahp analyze", description=__doc__)
    if arguments.json and arguments.dot:
        raise BadInput("--json, --dot: one of them at a time")
    from ahp.graph.export import to_dot, to_json
    from ahp.graph.kept import analyze

    length = arguments.sequence_length
    chosen = _default_length(arguments.model) if length is None else length
    job = validated(Job, {"sequence_length": chosen, "precision": arguments.precision}, "job")
    started = time.perf_counter()
    graph = analyze(arguments.model, job, micro_batch_size=arguments.micro_batch_size, attention=arguments.attention)
    print(f"traced in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if arguments.json:
        print(to_json(graph))
    elif arguments.dot:
        print(to_dot(graph), end="")
    else:
        _show(graph, arguments, given=length is not None)
    return 0


def _default_length(model: str) -> int:
    """The model's own context, at most what ``ahp plan`` takes too; the job's default where the model does not say."""
    from ahp.graph.positions import context_of

    context = context_of(model)
    return Job().sequence_length if context is None else min(context, LONGEST_DEFAULT_SEQUENCE)


def _show(graph: ModelGraph, arguments: Arguments, *, given: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for line in heading(graph, arguments.attention, given=given):
        console.print(line, markup=False)
    console.print()
    console.print(_parts_table(graph))
    console.print()
    console.print(_heaviest_table(graph))
    console.print()
    for line in six_n(graph):
        console.print(line, markup=False)
    console.print(f"\nNext: ahp plan {arguments.model} CLUSTER", markup=False)


def heading(graph: ModelGraph, attention: str, *, given: bool) -> list[str]:
    """Model and what was traced, one line each."""
    kinds = len(graph.blocks)
    layers = f"{graph.num_layers} layers" + (f" of {kinds} kinds" if kinds > 1 else " alike" if kinds else "")
    tied = f", {len(graph.tied)} tied" if graph.tied else ""
    note = "" if given else "   (length chosen, not given)"
    sequences = f"{graph.micro_batch_size} x {graph.sequence_length} tokens"
    return [
        f"Model    {graph.name}, {count(graph.num_parameters)} parameters ({graph.num_parameters:,}{tied}), {layers}",
        f"Traced   {sequences}, {graph.dtype}, {attention} attention; forward, loss, backward{note}",
    ]


def repeated(graph: ModelGraph) -> Iterator[tuple[Segment, int]]:
    """Each part once, with how often it stands in the model."""
    yield graph.embedding, 1
    for kind, block in enumerate(graph.blocks):
        yield block, graph.layers.count(kind)
    yield graph.head, 1


def _parts_table(graph: ModelGraph) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="Parts, each figure for one of them", title_justify="left")
    table.add_column("part")
    for name in ("times", "parameters", "operators", "forward GFLOP", "backward GFLOP", "moved MB", "saved MB"):
        table.add_column(name, justify="right")
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
    table.add_section()
    table.add_row("whole model", "", *_figures(totals))
    return table


def _figures(figures: list[int]) -> list[str]:
    parameters, operators, *rest = figures
    forward, backward, moved, saved = rest
    sizes = [f"{forward / 1e9:,.1f}", f"{backward / 1e9:,.1f}", f"{moved / 1e6:,.1f}", f"{saved / 1e6:,.1f}"]
    return [f"{parameters:,}", f"{operators:,}", *sizes]


def _heaviest_table(graph: ModelGraph) -> Any:
    from rich import box
    from rich.table import Table

    whole = max(graph.flops(), 1)
    table = Table(box=box.SIMPLE_HEAD, title="Heaviest operators, over the whole model", title_justify="left")
    for name in ("operator", "module", "phase", "inputs"):
        table.add_column(name, overflow="fold")
    for name in ("calls", "of FLOPs", "FLOP/byte"):
        table.add_column(name, justify="right")
    for operator, part, calls, flops, moved in heaviest(graph):
        shapes = " ".join("x".join(map(str, t.shape)) for t in operator.inputs)
        short = operator.name.removeprefix("aten.").removeprefix("_").replace("_for_cpu", "")
        row = [short, f"{part}: {operator.module}", operator.phase, shapes, str(calls), percent(flops / whole)]
        table.add_row(*row, f"{flops / moved:,.0f}" if moved else "")
    return table


def heaviest(graph: ModelGraph) -> list[tuple[Operator, str, int, int, int]]:
    """Calls alike in name, phase, module and shapes, by FLOPs: one of them, its part, calls, FLOPs, bytes moved."""
    groups: dict[Any, tuple[Operator, str, int, int, int]] = {}
    for part, times in repeated(graph):
        for operator in part.operators:
            key = (part.name, operator.name, operator.phase, operator.module, operator.inputs)
            first, name, calls, flops, moved = groups.get(key, (operator, part.name, 0, 0, 0))
            bytes_moved = operator.bytes_read + operator.bytes_written
            groups[key] = first, name, calls + times, flops + times * operator.flops, moved + times * bytes_moved
    return sorted(groups.values(), key=lambda group: -group[3])[:TOP]


def six_n(graph: ModelGraph) -> list[str]:
    """The rule of thumb of 6 FLOPs per parameter and token, against what was traced."""
    tokens = graph.micro_batch_size * graph.sequence_length
    attention = sum(
        times * o.flops for part, times in repeated(graph) for o in part.operators if "scaled_dot_product" in o.name
    )
    traced, rule = graph.flops(), 6 * graph.num_parameters * tokens
    share = percent(attention / traced) if traced else "0 %"
    of_it = f"of it {share} in fused attention (the full square)"
    ratios = f"traced / 6 N = {traced / rule:.3f}, without attention {(traced - attention) / rule:.3f}"
    lines = [
        f"FLOP     {_flop(traced)} a micro-batch, {_flop(traced / tokens)} a token, {of_it}",
        f"6 N      6 x {count(graph.num_parameters)} x {tokens} tokens = {_flop(rule)}; {ratios}",
    ]
    if graph.config.get("num_experts"):
        visited = graph.config.get("num_experts_per_token", "?")
        lines.append(f"         (a token visits {visited} of {graph.config['num_experts']} experts)")
    return lines


def _flop(number: float) -> str:
    """``492 TFLOP``, three figures."""
    unit, size = next(((u, s) for u, s in (("P", 1e15), ("T", 1e12), ("G", 1e9)) if number >= 0.9995 * s), ("M", 1e6))
    return f"{number / size:.3g} {unit}FLOP"
