"""Memory for the messages between pipeline stages: activations that come from the stage before, gradients from the stage after."""

from __future__ import annotations

import numpy as np

from ahp.arrays import Ints
from ahp.engines.traits import Receives
from ahp.schedule.actions import Schedule
from ahp.schedule.messages import waiting


def receives_from(own: Ints, p: int) -> Ints:
    """[W] From how many stages ranks with the stages ``own`` [W, V] of ``p`` ranks receive, in both passes; none if a rank is alone."""
    return ((own > 0) * 1 + (own < p * own.shape[1] - 1)).sum(axis=1) * (p > 1)


def received_bytes(
    own: Ints, p: int, hidden_bytes: int, micro_batches: int, receives: Receives, order: Schedule | None = None
) -> Ints:
    """[W] Bytes for what ranks with the stages ``own`` [W, V] of ``p`` ranks receive. ``order``: the order of all ranks, if no pattern makes it.

    A message that was read is an activation of the layer that read it, and is counted there.
    """
    sides = receives_from(own, p)
    if p == 1:
        return sides
    if receives == "all":
        return sides * micro_batches * hidden_bytes
    messages = sides
    if receives == "waiting" and own.shape[1] > 1:
        # Where a rank has several stages, messages come before their turn: up to p + 1 under torch's patterns.
        messages = np.minimum(np.maximum(sides, p + 1), sides * micro_batches)
    if receives == "waiting" and order is not None:
        messages = np.maximum(messages, waiting(order))
    return messages * hidden_bytes
