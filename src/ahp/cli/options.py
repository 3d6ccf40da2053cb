"""Parses the words of a command line into options, and formats the help about them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import fields
from inspect import cleandoc
from io import StringIO
from itertools import dropwhile, takewhile
from textwrap import wrap
from typing import TYPE_CHECKING, TypeVar, get_type_hints

import tyro

from ahp.errors import BadInput, bad_input

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def options_of(
    options: type[Options], words: Sequence[str], command: str, about: str | None = None, roots: Sequence[str] = ()
) -> Options:
    """The options in ``words``. Ends the program after --help. Raises BadInput for a word that is missing or has a wrong value, for the first word
    that the command does not take, and for the name of a positional argument.

    Args:
        options: the dataclass of the command's own options.
        words: what ``split_overrides`` left, or all words of a command that takes no keys.
        command: as it is typed, ``ahp plan``.
        about: what the command does, by default the docstring of the class.
        roots: the first parts of the keys that the command takes, which an unknown option may mean.
    """
    before_end = words[: words.index("--")] if "--" in words else words
    positionals = _positionals(options)
    _refuse_names_of_positionals(options, positionals, before_end, command)
    mine = [field.name for field in fields(options)]
    for word in before_end:
        name = word.partition("=")[0]
        short = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and " " not in name and short not in (*mine, "help"):
            from ahp.cli.overrides import meant

            raise BadInput(f"{name}: no option of {command}{meant(short, mine, roots)}; {command} --help lists them")
    text = in_columns(about or options.__doc__ or "", shutil.get_terminal_size().columns)
    box = StringIO()
    try:
        with redirect_stderr(box):
            found, unknown = tyro.cli(options, args=words, prog=command, description=text, return_unknown_args=True)
    except SystemExit as end:
        if end.code != BadInput.exit_code:
            raise
        raise _refusal(box.getvalue(), command, [*positionals.values()]) from None
    if unknown and unknown[0].startswith("-"):
        raise BadInput(f"{unknown[0]}: no option of {command}; {command} --help lists them")
    if unknown:
        raise BadInput(
            f"{unknown[0]!r}: {command} takes no such word; {command} --help says what it takes, and a value of several words needs quotes"
        )
    return found


def _refusal(box: str, command: str, positionals: list[str]) -> BadInput:
    """What tyro (1.0.17, ``_cli.py``) says in a box, as one sentence: up to the line that leads to the help."""
    lines = [line.strip(" │|─-") for line in box.splitlines()[1:]]
    text = " ".join(takewhile(bool, dropwhile(lambda line: not line, lines)))  # what was a rule is empty now
    missing = [name for name in positionals if name in lines]
    if missing:
        form = f"the form is: {' '.join([command, *positionals])}"
        return BadInput(f"{' and '.join(missing)} missing; {form}; {command} --help says what they are")
    if found := re.search(r"Error parsing (\S+): .*?\b(int|float)\b.*?'(.*?)'", text, re.IGNORECASE):
        rule = "must be a whole number" if found[2].lower() == "int" else "must be a number"
        return bad_input(found[1], found[3], rule)
    if found := re.search(r"invalid choice '(.*)' for argument '(.*?)'. Expected one of \((.*)\)", text):
        return bad_input(found[2], found[1], "there is no such value", re.findall("'(.*?)'", found[3]))
    return BadInput(f"{text.rstrip('.')}; {command} --help lists the options")


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


def _positionals(options: type[object]) -> dict[str, str]:
    """The positional arguments with their names on a command line."""
    parts = {name: getattr(of, "__metadata__", ()) for name, of in get_type_hints(options, include_extras=True).items()}
    return {
        name: [part.metavar for part in of if hasattr(part, "metavar")][-1]
        for name, of in parts.items()
        if tyro.conf.Positional in of
    }


def _refuse_names_of_positionals(
    options: type[DataclassInstance], metavars: dict[str, str], words: Sequence[str], command: str
) -> None:
    """Raises BadInput for the name of a positional argument: of ``ahp plan llama3-8b --cluster 8xH100`` the parser would only say that CLUSTER is
    missing."""
    others = {field.name for field in fields(options)} - metavars.keys()
    names = {*metavars, *re.findall("[a-z]+", " ".join(metavars.values()).lower())} - others
    for word in words:
        if (name := word.partition("=")[0]).removeprefix("--") in names and name.startswith("--"):
            usage = " ".join([command, *metavars.values()])
            raise BadInput(f"{name}: is no option; its value stands alone, without the name: {usage}")
