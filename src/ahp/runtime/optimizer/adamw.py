"""The optimizer over this rank's shards: AdamW element by element, Muon matrix by matrix."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.blocks import NoBlocks, find_blocks
from ahp.job import Optimizer as Settings
from ahp.runtime.optimizer.eight_bit import EightBitAdamW
from ahp.runtime.optimizer.muon import LocalMatrices, OwnedMatrices
from ahp.runtime.optimizer.offload import HostMoments
from ahp.runtime.torch_compat import leave_out_update, local_tensor


def matrices_of(module: nn.Module, settings: Settings) -> frozenset[str]:
    """Parameters that Muon updates, under every name they have: the matrices inside the blocks. AdamW updates the rest.

    Embeddings, the head, norms, biases and stacks of experts are left to AdamW (Keller Jordan, kellerjordan.github.io/posts/muon).
    Raises BadInput for a model without blocks.
    """
    if settings.name != "muon":
        return frozenset()
    try:
        path = find_blocks(module).path
    except NoBlocks as error:
        raise BadInput(f"job.optimizer.name = 'muon': it updates the matrices of a model's blocks; {error}") from None
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, p in named if name.startswith(f"{path}.") and p.ndim == 2)


class ShardedOptimizer:
    """``torch.optim.AdamW`` and ``torch.optim.Muon`` on the local shards of distributed parameters.

    AdamW works element by element, so it needs no collective and no knowledge of how a tensor is spread: it runs on plain
    tensors that share memory with the shards, without DTensor's dispatch at every operator. Muon's momentum is a shard too;
    only its update is orthogonalized whole, by the owner of each matrix (``ahp.runtime.optimizer.muon``).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Settings,
        *,
        matrices: Collection[str] = (),
        in_blocks: Collection[str] = (),
        offload: bool = False,
        muon: LocalMatrices | OwnedMatrices | None = None,
    ) -> None:
        """``matrices``: updated by Muon, through ``muon``. ``in_blocks``: have moments in 8 bits. ``offload``: keep moments of AdamW on the host."""
        self.settings = settings
        self.parameters = parameters
        self.shards = {
            name: nn.Parameter(local_tensor(p.detach()), p.requires_grad)
            for name, p in parameters.items()
            if p.requires_grad
        }
        self.momentum = {name: torch.zeros_like(self.shards[name].data) for name in self.shards if name in matrices}
        """This rank's part of the momentum of each matrix that Muon updates."""
        self.muon = muon if muon is not None else LocalMatrices(self.momentum)
        in_8_bits = {name: shard for name, shard in self.shards.items() if name in in_blocks}
        self.eight_bit = EightBitAdamW(in_8_bits, {name: self._decay(name) for name in in_8_bits}, settings)
        self.adamw = torch.optim.AdamW(
            self._groups() or [nn.Parameter(torch.zeros(1))],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        self.host = HostMoments(self.adamw) if offload else None

    def _groups(self) -> list[dict[str, object]]:
        """AdamW's parameters, grouped by weight decay: vectors (norms, biases) decay only if the settings ask for it.

        Empty shards are included: their ``step`` counts as on every other rank, and a checkpoint takes it from any rank.
        """
        by_decay: dict[float, list[nn.Parameter]] = {}
        for name, shard in self.shards.items():
            if name not in self.momentum and name not in self.eight_bit.shards:
                by_decay.setdefault(self._decay(name), []).append(shard)
        return [{"params": shards, "weight_decay": decay} for decay, shards in by_decay.items()]

    def _decay(self, name: str) -> float:
        decays = self.settings.decay_norms_and_biases or self.parameters[name].ndim > 1
        return self.settings.weight_decay if decays else 0.0

    def step(
        self,
        rate: float,
        gradients: dict[str, torch.Tensor],
        *,
        without: Collection[str] = (),
        leave_out: torch.Tensor | None = None,
    ) -> None:
        """One update at ``rate`` with this rank's parts of the gradients, keyed by parameter name. Collective under Muon.

        ``without``: parameters that no rank has a gradient of; they stay as they are.
        ``leave_out``: bool scalar on the device; if it is true no weight, no moment and no step count changes, whatever the gradients
        hold. The host does not read it.
        """
        for name, shard in self.shards.items():
            shard.grad = gradients.get(name)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        leave_out_update(self.adamw, leave_out)
        (self.adamw if self.host is None else self.host).step()
        self.eight_bit.step(rate, leave_out)
        self._muon_step(rate, without, leave_out)
        for shard in self.shards.values():
            shard.grad = None

    @torch.no_grad()
    def _muon_step(self, rate: float, without: Collection[str], leave_out: torch.Tensor | None) -> None:
        """Like ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, on this rank's parts of the matrices."""
        beta = self.settings.momentum
        # A rank with an empty part, or without a gradient, still takes part in the exchange.
        gradients = {
            name: torch.zeros_like(momentum) if (found := self.shards[name].grad) is None else found
            for name, momentum in self.momentum.items()
        }
        for name, momentum in self.momentum.items():
            if name not in without:
                _write_(momentum, momentum.lerp(gradients[name], 1 - beta), leave_out)
        for name, part in self.muon.orthogonalized(lambda name: gradients[name].lerp(self.momentum[name], beta)):
            if name in without:
                continue
            shard, (rows, columns) = self.shards[name], self.parameters[name].shape
            updated = shard.mul(1 - rate * self.settings.weight_decay)
            _write_(shard, updated.add_(part, alpha=-rate * ADAMW_RMS * max(rows, columns) ** 0.5), leave_out)

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """States of one parameter's shard, made if no step was taken yet: tensors like the shard and, under AdamW, ``step``. Moments in
        8 bits are codes like the shard, and a scale for each block of its last dim."""
        if name in self.momentum:
            return {"momentum_buffer": self.momentum[name]}
        if name in self.eight_bit.shards:
            return self.eight_bit.moments(name)
        if self.host is not None:
            self.host.wait()
        shard = self.shards[name]
        state = self.adamw.state[shard]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            state["exp_avg"] = torch.zeros_like(shard)
            state["exp_avg_sq"] = torch.zeros_like(shard)
        return state


def _write_(live: torch.Tensor, updated: torch.Tensor, leave_out: torch.Tensor | None) -> None:
    """Copy the updated values, or nothing if ``leave_out`` is true."""
    live.copy_(updated if leave_out is None else torch.where(leave_out, live, updated))


ADAMW_RMS = 0.2
"""Root mean square of an AdamW update. Muon's update is scaled to it, so that both share rate and decay (Moonlight, arXiv
2502.16982, section 2.2)."""
