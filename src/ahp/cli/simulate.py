"""What a plan's step costs: where the time and the memory go, what binds, and its timeline.

With --engine.KEY VALUE, --job.KEY VALUE or --parallelism.KEY VALUE the plan is priced with that change; the file stays as it is.
With --trace the timeline is written for Perfetto (ui.perfetto.dev) or chrome://tracing, one track for each rank and stream.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ahp.cli.following import can_follow, show_next
from ahp.cli.json_alone import print_alone
from ahp.cli.options import options_of
from ahp.cli.overrides import split_overrides
from ahp.cli.waiting import waiting
from ahp.cli.writable import require_writable
from ahp.cluster.plain_groups import plain_groups
from ahp.config import set_dotted
from ahp.errors import BadInput, NotExpressible, bad_input
from ahp.optional import Flag, OptionalText
from ahp.plan import Plan, validated
from ahp.words import part_words

if TYPE_CHECKING:
    from ahp.cluster.model import Cluster
    from ahp.forecast.priced import Priced
    from ahp.graph.operators import ModelGraph
    from ahp.report.binding import Binding

ROOTS = ("job", "parallelism", "engine")
"""Roots of a plan's keys that can be changed on the command line."""

NARROWEST = 80
"""Columns that the output needs; a narrower terminal wraps the lines itself."""


MOST_IN_VAIN = 5
"""How many neighboring layouts are shown if none helps."""


@dataclass(frozen=True)
class Arguments:
    plan: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PLAN")]
    """plan.yaml, or a run's folder."""
    trace: Annotated[OptionalText, tyro.conf.arg(metavar="FILE")] = None
    """Write the timeline to this file."""
    all_ranks: Flag = False
    """Draw every rank in the timeline, not only one of those that do the same."""
    json: Flag = False
    """Print one JSON object."""


def run(argv: list[str]) -> int:
    """``ahp simulate PLAN``. Returns the exit code; raises AhpError."""
    from ahp.cluster.sources import stands_on
    from ahp.forecast import timeline
    from ahp.report.binding import binding_of
    from ahp.report.tables import capacity_bytes

    overrides, rest = split_overrides(argv, ROOTS)
    arguments = options_of(Arguments, rest, "ahp simulate", __doc__, ROOTS)
    if arguments.all_ranks and arguments.trace is None:
        raise bad_input("--all-ranks", True, "is an option of the timeline; give its file: --trace FILE", [False])
    if arguments.trace is not None:
        require_writable(arguments.trace, "--trace")
    plan = changed(Plan.load(arguments.plan), overrides)
    graph, cluster = _subject(plan)
    priced = _price(graph, cluster, plan)
    plan = plan.model_copy(
        update={"forecast": priced.forecast, "parallelism": priced.parallelism, "cluster": cluster.plain()}
    )
    if arguments.trace is not None:
        timeline.write(priced, arguments.trace, all_ranks=arguments.all_ranks)
    print("pricing its neighbours ...", file=sys.stderr)
    with waiting("pricing its neighbours"):
        found, following = binding_of(graph, cluster, plan), _following(plan, arguments, overrides)
    if arguments.json:
        result = {
            "parallelism": priced.parallelism.model_dump(mode="json"),
            "engine": plan.engine.model_dump(mode="json"),
            "forecast": priced.forecast.model_dump(mode="json"),
            "capacity_bytes": capacity_bytes(plan),
            "stands_on": stands_on(cluster),
            "binds": _plain(found),
            "wrote": arguments.trace,
            "next": following,
        }
        print_alone(json.dumps(result))
    else:
        _show(plan, found, arguments.trace, following)
    return 0


def changed(plan: Plan, overrides: dict[str, Any]) -> Plan:
    """The plan with dotted keys set. Raises BadInput for an invalid key or value."""
    if not overrides:
        return plan
    data = plan.model_dump(mode="json")
    for key, value in overrides.items():
        set_dotted(data, key, value)
    return validated(Plan, data, "plan")


def price(plan: Plan) -> Priced:
    """Analyze the plan's model and price its layout on its cluster. Raises BadInput without a cluster."""
    return _price(*_subject(plan), plan)


def _price(graph: ModelGraph, cluster: Cluster, plan: Plan) -> Priced:
    from ahp.forecast.step import price as price_layout

    return price_layout(graph, cluster, plan.job, plan.parallelism, plan.engine)


def _subject(plan: Plan) -> tuple[ModelGraph, Cluster]:
    """The graph of the plan's model, and its cluster."""
    from ahp.cluster.model import Cluster
    from ahp.engines.registry import get
    from ahp.graph.kept import analyze

    if plan.cluster is None:
        raise BadInput(
            f"cluster = None: the plan names no cluster to simulate it on; add one, such as {{device: H100, devices_per_node: {plan.parallelism.world_size}}}, "
            "or write a plan with: ahp plan MODEL CLUSTER"
        )
    cluster = Cluster.resolve(plan.cluster)
    # Refuse what the engine cannot express before the model is traced.
    lightest = {"activation_checkpoint": "none"} if plan.parallelism.activation_checkpoint == "auto" else {}
    layout = plan.parallelism.model_copy(update=lightest)
    if reason := get(plan.engine.name).refuses(plan.job, layout, plan.engine):
        raise NotExpressible(reason)
    announce(plan)
    return analyze(plan.model, plan.job, attention=plan.engine.attention), cluster


def announce(plan: Plan) -> None:
    """Print what is about to be analyzed. A plan from elsewhere may name a factory. Its code then runs, which users do not expect of a forecast."""
    from ahp.graph.models import is_factory

    if is_factory(plan.model):
        module, _, function = str(plan.model).partition(":")
        print(f"the plan's model is code: {module} is imported and {function}() called", file=sys.stderr, flush=True)
    print(f"analyzing {_named(plan)} ...", file=sys.stderr, flush=True)


def _following(plan: Plan, arguments: Arguments, overrides: dict[str, Any]) -> list[str]:
    """The next commands. What was changed here is in no file, so no other command knows of it."""
    path = arguments.plan
    if not overrides:
        return can_follow(plan, path, "explain")
    if arguments.trace is None:
        words = [
            f"--{key.replace('_', '-')} {shlex.quote(json.dumps(value) if not isinstance(value, str) else value)}"
            for key, value in overrides.items()
        ]
        return [f"ahp simulate {shlex.quote(path)} {' '.join(words)} --trace trace.json"]
    return [f"ahp simulate {shlex.quote(path)}", f"ahp explain {shlex.quote(path)}"]


def _plain(found: Binding) -> dict[str, Any]:
    """What binds, as plain data."""
    tried = [
        {
            "change": neighbour.change,
            "relieves": neighbour.part,
            "verdict": neighbour.verdict,
            "step_time_s": neighbour.forecast.step_time_s if neighbour.forecast is not None else None,
            "helps": neighbour.helps,
        }
        for neighbour in found.neighbours
    ]
    return {**asdict(found), "neighbours": tried}


def _show(plan: Plan, found: Binding, trace: str | None, following: list[str]) -> None:
    """Bars for people, on stdout."""
    from ahp.report import tables

    console, forecast = tables.console(least_width=NARROWEST), plan.priced

    def tell(*lines: str) -> None:
        for line in lines:
            console.print(line, markup=False)

    console.print(tables.Hanging(_heading(plan)))
    tell("")
    console.print(tables.time_bar(forecast))
    tell("")
    console.print(tables.memory_bar(forecast, tables.capacity_bytes(plan)))
    tell("", "What binds")
    console.print(tables.bulleted(_told(found)))
    console.print(tables.bulleted(_in_vain(found), "      *"))
    tell("", "What the parts are")
    console.print(tables.meanings(forecast))
    if trace is not None:
        tell("", f"Wrote {Path(trace)}   open it at https://ui.perfetto.dev")
    show_next(console, following)


def _heading(plan: Plan) -> list[tuple[str, str]]:
    """Lines about what was priced, and how fast it is."""
    from ahp.cluster.model import Cluster
    from ahp.cluster.sources import stands_on
    from ahp.forecast.open_switch import open_switch
    from ahp.words import number_of, percent

    assert plan.cluster is not None, "_subject refuses a plan without one"
    groups, forecast, job = plain_groups(plan.cluster), plan.priced, plan.job
    devices = " + ".join(f"{g['nodes'] * g['devices_per_node']} x {g['device']['name']}" for g in groups)
    idle = sum(g["nodes"] * g["devices_per_node"] for g in groups) - plan.parallelism.world_size
    left = f", {idle} left idle by this layout" if idle else ""
    cluster = Cluster.resolve(plan.cluster)
    assumed = open_switch(cluster, plan.parallelism)
    return [
        (
            "Model",
            f"{_named(plan)}, {number_of(job.global_batch_size, 'sequence')} of {job.sequence_length}, {job.precision}",
        ),
        ("Cluster", f"{devices}{left}, {stands_on(cluster)}"),
        *([("Note", assumed)] if assumed else []),
        ("Engine", f"{plan.engine.words()}"),
        ("Layout", f"{plan.parallelism.short()}"),
        ("Speed", f"{forecast.tokens_per_s_per_device:,.0f} tokens/s/device, MFU {percent(forecast.mfu)}"),
    ]


def _named(plan: Plan) -> str:
    """The model's name, or its type."""
    return plan.model if isinstance(plan.model, str) else str(plan.model.get("model_type", "given config"))


def _told(found: Binding) -> list[str]:
    """Lines about what binds: first the sentence, then memory, then what would relieve it."""
    lines = [found.sentence]
    if found.part != "memory":
        lines.append(f"Memory: {found.memory}.")
    if found.relief is not None:
        first = found.neighbours[0].part
        about = f", against {part_words(found.relief.part)}" if found.relief.part not in (first, "compute") else ""
        lines.append(f"Most relief of the neighbouring layouts{about}: {found.relief.change}: {found.relief.verdict}.")
    elif found.neighbours:
        lines.append("No neighbouring layout helps:")
    return lines


def _in_vain(found: Binding) -> list[str]:
    """Lines about the neighbors, if none helps."""
    if found.relief is not None:
        return []
    shown = [f"{neighbour.change}: {neighbour.verdict}" for neighbour in found.neighbours[:MOST_IN_VAIN]]
    more = len(found.neighbours) - len(shown)
    return [*shown, f"and {more} more (--json has them)"] if more else shown
