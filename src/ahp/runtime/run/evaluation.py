"""The user's own function that evaluates the model every few steps (``run.evaluation``)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from inspect import isfunction, signature
from typing import Any

from ahp.errors import BadInput, bad_input
from ahp.run_files import finite

KEY = "run.evaluation"
OWN_NAME = "time_s"
"""The name under which the time of an evaluation is recorded."""

Evaluation = Callable[[Any, int], Any]
"""(the parallel model, number of the step) -> a number, or numbers keyed by name. Called on every rank."""


def find(name: str) -> Evaluation:
    """The function named ``pkg.mod:function``. Raises BadInput if it cannot be imported."""
    path, colon, function = name.partition(":")
    if not colon or not function.isidentifier() or not all(part.isidentifier() for part in path.split(".")):
        raise bad_input(KEY, name, "must name a function", ["pkg.mod:function"])
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        where = "it must lie in the folder that the command starts in, be installed, or be on PYTHONPATH"
        raise BadInput(f"{KEY} = {name!r}: {error}; {where}") from error
    except ImportError as error:
        raise BadInput(f"{KEY} = {name!r}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        raise BadInput(f"{KEY} = {name!r}: importing {path} raised {type(error).__name__}: {error}") from error
    if (found := getattr(module, function, None)) is None:
        its_own = [key for key, one in vars(module).items() if isfunction(one) and one.__module__ == module.__name__]
        raise bad_input(KEY, name, f"{path} has no such function", [f"{path}:{key}" for key in its_own])
    if not callable(found):
        raise bad_input(KEY, name, f"it is of {type(found).__name__}, not a function of (parallel, step)")
    try:
        signature(found).bind(None, 0)
    except TypeError as error:
        raise bad_input(KEY, name, f"it cannot be called with (parallel, step): {error}") from None
    except ValueError:  # a function without a signature
        pass
    return found


def figures(name: str, found: Any) -> dict[str, float | None]:
    """A function's result as fields of the step's record: ``evaluation``, or one ``evaluation_NAME`` per name; None for a value that is
    not finite. Raises BadInput for anything but numbers."""
    named: Mapping[Any, Any] = found if isinstance(found, Mapping) else {"": found}
    record: dict[str, float | None] = {}
    for key, value in named.items():
        number = _number(value)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not isinstance(key, str):
            raise bad_input(KEY, name, f"it returned {found!r}; a number was expected, or numbers by name")
        if key == OWN_NAME:
            rule = f"it returned a number named {key}, and evaluation_{key} is the time that it takes; give it another name"
            raise bad_input(KEY, name, rule)
        record["evaluation" + (f"_{key}" if key else "")] = finite(number)
    return record


def _number(value: Any) -> Any:
    """The number that a tensor or a NumPy scalar holds, None if it holds several; anything else as it is."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):
        return None
