"""``ahp export torchtitan``: its TOML file, or the Python function that newer releases load."""

from __future__ import annotations

import ast
import json
import math
import re
import tomllib
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from ahp.errors import BadInput, NotExpressible, bad_input
from ahp.export.engine_target import EngineTarget, Format, commented, torchrun
from ahp.export.engine_target import Options as EngineOptions
from ahp.export.table import Settings, Subject, flat
from ahp.export.target import Shape
from ahp.export.torchtitan_keys import MODEL_KEYS, PYTHON_030, PYTHON_MAIN, TOML_022
from ahp.optional import OptionalText
from ahp.plan import Plan

MODELS = {
    "llama3-8b": ("llama3/8B", "llama3/llama3_8b"),
    "llama3-70b": ("llama3/70B", "llama3/llama3_70b"),
    "llama3-405b": ("llama3/405B", "llama3/llama3_405b"),
    "qwen3-8b": ("qwen3/8B", None),
}
"""Models of the catalog: name and flavor in 0.2.2 (models/*/__init__.py), module and function since then (models/*/config_registry.py)."""
FUNCTION = "ahp_plan"
RECOMPUTE = {"none": None, "selective": "SelectiveAC", "full": "FullAC"}
"""Classes of distributed/activation_checkpoint.py since 0.3.0."""


@dataclass(frozen=True)
class Options(EngineOptions):
    model: Annotated[OptionalText, tyro.conf.arg(name="model", metavar="NAME/FLAVOR")] = None
    """The model in torchtitan, if it is not in AHP's catalog: llama3/8B; from 0.3.0 on module and function, llama3/llama3_8b."""


def _named(plan: Plan, version: str, options: Options) -> str:
    if options.model is None:
        return _model(plan.model, version)
    parts = options.model.split("/")
    if len(parts) != 2 or not all(re.fullmatch(r"[\w.-]+", part) for part in parts):
        raise bad_input("--model", options.model, "must be two names, NAME/FLAVOR", ["llama3/8B", "llama3/llama3_8b"])
    if version != "0.2.2" and not all(part.isidentifier() for part in parts):
        rule = f"torchtitan {version} has a module and a function of its config_registry, which are names in Python"
        raise bad_input("--model", options.model, rule, ["llama3/llama3_8b"])
    return options.model


def _model(model: str | dict[str, Any], version: str) -> str:
    found = MODELS.get(model, (None, None)) if isinstance(model, str) else (None, None)
    name = found[0 if version == "0.2.2" else 1]
    if name is None:
        asked = model if isinstance(model, str) else model.get("model_type", "given config")
        valid = ", ".join(one for one, names in MODELS.items() if names[0 if version == "0.2.2" else 1])
        raise NotExpressible(
            f"model = {asked!r}: torchtitan {version} runs its own models (valid: {valid}; or --model, the name of the same model there)"
        )
    return name


def _toml(settings: Settings, subject: Subject, shape: Shape, head: list[str]) -> str:
    tables: dict[str, list[str]] = {}
    for key, value in settings.items():
        if value is None:  # TOML has no null: a missing key stands for it
            continue
        table, _, name = key.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {_toml_value(value)}")
    body = "\n".join("\n".join((f"[{table}]", *lines, "")) for table, lines in tables.items())
    return f"{commented(head)}\n{body}"


def _toml_value(value: Any) -> str:
    if isinstance(value, float):
        return "inf" if value == math.inf else repr(value)
    return json.dumps(value)


def _read_toml(text: str) -> Settings:
    try:
        return flat(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"not TOML: {error}") from None


def _python(settings: Settings, subject: Subject, shape: Shape, head: list[str]) -> str:
    module, function = subject.model.split("/")
    settings = dict(settings)
    mode = RECOMPUTE[settings.pop("activation_checkpoint.mode")]
    settings.pop("activation_checkpoint.selective_ac_option", None)
    adamw = {key: settings.pop(f"optimizer.{key}") for key in ("lr", "beta1", "beta2", "eps", "weight_decay")}
    del settings["optimizer.name"]
    betas = f"betas=({adamw['beta1']!r}, {adamw['beta2']!r})"
    lines = [
        f"c = {function}()",
        *(f"c.{key} = {_python_value(value)}" for key, value in settings.items()),
        f"c.optimizer = default_adamw(lr={adamw['lr']!r}, {betas}, eps={adamw['eps']!r}, weight_decay={adamw['weight_decay']!r})",
        f"c.activation_checkpoint = {f'{mode}.Config()' if mode else None}",
        "return c",
    ]
    imports = [
        "from torchtitan.components.optimizer import default_adamw",
        *([f"from torchtitan.distributed.activation_checkpoint import {mode}"] if mode else []),
        f"from torchtitan.models.{module}.config_registry import {function}",
    ]
    body = "\n".join(f"    {line}" for line in lines)
    return f"{commented(head)}\n" + "\n".join(imports) + f"\n\n\ndef {FUNCTION}():\n{body}\n"


def _python_value(value: Any) -> str:
    return 'float("inf")' if value == math.inf else repr(value)


def _read_python(text: str) -> Settings:
    """Assignments to attributes of a name, wherever they are in the file; nothing of it is run."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise BadInput(f"not Python: {error}") from None
    found: Settings = _base(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and (key := _attribute(node.targets[0])):
            found.update(_assigned(key, node.value))
    return found


def _base(tree: ast.Module) -> Settings:
    """The model and the flavor of the ``config_registry`` function that the file calls; empty if it calls none, or more than one."""
    homes: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if home := re.fullmatch(r"torchtitan\.models\.(\w+)\.config_registry", node.module or ""):
            homes |= {name.asname or name.name: (home[1], name.name) for name in node.names}
    calls = (node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    called = {homes[name] for name in calls if name in homes}
    return dict(zip(MODEL_KEYS, called.pop(), strict=True)) if len(called) == 1 else {}


def _attribute(node: ast.expr) -> str | None:
    """``training.steps`` of ``c.training.steps``."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if isinstance(node, ast.Name) and parts else None


def _assigned(key: str, node: ast.expr) -> Settings:
    call = ast.unparse(node)
    if key == "activation_checkpoint":
        mode = next(
            (mode for mode, name in RECOMPUTE.items() if call == (f"{name}.Config()" if name else "None")), None
        )
        return {f"{key}.mode": mode or call, f"{key}.selective_ac_option": "op"}
    if key == "optimizer" and isinstance(node, ast.Call) and call.startswith("default_adamw("):
        given = {word.arg: _literal(word.value) for word in node.keywords if word.arg}
        betas = given.pop("betas", None)
        pair = dict(zip(("optimizer.beta1", "optimizer.beta2"), betas, strict=True)) if isinstance(betas, tuple) else {}
        return {f"optimizer.{name}": value for name, value in given.items()} | pair
    return {key: _literal(node)}


def _literal(node: ast.expr) -> Any:
    text = ast.unparse(node)
    if text in ("float('inf')",):
        return math.inf
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return text


def _launch_toml(shape: Shape) -> tuple[str, ...]:
    return (f"{torchrun(shape)} -m torchtitan.train --job.config_file {{file}}",)


def _launch_python(shape: Shape) -> tuple[str, ...]:
    where = 'PYTHONPATH="$(dirname {file})"'
    return (f'{where} {torchrun(shape)} -m torchtitan.train --module "$(basename {{file}} .py)" --config {FUNCTION}',)


PYTHON_SUFFIX = "_torchtitan.py"
"""No dot before the end: the file is imported by its name."""

FORMATS = {
    "0.3.0": Format(PYTHON_030, _python, _read_python, _launch_python, PYTHON_SUFFIX),
    "0.2.2": Format(TOML_022, _toml, _read_toml, _launch_toml, ".torchtitan.toml"),
    "main": Format(PYTHON_MAIN, _python, _read_python, _launch_python, PYTHON_SUFFIX),
}
"""The newest release first."""

TARGET = EngineTarget(
    "torchtitan",
    "torchtitan's configuration: TOML for 0.2.2, a Python function for 0.3.0 and main",
    ".torchtitan",
    FORMATS,
    Options,
    _named,
)
