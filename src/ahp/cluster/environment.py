"""Environment variables of processes that train or measure on CPU cores, so that a probe measures what a run will meet."""

from __future__ import annotations

COMPUTE = {
    # Huge pages for what glibc hands out (glibc 2.35; older ones ignore it). Where memory is new, the kernel then clears 2 MiB at once, not pages of
    # 4 KiB. torch's own THP_MEM_ALLOC_ENABLE is not for this: it aligns large tensors to 2 MiB, and blocks so aligned rarely fit where
    # others were freed. The heap then grows for tens of steps, to 1.1 to 1.7 times the size (docs/forecast/workers.md).
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # Makes glibc keep what a step frees for the next step. By default it returns tensors above 32 MiB, and the top of its heap, to the kernel.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


def with_ours(given: dict[str, str]) -> dict[str, str]:
    """``given`` with our variables added; variables that the user has set stay."""
    return {**COMPUTE, **given}
