"""What a step gives its caller, without making the host wait for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ahp.runtime.host_copy import HostCopy
from ahp.runtime.optimizer.norm import SquareSum


@dataclass(frozen=True, repr=False, eq=False)
class StepResult:
    """What one step gave; but for ``bad_gradients`` the same on every rank.

    On a GPU the step may still be running when it is returned: reading ``loss``, ``grad_norm`` or ``skipped`` waits for the end of this
    step, and for nothing that was queued after it. So a loop that reads a step's numbers after it called the next step leaves
    no gap on the device.
    """

    figures: HostCopy
    """float64 [3]: loss, gradient norm, and whether fp16's loss scale could still shrink."""
    learning_rate: float
    norms: SquareSum
    """Of this rank's parts of the gradients, still multiplied by the loss scale."""
    index: int
    """Steps that were done before it: its random numbers are those of this number."""

    @cached_property
    def _numbers(self) -> tuple[float, float, float]:
        loss, norm, can_shrink = self.figures.read().tolist()
        return loss, norm, can_shrink

    @property
    def loss(self) -> float:
        """Mean cross-entropy over the scored tokens of the global batch, before the update; and the weighted balance loss of a mixture of
        experts, where the model's config asks for it (docs/runtime/experts.md)."""
        return self._numbers[0]

    @property
    def grad_norm(self) -> float:
        """Global norm of the gradient before clipping."""
        return self._numbers[1]

    @property
    def skipped(self) -> bool:
        """Whether the gradients overflowed fp16, so that nothing was updated; ``grad_norm`` is no number then."""
        return bool(self._numbers[2]) and not math.isfinite(self.grad_norm)

    @property
    def failed(self) -> bool:
        """Whether the loss or the gradient is no number for another reason, so that nothing was updated either."""
        return not math.isfinite(self.loss) or not (math.isfinite(self.grad_norm) or self.skipped)

    @property
    def bad_gradients(self) -> tuple[str, ...]:
        """Parameters whose gradient has a norm that is no number, of those of this rank."""
        return self.norms.not_finite()

    def __repr__(self) -> str:
        return (
            f"StepResult(loss={self.loss}, grad_norm={self.grad_norm}, learning_rate={self.learning_rate}, "
            f"skipped={self.skipped})"
        )
