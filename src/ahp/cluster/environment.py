"""What the processes that train or measure on processor cores inherit, so that a probe measures what a run will meet."""

from __future__ import annotations

COMPUTE = {
    # torch asks for huge pages for its large tensors. Without them the kernel hands out what a step frees and takes
    # again in pages of 4 KiB: a LLaMA of 28 M parameters waits for 56,000 of them in a step, 9 % of it (docs/forecast/workers.md).
    "THP_MEM_ALLOC_ENABLE": "1",
    # glibc keeps what a step frees for the next one. By default it gives tensors above 32 MiB, and the top of its heap, back to the kernel.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


def with_ours(given: dict[str, str]) -> dict[str, str]:
    """``given`` and our variables; what the user has set stays."""
    return {**COMPUTE, **given}
