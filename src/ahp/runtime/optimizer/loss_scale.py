"""The factor that lifts gradients into what fp16 can hold, with the rules of ``torch.amp.GradScaler``.

The loss is multiplied by it, the gradients are divided by it in fp32. Whether they overflowed is read off the global norm,
which every rank has alike, so that all ranks take the update or none does.
"""

from __future__ import annotations

import torch

from ahp.job import Precision

INITIAL, GROWTH, BACKOFF, GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000
"""GradScaler's defaults (torch/amp/grad_scaler.py)."""
SMALLEST = 1.0
"""Gradients that overflow at a scale of 1 are no longer numbers, or too large for fp16 whatever the scale."""


class LossScale:
    """Starts high, halves at each overflow, doubles after so many steps without one. Powers of two change no digit."""

    def __init__(self, precision: Precision) -> None:
        self.dynamic = precision == "fp16"
        self.value = INITIAL if self.dynamic else 1.0
        self.num_good_steps = 0
        """Steps without an overflow since the scale last changed."""

    def can_skip(self) -> bool:
        """Whether a step whose gradients overflowed is left out and the next one scaled less; else training has diverged."""
        return self.dynamic and self.value > SMALLEST

    def update(self, *, overflowed: bool) -> None:
        """After each step; the same on every rank."""
        if not self.dynamic:
            return
        if overflowed:
            self.value, self.num_good_steps = self.value * BACKOFF, 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == GROWTH_INTERVAL:
            self.value, self.num_good_steps = self.value * GROWTH, 0

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it, nothing where the scale is constant."""
        if not self.dynamic:
            return {}
        return {
            "loss_scale.value": torch.tensor(self.value),
            "loss_scale.num_good_steps": torch.tensor(self.num_good_steps),
        }

    def take_over(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from what ``state`` gave."""
        if self.dynamic:
            self.value = float(state["loss_scale.value"])
            self.num_good_steps = int(state["loss_scale.num_good_steps"])
