"""Other engines as somebody who follows their documentation would use them, for ``side_by_side.py --engines``.

DS_BUILD_OPS=0 .venv/bin/pip install --no-build-isolation accelerate deepspeed
.venv/bin/pip install torchtitan==0.2.2 triton
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path


def refuse_stale_locks() -> None:
    """End with a message where a build of an extension was ended half way: torch's builder waits for its lock for ever.

    DeepSpeed builds its collectives and its AdamW for CPUs at first use. Asked before any worker starts, when nobody builds.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    if locks := [*sorted(root.glob("**/deepspeed_*/lock")), *sorted(root.glob("**/fused_adam/lock"))]:
        raise SystemExit(
            f"{locks[0]}: a build that was ended left this lock, and the next would wait for it; remove it"
        )


def versions(layouts: Iterable[str]) -> str:
    """Of the engines that layouts of these names compare with."""
    return ", ".join(f"{name} {version(name)}" for name in dict.fromkeys(layout.split("-")[0] for layout in layouts))
