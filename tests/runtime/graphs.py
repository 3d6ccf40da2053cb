"""Graphs of torch.compile without the compiler of kernels, which takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch

from ahp.runtime.compute import compile as compiled


@contextmanager
def no_kernels() -> Iterator[dict[str, int]]:
    """Within, graphs are made and differentiated as torch.compile does it, and run operator by operator. Nothing is left of what the
    process compiled before; what is yielded counts."""
    from torch._dynamo.utils import counters  # a second of imports

    torch._dynamo.reset()
    counters.clear()
    plain = mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with plain, mock.patch.object(compiled, "BACKEND", "aot_eager"):
        yield counters["stats"]
