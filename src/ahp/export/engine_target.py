"""Common parts of the targets that write a plan as another engine's own configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from ahp.errors import BadInput, NotExpressible, bad_input
from ahp.export.table import Dialect, Settings, Subject
from ahp.export.target import Exported, Shape, Source, shape_of_plan
from ahp.optional import OptionalText
from ahp.plan import EngineChoice, Plan


@dataclass(frozen=True)
class Options:
    target_version: Annotated[OptionalText, tyro.conf.arg(metavar="VERSION")] = None
    """Release of the engine whose keys are written; without it that of engine.version, or the newest release known."""


@dataclass(frozen=True)
class Format:
    """How the settings of one dialect are written to a file and read back."""

    dialect: Dialect
    render: Callable[[Settings, Subject, Shape, list[str]], str]
    """The file's text from the settings, with the lines that head it."""
    parse: Callable[[str], Settings]
    """The settings of a text. Raises BadInput for text of another form."""
    next: Callable[[Shape], tuple[str, ...]]
    """Commands that use the file, with {file} for its path."""
    suffix: str | None = None
    """Suffix of the file, if it is not the target's."""


def chosen(formats: Mapping[str, Format], plan: Plan, asked: str | None, engine: str) -> Format:
    """The dialect that is asked for. Raises BadInput for an unknown one, or for one that contradicts engine.version."""
    own = plan.engine.version if plan.engine.name == engine else None
    if asked is not None and asked not in formats:
        raise bad_input("--target-version", asked, f"AHP knows no keys of this release of {engine}", formats)
    meant = [name for name, one in formats.items() if own in (name, *one.dialect.agrees)]
    if own is not None and asked not in ([*meant] if meant else [None]):
        if asked is None:
            return formats[meant[0]]
        rule = f"the plan is for engine.version {own!r}"
        raise bad_input("--target-version", asked, rule, meant or ["plan again without engine.version"])
    if own is not None and not meant:
        raise BadInput(
            f"engine.version = {own!r}: its keys are not known (valid: {', '.join(formats)}; or plan again without engine.version)"
        )
    return formats[asked or (meant[0] if meant else next(iter(formats)))]


@dataclass
class EngineTarget:
    """A ``Target`` that writes a plan as the configuration of an engine, or of a program that is priced as an engine."""

    name: str
    what: str
    suffix: str
    formats: Mapping[str, Format]
    """Keyed by release; the first is the default."""
    options: type[Any] = Options
    model: Callable[[Plan, str, Any], str] = lambda plan, version, options: ""
    """The engine's name for the plan's model, by release and options; empty if the script has the model, or the arguments describe all of
    it. Raises NotExpressible for a model that the engine does not have."""

    def write(self, source: Source, options: Any) -> Exported:
        """The plan as a file. Raises BadInput for a config or an unknown version, NotExpressible if the file cannot express it."""
        from ahp.export.model_shape import layers_of

        if source.plan is None:
            engine = next(iter(self.formats.values())).dialect.engine
            raise BadInput(
                f"{source.file}: a config has no layout yet; write a plan with: ahp plan MODEL CLUSTER --engine.name {engine}"
            )
        plan, notices = source.plan, []
        form = chosen(self.formats, plan, options.target_version, self.name)
        engine = form.dialect.engine
        if plan.engine.name != engine:
            notices.append(
                f"engine.name = {plan.engine.name!r}: the layout was chosen for {plan.engine.name}; for {engine}: ahp plan --engine.name {engine}"
            )
            plan = plan.model_copy(
                update={"engine": EngineChoice(**{**dict(plan.engine), "name": engine, "version": None})}
            )
        shape = shape_of_plan(plan, source.file)
        subject = Subject(plan, layers_of(plan.model), self.model(plan, form.dialect.version, options))
        try:
            settings, left = form.dialect.settings(subject)
        except NotExpressible as refusal:
            if source.plan.engine.name == engine:
                raise
            made_for = f"the plan was made for {source.plan.engine.name}"
            raise NotExpressible(f"{refusal}; {made_for}: plan again with --engine.name {engine}") from None
        head = [
            f"{source.file.name}: {plan.parallelism.short()}, {shape.most} x {shape.workers} {shape.device}",
            f"Written by ahp export {self.name} --target-version {form.dialect.version}; keys as in {form.dialect.source}.",
            *([f"Not in this file: {notice}" for notice in (*notices, *left)]),
        ]
        text = form.render(settings, subject, shape, head)
        return Exported(text, form.next(shape), notices=(*notices, *left), suffix=form.suffix)


def torchrun(shape: Shape) -> str:
    """The torchrun command for every node."""
    several = (
        ' --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"'
        if shape.most > 1
        else ""
    )
    return f"torchrun --nnodes {shape.most} --nproc-per-node {shape.workers}{several}"


def commented(lines: list[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)
