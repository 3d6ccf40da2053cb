"""Environment variables of processes that train or measure on CPU cores, so that a probe measures what a run will meet."""

from __future__ import annotations

COMPUTE = {
    # Makes torch ask for huge pages for its large tensors. Without them the kernel hands out the memory that a step frees and takes
    # again in pages of 4 KiB: a LLaMA of 28 M parameters waits for 56,000 such pages in a step, 9 % of its time (docs/forecast/workers.md).
    "THP_MEM_ALLOC_ENABLE": "1",
    # Makes glibc keep what a step frees for the next step. By default it returns tensors above 32 MiB, and the top of its heap, to the kernel.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


def with_ours(given: dict[str, str]) -> dict[str, str]:
    """``given`` with our variables added; variables that the user has set stay."""
    return {**COMPUTE, **given}
