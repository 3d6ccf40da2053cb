"""One program each, as its users start it: they read the file that ``ahp export`` wrote, and write what their steps gave.

Started by ``exports.py``; each is a script of its own, because the program's launcher starts it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def tell(losses: list[float], norms: list[float], says: dict[str, Any]) -> None:
    """The results of rank 0: for each step the global mean loss and the norm before clipping; and the layout that the program reports."""
    if int(os.environ["RANK"]) == 0:
        found = {"losses": losses, "norms": norms, "says": says}
        Path(os.environ["EXPORTED_RESULT"]).write_text(json.dumps(found))


def task() -> Any:
    """The model and the batches that both sides have."""
    from task import Task

    return Task(**json.loads(os.environ["EXPORTED_TASK"]))
