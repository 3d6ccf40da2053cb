"""Judge a configuration that others wrote: torchtitan's TOML or Python, Megatron-LM's script, DeepSpeed's JSON, the YAML of accelerate,
nanotron, MaxText, NeMo and Megatron-Bridge, or a script that starts one of these programs.

Prints the layout that the file states, its forecast, whether it fits, what binds, the best layout that the same engine can run, and the
lines to change to get it. Keys that it does not know are listed. The file is read, not executed.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ahp.cli.following import show_next
from ahp.cli.json_alone import print_alone
from ahp.cli.options import options_of
from ahp.cli.overrides import split_overrides
from ahp.errors import AhpError, BadInput, NotExpressible, NothingFits
from ahp.export.table import Settings, Unreadable
from ahp.optional import Flag, OptionalText
from ahp.plan import EngineChoice, Forecast, Parallelism, Plan, validated
from ahp.words import WORTH_TELLING, number_of, percent, seconds

if TYPE_CHECKING:
    from ahp.cluster.model import Cluster
    from ahp.export.reading import Foreign
    from ahp.search.current import Current
    from ahp.search.result import Ranking

Price = Callable[[Parallelism], Forecast]
ROOTS = ("job", "parallelism")
"""Roots of the keys that can be given besides the file."""
ASSUMED = ("job.sequence_length", "job.global_batch_size", "job.precision", "parallelism.micro_batch_size")
"""Keys that a forecast rests on, and not every file gives."""
LAYOUT = ("parallelism.", "job.precision")
"""Fields without which a file's cost cannot be forecast."""
KEPT = 40
"""How many plans of the ranking are tried, to find the first that the file can express."""
DEVICE, EACH, NODES = "H100", 8, (1, 2, 4, 8, 16, 32, 64, 128)
"""The cluster that is assumed if none is given: the usual node of today's recipes, as many as the degrees make."""
MOST_LISTED = 12
"""How many lines that were not understood are printed; --json has all."""


@dataclass(frozen=True)
class Arguments:
    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """The engine's configuration, or the script that starts it."""
    cluster: Annotated[OptionalText, tyro.conf.arg(metavar="CLUSTER")] = None
    """What it runs on: 8x8xH100, or a cluster.yaml; without it as many H100 as the file's degrees make, eight to a node."""
    model: Annotated[OptionalText, tyro.conf.arg(metavar="MODEL")] = None
    """Catalogue name or config.json, if the file does not name the model."""
    engine: Annotated[OptionalText, tyro.conf.arg(metavar="NAME")] = None
    """torchtitan, megatron, deepspeed, accelerate, accelerate-megatron, nanotron, maxtext, nemo or bridge, if the file's ending and keys do not show it."""
    target_version: Annotated[OptionalText, tyro.conf.arg(metavar="VERSION")] = None
    """Release of the engine; without it the one whose keys the file has."""
    json: Flag = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Change:
    """Lines of a file that belong together: key, value now, value of the best layout; None = not there."""

    lines: tuple[tuple[str, Any, Any], ...]
    saves_alone_s: float | None


@dataclass(frozen=True)
class Checked:
    """The findings about a file."""

    foreign: Foreign
    plan: Plan
    current: Current | None
    best: Plan
    changes: tuple[Change, ...]
    """Empty if the file's layout is best (``is_best``), or the file cannot express the best one."""
    given: tuple[str, ...]
    """Keys that the user gave besides the file."""
    can_be_said: bool
    """Whether the file can express the best plan."""
    cluster: str | None = None
    """The cluster that was assumed, in short form."""

    @property
    def today(self) -> Forecast | None:
        """The forecast of the file's layout; None if it cannot run here."""
        return None if self.current is None else self.current.forecast

    @property
    def saves(self) -> float | None:
        """Share of today's step time that the best plan saves."""
        if self.today is None or self.best.forecast is None:
            return None
        return 1 - self.best.forecast.step_time_s / self.today.step_time_s

    @property
    def is_best(self) -> bool:
        """Whether the file's layout fits, and the forecast cannot tell it from the fastest."""
        from ahp.search.ties import TIED

        return self.saves is not None and self.saves <= TIED and self.today is not None and self.today.fits

    @property
    def assumed(self) -> list[str]:
        """Keys that a forecast rests on and neither the file nor the user gives; those of the job are chosen as by ``ahp plan``."""
        return [name for name in ASSUMED if name not in self.foreign.read.fields and name not in self.given]


def run(argv: list[str]) -> int:
    """``ahp check FILE --cluster CLUSTER``. Returns the exit code; raises AhpError."""
    overrides, rest = split_overrides(argv, ROOTS)
    arguments = options_of(Arguments, rest, "ahp check", __doc__, ROOTS)
    foreign, plan = understood(arguments, overrides)
    print("searching the engine's layouts ...", file=sys.stderr)
    found = judged(foreign, plan, tuple(overrides))
    if arguments.cluster is None:
        found = replace(found, cluster=_short(plan.parallelism.world_size))
    following = _following(found, arguments.cluster or found.cluster)
    if arguments.json:
        print_alone(json.dumps({**_plain(found), "next": following}))
    else:
        _show(found, following)
    return 0


def _following(found: Checked, cluster: str | None) -> list[str]:
    """The command of the full search that finds the best plan, explains why the others lost, and writes what ``ahp export`` reads; none for a
    model of sizes that no known model has, which no command line can name."""
    from ahp.graph.catalogue import with_sizes

    plan, job = found.plan, found.plan.job
    model = plan.model if isinstance(plan.model, str) else with_sizes(plan.model)
    if model is None:
        return []
    words = ["ahp", "plan", model, cluster or "CLUSTER", "--engine.name", plan.engine.name]
    words += ["--job.sequence-length", str(job.sequence_length), "--job.global-batch-size", str(job.global_batch_size)]
    release = [] if plan.engine.version is None else ["--engine.version", plan.engine.version]
    return [shlex.join([*words, "--job.precision", job.precision, *release])]


def understood(arguments: Arguments, overrides: dict[str, Any]) -> tuple[Foreign, Plan]:
    """The file, and its plan together with the overrides. Raises BadInput if it states no layout, or no model that AHP knows."""
    from ahp.cluster.model import Cluster

    if arguments.cluster is not None:
        return _understood(arguments, overrides, Cluster.resolve(arguments.cluster))
    # A file that leaves a degree to the devices gets the fewest nodes that its other degrees divide.
    refusals: list[BadInput] = []
    for nodes in NODES:
        try:
            plan = _understood(arguments, overrides, Cluster.resolve(_short(nodes * EACH)))[1]
        except BadInput as error:
            refusals.append(error)
            continue
        return _understood(arguments, overrides, Cluster.resolve(_short(plan.parallelism.world_size)))
    if str(refusals[0]) != str(refusals[-1]):  # the refusal depends on the devices
        raise BadInput(f"{refusals[0]}; give the devices with --cluster") from refusals[0]
    raise refusals[0]


def _short(devices: int) -> str:
    """The cluster that is assumed for that many devices. Raises BadInput if they do not make whole nodes."""
    nodes, left = divmod(devices, EACH)
    if nodes and left:
        rule = f"the file's degrees make {devices} devices, which do not fill nodes of {EACH}; give the devices as NODES x DEVICES x NAME"
        raise BadInput(f"--cluster: {rule} (valid: {devices}x1x{DEVICE})")
    return f"{nodes}x{EACH}x{DEVICE}" if nodes else f"{left}x{DEVICE}"


def _understood(arguments: Arguments, overrides: dict[str, Any], cluster: Cluster) -> tuple[Foreign, Plan]:
    from ahp.export.reading import read_foreign

    each = cluster.groups[0].devices_per_node if len(cluster.groups) == 1 else None
    foreign = read_foreign(arguments.file, arguments.engine, arguments.target_version, cluster.num_devices, each)
    return foreign, _plan(foreign, arguments.model, cluster, overrides)


def judged(foreign: Foreign, plan: Plan, given: tuple[str, ...] = ()) -> Checked:
    """The cost of a file's plan, and the best plan that its program can run. ``given``: keys that the user gave. Raises AhpError."""
    from ahp.cluster.model import Cluster
    from ahp.forecast.step import forecast
    from ahp.graph.kept import analyze
    from ahp.search.ranking import search

    assert plan.cluster is not None
    cluster, graph = Cluster.resolve(plan.cluster), analyze(plan.model, plan.job, attention=plan.engine.attention)
    choice: EngineChoice = plan.engine.model_copy(update={"enable_async_tensor_parallel": None})

    def ranked(space: Mapping[str, Any]) -> Ranking:
        return search(graph, cluster, plan.job, constraints=space, engine=choice, current=plan.parallelism, keep=KEPT)

    try:
        ranking, best, wanted = _best(foreign, plan, ranked)
    except NothingFits as refusal:
        own = _own_words(plan, lambda layout: forecast(graph, cluster, plan.job, layout, plan.engine))
        raise NothingFits(f"the file's layout, {own}\n  {refusal}") from refusal

    def price(layout: Parallelism) -> Forecast:
        return forecast(graph, cluster, plan.job, layout, best.engine)

    found = Checked(foreign, plan, ranking.current, best, (), given, wanted is not None)
    return (
        found
        if wanted is None or found.is_best
        else replace(found, changes=tuple(_changes(foreign, plan, wanted, price)))
    )


def _plan(foreign: Foreign, model: str | None, cluster: Cluster, overrides: dict[str, Any]) -> Plan:
    """The plan of a file together with the overrides; keys of the job that neither gives are chosen as by ``ahp plan``. Raises BadInput if it
    names no model that AHP knows, or its layout cannot be read."""
    from ahp.cli.planning_job import with_batch, with_sequence
    from ahp.export.table import plan_of
    from ahp.graph.kept import analyze

    fields, named = dict(foreign.read.fields), model or foreign.model
    if named is None:
        raise BadInput(
            "model: the file does not say it in words that AHP knows; add --model, a catalogue name or a config.json"
        )
    unread = [
        (why, [name for name in names if name.startswith(LAYOUT)])
        for why, names in foreign.read.unread
        if not set(names) & set(overrides)
    ]
    if unknown := {why: names for why, names in unread if names}:
        flags = dict.fromkeys(_flag(name) for names in unknown.values() for name in names)
        raise BadInput(f"the layout cannot be read: {'; '.join(unknown)}; give what it is: {', '.join(flags)}")
    fields.update(overrides)
    plan = plan_of(foreign.form.dialect, fields, named, cluster.plain())
    said = plan.job.model_dump(exclude_unset=True)
    job = with_sequence(said, named, cluster, plan.engine)
    if "global_batch_size" not in said:
        graph = analyze(named, job, attention=plan.engine.attention)
        at_once = plan.parallelism.data_parallel_degree * plan.parallelism.micro_batch_size
        multiple = math.lcm(cluster.num_devices, at_once)  # so that the file's own layout divides it
        job = with_batch(job, said, named, graph.num_parameters, multiple)
    return plan.model_copy(update={"job": job})


def _flag(key: str) -> str:
    """The option that gives a key besides the file."""
    return f"--{key.replace('_', '-')}"


def _best(
    foreign: Foreign, plan: Plan, ranked: Callable[[Mapping[str, Any]], Ranking]
) -> tuple[Ranking, Plan, Settings | None]:
    """The fastest plan that the program's file can express, with its keys; if it can express none, the fastest of all, without keys. Raises
    NothingFits if no layout of the program fits."""
    rankings, refusal = [], None
    for space in foreign.form.dialect.spaces:
        try:
            rankings.append(ranked(space))
        except (NothingFits, BadInput) as error:  # BadInput: a space without layouts, such as ZeRO on one device
            refusal = refusal or error
    if not rankings:
        assert refusal is not None
        raise refusal
    said = [(plan_, keys, ranking) for ranking in rankings for plan_, keys in [_first_said(foreign, plan, ranking)]]
    best, wanted, ranking = min(
        said, key=lambda one: (one[1] is None, one[0].forecast.step_time_s if one[0].forecast else 0)
    )
    return ranking, best, wanted


def _own_words(plan: Plan, price: Price) -> str:
    """The file's layout and its cost in words, for when neither it nor another layout fits."""
    from ahp.report.tables import capacity_of
    from ahp.search.reasons import does_not_fit

    layout = plan.parallelism
    try:
        own = price(layout)
    except AhpError as refusal:
        return f"{layout.short()}: {refusal}"
    return f"{layout.short()}: {seconds(own.step_time_s)} a step, {does_not_fit(own, capacity_of(plan, layout, own))}"


def _first_said(foreign: Foreign, plan: Plan, ranking: Ranking) -> tuple[Plan, Settings | None]:
    """The first plan of a ranking that the file can express, with its keys; if it can express none, the best plan without keys."""
    from ahp.export.model_shape import layers_of
    from ahp.export.table import Subject

    dialect, layers = foreign.form.dialect, layers_of(plan.model)
    for found in ranking.plans:
        try:
            subject = Subject(found.model_copy(update={"model": plan.model}), layers, "NAME/FLAVOR")
            return found, dialect.settings(subject)[0]
        except NotExpressible:
            continue
    return ranking.best, None


def _changes(foreign: Foreign, plan: Plan, wanted: Settings, price: Price) -> list[Change]:
    """Lines of the file that differ in the best layout. Lines that express the same in another way do not count."""
    dialect, found = foreign.form.dialect, []
    for rule in dialect.rules:
        if not any(name.startswith(("parallelism.", "engine.")) for name in rule.fields):
            continue
        try:
            now = rule.read(foreign.settings)
        except Unreadable:
            now = {}
        best = rule.read(
            {**{key: foreign.settings[key] for key in dialect.launcher if key in foreign.settings}, **wanted}
        )
        if now == best:
            continue
        lines = tuple(
            (key, foreign.settings.get(key), wanted.get(key))
            for key in rule.keys
            if key not in dialect.launcher and str(foreign.settings.get(key)) != str(wanted.get(key))
        )
        if lines:
            found.append(Change(lines, _alone(plan, best, price)))
    return found


def _alone(plan: Plan, fields: dict[str, Any], price: Price) -> float | None:
    """Seconds of a step that a change saves by itself; None if it does not run without the others."""
    layout = {name.partition(".")[2]: value for name, value in fields.items() if name.startswith("parallelism.")}
    data = plan.parallelism.model_dump(mode="json") | layout
    try:
        other = validated(Parallelism, data, "parallelism")
        if other == plan.parallelism or other.world_size != plan.parallelism.world_size:
            return None
        return price(plan.parallelism).step_time_s - price(other).step_time_s
    except AhpError:
        return None


def _plain(found: Checked) -> dict[str, Any]:
    dialect, today = found.foreign.form.dialect, found.today
    return {
        "engine": dialect.name,
        "priced_as": dialect.engine,
        "version": dialect.version,
        "parallelism": found.plan.parallelism.model_dump(mode="json"),
        "job": found.plan.job.model_dump(mode="json"),
        "assumed": found.assumed,
        "assumed_cluster": found.cluster,
        "forecast": None if today is None else today.model_dump(mode="json"),
        "refused": None if today is not None or found.current is None else found.current.against_best,
        "best": found.best.model_dump(mode="json", include={"parallelism", "engine", "forecast"}),
        "saves": found.saves,
        "changes": [asdict(change) for change in found.changes],
        "not_understood": list(found.foreign.read.not_understood),
        "counted_on_but_missing": list(found.foreign.read.missing),
    }


def _show(found: Checked, following: list[str]) -> None:
    from ahp.report import tables

    rows, console = (*_judgement(found), *_changes_in_words(found), *_ignored(found)), tables.console()
    console.print(tables.Hanging([(f"{lead:<8}", words) for lead, words in rows], gap=1))
    if following:
        show_next(console, following)


def _judgement(found: Checked) -> Iterator[tuple[str, str]]:
    """Lines for people, each with its leading word."""
    dialect, today, job = found.foreign.form.dialect, found.today, found.plan.job
    yield "File", f"{dialect.name} {dialect.version}"
    if dialect.name != dialect.engine:
        yield "Forecast", f"as {dialect.engine}: {dialect.why_priced}"
    yield "Job", f"{number_of(job.global_batch_size, 'sequence')} of {job.sequence_length}, {job.precision}"
    if found.cluster is not None:
        yield "Assumed", f"{found.cluster}: give the devices with --cluster"
    if found.assumed:
        plan, them = found.plan.model_dump(mode="json"), "it" if len(found.assumed) == 1 else "them"
        values = [f"{name} = {plan[record][key]}" for name in found.assumed for record, key in [name.split(".")]]
        flags, another = [_flag(name) for name in found.assumed], "another" if len(found.assumed) == 1 else "others"
        yield "Assumed", f"{', '.join(values)}: the file does not say {them}; give {another} as {', '.join(flags)}"
    if missing := found.foreign.read.missing:
        keys, them = ", ".join(missing), "it" if len(missing) == 1 else "them"
        yield "Assumed", f"{keys}: the forecast counts on {them}, and the file does not have {them}"
    yield "Layout", found.plan.parallelism.short()
    if today is None:
        yield "Cost", "" if found.current is None else found.current.against_best
    else:
        band = f"{seconds(today.step_time_low_s)} .. {seconds(today.step_time_high_s)}"
        yield "Cost", f"{seconds(today.step_time_s)} a step (90 % band {band})"
        yield "Fits", f"{'yes' if today.fits else 'no'}: probability {today.fit_words}"
        yield "Binds", _binds(today.step)
    assert found.best.forecast is not None
    gain = (
        ""
        if found.saves is None
        else ", no faster"
        if found.saves < WORTH_TELLING
        else f", {percent(found.saves)} less"
    )
    if found.is_best and ", no" not in gain:
        gain += ": tied, the forecast cannot tell which is faster"
    if today is not None and not today.fits:
        gain = ", and it fits"
    yield "Best", f"{found.best.parallelism.short()}: {seconds(found.best.forecast.step_time_s)} a step{gain}"
    if not found.can_be_said:
        yield "", "the file has no keys for this layout, nor for the next best layouts"


def _changes_in_words(found: Checked) -> Iterator[tuple[str, str]]:
    """The lines to change."""
    for change in found.changes:
        for key, now, best in change.lines:
            yield "Change", f"{key}: {_word(now)} -> {_word(best)}"
        if alone := change.saves_alone_s:
            yield "", f"by itself {seconds(abs(alone))} a step {'less' if alone > 0 else 'more'}"


def _ignored(found: Checked) -> Iterator[tuple[str, str]]:
    ignored = found.foreign.read.not_understood
    yield from (("Ignored", line) for line in ignored[:MOST_LISTED])
    if len(ignored) > MOST_LISTED:
        yield "Ignored", f"{len(ignored) - MOST_LISTED} more (--json has them)"


def _binds(step: dict[str, float]) -> str:
    """The largest part of a step, in words."""
    from ahp.words import part_words

    part, most = max(step.items(), key=lambda item: item[1])
    return f"{part_words(part)}, {seconds(most)} of a step"


def _word(value: Any) -> str:
    return "not there" if value is None else str(value)
