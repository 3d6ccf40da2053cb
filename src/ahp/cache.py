"""The folder that keeps what was made once for other runs of the same user."""

from __future__ import annotations

import os
from pathlib import Path

from ahp.errors import BadInput


def cache_folder() -> Path:
    """``$AHP_CACHE``, else ``~/.cache/ahp``. Raises BadInput if the user has no home folder, as in some containers."""
    try:
        return Path(os.environ.get("AHP_CACHE") or "~/.cache/ahp").expanduser()
    except RuntimeError:
        raise BadInput(
            "AHP_CACHE is not set, and this user has no home folder; set AHP_CACHE to a folder that can be written"
        ) from None
