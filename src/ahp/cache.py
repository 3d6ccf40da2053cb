"""The folder that keeps what was made once for other runs of the same user."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$AHP_CACHE``, else ``~/.cache/ahp``."""
    given = os.environ.get("AHP_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "ahp"
