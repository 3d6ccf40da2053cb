"""``ahp`` with a probe of small shapes, as on a machine of small caches: every kind of task, with each dtype and number of workers, and little else.

[Empirical] On two cores that report a cache of 260 MB a quick probe of two workers takes 42 s of processor time, 14 s of them for pages of
tensors of four caches, and so takes 14 s.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

from ahp.cli.main import main
from ahp.cluster import measure, tasks

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE_BYTES = 8 * 2**20


@contextmanager
def small_probe() -> Iterator[None]:
    """Every task is gone through in the first round whatever the time; only how often each is repeated shrinks."""
    pace = replace(measure.QUICK, total_s=6.0, disk_bytes=2**24)
    with ExitStack() as kept:
        for module, name, value in (
            (measure, "QUICK", pace),
            (measure.sense, "last_level_cache_bytes", lambda: CACHE_BYTES),
            (tasks, "CPU_QUICK", tasks.CPU_QUICK[:7]),
            (tasks, "CPU_QUICK_GRADIENTS", tasks.CPU_QUICK_GRADIENTS[:3]),
            (tasks, "CPU_QUICK_ATTENTION", tasks.CPU_QUICK_ATTENTION[:2]),
            (tasks, "QUICK_ELEMENTS", tasks.QUICK_ELEMENTS[:2]),
        ):
            kept.enter_context(mock.patch.object(module, name, value))
        yield


if __name__ == "__main__":
    with small_probe():
        sys.exit(main(sys.argv[1:]))
