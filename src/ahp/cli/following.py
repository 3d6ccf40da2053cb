"""What can be done next with a plan, by the engine that would run it."""

from __future__ import annotations

import shlex

RUNS = "ahp"
"""The engine whose plans ``ahp train`` runs."""


def after(path: str, engine: str, *first: str) -> list[str]:
    """Commands about the plan in ``path``: ``first`` by their names, then what runs it, or shows it where AHP does not."""
    last = "train" if engine == RUNS else "report"
    return [f"ahp {command} {shlex.quote(path)}" for command in (*first, last)]
