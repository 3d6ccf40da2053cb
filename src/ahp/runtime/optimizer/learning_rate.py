"""The learning rate of each step: warm-up, then a schedule. Does not import torch, so that readers of a run's folder can use it."""

from __future__ import annotations

import math

from ahp.job import Optimizer


def learning_rate(settings: Optimizer, step: int, num_steps: int) -> float:
    """The rate of step ``step`` (from 0) of ``num_steps``: linear warm-up, then the schedule, down to ``min_lr_factor``.

    ``wsd`` (warm-up, stable, decay; MiniCPM, arXiv 2404.06395): the whole rate until the last ``decay_share`` of the steps,
    over which it falls linearly.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    first = settings.warmup_steps
    if settings.schedule == "wsd":
        first = max(first, num_steps - round(settings.decay_share * num_steps))
    done = min(1.0, max(0.0, (step - first) / max(1, num_steps - first)))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.learning_rate * (settings.min_lr_factor + (1 - settings.min_lr_factor) * shape)
