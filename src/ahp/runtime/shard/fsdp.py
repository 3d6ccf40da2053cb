"""Step 5: shards optimizer states, gradients and parameters to 1/n per rank, and sums over replicas. One mechanism: FSDP2.

ZeRO stage   parameters              gradients of the micro-batches       optimizer states
0            whole                   whole, summed once per step           whole
1            gathered once per step  whole, reduce-scattered once          sharded
2            gathered once per step  reduce-scattered at each micro-batch  sharded
3            gathered at each use    reduce-scattered at each micro-batch  sharded

If nothing is sharded and nothing is cast (fp32, or all states in bf16), FSDP2 would only copy: then ``replicas`` alone sums the gradients of the
replicas. Frozen weights under ``job.lora`` are held in the dtype they compute in: if nothing is sharded they are left out of FSDP2 too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from ahp.errors import BadInput
from ahp.job import Job, Precision
from ahp.runtime.ranks.mesh import Mesh
from ahp.runtime.shard.block_calls import BlockCalls
from ahp.runtime.shard.replicas import Replicas
from ahp.runtime.torch_compat import (
    forget_backward,
    gather_outside_modes,
    local_tensor,
    reduce_every_gradient,
    sum_gradients,
)

COMPUTE_DTYPE: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""The compute dtype of each precision; fp8 has products of blocks in 8 bits (``fp8``). Master weights, reduction and optimizer are in fp32, or all in bf16
(``job.dtype``)."""


class Sharding:
    """How one rank's stages are sharded, and what the backward of each micro-batch sends."""

    def __init__(self, mesh: Mesh, zero_stage: int, job: Job) -> None:
        self.mesh = mesh
        # If nothing is sharded FSDP2 still casts, and ZeRO stages 2 and 3 would sum over the replicas at every micro-batch.
        replicated, sharded = mesh.num_replicas > 1, mesh.shards[1] > 1
        self.zero_stage = zero_stage if sharded else 0
        self.sharded = sharded
        self.policy = (
            MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPE[job.precision], reduce_dtype=torch.float32)
            if job.casts_weights
            else MixedPrecisionPolicy()
        )
        self.fsdp_mesh = (
            mesh.weights["dp_replicate", "dp_shard"] if replicated and sharded else mesh.weights["dp_shard"]
        )
        self.uses_fsdp = sharded or job.casts_weights
        self.replicas = Replicas(mesh.weights.get_group("dp_replicate")) if replicated and not sharded else None
        self.roots: list[FSDPModule] = []
        self.units: list[FSDPModule] = []
        self.given: set[int] = set()
        self.zeros: set[int] = set()
        """In this step, the ``id`` of each parameter that some micro-batch gave a gradient, and that some gave none."""
        self._set_for_last: bool | None = None

    def apply(
        self,
        root: nn.Module,
        blocks: list[nn.Module],
        experts: list[nn.Module],
        embedding: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> BlockCalls | None:
        """Shard the embedding, the head and each block as units, then the rest of ``root``; sum over replicas. Returns what must run the
        forward of ``root``, if the units are FSDP2's.

        ``experts``: modules inside the blocks whose weights are divided over the ``ep`` axis. Each is a unit of its own,
        sharded over the rest of the shard axis.
        """
        ends = [module for module in (embedding, head) if module is not None]
        if not self.uses_fsdp:
            if self.replicas is not None:
                self.replicas.watch([*([head] if head else []), *reversed(blocks), root])
            return None
        ignored = set() if self.sharded else {weight for weight in root.parameters() if self._is_as_it_computes(weight)}
        if self._experts_are_alone():
            ignored |= {parameter for module in experts for parameter in module.parameters()}
            experts = []
        for module in experts:
            self._shard_experts(module)
        for module in [*ends, *blocks, root]:
            # The head's weights and those of the root are needed as soon as backward begins.
            keep_whole = self.zero_stage < 3 or module in (head, root)
            fully_shard(
                module,
                mesh=self.fsdp_mesh,
                # Inputs of others have the right type already, or are the balance loss's sums, which stay fp32. A head has not where the
                # model asks for the type of its weight (``head(x.to(head.weight.dtype))``) before it is gathered and cast.
                mp_policy=replace(self.policy, cast_forward_inputs=module in blocks or isinstance(module, nn.Linear)),
                reshard_after_forward=not keep_whole,
                ignored_params=ignored,
            )
            if module in ends:  # else the root would take the weights inside of ``GatheredOnce``
                ignored |= set(module.parameters())
        if isinstance(embedding, FSDPModule):
            embedding.set_unshard_in_backward(False)  # its backward reads the token ids only
            # By default FSDP2 would prefetch the unit that ran before it: the last one of the micro-batch before.
            embedding.set_modules_to_backward_prefetch([embedding])
        assert isinstance(root, FSDPModule)
        for module in [*experts, *ends, *blocks, root]:
            assert isinstance(module, FSDPModule)
            sum_gradients(module, self.replicas.start if self.replicas else None)
            reduce_every_gradient(module, self.given, self.zeros)
            self.units.append(module)
        self.roots.append(root)
        return BlockCalls(blocks, head)

    def _is_as_it_computes(self, weight: nn.Parameter) -> bool:
        """Whether a weight is not trained and needs no cast."""
        return not weight.requires_grad and weight.dtype is self.policy.param_dtype

    def _experts_are_alone(self) -> bool:
        """Whether each expert is on one rank only and needs no cast: then FSDP2 would only copy its weights and gradients."""
        mesh = self.mesh.experts
        return (
            mesh is not None
            and self.mesh.size("efsdp") == 1
            and self.mesh.num_replicas == 1
            and self.policy.param_dtype is None
        )

    def _shard_experts(self, module: nn.Module) -> None:
        mesh = self.mesh.experts
        assert mesh is not None
        fully_shard(
            module,
            mesh=mesh["dp_replicate", "efsdp"] if self.mesh.num_replicas > 1 else mesh["efsdp"],
            # The router's weights, an input, stay in the precision that the router gave them.
            mp_policy=replace(self.policy, cast_forward_inputs=False),
            reshard_after_forward=self.zero_stage == 3,
            shard_placement_fn=lambda parameter: shard_of_experts(parameter, self.mesh.size("efsdp")),
        )
        assert isinstance(module, FSDPModule)
        gather_outside_modes(module)

    def before_backward(self, *, last: bool) -> None:
        """Set what the backward of one micro-batch sends and frees."""
        if last == self._set_for_last:
            return
        self._set_for_last = last
        if self.replicas is not None:
            self.replicas.armed = last
        for root in self.roots:
            root.set_is_last_backward(last)
        for unit in self.units:  # one by one: called on the root, the setters would walk over every module
            unit.set_requires_gradient_sync(last or self.zero_stage >= 2, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or self.zero_stage == 3, recurse=False)

    def forget(self) -> None:
        """Drop what a step left behind when it raised."""
        self.given.clear()
        self.zeros.clear()
        self._set_for_last = None
        for root in self.roots:
            forget_backward(root)
        if self.replicas is not None:
            self.replicas.forget()

    def finish(self) -> set[int]:
        """Wait until every gradient is the sum over all replicas. Returns the ``id`` of each parameter that no micro-batch of this rank gave
        a gradient, so that zeros stand in for it."""
        zeros = self.zeros - self.given
        self.zeros.clear()
        self.given.clear()
        return zeros if self.replicas is None else zeros | self.replicas.finish()


@contextmanager
def without_backward(stages: Collection[nn.Module]) -> Iterator[None]:
    """Inside the block forwards run that no backward follows. What they have gathered is freed at its end: else the next forward would compute with
    it, whatever its shards are by then."""
    try:
        yield
    except BaseException:
        for root in stages:
            if isinstance(root, FSDPModule):
                with suppress(BadInput):  # before torch 2.13
                    forget_backward(root)
        raise
    finally:
        for module in (module for stage in stages for module in stage.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()


def shard_of_experts(parameter: torch.Tensor, ranks: int) -> Shard:
    """The dim along which a rank's experts are sharded: the experts, or their rows if ``ranks`` divides only those."""
    shape = local_tensor(parameter).shape
    return Shard(1) if shape[0] % ranks and len(shape) > 1 and shape[1] % ranks == 0 else Shard(0)
