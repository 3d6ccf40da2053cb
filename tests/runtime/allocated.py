"""What a piece of work allocates on a CPU, as torch's profiler counts it."""

from __future__ import annotations

from collections.abc import Callable


def most_allocated_bytes(work: Callable[[], object]) -> int:
    """The peak of what ``work`` has allocated and not freed."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()  # type: ignore[attr-defined]
            most = max(most, now)
    return most
