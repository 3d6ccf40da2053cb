"""AdamW with both moments in 8 bits, as ``torchao.optim.AdamW8bit`` has them, under every layout.

A moment is a code of 8 bits for each element and a scale in fp32 for each block of 256 (arXiv 2110.02861). torchao cuts blocks
from the part of a weight that a rank holds, so they depend on the layout. Here blocks lie along the last dim of the whole weight,
and no rank's part ends within a block: every layout rounds the same elements together. Weights whose last dim is no multiple of 256,
vectors, and weights of fewer than 4096 elements (the latter as in torchao) keep moments in fp32.

On a GPU the update is one compiled kernel for each weight, as in torchao. Elsewhere torch's own operators update a few million elements
at a time: they need little memory besides the weights, and no compiler.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ahp.about import install_extra
from ahp.engines.ahp import BLOCK_OF_8_BITS, held_in_8_bits
from ahp.errors import BadInput, bad_input
from ahp.job import Optimizer as Settings
from ahp.runtime.device_limits import why_not_compiled
from ahp.runtime.shard.parameter_layout import ParameterLayout

CHUNK_ELEMENTS = 1 << 22
"""How many elements of a weight are updated at a time, a multiple of a block: 16 MiB in fp32, and in each of a handful of temporaries."""

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Whether each moment has a sign."""

Table = tuple[torch.Tensor, torch.Tensor]
"""The value of each code of a moment, increasing, and the midpoints between neighboring values."""

Update = Callable[..., None]
"""``updated_``, plain or compiled."""


def refuse_without_torchao() -> None:
    """Raise BadInput if torchao is missing: its table of codes is used."""
    if importlib.util.find_spec("torchao") is None:
        what = f"torchao is not installed; {install_extra('low-bit')}"
        raise BadInput(f"job.optimizer.name = 'adamw8bit': {what} (valid: adamw, muon)")


def names_in_blocks(layout: ParameterLayout) -> frozenset[str]:
    """Parameters on this rank whose moments are held in 8 bits: the same on every rank that has a part of one. Collective.

    Raises BadInput, on all ranks, if tensor parallelism would end any rank's part within a block: stages may differ in width.
    """
    found = [name for name, parameter in layout.parameters.items() if parameter.requires_grad and _rows(layout, name)]
    refusal = next(filter(None, (_cut_in_a_block(layout, name) for name in found)), None)
    refusals: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal)
    if (said := next(filter(None, refusals), None)) is not None:
        raise BadInput(said)
    return frozenset(found)


def _rows(layout: ParameterLayout, name: str) -> int:
    """How many dims ranks can divide without cutting a block; 0 if moments are not held in blocks."""
    shape = layout.shapes[name]
    rows = len(shape) - 1 - (name in layout.experts)
    return rows if rows >= 1 and held_in_8_bits(shape) else 0


def _cut_in_a_block(layout: ParameterLayout, name: str) -> str | None:
    split, ranks = layout.splits.get(name), layout.mesh.size("tp")
    cut = split.segments if split is not None and split.dim == len(layout.shapes[name]) - 1 else ()
    bad = next((size for size in cut if size // ranks % BLOCK_OF_8_BITS), None)
    if bad is None:
        return None
    valid = [n for n in range(1, ranks) if bad % (n * BLOCK_OF_8_BITS) == 0]
    rule = f"cuts {bad} columns of {name}, and job.optimizer.name adamw8bit holds its moments in blocks of {BLOCK_OF_8_BITS}"
    return str(bad_input("tensor_parallel_degree", ranks, rule, valid))


@dataclass(frozen=True)
class Moment:
    """One moment of this rank's part of a weight."""

    codes: torch.Tensor
    """uint8, in the shape of the part."""
    scale: torch.Tensor
    """float32 [..., columns / 256]: the largest magnitude of each block."""

    @classmethod
    def zeros(cls, shard: torch.Tensor, table: torch.Tensor) -> Moment:
        *rows, columns = shard.shape
        codes = torch.full_like(shard, int((table == 0).nonzero()), dtype=torch.uint8)
        return cls(codes, shard.new_zeros((*rows, columns // BLOCK_OF_8_BITS), dtype=torch.float32))


class EightBitAdamW:
    """Updates a rank's shards with moments in 8 bits; ``torch.optim.AdamW`` updates the others."""

    def __init__(self, shards: dict[str, nn.Parameter], decay: dict[str, float], settings: Settings) -> None:
        """``decay``: the decoupled weight decay of each shard."""
        self.shards, self.decay, self.settings = shards, decay, settings
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        self._tables: dict[tuple[bool, torch.device], Table] = {}
        self._update: Update | None = None

    @torch.no_grad()
    def step(self, rate: float, leave_out: torch.Tensor | None) -> None:
        """One update of each shard that has a gradient; nothing changes if ``leave_out``, bool scalar on the device, is true."""
        for name, shard in self.shards.items():
            if shard.grad is None:
                continue
            state = self.moments(name)
            state["step"] += 1 if leave_out is None else (~leave_out).float()
            # Numbers that change from step to step are tensors: in a compiled kernel all others are constants.
            kept, step_size = (
                torch.full((), x, dtype=torch.float32, device=shard.device) for x in (1 - rate * self.decay[name], rate)
            )
            moments = [state[f"{key}.{part}"] for key in MOMENTS for part in ("codes", "scale")]
            tables = [self._table(signed, shard.device) for signed in MOMENTS.values()]
            update_, at_once = self._update_on(shard.device), shard.numel()
            if update_ is updated_:
                at_once = CHUNK_ELEMENTS
            for part in _chunks(at_once, shard.data, shard.grad, *moments):
                update_(
                    *part, *tables, state["step"], kept, step_size, self.settings.betas, self.settings.eps, leave_out
                )

    def _update_on(self, device: torch.device) -> Update:
        """``updated_``, as one kernel on a GPU with a compiler: its operators, uncompiled, read and write fifteen times as much."""
        if self._update is None:
            compiles = device.type == "cuda" and why_not_compiled(device) is None
            self._update = torch.compile(updated_, fullgraph=True) if compiles else updated_
        return self._update

    def _table(self, signed: bool, device: torch.device) -> Table:
        """Torchao's own codes."""
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


def updated_(
    weight: torch.Tensor, gradient: torch.Tensor,
    mean_codes: torch.Tensor, mean_scale: torch.Tensor, square_codes: torch.Tensor, square_scale: torch.Tensor,
    mean_table: Table, square_table: Table, step: torch.Tensor, kept: torch.Tensor, rate: torch.Tensor,
    betas: tuple[float, float], eps: float, leave_out: torch.Tensor | None,
) -> None:  # fmt: skip
    """One step of AdamW on blocks of a weight, in place.

    Args:
        weight, gradient: float32 [blocks, 256].
        mean_codes, square_codes: uint8 [blocks, 256]; their scales float32 [blocks, 1].
        step: number of steps including this one; ``kept``: factor of the weight that decay leaves; all float32 scalars.
        leave_out: bool scalar on the device: nothing changes if it is true.
    """
    mean = _decoded(mean_codes, mean_scale, mean_table).lerp_(gradient, 1 - betas[0])
    square = _decoded(square_codes, square_scale, square_table).lerp_(gradient.square(), 1 - betas[1])
    of_mean, of_square = _encoded(mean, mean_table), _encoded(square, square_table)
    # The update reads the moments before rounding.
    denominator = square.sqrt_().div_((1 - betas[1] ** step).sqrt()).add_(eps)
    change = mean.div_(1 - betas[0] ** step).div_(denominator).mul_(rate)
    new = (weight.float() * kept).sub_(change)
    for live, value in zip(
        (mean_codes, mean_scale, square_codes, square_scale, weight), (*of_mean, *of_square, new), strict=True
    ):
        live.copy_(value if leave_out is None else torch.where(leave_out, live, value))


def _decoded(codes: torch.Tensor, scale: torch.Tensor, table: Table) -> torch.Tensor:
    return table[0][codes.int()] * scale


def _encoded(value: torch.Tensor, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest code of each element, and the scale of each block."""
    scale = value.abs().amax(-1, keepdim=True).clip_(1e-12)
    return torch.bucketize(value / scale, table[1], right=True, out_int32=True).to(torch.uint8), scale


def _chunks(elements: int, *tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """``elements`` at a time of tensors with a value for each element or each block: [blocks, 256] and [blocks, 1], sharing memory."""
    rows = tensors[0].numel() // BLOCK_OF_8_BITS
    if rows == 0:
        return
    blocks = [tensor.view(rows, -1) for tensor in tensors]
    some = max(1, elements // BLOCK_OF_8_BITS)
    for first in range(0, rows, some):
        yield [one[first : first + some] for one in blocks]
