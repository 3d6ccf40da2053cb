"""Numbers on their way from the device to the host, waited for only when somebody reads them."""

from __future__ import annotations

import torch


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
