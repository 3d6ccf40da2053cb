"""``job.deterministic``: the same digits each time on the same devices, where CUDA's fastest kernels add in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from ahp.errors import NotExpressible

REFUSAL = "does not have a deterministic implementation"
"""What torch says of an operator that adds in any order and has no other kernel (aten/src/ATen/Context.cpp)."""


def set_environment() -> None:
    """Before the first product on a GPU, and before anything is compiled. What the user has set stays.

    cuBLAS is deterministic with workspaces of its own for each stream (docs.nvidia.com/cuda/cublas, "Results Reproducibility"); Inductor
    else picks among kernels by their times.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within, torch takes deterministic kernels alone, where it is wanted; then the program's own choice holds again.

    Raises NotExpressible on an operator that has none.
    """
    if not wanted:
        yield
        return
    mode = torch.get_deterministic_debug_mode()
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # torch would write NaN into each new tensor besides, to show who reads what nobody wrote.
    cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
    try:
        yield
    except RuntimeError as error:
        if REFUSAL not in str(error):
            raise
        said = next(line for line in str(error).splitlines() if REFUSAL in line)
        raise NotExpressible(f"job.deterministic = True: {said.strip()}") from error
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before
