"""The loss scale that lifts gradients into the range of fp16, by the rules of ``torch.amp.GradScaler``.

The loss is multiplied by it, the gradients are divided by it in fp32. The global norm shows whether they overflowed: it is the
same on every rank, so that all ranks take the update or none does. Like GradScaler's scale it stays on the device.
"""

from __future__ import annotations

import torch

from ahp.job import Precision
from ahp.runtime.torch_compat import update_loss_scale_

INITIAL, GROWTH, BACKOFF, GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000
"""GradScaler's defaults (torch/amp/grad_scaler.py)."""
SMALLEST = 1.0
"""Gradients that overflow at a scale of 1 are not finite themselves, or too large for fp16 at any scale."""


class LossScale:
    """Starts high, halves at each overflow, doubles after 2000 steps without one. Powers of two change no digit."""

    def __init__(self, precision: Precision, device: torch.device | str = "cpu") -> None:
        self.dynamic = precision == "fp16"
        self.scale = torch.full((), INITIAL if self.dynamic else 1.0, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        """Steps without an overflow since the scale last changed."""

    @property
    def factor(self) -> torch.Tensor | float:
        """What the loss is multiplied by: a tensor of its own, which ``update`` does not change, or 1."""
        return self.scale.clone() if self.dynamic else 1.0

    @property
    def value(self) -> float:
        """The scale as a number. The host waits for the device."""
        return self.scale.item()

    @value.setter
    def value(self, value: float) -> None:
        self.scale.fill_(value)

    def can_shrink(self) -> torch.Tensor:
        """Whether an overflow only skips the step and makes the scale smaller; if not, training has diverged."""
        return (self.scale > SMALLEST) & self.dynamic

    def update(self, overflowed: torch.Tensor) -> None:
        """After each step; the same on every rank. ``overflowed``: float32 scalar, 0 or 1."""
        if self.dynamic:
            update_loss_scale_(self.scale, self.good_steps, overflowed, GROWTH, BACKOFF, GROWTH_INTERVAL)
            self.scale.clamp_(min=SMALLEST)

    def state(self) -> dict[str, torch.Tensor]:
        """The state for a checkpoint, empty if the scale is constant."""
        if not self.dynamic:
            return {}
        return {
            "loss_scale.value": self.scale.detach().cpu().clone(),
            "loss_scale.num_good_steps": self.good_steps.cpu().to(torch.int64),
        }

    def take_over(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from what ``state`` gave."""
        if self.dynamic:
            self.scale.copy_(state["loss_scale.value"])
            self.good_steps.copy_(state["loss_scale.num_good_steps"])
