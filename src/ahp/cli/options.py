"""Parses the words of a command line into options, and formats the help about them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from inspect import cleandoc
from textwrap import wrap
from typing import TypeVar

import tyro

Options = TypeVar("Options")


def options_of(options: type[Options], words: Sequence[str], command: str, about: str | None = None) -> Options:
    """The options in ``words``. Ends the program after --help, and if the words are no options.

    ``about``: what the command does, by default the docstring of the class.
    """
    told = in_columns(about or options.__doc__ or "", shutil.get_terminal_size().columns)
    return tyro.cli(options, args=words, prog=command, description=told)


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
