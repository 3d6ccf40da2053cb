"""How many worker processes this machine can run, so that none are started that would bring it down."""

from __future__ import annotations

from ahp.cluster import sense
from ahp.errors import BadInput

LEAST_WORKER_BYTES = 500_000_000
"""[Empirical] Memory of a worker that trains or measures next to nothing: 234 MB with torch and a process group (``ahp.cluster.local``),
and as much again of buffers, gradients and states; workers in tests/ take about 0.5 GB."""

WORKERS_PER_CORE = 8
"""This many workers on a core still make progress, so that a layout of eight can be tried on a laptop; far more only wait for each other."""


def refuse_workers(key: str, count: int) -> None:
    """Raises BadInput, before anything starts, for more processes than the machine's cores or its free memory allow.

    ``key`` is the user's setting as the user wrote it: ``workers = 9999``.
    """
    cores, free = sense.physical_cores(), sense.memory_available_bytes()
    by_cores, by_memory = WORKERS_PER_CORE * cores, max(1, free // LEAST_WORKER_BYTES)
    most = min(by_cores, by_memory)
    if count <= most:
        return
    if by_cores <= by_memory:
        reason = f"{WORKERS_PER_CORE} on each of its {cores} physical cores"
    else:
        reason = f"{LEAST_WORKER_BYTES / 1e9:.1f} GB for each of the {free / 1e9:.1f} GB that are free"
    raise BadInput(f"{key}: this machine carries at most {most} worker processes, {reason} (valid: 1 to {most})")
