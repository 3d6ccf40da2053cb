"""``job.deterministic``: the same digits each time on the same devices, although CUDA's fastest kernels add in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from ahp.errors import NotExpressible

REFUSAL = "does not have a deterministic implementation"
"""torch's message for an operator that adds in any order and has no other kernel (aten/src/ATen/Context.cpp)."""


def set_environment() -> None:
    """To be called before the first product on a GPU, and before anything is compiled. Variables that the user has set stay.

    cuBLAS is deterministic with a workspace for each stream (docs.nvidia.com/cuda/cublas, "Results Reproducibility"); Inductor
    would otherwise choose kernels by their measured times.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within, torch uses only deterministic kernels, if ``wanted``; afterwards the program's own choice holds again.

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
    # torch would also write NaN into each new tensor, to expose reads of memory that nothing wrote.
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
