"""Write docs/reference: every key of the files, every verb of Python, every option of the commands, from the code's own docstrings.

Run it when one of these changes: ``.venv/bin/python .ci/reference.py``, a few seconds. ``tests/docs/test_reference.py`` says when it is due.
Keys and types come from the pydantic schemas, words from ``ahp.config.HELP`` and from docstrings (of a field: the text under it).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

import ahp.config

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
MADE = "<!-- Made by .ci/reference.py from the code: change it there. -->\n"
VERBS = {
    "analyze": "ahp.graph.kept",
    "probe": "ahp.cluster.measure",
    "search": "ahp.search.ranking",
    "simulate": "ahp.forecast.step",
    "slicing": "ahp.search.slicing.model",
    "parallelize": "ahp.runtime.parallel",
    "Trainer": "ahp.runtime.run.trainer",
}
RESULTS = {"Parallel": "ahp.runtime.parallel", "Ranking": "ahp.search.result"}
"""What verbs give back and people call."""
NOUNS = {
    "Job": "ahp.job",
    "Cluster": "ahp.cluster.model",
    "Parallelism": "ahp.plan",
    "Plan": "ahp.plan",
    "Forecast": "ahp.step_forecast",
}
VALIDATORS = {"field_validator", "model_validator"}
Named = ast.ClassDef | ast.FunctionDef


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """The pages of docs/reference, by name."""
    return {"config.md": config_page(), "python.md": python_page(), "commands.md": commands_page()}


def config_page() -> str:
    lines = [
        "# Keys of config.yaml",
        MADE,
        "Each key has a default, so an empty file is a whole configuration. On the command line a key is `--key value`, with hyphens or",
        "underscores: `--job.steps 20`, `--parallelism.tensor-parallel-degree=4`. [config.yaml](../config.md) says how the file is read.",
    ]
    schema = ahp.config.Config.model_json_schema()
    sections: dict[str, list[str]] = {}
    for key, words in ahp.config.HELP.items():
        head, _, last = key.rpartition(".")
        kind, default = _kind_and_default(schema, key)
        sections.setdefault(head, []).extend(item(f"`{last}`", f"{kind}; default {default}. {_sentence(words)}"))
    for head, items in sections.items():
        lines += ["", f"## {head}" if head else "## The file", "", *items]
    return "\n".join([*lines, *_parts(lines, ahp.config.Config)]) + "\n"


def _parts(lines: list[str], *kinds: type[BaseModel]) -> list[str]:
    """The fields of each mapping that a page names by its class and says nothing else about."""
    there = {kind.__name__: kind for kind in _inside(kinds)}
    found: dict[str, list[str]] = {}
    while new := _mappings_in([*lines, *chain(*found.values())]) - set(NOUNS) - set(found):
        found |= {name: _fields(there[name]) for name in new}
    return ["", "## Mappings", *(line for name in sorted(found) for line in ("", f"### {name}", "", *found[name]))]


def _mappings_in(lines: list[str]) -> set[str]:
    return set(re.findall(r"a mapping \((\w+)\)", " ".join(" ".join(lines).split())))


def _inside(kinds: Iterable[Any]) -> Iterator[type[BaseModel]]:
    """These classes and all classes of their fields."""
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind
            yield from _inside(field.annotation for field in kind.model_fields.values())
        else:
            yield from _inside(get_args(kind))


def _kind_and_default(schema: dict[str, Any], key: str) -> tuple[str, str]:
    place, found = schema, {}
    for part in key.split("."):
        found = place["properties"][part]
        place = _resolved(schema, found)
    searched = key.startswith("parallelism.") or key == "engine.compile"
    return kind_words(schema, found), "searched" if searched else f"`{_yaml(found.get('default'))}`"


def _resolved(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A schema behind its reference; of several that may stand there, the one with keys."""
    for option in [part, *part.get("anyOf", []), *part.get("oneOf", []), *part.get("allOf", [])]:
        if "$ref" in option:
            return schema["$defs"][option["$ref"].rsplit("/", 1)[-1]]
    return part


def kind_words(schema: dict[str, Any], part: dict[str, Any]) -> str:
    """What values go, in words: ``whole number from 1 on, or null``."""
    options = part.get("anyOf") or part.get("oneOf")
    if options:
        return ", or ".join(dict.fromkeys(kind_words(schema, option) for option in options))
    if "$ref" in part:
        target = _resolved(schema, part)
        return kind_words(schema, target) if "enum" in target else f"a mapping ({part['$ref'].rsplit('/', 1)[-1]})"
    if "enum" in part or "const" in part:
        return "one of " + ", ".join(f"`{value}`" for value in part.get("enum", [part.get("const")]))
    kind = part.get("type")
    if kind == "array":
        items = part.get("items")
        if items:
            return f"a list of ({kind_words(schema, items)})"
        inner = list(dict.fromkeys(kind_words(schema, one) for one in part.get("prefixItems", [])))
        return f"a list of {len(part['prefixItems'])} ({', '.join(inner)})" if inner else "a list"
    plain = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    return plain.get(str(kind), {"null": "null", "object": "a mapping"}.get(str(kind), "any value")) + _range(part)


def _range(part: dict[str, Any]) -> str:
    words = []
    for key, text in (("minimum", "from {} on"), ("exclusiveMinimum", "above {}"), ("maximum", "up to {}")):
        if key in part:
            words.append(text.format(part[key]))
    if "exclusiveMaximum" in part:
        words.append(f"below {part['exclusiveMaximum']}")
    return " " + ", ".join(words) if words else ""


def _yaml(value: Any) -> str:
    plain = {None: "null", True: "true", False: "false"}
    return plain[value] if value is None or isinstance(value, bool) else str(value)


def _sentence(words: str) -> str:
    """As a sentence of its own; what begins with a value (``flash: ...``) stays as it is."""
    value_first = re.match(r"[\w{-]+[:,;{]", words) or not words[0].isalpha()
    return (words if value_first else words[0].upper() + words[1:]) + ("" if words.endswith((".", ")")) else ".")


def item(name: str, text: str) -> list[str]:
    """A point of a list, broken at 110 characters."""
    return textwrap.wrap(
        f"- **{name}**: {text}", 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def python_page() -> str:
    """From the source alone, since importing what trains takes seconds."""
    lines = [
        "# Python",
        MADE,
        "`import ahp` imports neither torch nor transformers; each name is imported when it is first used. Errors are those of `ahp.errors`:",
        "`BadInput` (exit code 2), `NothingFits` (3), `HardwareMismatch` (4), `NotExpressible` (5).",
        "",
        "## Verbs",
    ]
    for name, module in VERBS.items():
        node = found(module, name)
        lines += ["", f"### ahp.{name}", "", *_signature(f"ahp.{name}", node), "", *doc_lines(node)]
        if isinstance(node, ast.ClassDef):
            lines += ["", *_methods(node)]
    lines += ["", "## What they give back"]
    for name, module in RESULTS.items():
        node = found(module, name)
        lines += ["", f"### {name}", "", *doc_lines(node), "", *_methods(node)]
    lines += ["", "## Nouns"]
    for name, module in NOUNS.items():
        node = found(module, name)
        lines += ["", f"### ahp.{name}", "", *doc_lines(node), "", *_fields(getattr(ahp, name)), "", *_methods(node)]
    lines += _parts(lines, *(getattr(ahp, name) for name in NOUNS))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def found(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """A class or function in the source of a module."""
    spec = importlib.util.find_spec(module)
    assert spec
    assert spec.origin
    (node,) = (node for node in parsed(spec.origin).body if isinstance(node, Named) and node.name == name)
    return node


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _signature(name: str, node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    given = _called(node).args
    places = [(arg, None) for arg in given.args[: len(given.args) - len(given.defaults)]]
    places += list(zip(given.args[len(places) :], given.defaults, strict=True))
    words = [_parameter(arg, default) for arg, default in places if arg.arg != "self"]
    if given.kwonlyargs:
        words += ["*", *map(_parameter, given.kwonlyargs, given.kw_defaults)]
    return ["```text", f"{name}(", *(f"    {word}," for word in words), ")", "```"]


def _called(node: ast.ClassDef | ast.FunctionDef) -> ast.FunctionDef:
    """A function; of a class what makes one."""
    if isinstance(node, ast.FunctionDef):
        return node
    (made,) = (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
    return made


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(arg.annotation)}" if arg.annotation else ""
    if default is None:
        return f"{arg.arg}{kind}"
    value = ast.unparse(default)
    return f"{arg.arg}{kind} = {getattr(ahp.config, value) if value.isupper() else value}"


def doc_lines(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """A docstring as Markdown: its sections as lists, its examples as code."""
    text = ast.get_docstring(node) or ""
    parts = re.split(r"^(Args|Returns|Raises|Example)::?\n", text, flags=re.MULTILINE)
    lines = _told(parts[0])
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        lines += ["", f"**{title}**", ""]
        body = textwrap.dedent(body.strip("\n"))
        if title == "Example":
            lines += ["```text", *body.rstrip().splitlines(), "```"]
        elif title in ("Args", "Raises"):
            for entry in re.split(r"\n(?=\S)", body.strip()):
                name, _, words = entry.partition(": ")
                lines += item(f"`{name}`", " ".join(_plain(words).split()))
        else:
            lines += _plain(body).rstrip().splitlines()
    return lines


def _told(text: str) -> list[str]:
    """Paragraphs; what follows ``::`` is code."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\n+", text.strip()):
        code = bool(lines) and lines[-2].endswith("::") and paragraph.startswith("    ")
        if code:
            lines[-2] = lines[-2].removesuffix(":")
        lines += [
            *(["```text", *textwrap.dedent(paragraph).splitlines(), "```"] if code else _plain(paragraph).splitlines()),
            "",
        ]
    return lines[:-1]


def _plain(text: str) -> str:
    """reStructuredText's double backticks as Markdown's single ones."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _methods(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    lines = []
    for part in node.body:
        told = ast.get_docstring(part) if isinstance(part, ast.FunctionDef) else None
        if not isinstance(part, ast.FunctionDef) or not told or part.name.startswith("_"):
            continue
        marks = {ast.unparse(mark) for mark in part.decorator_list}
        if marks & VALIDATORS:
            continue
        given = [arg.arg for arg in (*part.args.args, *part.args.kwonlyargs) if arg.arg not in ("self", "cls")]
        call = part.name if marks & {"property", "cached_property"} else f"{part.name}({', '.join(given)})"
        text = re.split(r"\n\n(?=Args|Returns|Example)", told)[0]
        lines += item(f"`{call}`", " ".join(_plain(text).split()))
    return ["Methods:", "", *lines] if lines else []


def _fields(kind: type[BaseModel]) -> list[str]:
    schema = kind.model_json_schema()
    told = told_fields(kind)
    lines = []
    for name, part in schema["properties"].items():
        default = f"; default `{_yaml(part['default'])}`" if "default" in part else ""
        words = " ".join(_plain(told.get(name, "")).split())
        lines += item(f"`{name}`", f"{kind_words(schema, part)}{default}.{' ' + _sentence(words) if words else ''}")
    return ["Fields:", "", *lines]


def told_fields(kind: type) -> dict[str, str]:
    """The text under each field in a class's source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    told = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(text):
            told[field.target.id] = inspect.cleandoc(text.value.value)  # type: ignore[attr-defined]
    return told


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def commands_page() -> str:
    from ahp.cli.main import COMMANDS
    from ahp.export.registry import TARGETS

    lines = [
        "# Commands",
        MADE,
        "Every command prints its result on stdout and progress on stderr, and ends by naming the next one. Exit codes: 0 done, 1 internal,",
        "2 bad input, 3 nothing fits, 4 other hardware than planned for, 5 the engine cannot express it; 128 + its number after a signal",
        "(130 for Ctrl-C). `ahp verify` ends with 1 if a step differs. With `--json` an error is data too: `error` with `kind`, `message` and",
        "`exit_code`.",
    ]
    for name, words in COMMANDS.items():
        module = import_module(f"ahp.cli.{name}")
        lines += ["", f"## ahp {name}", "", _sentence(words)]
        about = inspect.cleandoc(module.__doc__ or module.Arguments.__doc__ or "")
        if name == "export":  # the one whose words have places for those of its targets
            about = about.format(**{key: target.what for key, target in TARGETS.items()})
        lines += ["", *_as_paragraphs(about)] if about else []
        lines += ["", *_options(module.Arguments)]
        if name == "export":
            for target in TARGETS.values():
                lines += ["", f"### ahp export {target.name}", "", _sentence(target.what), ""]
                lines += _options(target.options) or ["It has no options of its own."]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _as_paragraphs(text: str) -> Iterator[str]:
    """A command's own words; what is set apart there by spaces is code here."""
    for paragraph in _plain(text).split("\n\n"):
        indented = [line for line in paragraph.splitlines() if line.startswith("  ")]
        if indented:
            yield from ("```text", *paragraph.splitlines(), "```", "")
        else:
            yield from (*paragraph.splitlines(), "")


def _options(arguments: type) -> list[str]:
    told = told_fields(arguments)
    hints = inspect.get_annotations(arguments)
    lines = []
    for field in dataclasses.fields(arguments):
        hint = str(hints.get(field.name, field.type))
        positional, metavar = "Positional" in hint, re.search(r"metavar=[\"']([^\"']+)", hint)
        aliases = re.findall(r"aliases=\[[\"']([^\"']+)", hint)
        flag = f"--{field.name.replace('_', '-')}"
        name = (metavar[1] if metavar else field.name.upper()) if positional else ", ".join([*aliases, flag])
        choices = re.search(r"Literal\[([^\]]+)\]", hint)
        words = f"one of {re.sub(chr(39) + '|' + chr(34), '`', choices[1])}; " if choices else ""
        if field.default is not dataclasses.MISSING and field.default is not None:
            words += f"default `{_yaml(field.default)}`. "
        lines += item(f"`{name}`", words + " ".join(_plain(told.get(field.name, "")).split()))
    return lines


if __name__ == "__main__":
    main()
