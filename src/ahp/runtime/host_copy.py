"""What is on its way from the device to the host: numbers, waited for only when somebody reads them, and memory to copy to."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

PINNED_IN_PLACE_BYTES = 1 << 20
"""Smaller pieces share pages with others, which cannot be locked twice."""


class HostCopy:
    """A copy of a small tensor on the host. On a GPU it goes beside what is queued next: nothing waits until ``read``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.arrived = tensor, None
        if tensor.is_cuda:
            self.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.tensor.copy_(tensor, non_blocking=True)
            self.arrived = torch.cuda.Event(blocking=True)  # sleeps, so that other threads have the core
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
    """Page-locked host memory like a tensor, without values. Where the system locks no more it is plain, with a warning.

    torch's own allocator of such memory rounds each piece up to a power of two, so the large ones are locked where they lie.
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
    # Not at the end of the process, when CUDA may be gone before.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory
