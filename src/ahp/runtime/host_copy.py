"""Copies from the device to the host: numbers that are waited for only when they are read, and memory to copy to."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

PINNED_IN_PLACE_BYTES = 1 << 20
"""Smaller tensors share memory pages with others, and a page cannot be locked twice."""


class HostCopy:
    """A copy of a small tensor on the host. From a GPU it is queued on the current stream: the host waits only in ``read``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.arrived = tensor, None
        if tensor.is_cuda:
            self.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.tensor.copy_(tensor, non_blocking=True)
            self.arrived = torch.cuda.Event(blocking=True)  # waiting sleeps, so other threads get the core
            self.arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> torch.Tensor:
        """The tensor on the host, once everything that was queued before the copy is over."""
        if self.arrived is not None:
            self.arrived.synchronize()
            self.arrived = None
        return self.tensor

    def __getstate__(self) -> dict[str, object]:
        """For pickle: an event cannot leave its process."""
        return {"tensor": self.read(), "arrived": None}


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Page-locked host memory like a tensor, without values. If the system cannot lock more, the memory is pageable, with a warning.

    torch's own allocator of page-locked memory rounds sizes up to a power of two, so large tensors are locked in place.
    """
    if tensor.nbytes < PINNED_IN_PLACE_BYTES:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    memory = torch.empty_like(tensor, device="cpu")
    address: int = memory.data_ptr()
    cudart: Any = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(address, memory.nbytes, 1)):  # 1: cudaHostRegisterPortable
        warnings.warn(
            f"host memory: {memory.nbytes} bytes cannot be page-locked; copies to it are slower", stacklevel=2
        )
        return memory
    # Not at process exit: CUDA may be gone by then.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory
