"""Dotted overrides on the command line: ``--job.steps 20``, ``--parallelism.tensor-parallel-degree=4``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import yaml

from ahp.config import HELP
from ahp.errors import BadInput
from ahp.violations import MOST_MEANT, MOST_SHOWN
from ahp.words import OTHER_NAMES
from ahp.yaml_text import parse_yaml

CONFIG_ROOTS = ("model", "init_from", "cluster", "job", "parallelism", "engine", "run")

TEXT = ("engine.version",)
"""Keys whose value is taken as it is typed: 26.10 is a release, not a number."""

OPTION = re.compile("--|-[A-Za-z]")
"""How a word begins that is an option and no value: ``-o``, unlike the number -1."""

UNSET = ("null", "true")
"""Values that are exceptions: null, and true, which a key without a value stands for."""


def split_overrides(argv: Sequence[str], roots: Sequence[str] = CONFIG_ROOTS) -> tuple[dict[str, Any], list[str]]:
    """Separate overrides from a command's own arguments.

    An override is ``--root.key value``, ``--root.key=value``, or ``--root`` with a value where ``root`` itself is a
    key. Hyphens and underscores are the same, values are read as YAML, a key without a value is true (an
    option follows, or nothing), the last of two equal keys wins. What follows ``--`` is left alone.

    Args:
        argv: the words after the command.
        roots: the first parts that this command knows.

    Returns:
        Dotted keys to values, for ``ahp.config.load_config``; and the words that remain for the command's parser.

    Raises:
        BadInput: an option with a dot whose first part is no root; a value that is not YAML.
    """
    overrides: dict[str, Any] = {}
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return overrides, [*rest, word, *words]
        name, has_value, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if not word.startswith("--") or not ("." in name or key in roots):
            rest.append(word)
            continue
        if key.split(".")[0] not in roots:
            near = _whole_keys(key, _keys(roots))
            meant = f" (did you mean: {', '.join(map(_option, near))}?)" if near else ""
            raise BadInput(f"--{name}: unknown key; it must begin with one of {', '.join(roots)}{meant}")
        if not has_value:
            value = words.pop(0) if words and not OPTION.match(words[0]) else "true"
        overrides[key] = value if key in TEXT and value not in UNSET else _value(word, value)
    return overrides, rest


def meant(name: str, own: list[str], roots: Sequence[str]) -> str:
    """The keys whose name, whole or short, is that of an option that a command does not have, else the options and keys whose names are near it, in
    words that follow "no option of COMMAND"; empty if there are none.

    Args:
        name: the option, with underscores and without ``--``.
        own: the command's own options, written likewise.
        roots: the first parts of the keys that the command takes.
    """
    keys = _keys(roots)
    whole = _whole_keys(name, keys)
    near = whole or _near(name, [*own, *keys])
    rule = "; keys are given whole" if whole else ""
    return f"{rule} (did you mean: {', '.join(map(_option, near))}?)" if near else ""


def _keys(roots: Sequence[str]) -> list[str]:
    """The dotted keys under some roots."""
    keys = [key for key in HELP if "." in key and key.split(".")[0] in roots]
    if "objective" in roots:
        from ahp.search.objective import Objective

        keys += [f"objective.{name}" for name in Objective.model_fields if name != "name"]
    return keys


def _whole_keys(name: str, keys: list[str]) -> list[str]:
    """The keys that end as ``name`` does, or to which others give this name."""
    last = name.rsplit(".", 1)[-1]
    return [key for key in keys if key.rsplit(".", 1)[-1] in (last, OTHER_NAMES.get(last))]


def _near(short: str, names: list[str]) -> list[str]:
    """The names whose last part is spelled nearly like ``short``."""
    lasts = [name.rsplit(".", 1)[-1] for name in names]
    close = difflib.get_close_matches(short, lasts, n=MOST_MEANT)
    return [name for one in dict.fromkeys(close) for name, last in zip(names, lasts, strict=True) if last == one]


def _option(key: str) -> str:
    return f"--{key}" if key in HELP else f"--{key.replace('_', '-')}"


def _value(option: str, text: str) -> Any:
    if text in ("", "-"):  # in YAML, null and a list of null; people mean no text, and stdin
        return text
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        shown = text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
        raise BadInput(f"{option} {shown}: the value is not YAML; quote it if it is text ({error})") from None
