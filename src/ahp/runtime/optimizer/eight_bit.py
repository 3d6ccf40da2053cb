"""AdamW with both moments in 8 bits, as ``torchao.optim.AdamW8bit`` has them, under every layout.

A moment is a code of 8 bits for each element and a scale in fp32 for each block of 256 (arXiv 2110.02861). torchao cuts blocks
from whatever part of a weight a rank holds, so that another layout has other blocks. Here they lie along the last dim of the whole weight,
where no rank's part ends within one: each layout rounds the same elements together. Weights whose last dim is no multiple of 256,
vectors, and small ones keep moments in fp32, also as torchao does.

The update runs on a few million elements at a time, by torch's own operators: what they need beside the weights is small, and they
need no compiler.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ahp.about import install_extra
from ahp.engines.ahp import BLOCK_OF_8_BITS, held_in_8_bits
from ahp.errors import BadInput, bad_input
from ahp.job import Optimizer as Settings
from ahp.runtime.shard.parameter_layout import ParameterLayout

CHUNK_ELEMENTS = 1 << 22
"""Of a weight that are updated at a time, a multiple of a block: 16 MiB in fp32, as many of each of a handful of temporaries."""

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Whether each has a sign."""


def refuse_without_torchao() -> None:
    """Its table of codes is used."""
    if importlib.util.find_spec("torchao") is None:
        what = f"torchao is not installed; {install_extra('low-bit')}"
        raise BadInput(f"job.optimizer.name = 'adamw8bit': {what} (valid: adamw, muon)")


def names_in_blocks(layout: ParameterLayout) -> frozenset[str]:
    """Parameters on this rank whose moments are held in 8 bits: the same on every rank that has a part of one.

    Raises BadInput where tensor parallelism would end a rank's part within a block.
    """
    found = []
    for name, parameter in layout.parameters.items():
        shape = layout.shapes[name]
        rows = len(shape) - 1 - (name in layout.experts)  # dims that ranks may divide without cutting a block
        if not parameter.requires_grad or rows < 1 or not held_in_8_bits(shape):
            continue
        split, ranks = layout.splits.get(name), layout.mesh.size("tp")
        cut = split.segments if split is not None and split.dim == len(shape) - 1 else ()
        if bad := next((size for size in cut if size // ranks % BLOCK_OF_8_BITS), None):
            valid = [n for n in range(1, ranks) if bad % (n * BLOCK_OF_8_BITS) == 0]
            rule = f"cuts {bad} columns of {name}, and job.optimizer.name adamw8bit holds its moments in blocks of {BLOCK_OF_8_BITS}"
            raise bad_input("tensor_parallel_degree", ranks, rule, valid)
        found.append(name)
    return frozenset(found)


@dataclass(frozen=True)
class Moment:
    """Of one weight's part on this rank."""

    codes: torch.Tensor
    """uint8, in the shape of the part."""
    scale: torch.Tensor
    """float32 [..., columns / 256]: of each block the largest magnitude."""

    @classmethod
    def zeros(cls, shard: torch.Tensor, table: torch.Tensor) -> Moment:
        *rows, columns = shard.shape
        codes = torch.full_like(shard, int((table == 0).nonzero()), dtype=torch.uint8)
        return cls(codes, shard.new_zeros((*rows, columns // BLOCK_OF_8_BITS), dtype=torch.float32))


class EightBitAdamW:
    """Updates some of a rank's shards; the counterpart of ``torch.optim.AdamW`` for the others."""

    def __init__(self, shards: dict[str, nn.Parameter], decay: dict[str, float], settings: Settings) -> None:
        """``decay``: the decoupled weight decay of each shard."""
        self.shards, self.decay, self.settings = shards, decay, settings
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        self._tables: dict[tuple[bool, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, rate: float, leave_out: torch.Tensor | None) -> None:
        """One update of each shard that has a gradient; none where ``leave_out``, bool scalar on the device, is true."""
        for name, shard in self.shards.items():
            if shard.grad is None:
                continue
            state = self.moments(name)
            state["step"] += 1 if leave_out is None else (~leave_out).float()
            parts = [
                shard.data,
                shard.grad,
                *(state[f"{key}.{part}"] for key in MOMENTS for part in ("codes", "scale")),
            ]
            for weight, gradient, *moments in _chunks(*parts):
                self._update(name, weight, gradient, moments, state["step"], rate, leave_out)

    def _update(
        self, name: str, weight: torch.Tensor, gradient: torch.Tensor, moments: list[torch.Tensor], step: torch.Tensor,
        rate: float, leave_out: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """``moments``: codes and scale of the first, then of the second. All flat, in fp32 but for the codes."""
        first, second = (Moment(*moments[:2]), Moment(*moments[2:]))
        beta_1, beta_2 = self.settings.betas
        mean = self._decoded(first, signed=True).lerp_(gradient, 1 - beta_1)
        square = self._decoded(second, signed=False).lerp_(gradient.square(), 1 - beta_2)
        for moment, value, signed in ((first, mean, True), (second, square, False)):
            codes, scale = self._encoded(value, signed)
            _write_(moment.codes, codes, leave_out)
            _write_(moment.scale, scale, leave_out)
        # The update reads the moments as they were before they were rounded.
        denominator = square.sqrt_().div_((1 - beta_2**step).sqrt()).add_(self.settings.eps)
        updated = weight.float() * (1 - rate * self.decay[name])
        updated.sub_(mean.div_(1 - beta_1**step).div_(denominator).mul_(rate))
        _write_(weight, updated, leave_out)

    def _decoded(self, moment: Moment, signed: bool) -> torch.Tensor:
        table, _ = self._table(signed, moment.codes.device)
        return (table[moment.codes.int()].view(-1, BLOCK_OF_8_BITS) * moment.scale.view(-1, 1)).view(-1)

    def _encoded(self, value: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The nearest code of each element, and the scale of each block."""
        _, between = self._table(signed, value.device)
        blocks = value.view(-1, BLOCK_OF_8_BITS)
        scale = blocks.abs().amax(-1).clip_(1e-12)
        codes = torch.bucketize(blocks / scale.view(-1, 1), between, right=True, out_int32=True)
        return codes.view(-1).to(torch.uint8), scale

    def _table(self, signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """What each code stands for, increasing, and the middles between two: torchao's own codes."""
        if (signed, device) not in self._tables:
            from torchao.optim.quant_utils import create_dynamic_map  # pyright: ignore[reportMissingImports]

            codes = torch.tensor(create_dynamic_map(signed=signed), dtype=torch.float32, device=device)
            self._tables[signed, device] = codes, (codes[1:] + codes[:-1]) * 0.5
        return self._tables[signed, device]

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """States of one shard, made if no step was taken yet: ``step``, and codes and scale of both moments."""
        if name not in self.states:
            shard = self.shards[name].data
            state = {"step": torch.zeros((), dtype=torch.float32, device=shard.device)}
            for key, signed in MOMENTS.items():
                made = Moment.zeros(shard, self._table(signed, shard.device)[0])
                state |= {f"{key}.codes": made.codes, f"{key}.scale": made.scale}
            self.states[name] = state
        return self.states[name]


def _chunks(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Some elements at a time of tensors that have as many, or one for each block: flat, sharing memory."""
    flat = [tensor.view(-1) for tensor in tensors]
    size = flat[0].numel()
    for first in range(0, size, CHUNK_ELEMENTS):
        end = min(first + CHUNK_ELEMENTS, size)
        whole = slice(first, end)
        blocks = slice(first // BLOCK_OF_8_BITS, end // BLOCK_OF_8_BITS)
        yield [one[whole if one.numel() == size else blocks] for one in flat]


def _write_(live: torch.Tensor, updated: torch.Tensor, leave_out: torch.Tensor | None) -> None:
    """Take the updated values over, or none where ``leave_out`` is true."""
    live.copy_(updated if leave_out is None else torch.where(leave_out, live, updated))
