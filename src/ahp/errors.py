"""The errors that a user gets when AHP cannot do what was asked, with their exit codes."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from typing import Any


class AhpError(Exception):
    """An error with a message for the user; the command line prints it without a traceback."""

    exit_code = 1
    may_pass = False
    """Whether a machine or a network may be the cause, so that workers that are started again may not meet it."""


class BadInput(AhpError, ValueError):
    """The user's input breaks a rule."""

    exit_code = 2


class OtherJob(BadInput):
    """The run in the folder has another job: the command is wrong, and nothing is wrong with that run."""


class NothingFits(AhpError):
    """No legal plan fits into the memory there is."""

    exit_code = 3


class HardwareMismatch(AhpError):
    """The hardware is not what the plan was made for."""

    exit_code = 4


class NotExpressible(AhpError):
    """The engine cannot express the plan."""

    exit_code = 5


def bad_input(key: str, value: Any, rule: str, valid: Iterable[Any] | None = None) -> BadInput:
    """The one form of an input error: the user's own key, its value, the rule, and the valid values: all, or the nearest of many."""
    text = f"{key} = {_cut(repr(value))}: {rule}"
    choices = list(valid) if valid is not None else []
    if choices:
        near = nearest(value, choices)
        text += f" ({'valid' if len(near) == len(choices) else 'nearest'}: {listed(near)})"
    return BadInput(text)


def whole_number(key: str, value: Any, least: int, rule: str = "") -> int:
    """A whole number that a function was given, numpy's too. Raises BadInput with ``rule`` for another value, or one below ``least``."""
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if number is None or number < least:
        raise bad_input(key, value, rule or f"must be a whole number, at least {least}")
    return number


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or ["no reason"])[0]


LONGEST_CHOICE = 500
"""Longer values and choices are cut to so many characters: one may be a name from the user's own file, or a whole graph."""


def listed(choices: Iterable[Any]) -> str:
    """The choices as a user would write them: null, not None."""
    return ", ".join("null" if choice is None else _cut(str(choice)) for choice in choices)


def _cut(word: str) -> str:
    return word if len(word) <= LONGEST_CHOICE else f"{word[: LONGEST_CHOICE - 3]}..."


def nearest(value: Any, choices: list[Any], count: int = 5) -> list[Any]:
    """The choices closest to a value: by distance for numbers, by spelling for words; else the first ones."""
    if len(choices) <= count:
        return choices
    if isinstance(value, (int, float)) and all(isinstance(c, (int, float)) for c in choices):
        return sorted(sorted(choices, key=lambda c: abs(c - value))[:count])
    close = difflib.get_close_matches(str(value), [str(c) for c in choices], n=count, cutoff=0.3)
    return close or choices[:count]
