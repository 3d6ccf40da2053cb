"""Keys of an engine's configuration and the plan's fields that they stand for: one table per dialect, used to write and to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ahp.engines import registry
from ahp.errors import BadInput, NotExpressible
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism, Plan, validated
from ahp.schedule.stages import Ends, layers_of_stages
from ahp.yaml_text import mapping, parse_yaml

Settings = dict[str, Any]
"""Keys of an engine's file, dotted where they are nested, with plain values."""
Fields = dict[str, Any]
"""Dotted keys of a plan (parallelism.zero_stage, job.sequence_length), with plain values."""

NOTICE = "!"
"""Prefix of keys under which a rule puts a line about what the file cannot express, instead of a setting."""
UNIFORM = ("parallelism.micro_batches_per_replica",)
"""Fields without a meaning once an engine accepts a plan: it refuses them unless they are the same for every replica."""


@dataclass(frozen=True)
class Subject:
    """A plan, as it is written for an engine."""

    plan: Plan
    layers: int
    """Number of blocks of the model."""
    model: str
    """The engine's name for the model; empty if its file names none."""

    @property
    def p(self) -> Parallelism:
        return self.plan.parallelism

    @property
    def job(self) -> Job:
        return self.plan.job


@dataclass(frozen=True)
class Rule:
    """Some keys of the engine, and the fields that they stand for."""

    keys: tuple[str, ...]
    fields: tuple[str, ...]
    write: Callable[[Subject], Settings]
    """The keys of a plan. Raises NotExpressible for a value that these keys cannot express."""
    read: Callable[[Settings], Fields]
    """The fields from all settings of a file. Raises Unreadable for a value that no plan has."""


class Unreadable(Exception):
    """A setting of an engine's file that no plan can express: its key, its value and why."""


@dataclass(frozen=True)
class Read:
    """The fields of a plan that a file sets."""

    fields: Fields
    not_understood: tuple[str, ...]
    unread: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Settings that no plan can express: why, and the fields that they stand for, which keep AHP's default."""
    missing: tuple[str, ...] = ()
    """Keys that the forecast counts on, and the file does not have."""


@dataclass(frozen=True)
class Dialect:
    """The configuration of some releases of one engine, or of a program that is priced as an engine."""

    engine: str
    """The engine that prices it and decides what it can run."""
    version: str
    source: str
    """Where its keys were read."""
    rules: tuple[Rule, ...]
    agrees: tuple[str, ...] = ()
    """Values of engine.version that mean this dialect, besides its own name."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Fields of a layout that the file has no key for, and what sets them instead."""
    other: tuple[str, ...] = ()
    """Prefixes of keys that do not affect the layout or what a step computes: logs, checkpoints, the data's place."""

    launcher: tuple[str, ...] = ()
    """Keys that are read and never written: the launch line has them."""
    program: str | None = None
    """The program whose files these are, if AHP has no engine of that name: it is priced as ``engine``."""
    why_priced: str = "AHP has no engine of it"
    """Why it is priced as ``engine``."""
    counted: Callable[[Settings, Fields], Iterable[str]] = lambda settings, fields: ()
    """Keys that the forecast counts on for a file with these settings and fields of a plan, and that no field sets."""
    spaces: tuple[Mapping[str, Any], ...] = ({},)
    """Keys of a layout with the values that the program has, if fewer than the engine's; together they cover all its layouts."""

    @property
    def name(self) -> str:
        """The program's usual name."""
        return self.program or self.engine

    def settings(self, subject: Subject) -> tuple[Settings, tuple[str, ...]]:
        """The file's keys, and lines on what it lacks of the plan. Raises NotExpressible with the field and its value."""
        p, choice = subject.p, subject.plan.engine
        if reason := registry.get(self.engine).refuses(subject.job, p, choice):
            raise NotExpressible(reason)
        found: Settings = {}
        for rule in self.rules:
            found.update(rule.write(subject))
        covered = {name for rule in self.rules for name in rule.fields} | set(self.beside) | set(UNIFORM)
        for record, root in ((p, "parallelism"), (choice, "engine")):
            for name, value in record:
                if f"{root}.{name}" not in covered and value not in (
                    type(record).model_fields[name].default,
                    None,
                    False,
                ):
                    if (root, name) in (("engine", "name"), ("engine", "version")) or _says_nothing(name, p):
                        continue
                    raise NotExpressible(
                        f"{name} = {value!r}: {self.name} {self.version} has no key for it in its file"
                    )
        notices = [text for key, text in found.items() if key.startswith(NOTICE)]
        kept = {key: value for key, value in found.items() if not key.startswith(NOTICE)}
        return kept, (*notices, *self._left(subject, covered))

    def _left(self, subject: Subject, covered: set[str]) -> list[str]:
        """What the file lacks of the plan, one line each."""
        lines = [f"{name.partition('.')[2]} = {_value(subject, name)}: {who}" for name, who in self.beside.items()]
        for name in _job_fields(subject.job):
            if name not in covered:
                lines.append(f"{name} = {_value(subject, name)!r}: the file has no key for it")
        return lines

    def read(self, settings: Settings) -> Read:
        """The fields that a file sets; keys that no rule knows are listed, and their fields keep AHP's default."""
        fields: Fields = {}
        ignored = [
            f"{key} = {value!r}: not understood"
            for key, value in settings.items()
            if not any(key in rule.keys for rule in self.rules) and not key.startswith(self.other)
        ]
        unread: list[tuple[str, tuple[str, ...]]] = []
        for rule in self.rules:
            try:
                fields.update(rule.read(settings))
            except Unreadable as error:
                unread.append((str(error), rule.fields))
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
                given = ", ".join(f"{key} = {settings[key]!r}" for key in rule.keys if key in settings)
                unread.append((f"{given}: not a value that {self.name} takes", rule.fields))
        ignored += [why for why, _ in unread]
        missing = tuple(key for key in self.counted(settings, fields) if not settings.get(key))
        return Read(fields, tuple(dict.fromkeys(ignored)), tuple(unread), missing)


def refuse_what_has_no_key(s: Subject) -> None:
    """Raise NotExpressible for a layout that none of an engine's own files can express; for rules of these files."""
    engine = s.plan.engine
    if reason := registry.get(engine.name).no_key_for(s.job, s.p, engine):
        raise NotExpressible(reason)


def plan_of(dialect: Dialect, fields: Fields, model: str | dict[str, Any], cluster: dict[str, Any] | None) -> Plan:
    """The plan with these fields. Raises BadInput, in terms of AHP's keys, if they break a rule of plans."""
    data: dict[str, Any] = {"parallelism": {}, "job": {"optimizer": {}}, "engine": {}}
    for key, value in fields.items():
        place = data
        *parents, last = key.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    kinds = (("parallelism", Parallelism), ("job", Job), ("engine", EngineChoice))
    data["engine"]["name"] = dialect.engine
    made: dict[str, Any] = {name: validated(kind, data[name], dialect.name) for name, kind in kinds}
    return Plan(model=model, cluster=cluster, **made)


def same(key: str, name: str, default: Any = None, *, skip: Any = ...) -> Rule:
    """A key that has a field's own value. ``default``: the engine's, if the key is missing; None = AHP's stays. ``skip``: value not written."""

    def write(subject: Subject) -> Settings:
        value = _value(subject, name)
        value = list(value) if isinstance(value, tuple) else value
        return {} if value == skip else {key: value}

    def read(settings: Settings) -> Fields:
        value = settings.get(key, default)
        return {} if value is None else {name: value}

    return Rule((key,), (name,), write, read)


def word_of(s: Subject, name: str, values: Mapping[str, str], program: str) -> str:
    """The program's word for the value of a plan's field. Raises NotExpressible if it has none. ``values``: what each word means."""
    value = _value(s, name)
    found = next((word for word, meant in values.items() if meant == value), None)
    if found is None:
        key, valid = name.removeprefix("parallelism."), ", ".join(values.values())
        raise NotExpressible(f"{key} = {value!r}: {program} has no such value (valid: {valid})")
    return found


def value_of(settings: Settings, key: str, values: Mapping[str, str], default: str) -> str:
    """What the word of a key means. Raises Unreadable for a word that is not in ``values``."""
    given = settings.get(key, default)
    if given not in values:
        raise Unreadable(f"{key} = {given!r}: AHP knows {', '.join(values)}")
    return values[given]


def size(key: str, name: str, least: int = 1) -> Rule:
    """A key that has a degree; if it is missing, the degree is ``least``."""
    field = f"parallelism.{name}"
    return Rule(
        (key,), (field,), lambda s: {key: getattr(s.p, name)}, lambda t: {field: whole(t.get(key, least), key, least)}
    )


STATES = (
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.zero_stage",
)
"""The fields that set how replicas share states."""


def one_kind_of_replicas(ranks: int, stage: int, micro_batch: int, batch: int) -> Fields:
    """Fields of the data-parallel ranks of a program that shards states over all of these ranks or does not shard them."""
    one, other = ("shard", "replicate") if stage else ("replicate", "shard")
    return {
        f"parallelism.data_parallel_{one}_degree": ranks,
        f"parallelism.data_parallel_{other}_degree": 1,
        "parallelism.zero_stage": stage,
        "parallelism.micro_batch_size": micro_batch,
        "job.global_batch_size": batch,
    }


def whole(value: Any, key: str, least: int = 1) -> int:
    """A whole number of a file, where it can be text. Raises Unreadable for anything else."""
    text = str(value)
    if isinstance(value, bool) or not text.lstrip("-").isdigit() or int(text) < least:
        raise Unreadable(f"{key} = {value!r}: must be a whole number from {least} on")
    return int(text)


def switch(value: Any, key: str) -> bool:
    """Whether a file switches something on, in which true can be text. Raises Unreadable for anything else."""
    text = str(value).lower()
    if text not in ("true", "false", "1", "0"):
        raise Unreadable(f"{key} = {value!r}: must be true or false")
    return text in ("true", "1")


def cut_of(layers: list[int], ranks: int, ends: Ends, key: str) -> Fields:
    """Fields of a cut: virtual stages, and blocks of each stage unless it is the engine's own cut. Raises Unreadable if no plan can have it."""
    if len(layers) % ranks:
        raise Unreadable(f"{key}: {len(layers)} stages do not divide among {ranks} ranks")
    virtual = len(layers) // ranks
    found: Fields = {"parallelism.virtual_stages_per_rank": virtual}
    try:
        own = layers_of_stages(
            Parallelism(pipeline_parallel_degree=ranks, virtual_stages_per_rank=virtual), sum(layers), ends=ends
        )
    except BadInput:
        own = None
    if own == tuple(layers):
        return found
    if min(layers) < 1:
        raise Unreadable(f"{key}: stages without a layer ({layers}); AHP gives every stage one")
    return found | {"parallelism.layers_per_stage": layers}


def flat(data: Mapping[str, Any], prefix: str = "") -> Settings:
    """Nested mappings as dotted keys."""
    found: Settings = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def nested(settings: Settings) -> dict[str, Any]:
    """Dotted keys as nested mappings, in their order."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return found


def from_yaml(text: str, what: str) -> Settings:
    """A YAML mapping as dotted keys. Raises BadInput for any other text."""
    try:
        return flat(mapping(parse_yaml(text), what))
    except yaml.YAMLError as error:
        raise BadInput(f"not YAML: {error}") from None


def understood(*keys: str) -> Rule:
    """Keys that set no field of a plan, because they are read separately: those of the model."""
    return Rule(keys, (), lambda s: {}, lambda settings: {})


def _says_nothing(name: str, p: Parallelism) -> bool:
    """Whether a field has no effect in this layout."""
    pipeline = ("pipeline_parallel_schedule", "virtual_stages_per_rank", "layers_per_stage")
    return name in pipeline and p.num_stages == 1


def _job_fields(job: Job) -> list[str]:
    """The job's keys that are not at their default, and those that every run has."""
    optimizer = [f"job.optimizer.{name}" for name in type(job.optimizer).model_fields]
    names = [f"job.{name}" for name in Job.model_fields if name != "optimizer"] + optimizer
    always = {"job.data", "job.sequence_length", "job.global_batch_size", "job.steps", "job.precision", "job.seed"}
    own = {"job.optimizer.momentum", "job.optimizer.decay_share", "job.optimizer.name"}
    plain, made = (Subject(Plan(job=one), 0, "") for one in (Job(), job))
    return [
        name
        for name in names
        if name in always
        or (name.startswith("job.optimizer.") and name not in own)
        or _value(made, name) != _value(plain, name)
    ]


def _value(subject: Subject, name: str) -> Any:
    found: Any = subject.plan
    for part in name.split("."):
        found = getattr(found, part)
    return found
