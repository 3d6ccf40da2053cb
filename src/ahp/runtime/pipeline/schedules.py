"""Runs the micro-batches of a step: one after the other on a single stage, or on torch's pipeline runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ahp.graph.capture import TensorLike
from ahp.plan import Parallelism
from ahp.runtime.compute.loss import Loss
from ahp.runtime.limits import refuse_micro_batches
from ahp.runtime.pipeline.borders import Border, Place, pieces
from ahp.runtime.pipeline.cut import Stage
from ahp.runtime.pipeline.torch_compat import (
    forget_logits,
    give_peers,
    greet_others_alone,
    pipeline_of_steps,
    receive_in_turn,
    reduce_beside,
    reduce_units_at_once,
)
from ahp.runtime.ranks.mesh import STAGE_AXES, Mesh
from ahp.runtime.shard.fsdp import Sharding
from ahp.runtime.torch_compat import accumulate_in_reduce_dtype
from ahp.schedule.messages import with_messages
from ahp.schedule.orders import given_order, ranks_of_stages
from ahp.schedule.patterns import make
from ahp.schedule.registry import get

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

Inputs = dict[str, torch.Tensor]
"""The inputs of a model, int64 [rows, sequence]: ``input_ids``, and ``position_ids`` if the job masks documents."""


def split_rows(inputs: Inputs, labels: torch.Tensor, size: int) -> Iterator[tuple[Inputs, torch.Tensor]]:
    """Inputs and labels, ``size`` rows at a time."""
    for first in range(0, len(labels), size):
        part = slice(first, first + size)
        yield {key: value[part] for key, value in inputs.items()}, labels[part]


class Accumulation:
    """No pipeline: forward and backward of each micro-batch in turn, gradients accumulate."""

    def __init__(self, stage: Stage, loss: Loss, sharding: Sharding) -> None:
        self.stages, self.loss, self.sharding = {0: stage}, loss, sharding

    def prepare(self, num_micro_batches: int) -> None:
        """Does nothing: any number can be run."""

    def run(self, inputs: Inputs, labels: torch.Tensor, num_micro_batches: int) -> torch.Tensor:
        """Compute the gradients of the whole part. Returns its share of the mean loss, detached."""
        total = torch.zeros((), dtype=torch.float32, device=labels.device)
        for number, (part, targets) in enumerate(split_rows(inputs, labels, len(labels) // num_micro_batches)):
            self.sharding.before_backward(last=number == num_micro_batches - 1)
            loss = self.loss(self.stages[0](part["input_ids"], **part), targets)
            loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, inputs: Inputs, labels: torch.Tensor) -> torch.Tensor:
        """This rank's share of the loss of one micro-batch, forward only."""
        return self.loss(self.stages[0](inputs["input_ids"], **inputs), labels)


class Pipeline:
    """Several stages on torch's pipeline runtime, in the order of a schedule, which also decides the rank of each stage."""

    def __init__(
        self,
        stages: dict[int, Stage],
        parallelism: Parallelism,
        loss: Loss,
        mesh: Mesh,
        *,
        ids: tuple[int, int],
        hidden: TensorLike,
        outputs: TensorLike,
    ) -> None:
        """``hidden``: the tensor between stages of this rank's width; ``outputs``: what the last stage gives to the loss. The sums of the
        balance loss, if there is one, come next to both."""
        p = parallelism
        self.stages, self.num_stages, self.loss, self.mesh = stages, p.num_stages, loss, mesh
        self.layout = p.of_rank(mesh.rank("pp"))
        self.name, self.order = p.pipeline_parallel_schedule, given_order(p, mesh.rank("dp_replicate"))
        self.stage_ranks = ranks_of_stages(p)
        """The pipeline rank of each stage."""
        self.ids, self.hidden, self.outputs = ids, hidden, outputs
        self.schedules: dict[int, Any] = {}
        self.waits: list[Callable[[], None]] = []
        """In this step, functions that wait for gradients whose reduction overlaps with the rank's other stages."""
        self.unlike = p.has_unlike_widths
        for index, stage in stages.items():
            stage.before, stage.after = (self._border(p, index, other) for other in (index - 1, index + 1))
            if len(stages) > 1:
                reduce_units_at_once(stage)

    def prepare(self, num_micro_batches: int) -> None:
        """Make the schedule for this number. Raises BadInput, before anything has run, if it cannot run that number."""
        if num_micro_batches not in self.schedules:
            ordered = None if self.order is None else self.order.num_micro_batches
            refuse_micro_batches(self.layout, num_micro_batches, ordered)
            self.schedules[num_micro_batches] = self._schedule(num_micro_batches)

    def run(self, inputs: Inputs, labels: torch.Tensor, num_micro_batches: int) -> torch.Tensor:
        """Like ``Accumulation.run``, for a prepared number of micro-batches. Returns 0 on ranks without the last stage."""
        losses: list[torch.Tensor] = []
        first, last = 0 in self.stages, self.num_stages - 1 in self.stages
        self.schedules[num_micro_batches].step(
            *((inputs["input_ids"],) if first else ()),
            **inputs,
            target=labels if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        for wait in self.waits:
            wait()
        self.waits.clear()
        return (
            torch.stack([loss.detach() for loss in losses]).sum()
            if last
            else torch.zeros((), dtype=torch.float32, device=labels.device)
        )

    def evaluate(self, inputs: Inputs, labels: torch.Tensor) -> torch.Tensor:
        """This rank's share of the loss of one micro-batch, forward only: 0 if the last stage is elsewhere. Collective.

        Stages run one after the other. Every rank goes through them in the same order, so every send meets its receive,
        and no ranks wait in a circle.
        """
        group, me, last = self.mesh.group("pp"), self.mesh.rank("pp"), self.num_stages - 1
        hidden: Any = inputs["input_ids"]
        for index in sorted(self.stages):
            if index > 0 and self.stage_ranks[index - 1] != me:
                hidden = self._empty(self.stages[index].before, self.mesh.device)
                for part, peer in zip(hidden, self._peers(self.stages[index].before, index - 1), strict=True):
                    dist.recv(part, src=peer, group=group)
            hidden = self.stages[index](*(hidden if isinstance(hidden, tuple) else (hidden,)), **inputs)
            if index == last:
                return self.loss(hidden, labels)
            if self.stage_ranks[index + 1] != me:
                parts = hidden if isinstance(hidden, tuple) else (hidden,)
                for part, peer in zip(parts, self._peers(self.stages[index].after, index + 1), strict=True):
                    dist.send(part.contiguous(), dst=peer, group=group)
        return torch.zeros((), dtype=torch.float32, device=self.mesh.device)

    def _border(self, p: Parallelism, index: int, other: int) -> Border | None:
        """This rank's side of the cut between one of its stages and a neighbor; None if both have one width, or there is no neighbor."""
        if not 0 <= other < self.num_stages:
            return None
        here, there = (p.widths[self.stage_ranks[stage]] for stage in (index, other))
        if here == there:
            return None
        mesh, (shards, tensors) = self.mesh, here
        rows, positions = self.ids[0] * shards, self.ids[1] // p.context_parallel_degree
        own = Place(mesh.rank("dp_shard"), shards, mesh.rank("tp"), tensors)
        found = pieces(own, mesh.peers(self.stage_ranks[other]).tolist(), rows, positions)
        part = (self.ids[0], positions // tensors, *self.hidden.shape[2:])
        holds_all = tensors > 1 and not p.enable_sequence_parallel
        return Border(found, part, self.hidden.dtype, mesh.group("tp") if holds_all else None)

    def _empty(self, border: Border | None, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Empty tensors for the hidden states that cross a cut."""
        if border is not None:
            return border.empty(device)
        return (torch.empty(self.hidden.shape, dtype=self.hidden.dtype, device=device),)

    def _peers(self, border: Border | None, other: int) -> list[int]:
        """The ranks of a neighboring stage that this rank sends parts of hidden states to, or receives them from."""
        if border is not None:
            return border.peers
        at = tuple(self.mesh.rank(axis) for axis in STAGE_AXES)
        return [int(self.mesh.places[self.stage_ranks[other]][at])]

    def _schedule(self, num_micro_batches: int) -> Any:
        stages = [self._stage(index) for index in sorted(self.stages)]
        order = self.order or make(self.name, len(self.stage_ranks) // len(stages), len(stages), num_micro_batches)
        # gloo's messages wait independently; NCCL's wait for each other on one stream.
        ranks = with_messages(order, receives_first=self.mesh.device.type == "cpu")
        steps = [[str(step) for step in rank] for rank in ranks]
        ahead = self.order is not None or get(self.name).gathers_ahead
        # The loss is divided by the global number of tokens already: dividing by the micro-batches too would be wrong.
        settings: dict[str, Any] = {"n_microbatches": num_micro_batches, "loss_fn": self.loss, "scale_grads": False}
        return pipeline_of_steps(stages, steps, gathers_ahead=ahead, **settings)

    def _stage(self, index: int) -> PipelineStage:
        """torch's PipelineStage with all shapes given, so that torch need not run the stage on made-up data to find them."""
        from torch.distributed.pipelining import PipelineStage

        first, last, meta = index == 0, index == self.num_stages - 1, torch.device("meta")
        stage, balance = self.stages[index], self.loss.balance
        ids = torch.empty(self.ids, dtype=torch.int64, device=meta)
        outputs = (torch.empty(self.outputs.shape, dtype=self.outputs.dtype, device=meta),)
        given, gives = (self._empty(border, meta) for border in (stage.before, stage.after))
        sums = () if balance is None else (balance.nothing(meta),)
        settings: dict[str, Any] = {
            "input_args": (ids,) if first else (*_trainable(given), *sums),
            "output_args": (*_trainable(outputs if last else gives), *sums),
            "dw_builder": None if stage.later is None else lambda: _weight_gradients(stage),
        }
        mesh = self.mesh
        made = PipelineStage(
            stage, index, self.num_stages, mesh.device, group=mesh.whole.get_group("pp"), **settings
        )  # the group is this rank alone if stages differ in width
        receive_in_turn(made)
        if last:
            forget_logits(made)
        if len(self.stages) > 1:
            greet_others_alone(made)
            reduce_beside(made, self.waits)
        if self.unlike:
            give_peers(
                made,
                sources=[] if first else self._peers(stage.before, index - 1),
                targets=[] if last else self._peers(stage.after, index + 1),
                group=mesh.group("pp"),
                stage_ranks=self.stage_ranks,
                pipeline_rank=mesh.rank("pp"),
            )
        return made


def _trainable(tensors: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
    return (tensor.requires_grad_() for tensor in tensors)


Runner = Accumulation | Pipeline


def stages_of_rank(rank: int, parallelism: Parallelism) -> tuple[int, ...]:
    """The stages that a pipeline rank holds: looped, down and up again under the V-shaped schedules, or as a given order says."""
    return tuple(stage for stage, holder in enumerate(ranks_of_stages(parallelism)) if holder == rank)


def _weight_gradients(stage: Stage) -> Callable[[], None]:
    """A function that computes the weight gradients that the last backward deferred."""
    assert stage.later is not None
    compute = stage.later.take()

    def run() -> None:
        compute()
        accumulate_in_reduce_dtype(stage)

    return run
