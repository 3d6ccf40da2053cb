"""The random numbers that a model draws (dropout): the job's own, whatever the program around it has seeded or drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ahp.runtime.ranks.mesh import Mesh


@contextmanager
def numbers_of_step(mesh: Mesh, seed: int, step: int) -> Iterator[None]:
    """Within, random numbers depend only on the job's seed, the step and this rank's place; afterwards the program's own go on.

    A run that is resumed under the same layout draws what it would have drawn, so no generator's state is saved. Ranks of a
    tensor-parallel group draw the same numbers, because they share whole tensors and weights. Other ranks draw their own numbers,
    also those that share a sequence: each has its own tokens.
    """
    place = (seed, step, mesh.token_rank, mesh.rank("pp"))
    state = int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)
    on_gpu = [mesh.device] if mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu, device_type="cuda"), _numbers_of_python(state):
        # Not torch.manual_seed, which would leave the generators of this process's other GPUs changed.
        torch.default_generator.manual_seed(state)
        for device in on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(state)
        yield


@contextmanager
def _numbers_of_python(state: int) -> Iterator[None]:
    """Within, the generators of Python and NumPy are seeded too: a forward that drops layers often asks ``random.random()``. Tensor-parallel
    ranks that dropped different layers would wait for each other."""
    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(state)
    np.random.seed(state % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)
