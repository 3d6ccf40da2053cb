"""Parses the words of a command line into options, and formats the help about them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import fields
from inspect import cleandoc
from textwrap import wrap
from typing import TYPE_CHECKING, TypeVar, get_type_hints

import tyro

from ahp.errors import BadInput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def options_of(
    options: type[Options], words: Sequence[str], command: str, about: str | None = None, roots: Sequence[str] = ()
) -> Options:
    """The options in ``words``. Ends the program after --help, and if a word is missing or has a wrong value. Raises BadInput for the first word
    that the command does not take, and for the name of a positional argument.

    Args:
        options: the dataclass of the command's own options.
        words: what ``split_overrides`` left, or all words of a command that takes no keys.
        command: as it is typed, ``ahp plan``.
        about: what the command does, by default the docstring of the class.
        roots: the first parts of the keys that the command takes, which an unknown option may mean.
    """
    before_end = words[: words.index("--")] if "--" in words else words
    _refuse_names_of_positionals(options, before_end, command)
    mine = [field.name for field in fields(options)]
    for word in before_end:
        name = word.partition("=")[0]
        short = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and " " not in name and short not in (*mine, "help"):
            from ahp.cli.overrides import meant

            raise BadInput(f"{name}: no option of {command}{meant(short, mine, roots)}; {command} --help lists them")
    told = in_columns(about or options.__doc__ or "", shutil.get_terminal_size().columns)
    found, unknown = tyro.cli(options, args=words, prog=command, description=told, return_unknown_args=True)
    if unknown and unknown[0].startswith("-"):
        raise BadInput(f"{unknown[0]}: no option of {command}; {command} --help lists them")
    if unknown:
        raise BadInput(
            f"{unknown[0]!r}: {command} takes no such word; {command} --help says what it takes, and a value of several words needs quotes"
        )
    return found


def in_columns(text: str, width: int) -> str:
    """Paragraphs wrapped with indented continuation lines: tyro (1.0.17, ``_strings.remove_single_line_breaks``) joins lines that begin with a
    letter into one long line, which a terminal breaks within words."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", cleandoc(text)):
        lines = []
        for line in re.sub(r"\n(?=\S)", " ", paragraph).split("\n"):
            indent = line[: len(line) - len(line.lstrip())] or "  "
            lines += wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _refuse_names_of_positionals(options: type[object], words: Sequence[str], command: str) -> None:
    """Raises BadInput for the name of a positional argument: of ``ahp plan llama3-8b --cluster 8xH100`` the parser would only say that CLUSTER is
    missing."""
    parts = {name: getattr(of, "__metadata__", ()) for name, of in get_type_hints(options, include_extras=True).items()}
    metavars = {
        name: [part.metavar for part in of if hasattr(part, "metavar")][-1]
        for name, of in parts.items()
        if tyro.conf.Positional in of
    }
    names = {*metavars, *re.findall("[a-z]+", " ".join(metavars.values()).lower())} - (parts.keys() - metavars.keys())
    for word in words:
        if (name := word.partition("=")[0]).removeprefix("--") in names and name.startswith("--"):
            usage = " ".join([command, *metavars.values()])
            raise BadInput(f"{name}: is no option; its value stands alone, without the name: {usage}")
