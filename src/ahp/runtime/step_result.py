"""The result of a step. Returning it does not make the host wait for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ahp.runtime.host_copy import HostCopy
from ahp.runtime.optimizer.norm import SquareSum


@dataclass(frozen=True, repr=False, eq=False)
class StepResult:
    """The result of one step; the same on every rank except for ``bad_gradients``.

    On a GPU the step may still be running when this is returned: reading ``loss``, ``grad_norm`` or ``skipped`` waits for the end of
    this step only, not for work queued after it. So a loop that reads a step's numbers after calling the next step leaves
    no gap on the device.
    """

    figures: HostCopy
    """float64 [4]: loss, gradient norm, whether fp16's loss scale could still shrink, and whether any token was scored."""
    learning_rate: float
    norms: SquareSum
    """Norms of this rank's parts of the gradients, still multiplied by the loss scale."""
    index: int
    """Number of the step, from 0; its random numbers depend on it."""

    @cached_property
    def _numbers(self) -> tuple[float, float, float, float]:
        loss, norm, can_shrink, any_scored = self.figures.read().tolist()
        return loss, norm, can_shrink, any_scored

    @property
    def loss(self) -> float:
        """Mean cross-entropy over the scored tokens of the global batch, before the update, plus the weighted balance loss of a mixture of
        experts if the model's config asks for it (docs/runtime/experts.md). nan without a scored token."""
        return self._numbers[0]

    @property
    def grad_norm(self) -> float:
        """Global norm of the gradient before clipping."""
        return self._numbers[1]

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated and training goes on: the gradients overflowed fp16 (``grad_norm`` is then not finite), or no token
        of the batch was scored (``loss`` is then nan)."""
        return not self._numbers[3] or (bool(self._numbers[2]) and not math.isfinite(self.grad_norm))

    @property
    def failed(self) -> bool:
        """Whether the loss or the gradient norm is not finite for another reason, so that nothing was updated either."""
        finite = math.isfinite(self.loss) and (math.isfinite(self.grad_norm) or self.skipped)
        return bool(self._numbers[3]) and not finite

    @property
    def bad_gradients(self) -> tuple[str, ...]:
        """This rank's parameters whose gradient norm is not finite."""
        return self.norms.not_finite()

    def __repr__(self) -> str:
        return (
            f"StepResult(loss={self.loss}, grad_norm={self.grad_norm}, learning_rate={self.learning_rate}, "
            f"skipped={self.skipped})"
        )
