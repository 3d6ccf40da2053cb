"""Variables that a process on GPUs inherits, or sets for itself before it first uses a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch 2.11 to 2.13 read the first, and the second for older scripts (c10/core/AllocatorConfig.h)."""
RECORDER = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables for the file to which NCCL's flight recorder writes the last collectives of each rank; the second is the older name."""


def gpu_variables(given: Mapping[str, str], log_folder: Path | None = None) -> dict[str, str]:
    """AHP's variables to add to those that are ``given``: what the user has set stays, under its older name too.

    Segments that grow keep memory from being cut into pieces that fit nothing. With a ``log_folder`` each rank writes its last
    collectives there if one does not end; torch has the recorder on, and dumps it then.
    """
    found: dict[str, str] = {}
    if not any(name in given for name in ALLOCATOR):
        found[ALLOCATOR[0]] = "expandable_segments:True"
    if log_folder is not None and not any(name in given for name in RECORDER):
        found[RECORDER[0]] = str(log_folder.resolve() / "nccl-rank-")
        found |= {
            name: value
            for name, value in {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}.items()
            if name not in given
        }
    return found


ROUND = "-round-"
"""Separates the name of a run from the number of the rendezvous that started its workers (``changing_nodes.py``)."""


def run_of_changing_nodes() -> str | None:
    """The run's id with its round, in a worker that a launcher of changing nodes has started; None in any other process."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return run if ROUND in run else None


def starts_since_launch() -> int:
    """How often the launchers of changing nodes have started workers, this time included; 0 under any other launcher."""
    run = run_of_changing_nodes()
    return 0 if run is None else int(run.rpartition(ROUND)[2])
