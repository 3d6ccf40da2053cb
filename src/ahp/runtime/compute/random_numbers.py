"""The random numbers that a model draws (dropout): the job's own, whatever the program around it has seeded or drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ahp.graph.host_numbers import Generators, seed_of
from ahp.runtime.ranks.mesh import Mesh


@contextmanager
def numbers_of_step(mesh: Mesh, seed: int, step: int, generators: Generators) -> Iterator[None]:
    """Within, random numbers depend only on the job's seed, the step and this rank's place; afterwards the program's own go on.

    A run that is resumed under the same layout draws what it would have drawn, so no generator's state is saved. Ranks of a
    tensor-parallel group draw the same numbers, because they share whole tensors and weights. Other ranks draw their own numbers,
    also those that share a sequence: each has its own tokens.

    The generators of Python and NumPy choose what runs (a forward that drops layers asks ``random.random()``), so ranks that meet
    inside of a block draw the same from them: those that share a sequence or experts. If one left out a block, the others would wait.
    The same holds for ``generators`` of these kinds that modules have made; those of torch's kind are like torch's default.
    """
    state, of_host = (
        seed_of(seed, step, number, mesh.rank("pp"))
        for number in (mesh.token_rank, mesh.token_rank // mesh.ranks_in_a_block)
    )
    on_gpu = [mesh.device] if mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu, device_type="cuda"), generators.seeded(of_host, state):
        # Not torch.manual_seed, which would leave the generators of this process's other GPUs changed.
        torch.default_generator.manual_seed(state)
        for device in on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(state)
        yield
