"""Search every layout of a model on a cluster, print the best with the reasons why the others lost, write plan.yaml.

Columns: dp = data parallel, replicate x shard degree (as FSDP and HSDP); zero = ZeRO stage of the shards; tp = tensor
parallel, +sp with Megatron's sequence parallel; pp = pipeline parallel, x virtual stages per rank; cp = context parallel; ep = expert
parallel; mb = sequences of a micro-batch; recompute = activation checkpointing, selective(6 9 0) of that many layers of each stage;
90 % band = where the measured step should lie.

The job is given by --job FILE (a config.yaml or its job) and --job.KEY VALUE; keys that are not given are chosen as large
models are pre-trained, and printed. --parallelism.KEY VALUE fixes a part of the layout, the rest
is searched; --engine.KEY VALUE chooses what runs it. docs/search.md explains the table.

The objective cost needs --objective.price-per-device-hour 2.5 (or "{NAME: 2.5, ...}" for each device); fewest-devices
needs --objective.target-tokens-per-s; tokens-per-day takes --objective.failures-per-device-hour, .checkpoint-blocks-s
and .restart-s, each with a default that is printed. All three may use fewer devices than there are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console, Group

from ahp.cli.following import RUNS, after, default_data_words, refused_export, show_next
from ahp.cli.json_alone import print_alone
from ahp.cli.layout_words import layout_of
from ahp.cli.options import options_of
from ahp.cli.overrides import split_overrides
from ahp.cli.plan_measured import by_measurement, require_here
from ahp.cli.planning_job import given_job, precision_for, with_batch, with_sequence
from ahp.cli.waiting import waiting
from ahp.cli.writable import require_writable
from ahp.cluster.model import Cluster, NodeGroup
from ahp.cluster.parse import width_words
from ahp.cluster.sources import figures_of, is_corrected, is_measured, stands_on
from ahp.config import Config, Constraints, set_dotted
from ahp.errors import bad_input
from ahp.graph.catalogue import CATALOGUE
from ahp.job import Job
from ahp.optional import Flag, OptionalText
from ahp.plan import EngineChoice, Parallelism, Plan, validated
from ahp.words import count, gib, number_of

if TYPE_CHECKING:
    from ahp.graph.operators import ModelGraph
    from ahp.search.lost import Lost
    from ahp.search.result import Ranking

ROOTS = ("job", "parallelism", "engine", "objective")
"""Roots of the keys that can be given."""
VALUE_TITLES = {"cost": "per M tokens", "tokens-per-day": "tok/day"}
"""Title of the column with a plan's worth, if no other column shows it."""


@dataclass(frozen=True)
class Arguments:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Catalogue name, folder or file of a Hugging Face config.json, or pkg.mod:factory."""
    cluster: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CLUSTER")]
    """cluster.yaml, a short form such as 8x8xH100-SXM-80GB or 8xH100+8xA100, local, slurm or kubernetes."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "plan.yaml"
    """Where the best plan is written."""
    top: int = 10
    """Plans that are shown, the best of each family; --json has as many regardless of families."""
    objective: Literal["speed", "cost", "tokens-per-day", "fewest-devices"] = "speed"
    """What to optimize."""
    current: OptionalText = None
    """What runs today, shown next to the winner: "tp=8 dp_shard=8 zero=1" (as ahp explain --why-not), or a plan.yaml."""
    measure: int = 0
    """Train this many of the first plans for a few steps on this machine, and take the one that is fastest when measured."""
    method: Literal["exact", "anneal", "evolve"] = "exact"
    """exact proves the best; anneal and evolve forecast --budget layouts, beginning with --seed."""
    budget: int = 500
    """Layouts that anneal and evolve may forecast."""
    seed: int = 0
    """Seed of anneal and evolve: the same seed gives the same plans."""
    wide: Flag = False
    """Every column of the table, each plan on one line, however narrow the terminal."""
    json: Flag = False
    """Print the ranking as one JSON object."""


@dataclass(frozen=True)
class Found:
    """One search and its subject, for printing."""

    graph: ModelGraph
    cluster: Cluster
    job: Job
    chosen: tuple[str, ...]
    """Keys of the job that were chosen, not given."""
    ranking: Ranking
    lost: Lost | None = None
    """What would fit if a node were lost; None if that was not asked."""
    batch: str | None = None
    """A note that the batch is small for the devices."""
    memory: str | None = None
    """A note on a setting with which a faster layout would fit."""
    width: str | None = None
    """A note on how many devices a node was assumed to have, if the cluster's short form does not say."""
    refused: str | None = None
    """A note that no file of the engine can express the first plan; None if the ranking has it."""
    two_types: str | None = None
    """Why the model computes in fp32 alone, if no precision is given; None if it computes in others."""
    top: int = 10
    """Rows of the table if it has one per family; 0: all plans, whatever their family."""

    @property
    def fewer(self) -> str | None:
        """A note that fewer devices are faster; None under an objective that compares device counts itself."""
        return self.lost.faster if self.lost is not None and self.ranking.choice is None else None


def run(argv: list[str]) -> int:
    """``ahp plan MODEL CLUSTER``. Returns the exit code; raises AhpError."""
    overrides, rest = split_overrides(argv, ROOTS)
    if "objective" in overrides:  # the option itself, not one of its keys
        rest += ["--objective", str(overrides.pop("objective"))]
    arguments = options_of(Arguments, rest, "ahp plan", __doc__, ROOTS)
    require_writable(arguments.out, "--out")  # before the search, which may take a while
    if arguments.top < 1:
        raise bad_input("--top", arguments.top, "must be 1 or more")
    if arguments.measure < 0:
        raise bad_input("--measure", arguments.measure, "must be 0 (choose by the forecast) or a number of plans")
    if arguments.method == "exact":
        for key, plain in (("budget", 500), ("seed", 0)):
            if (given := getattr(arguments, key)) != plain:
                raise bad_input(f"--{key}", given, "the exact search has none; add --method anneal or evolve")
    if arguments.measure and arguments.objective != "speed":
        raise bad_input("--measure", arguments.measure, "what is measured is speed; leave out --objective")
    if arguments.cluster in CATALOGUE or (arguments.cluster and Path(arguments.cluster, "config.json").is_file()):
        raise bad_input("cluster", arguments.cluster, "this is a model; the order is: ahp plan MODEL CLUSTER")
    cluster = Cluster.resolve(arguments.cluster)
    if arguments.measure:
        require_here(cluster, arguments.measure)
    by = {"name": arguments.method, "budget": arguments.budget, "seed": arguments.seed}
    found = find(
        arguments.model,
        cluster,
        overrides | {"objective.name": arguments.objective},
        arguments.top,
        by,
        today(arguments.current),
    )
    found = replace(found, width=width_words(arguments.cluster))
    if arguments.measure:
        found = measured(found, arguments.measure)
    best = found.ranking.best
    refused = refused_export(best, arguments.out)
    found = replace(found, refused=None if refused in found.ranking.notes else refused)
    best.save(arguments.out)
    if arguments.json:
        print_alone(json.dumps(as_json(found, arguments.out)))
    else:
        show(found, arguments.out, wide=arguments.wide)
    return 0


def today(words: str | None) -> Parallelism | None:
    """The layout of ``--current``: keys, or a plan's. Raises BadInput for what is neither."""
    if words is None:
        return None
    if not words or words.endswith((".yaml", ".yml")) or os.path.exists(words):
        return Plan.load(words).parallelism
    return layout_of(words, "--current")


def find(
    model: str | dict[str, Any],
    cluster: Cluster,
    overrides: dict[str, Any],
    top: int,
    method: dict[str, Any] | None = None,
    current: Parallelism | None = None,
) -> Found:
    """Analyze and search; keys of the job that the user did not give are chosen. ``method``: the keys of ``search.method.Method``."""
    from ahp.cli.searched import searched
    from ahp.forecast import rules
    from ahp.graph.kept import analyze
    from ahp.search.batch import small_batch
    from ahp.search.less_memory import less_memory
    from ahp.search.lost import one_lost
    from ahp.search.method import Method
    from ahp.search.objective import objective_of
    from ahp.search.problem import problem

    by = Method(**(method or {}))  # raises before anything is traced
    overrides = dict(overrides)
    given = given_job(overrides)
    asked: dict[str, Any] = {}
    for key, value in overrides.items():
        set_dotted(asked, key, value)
    layout = asked.get("parallelism", {})
    constraints = validated(Constraints, {} if layout == "auto" else layout, "parallelism", Config)
    engine = validated(EngineChoice, asked.get("engine", {}), "engine", Config)
    objective = objective_of(asked.get("objective", {}))
    job = with_sequence(given, model, cluster, engine)
    print(f"analyzing {model} ...", file=sys.stderr)
    graph = analyze(model, job, attention=engine.attention)
    if (two_types := rules.two_types(graph, job, engine)) and not {"precision", "dtype"} & given.keys():
        job = job.model_copy(update={"precision": "fp32"})
        two_types, graph = graph.two_types, analyze(model, job, attention=engine.attention)
    job = with_batch(job, given, model, graph.num_parameters, cluster.num_devices)
    print(f"searching layouts, world size {cluster.num_devices} ...", file=sys.stderr)
    with waiting("searching layouts"):
        ranking = searched(
            model,
            graph,
            cluster,
            job,
            constraints=constraints,
            engine=engine,
            keep=top,
            method=by,
            current=current,
            objective=objective,
        )
    what = problem(graph, cluster, job, constraints, ranking.best.engine)
    with waiting("searching for what would fit if a node were lost"):
        lost = one_lost(what, ranking.best)
    with waiting("searching with settings that need less memory"):
        # Another objective may choose fewer devices, which are not compared with all here.
        memory = None if ranking.choice else less_memory(what, ranking.best)
    chosen = tuple(key for key in ("sequence_length", "global_batch_size", "precision") if key not in given)
    small = small_batch(what, ranking.best)
    return Found(graph, cluster, job, chosen, ranking, lost, batch=small, memory=memory, two_types=two_types, top=top)


def measured(found: Found, count: int) -> Found:
    """``found`` with the first ``count`` plans ordered by their measured step times, which their reasons give."""
    from ahp.runtime.check.measure import measure
    from ahp.search.problem import problem

    ranking, best = found.ranking, found.ranking.best
    results = measure(ranking.plans[:count], say=lambda text: print(text, file=sys.stderr))
    assert best.cluster is not None, "plans of a search have one"
    used = problem(found.graph, best.cluster, found.job, None, best.engine)
    return replace(found, ranking=by_measurement(ranking, results, used), top=0)


def show(found: Found, out: str, *, wide: bool = False) -> None:
    """Print the ranking for people on stdout; ends with what to do next."""
    from ahp.report import tables

    console, best = tables.console(), found.ranking.best
    console.print(table(found, wide=wide), crop=not wide)
    explain_first(console, found.ranking)
    large = (f"{loser.parallelism.short()}: {loser.reason}" for loser in found.ranking.too_large)
    if found.ranking.too_large:
        _listed(console, "Faster, but for their memory", large)
    after_it = [] if found.lost is None else [found.lost.words()]
    after_it += [confidence(found.cluster), f"Wrote {out}"]
    if best.engine.name == RUNS and (trial := default_data_words(found.job)):
        after_it.append(trial)
    for words in after_it:
        console.print()
        console.print(tables.Hanging([("", words)], gap=0))
    show_next(console, following(found, out))


def following(found: Found, out: str) -> list[str]:
    """The next commands for the first plan; its export, which comes last, is none of them if it is refused."""
    commands = after(out, found.ranking.best.engine.name, "explain", "simulate")
    return commands[:-1] if found.refused else commands


def explain_first(console: Console, ranking: Ranking) -> None:
    """Print why the first plan is the first, without what the table's heading already states."""
    above = {*ranking.proof, *([ranking.choice.words()] if ranking.choice else [])}
    _listed(console, "Why #1", (reason for reason in ranking.best.why if reason not in above))


def _listed(console: Console, title: str, lines: Iterable[str]) -> None:
    from ahp.report.tables import bulleted

    console.print(f"\n{title}", style="bold")
    console.print(bulleted(lines))


def table(found: Found, *, wide: bool = False) -> Group:
    """The lines of ``heading``, then the table of plans."""
    from ahp.report.ranked import Ranked
    from ahp.report.tables import Hanging

    ranking = found.ranking
    by_value = ranking.objective.name in VALUE_TITLES
    values = [worth.words for worth in ranking.worth] if by_value else []
    rows, beside = ranking.plans, ""
    if ranking.families and ranking.choice is None and found.top:
        rows = (ranking.best, *ranking.families)[: found.top]
        beside = twins_words(ranking.twins)
    plans = Ranked(rows, values, VALUE_TITLES.get(ranking.objective.name, ""), beside, wide)
    return Group(Hanging(heading(found)), "", plans)


def twins_words(twins: int) -> str:
    """A note on what a table with one row per family leaves out; empty if it leaves out nothing."""
    if not twins:
        return ""
    others = f"{twins} other layouts of these families fit" if twins > 1 else "one other layout of these families fits"
    return f"the best of each family (what is divided beside the batch); {others}, slower or tied: --json lists them"


def heading(found: Found) -> list[tuple[str, str]]:
    """Lines about the model, the cluster, the job and the search, each with its title."""
    from ahp.forecast.step import graph_of_engine
    from ahp.graph.key_heads import has_fused_attention

    job, ranking = found.job, found.ranking
    fused = has_fused_attention(graph_of_engine(found.graph, job, ranking.best.engine))
    tokens = f"{number_of(job.global_batch_size, 'sequence')} of {job.sequence_length} = {count(job.tokens_per_step)} tokens a step"
    chosen = f" (chosen, not given: {', '.join(found.chosen)})" if found.chosen else ""
    parameters = f"{count(found.graph.num_parameters)} parameters, {number_of(found.graph.num_layers, 'layer')}"
    return [
        ("Model", f"{found.graph.name}, {parameters}"),
        ("Cluster", cluster_words(found.cluster)),
        *([("Note", found.width)] if found.width else []),
        ("Job", f"{tokens}, {job.precision}, {job.optimizer.name}{chosen}; {training_words(job)}"),
        *precision_note(found),
        *([("Note", found.batch)] if found.batch else []),
        ("Engine", ranking.best.engine.words(fused=fused)),
        *([("Aim", ranking.objective.words())] if ranking.choice else []),
        *((name.capitalize(), words) for name, _, words in (line.partition(": ") for line in ranking.proof)),
        *([("Devices", ranking.choice.words())] if ranking.choice else []),
        *(("Note", note) for note in ranking.notes),
        *(("Note", note) for note in (found.refused, found.fewer, found.memory) if note),
        *([] if ranking.current is None else [("Today", ranking.current.words())]),
    ]


def training_words(job: Job) -> str:
    """Keys of the job that the plan does not depend on, but ``ahp train`` takes from it."""
    return f"{number_of(job.steps, 'step')} on {job.data_words}, learning rate {job.optimizer.learning_rate:g}"


def precision_note(found: Found) -> list[tuple[str, str]]:
    """Why the chosen precision is not bf16."""
    if "precision" not in found.chosen:
        return []
    precision, reason = precision_for(found.cluster, found.ranking.best.engine)
    if found.two_types is not None:
        precision, reason = "fp32", found.two_types
    return [("Note", f"{precision}: {reason}")] if reason and precision == found.job.precision else []


def cluster_words(cluster: Cluster) -> str:
    """``8 x 8 H100-SXM-80GB, 80.0 GiB each, datasheet figures``."""
    groups = [
        f"{group.nodes} x {group.devices_per_node} {group.device.name}{_domain_words(group)}, {gib(group.device.memory_bytes)} each"
        for group in cluster.groups
    ]
    return f"{'; '.join(groups)}, {figures_of(cluster)}"


def _domain_words(group: NodeGroup) -> str:
    if group.nvlink_switch is False:
        return " without an NVLink switch"
    domain = group.devices_per_nvlink_domain
    return "" if domain is None else f" in NVLink domains of {domain}"


def confidence(cluster: Cluster) -> str:
    """How far the figures can be trusted, and what would make them better."""
    if is_measured(cluster) or is_corrected(cluster):
        return f"Confidence: {stands_on(cluster)}"
    return (
        "Confidence: datasheet figures only, nobody measured this cluster. On it run: "
        "ahp probe -o cluster.yaml, then ahp plan MODEL cluster.yaml"
    )


def plan_as_json(plan: Plan) -> dict[str, Any]:
    return plan.model_dump(mode="json", include={"parallelism", "forecast", "why"})


def as_json(found: Found, out: str) -> dict[str, Any]:
    """The ranking as plain data."""
    certificate = found.ranking.certificate
    return {
        "model": {"name": found.graph.name, "num_parameters": found.graph.num_parameters},
        "cluster": {
            "num_devices": found.cluster.num_devices,
            "source": found.cluster.source,
            "stands_on": stands_on(found.cluster),
        },
        "job": found.job.model_dump(mode="json"),
        "chosen": list(found.chosen),
        "engine": found.ranking.best.engine.model_dump(mode="json"),
        "certificate": certificate.plain(),
        "own_order": None if found.ranking.own_order is None else asdict(found.ranking.own_order),
        "notes": [
            *filter(None, [found.width, found.batch]),
            *(words for _, words in precision_note(found)),
            *found.ranking.notes,
            *filter(None, [found.refused, found.fewer, found.memory]),
        ],
        "objective": found.ranking.objective.model_dump(mode="json", exclude_none=True),
        "devices": None if found.ranking.choice is None else found.ranking.choice.plain(),
        "current": None if found.ranking.current is None else found.ranking.current.plain(),
        "plans": [
            {**plan_as_json(plan), "worth": dict(worth.figures)}
            for plan, worth in zip(found.ranking.plans, found.ranking.worth, strict=True)
        ],
        "fastest": plan_as_json(found.ranking.fastest),
        "families": [plan_as_json(plan) for plan in found.ranking.families],
        "one_lost": None if found.lost is None else found.lost.plain(),
        "rejected": [loser.model_dump(mode="json") for loser in found.ranking.best.rejected],
        "wrote": out,
        "next": following(found, out),
    }
