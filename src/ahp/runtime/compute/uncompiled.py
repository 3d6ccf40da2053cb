"""What stays outside of compiled graphs (docs/runtime/compute.md has the table)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """``torch.compiler.disable`` with the type of what it is given: graphs end before a call of the function and go on after it."""
    return cast(Function, torch.compiler.disable(function))
