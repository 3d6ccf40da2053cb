"""Dotted overrides on the command line: ``--job.steps 20``, ``--parallelism.tensor-parallel-degree=4``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from ahp.errors import BadInput
from ahp.violations import MOST_SHOWN
from ahp.yaml_text import parse_yaml

CONFIG_ROOTS = ("model", "init_from", "cluster", "job", "parallelism", "engine", "run")

TEXT = ("engine.version",)
"""Keys whose value is taken as it is typed: 26.10 is a release, no number."""

UNSET = ("null", "true")
"""But for these: nothing, and what a key without a value stands for."""


def split_overrides(argv: Sequence[str], roots: Sequence[str] = CONFIG_ROOTS) -> tuple[dict[str, Any], list[str]]:
    """Separate overrides from a command's own arguments.

    An override is ``--root.key value``, ``--root.key=value``, or ``--root`` with a value where ``root`` itself is a
    key. Hyphens and underscores are the same, values are read as YAML, a key without a value is true, the last of
    two equal keys wins. What follows ``--`` is left alone.

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
            raise BadInput(f"--{name}: unknown key; it must begin with one of {', '.join(roots)}")
        if not has_value:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        overrides[key] = value if key in TEXT and value not in UNSET else _value(word, value)
    return overrides, rest


def _value(option: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        shown = text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
        raise BadInput(f"{option} {shown}: the value is not YAML; quote it if it is text ({error})") from None
