"""A model under a plan: cut into stages, sliced, sharded, ready to take steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ahp.errors import BadInput, whole_number
from ahp.graph.document_mask import documents_apart
from ahp.graph.host_numbers import Generators
from ahp.graph.lora import base_alone, with_adapters
from ahp.graph.models import is_masked
from ahp.graph.outline import Outline
from ahp.plan import Plan, validated
from ahp.runtime.between_steps import ProgramsModule, forget_step, refuse_gradients, refuse_modes
from ahp.runtime.compute.chunked_loss import Tail
from ahp.runtime.compute.deterministic import deterministic, set_environment
from ahp.runtime.compute.fp8 import check_parts, refuse_device
from ahp.runtime.compute.loss import Loss, PendingCount, count_scored
from ahp.runtime.compute.random_numbers import numbers_of_step
from ahp.runtime.device_limits import refuse_default_device
from ahp.runtime.experts.balance_loss import Balance, balance_of
from ahp.runtime.host_copy import HostCopy
from ahp.runtime.inside import DIVIDING, blocks_of, needs_outline, outline_of, slicing_of
from ahp.runtime.limits import refuse_arguments, refuse_length, refuse_model, refuse_plan, refuse_what_stays_outside
from ahp.runtime.optimizer.adamw import ShardedOptimizer, matrices_of
from ahp.runtime.optimizer.eight_bit import names_in_blocks
from ahp.runtime.optimizer.learning_rate import learning_rate
from ahp.runtime.optimizer.loss_scale import LossScale
from ahp.runtime.optimizer.muon import OwnedMatrices
from ahp.runtime.optimizer.norm import loss_and_norm, unscale_and_clip_, weighted_square_sum
from ahp.runtime.parameters import mark_taken, refuse_calls, refuse_parameters
from ahp.runtime.part import RowsOfRanks, check_batch, check_part, keys_of_part
from ahp.runtime.peak_memory import most_bytes
from ahp.runtime.pipeline.borders import by_micro_batch
from ahp.runtime.pipeline.cut import Stage
from ahp.runtime.pipeline.schedules import Accumulation, Inputs, Pipeline, stages_of_rank
from ahp.runtime.ranks.device_order import check_device
from ahp.runtime.ranks.mesh import Mesh, build_mesh
from ahp.runtime.ranks.preflight import Hosts, preflight
from ahp.runtime.ranks.ranks import rank_device
from ahp.runtime.run.nan_fault import find_fault
from ahp.runtime.run.validation import evaluate
from ahp.runtime.sequence.document_attention import DocumentAttention, document_attention
from ahp.runtime.sequence.own_tokens import SequenceSharding
from ahp.runtime.shard.buffers import Buffers
from ahp.runtime.shard.ends import ends_of
from ahp.runtime.shard.fsdp import COMPUTE_DTYPE, Sharding
from ahp.runtime.shard.given_gradients import GivenGradients, nothing_trained
from ahp.runtime.shard.ownership import LocalParameters, ParameterNames, TiedParameters
from ahp.runtime.shard.parameter_layout import ParameterLayout
from ahp.runtime.stage_setup import StageSetup, cut_stages
from ahp.runtime.step_result import StepResult
from ahp.runtime.training_state import TrainingState
from ahp.runtime.weights.adapter import Adapter
from ahp.runtime.weights.alike import first_unlike
from ahp.runtime.weights.allocate import hold_in
from ahp.runtime.weights.hub_names import InFiles, in_files, shapes_of
from ahp.runtime.weights.starting_values import StartingValues
from ahp.schedule.orders import ranks_of_stages

if TYPE_CHECKING:
    from ahp.runtime.weights.saver import BackgroundSaver


def parallelize(
    module: nn.Module,
    plan: Plan | dict[str, Any],
    *,
    device: torch.device | str | None = None,
    initialize: bool = True,
) -> Parallel:
    """Split a model over the ranks of the job, by a plan. Collective. If the program has no default process group, one is made,
    under torchrun or in a single process (NCCL on the GPU of LOCAL_RANK, gloo on CPUs).

    ``module``: built with the same values on every rank, or on the meta device (then it is initialized from ``plan.job.seed``,
    or each rank reads its parts of ``plan.init_from``). It maps token ids [batch, sequence] to logits [batch, sequence, vocabulary].
    With ``pipeline_parallel_degree`` 1 it is changed in place, else its parts are taken over; with ``job.lora`` it gets adapters.
    ``plan``: a Plan, or ``{"job": {...}, "parallelism": {...}}``.
    ``device``: where to compute; None = a GPU if each worker of the node has one and the process group supports it, else the CPU,
    with a warning if GPUs stay idle.
    ``initialize``: False leaves a module on the meta device without values, which is quicker if ``Parallel.load`` comes next.

    Raises BadInput, NotExpressible or HardwareMismatch before anything is changed when the layout cannot run, NoAnswer when
    a rank does not come or an exchange along a mesh axis fails.

    Example: your own training loop under torchrun. ``batch``: int64 [sequences, tokens], the global batch, the same on every rank::

        parallel = ahp.parallelize(module, ahp.Plan.load("plan.yaml"))
        for step, batch in enumerate(batches):
            part = parallel.shard({"input_ids": batch, "labels": batch})
            result = parallel.step(part)
            print(step, result.loss, result.grad_norm)
        parallel.save("checkpoint")
    """
    refuse_arguments(module, plan)
    checked = validated(Plan, plan, "plan")
    if checked.job.deterministic:
        set_environment()
    where = rank_device(checked, device)
    refuse_default_device(where)
    if checked.job.precision == "fp8":
        refuse_device(where)
    return rehearse(module, checked, where, initialize=initialize)


def rehearse(module: nn.Module, plan: Plan, device: torch.device, *, initialize: bool = True) -> Parallel:
    """``parallelize`` on a rank that has joined. CPU cores can stand in for devices with 8-bit products, very slowly."""
    refuse_plan(plan, device)
    mesh = build_mesh(plan.parallelism, device)
    check_device(plan, dist.get_rank(), mesh.device)
    hosts = preflight(mesh)
    with torch.inference_mode(False):  # no step could train what it makes
        return Parallel(module, plan, mesh, hosts, initialize=initialize)


class Parallel:
    """A model that takes optimizer steps under a plan. Made by ``parallelize``."""

    def __init__(self, module: nn.Module, plan: Plan, mesh: Mesh, hosts: Hosts, *, initialize: bool = True) -> None:
        self.plan, self.mesh, self.hosts = plan, mesh, hosts
        p = self.layout = plan.parallelism.of_rank(mesh.rank("pp"))
        """The plan's parallelism as this rank sees it: with the width of its own stages."""
        self.rows_of_ranks = RowsOfRanks(p, mesh.rank("dp_replicate"), mesh.rank("dp_shard"))
        own = plan.model_copy(update={"parallelism": self.layout})
        refuse_parameters(module)
        hold_in(module, torch.float32)  # also for states in bf16: the model is traced and cut in fp32 under every plan
        with_adapters(module, plan.job.lora, seed=plan.job.seed)
        self._trains = any(parameter.requires_grad for parameter in module.parameters())
        self.config = getattr(module, "config", None)
        self.adapter = Adapter.of(module, plan)
        """What peft needs besides the adapter matrices; None for a model without adapters."""
        self._saver: BackgroundSaver | None = None
        self._in_step = False
        """Whether micro-batches may have left gradients behind. Still true at the next step if one raised."""
        self.halts_at_fault = False
        """Whether a failed step (``StepResult.failed``) stops all later updates too: for a loop that calls the next step before it
        has read the last result."""
        self._halted = torch.zeros((), dtype=torch.bool, device=mesh.device)
        blocks, balance = blocks_of(module, plan.parallelism), balance_of(module)
        documents = documents_apart(module, plan.job.sequence_length) if plan.job.document_mask else None
        self.documents: DocumentAttention | None = None
        """Attention within documents by their lengths; None = masks, or no documents to keep apart."""
        self.attention_reason = ""
        """How documents are kept apart, and why; empty if they are not."""
        if documents is not None:
            self.documents, self.attention_reason = document_attention(module, documents, own, mesh.device)
            documents = documents if self.documents is None else self.documents.documents
        found = outline_of(module, own, documents) if blocks and needs_outline(plan) else None
        refuse_model(module, blocks, found, plan, documents)
        path, num_layers = (blocks.path, len(blocks)) if blocks else (None, 0)
        self.tokens = (
            SequenceSharding(module, found, plan, mesh, documents) if found and p.context_parallel_degree > 1 else None
        )
        """How sequences are cut over the context ranks, None if they are not."""
        # Checked at every stage's width on all ranks: if only one stage refused, the other ranks would wait.
        ways = {each.tensor_parallel_degree: slicing_of(found, each) for each in plan.parallelism.layouts_of_ranks}
        for degree, sliced in ways.items():
            if found and sliced and plan.job.precision == "fp8":
                check_parts(module, found, sliced, degree)
            refuse_what_stays_outside(plan, sliced, self.tokens.context.method if self.tokens else None)
        sliced = ways[p.tensor_parallel_degree]
        self.names = ParameterNames(module)
        matrices = matrices_of(module, plan.job.optimizer)
        start = StartingValues(module, plan, initialize=initialize)
        self._awaits_load = start.streamed and not initialize
        with base_alone(module):
            self._shapes = shapes_of(module)
        real = not start.streamed and plan.init_from is None
        self._unlike = first_unlike(module, mesh.device) if real else None
        """The first parameter whose values differ between ranks, until weights are loaded."""
        stages = cut_stages(module, found, plan, documents)
        self.ties = TiedParameters([self.names.on(stage.model) for stage in stages], mesh, plan.parallelism)
        self.stages = {i: stages[i] for i in stages_of_rank(mesh.rank("pp"), p)}
        self.sharding = Sharding(mesh, p.zero_stage, plan.job)
        prepare = StageSetup(
            own, mesh, self.names, self.sharding, path, num_layers, found, sliced, balance, self.tokens, self.documents, start.streamed,
            ends_of(module, found),
        )  # fmt: skip
        for index, stage in self.stages.items():
            prepare(index, stage)
        self.state = self._training_state(stages, prepare, start, matrices)
        """What training changes."""
        self.given = GivenGradients(self.names.shapes, self.state.local, mesh.device)
        vocabulary = bool(sliced and sliced.vocabulary)
        self.loss = self._loss(found, vocabulary, balance, causal=not is_masked(module))
        self.runner = self._runner(found, vocabulary)
        self._generators = Generators(*self.runner.stages.values())
        self.copies = {name: self._num_copies(name) for name in self.parameters}
        mark_taken(module, in_stages=p.num_stages > 1)
        if self.sharding.uses_fsdp or any(getattr(p, key) > 1 for key in DIVIDING):
            refuse_calls(module)
        models, slices = [stage.model for stage in self.stages.values()], blocks if sliced else None
        self.given_module = ProgramsModule(module, models, self.names, self.state.local, slices)

    def _training_state(
        self, stages: list[Stage], prepare: StageSetup, start: StartingValues, matrices: frozenset[str]
    ) -> TrainingState:
        """This rank's parts of the weights, filled with values, and of the optimizer states. ``stages``: of the whole pipeline."""
        local = LocalParameters([stage.model for stage in self.stages.values()], self.names, self.sharding.roots)
        layout = ParameterLayout(
            self.mesh,
            self.names.shapes,
            prepare.splits,
            frozenset(prepare.experts),
            self.sharding.uses_fsdp,
            local.parameters,
        )
        buffers = (named for stage in self.stages.values() for named in stage.model.named_buffers())
        self.bytes_read = start.fill(layout, buffers)
        """How many bytes of ``plan.init_from`` this rank read."""
        return TrainingState(
            layout,
            local,
            self._optimizer(layout, matrices),
            LossScale(self.plan.job.precision, self.mesh.device),
            self.stages,
            Buffers(
                [stage.model for stage in stages],
                {index: stage.model for index, stage in self.stages.items()},
                self.mesh,
                ranks_of_stages(self.plan.parallelism),
            ),
            written_elsewhere=self.ties.written_elsewhere(self.mesh.rank("pp")),
        )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds a part of, keyed by the hub's names; DTensors where they are split."""
        return self.state.parameters

    @property
    def num_steps_done(self) -> int:
        return self.state.num_steps_done

    def _optimizer(self, layout: ParameterLayout, matrices: frozenset[str]) -> ShardedOptimizer:
        ours = [name for name, p in layout.parameters.items() if p.requires_grad and name in matrices]
        return ShardedOptimizer(
            layout.parameters,
            self.plan.job.optimizer,
            matrices=matrices,
            in_blocks=names_in_blocks(layout) if self.plan.job.optimizer.name == "adamw8bit" else (),
            offload=self.plan.engine.offload_optimizer,
            muon=OwnedMatrices(layout, ours) if matrices else None,
        )

    def _loss(self, found: Outline | None, vocabulary: bool, balance: Balance | None, *, causal: bool) -> Loss:
        loss = Loss(
            causal=causal,
            vocabulary_group=self.mesh.group("tp") if vocabulary else None,
            context=None if self.tokens is None else self.tokens.context,
        )
        loss.balance = balance
        chunk, last = self.plan.engine.loss_chunk_tokens, self.stages.get(self.plan.parallelism.num_stages - 1)
        if chunk is not None and last is not None:
            assert found is not None, "refused for a model without blocks"
            loss.tail = Tail(last.model, found, COMPUTE_DTYPE[self.plan.job.precision], chunk, last.head)
        return loss

    def _runner(self, found: Outline | None, vocabulary: bool) -> Accumulation | Pipeline:
        p = self.layout
        if p.num_stages == 1:
            return Accumulation(self.stages[0], self.loss, self.sharding)
        assert found is not None
        batch, sequence, width = found.logits.shape
        tokens, tensors = sequence // p.context_parallel_degree, p.tensor_parallel_degree
        outputs = replace(found.logits, shape=(batch, tokens, width // tensors if vocabulary else width))
        hidden, rest = found.hidden, found.hidden.shape[2:]
        if self.plan.engine.loss_chunk_tokens is not None:
            outputs = replace(hidden, shape=(batch, tokens, *rest))
        if found.other_dims is None:  # else no rank has a part of them
            hidden = replace(hidden, shape=(batch, tokens // (tensors if p.enable_sequence_parallel else 1), *rest))
        return Pipeline(
            self.stages,
            self.plan.parallelism,
            self.loss,
            self.mesh,
            ids=(batch, sequence),
            hidden=hidden,
            outputs=outputs,
        )

    def _num_copies(self, name: str) -> int:
        """How many ranks hold the same elements of a parameter as this one, itself included."""
        tensor = 1 if name in self.state.layout.splits else self.mesh.size("tp")
        return self.mesh.num_replicas * tensor * self.ties.num_holders(name)

    def shard(self, global_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part of ``{"input_ids", "labels"}`` int64 [global batch, sequence]: rows by data-parallel rank.

        With ``job.document_mask`` also ``position_ids``, of the same type and shape: each token's place in its document, from 0.
        Raises BadInput for what is no dict of tensors, and for a number of rows that the ranks cannot share.
        """
        check_batch(global_batch, self.plan.job)
        rows = self.rows(len(global_batch["input_ids"]))
        part = slice(rows.start, rows.stop)
        # The starts of documents are read on the host too.
        stay = () if self.documents is None else ("position_ids",)
        return {
            key: value[part] if key in stay else value[part].to(self.mesh.device, non_blocking=True)
            for key, value in global_batch.items()
        }

    def rows(self, num_rows: int) -> range:
        """This rank's rows of a global batch of ``num_rows``, for a reader that reads no others. Each replica has consecutive rows,
        in proportion to its micro-batches, and each of its shards an equal run of them."""
        return self.rows_of_ranks.of(num_rows)

    def step(self, part: dict[str, torch.Tensor]) -> StepResult:
        """Forward, backward, clip, update. Collective. If loss or gradient norm is not finite, or no token is scored, no weight or buffer changes.

        ``part``: as ``shard`` gives it, ``labels`` unshifted, -100 = not scored. Ranks can hold different numbers of
        scored tokens: the loss is the mean over all of them. Random numbers (dropout) depend on the job's seed and the step; the
        program's own generators are left as they were. If a step raised, the next one drops its gradients, or raises BadInput if it
        cannot (a pipeline; FSDP2 before torch 2.13). Raises BadInput for other keys, types and shapes, and for gradients that no step made.
        """
        refuse_modes(self.mesh.device, self.plan.job.precision)
        # Of a pipeline other ranks may train what this one does not.
        if not (self.state.local.trains() if self.layout.num_stages == 1 else self._trains):
            raise nothing_trained()
        if self._unlike is not None:
            raise BadInput(
                f"module: {self._unlike} has other values on other ranks; build it alike on every rank (torch.manual_seed), or on the "
                "meta device, which starts from job.seed, or load a checkpoint first"
            )
        inputs, labels = self._checked(part)
        state, scale, job = self.state, self.state.loss_scale.factor, self.plan.job
        num_micro_batches = len(labels) // self.layout.micro_batch_size
        self.runner.prepare(num_micro_batches)
        scored = count_scored(labels, causal=self.loss.causal)
        self.loss.scale = scale
        self.loss.num_micro_batches = self.rows_of_ranks.micro_batches(len(labels))
        self.loss.total = PendingCount(scored, self.mesh.data.get_group(), self.rows_of_ranks.share(len(labels)))
        self.rows_of_ranks.check(len(labels), self.loss.total, self.mesh.device)
        refuse_gradients(state.local, self.sharding)
        self._in_step = True
        state.buffers.before_step()
        numbers = numbers_of_step(self.mesh, job.seed, state.num_steps_done, self._generators)
        with numbers, deterministic(job.deterministic):
            loss = self.runner.run(inputs, labels, num_micro_batches)
        self.given_module.refuse_used()
        absent = self.given.absent(self.sharding.finish())
        gradients = state.local.gradients()
        self._in_step = False
        self.ties.sum_(gradients, state.layout, state.optimizer.shards)
        squares = weighted_square_sum(gradients, self.copies, self.mesh.device)
        figures, counts = loss_and_norm(loss / self.mesh.size("tp"), squares.total, self.given.counts(absent), scale)
        nobodys = self.given.settle(gradients, absent, counts, state.optimizer.shards)
        can_shrink, any_scored = state.loss_scale.can_shrink(), self.loss.total.number() > 0
        figures[0].masked_fill_(~any_scored, math.nan)
        state.loss_scale.update(overflowed=(~figures[1].isfinite()).float())
        rate = learning_rate(self.plan.job.optimizer, state.num_steps_done, self.plan.job.steps)
        unscale_and_clip_(gradients, figures[1], self.plan.job.optimizer.grad_clip, scale)
        leave_out = self._leaves_out(figures, can_shrink, any_scored)
        state.optimizer.step(rate, gradients, without=nobodys, leave_out=leave_out)
        state.buffers.after_step(leave_out)
        state.num_steps_done += 1
        # Last in the queue: whoever has read the numbers knows that the step is over.
        copied = HostCopy(torch.cat((figures, torch.stack((can_shrink, any_scored)))))
        return StepResult(copied, rate, squares, index=state.num_steps_done - 1)

    def _leaves_out(self, figures: torch.Tensor, can_shrink: torch.Tensor, any_scored: torch.Tensor) -> torch.Tensor:
        """Whether this step's update is skipped, bool scalar on the device: loss or norm is not finite, or training has halted."""
        bad = ~figures.isfinite().all()
        if self.halts_at_fault:
            failed = any_scored & (~figures[0].isfinite() | (bad & ~can_shrink))
            bad = bad | self._halted
            self._halted |= failed
        return bad

    def evaluate(self, parts: Iterable[dict[str, torch.Tensor]]) -> float:
        """Mean loss over the scored tokens of some global batches, nan without any; without training on them: no dropout, no gradient.

        ``parts``: this rank's rows of each batch, as ``shard`` gives them. Collective; the result is the same on every rank, under every plan.
        """
        self.given_module.follow()  # before modes are changed and put back
        checked, seed = (self._checked(part) for part in parts), self.plan.job.seed
        with deterministic(self.plan.job.deterministic):
            return evaluate(self.runner, self.mesh, self.rows_of_ranks, checked, seed)

    def find_fault(self, part: dict[str, torch.Tensor], result: StepResult) -> str:
        """Why a step's loss or norm is not finite, in words. To be called after that step, which left the weights as they were.

        ``part``, ``result``: what ``step`` took and returned. Collective; the result is the same on every rank.
        """
        size, bad = self.layout.micro_batch_size, result.bad_gradients
        with numbers_of_step(self.mesh, self.plan.job.seed, result.index, self._generators):
            return find_fault(self.runner, size, *self._checked(part), names=list(self.names.shapes), bad_gradients=bad)

    def _checked(self, part: dict[str, torch.Tensor]) -> tuple[Inputs, torch.Tensor]:
        """The inputs of the model, and the labels. A step before that raised is forgotten."""
        if self._awaits_load:
            raise _without_values()
        if self._in_step:
            forget_step(self.runner, self.state.local, self.sharding)
            self._in_step = False
        self.given_module.follow()
        check_part(part, self.plan.job, self.layout.micro_batch_size)
        found = {key: part[key].to(self.mesh.device, non_blocking=True) for key in keys_of_part(self.plan.job)}
        refuse_length(self.plan.job, self.layout, part["labels"].shape[1])
        widths = self.plan.parallelism.widths
        found = {key: by_micro_batch(tensor, widths, self.layout) for key, tensor in found.items()}
        labels = found.pop("labels")
        if self.documents is not None:
            self.documents.make_room(by_micro_batch(part["position_ids"], widths, self.layout))
        return found, labels

    def memory_bytes(self) -> int:
        """The most memory that this rank has used so far: allocated on a GPU, resident in the process on a CPU."""
        return most_bytes(self.mesh.device)

    def save(self, folder: str | Path) -> None:
        """Write weights, optimizer states and the step count to a folder. Collective; loads under any other plan."""
        from ahp.runtime.weights.checkpoint import save

        self.given_module.follow()
        save(self.state, Path(folder))

    @property
    def saver(self) -> BackgroundSaver:
        """Writes checkpoints while steps go on. Made at the first use, which is collective."""
        from ahp.runtime.weights.saver import BackgroundSaver

        if self._saver is None:
            self._saver = BackgroundSaver(self.state)
        return self._saver

    def load(self, folder: str | Path, *, weights_alone: bool = False) -> None:
        """Continue from what ``save`` wrote, under any plan of the same model and job. Collective. Raises BadInput, before anything is changed,
        if the checkpoint holds other tensors than this model and its optimizer.

        ``weights_alone``: read weights and buffers, and leave the optimizer and the number of steps as they are, to look at a model.
        """
        from ahp.runtime.weights.checkpoint import load, load_weights

        (load_weights if weights_alone else load)(self.state, Path(folder))
        self._unlike = None
        self._awaits_load = False
        self._halted.zero_()

    def skip_to(self, step: int) -> None:
        """Count the steps before ``step`` (from 0) as done: it comes next, with its learning rate and random numbers."""
        self.state.num_steps_done = whole_number("step", step, 0)

    @cached_property
    def in_files(self) -> dict[str, InFiles]:
        """How transformers writes each parameter. Computed on first use: it takes longer than the rest of a small model's start."""
        model = next(iter(self.stages.values())).model
        with base_alone(model):
            return in_files(model, self._shapes)

    def export_hf(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write the weights as safetensors under the hub's names, adapters merged into them, and config.json if there is one. Collective.

        ``dtype``: None = float32 if the job computes in fp32, else bfloat16.
        """
        from ahp.runtime.weights.hf_export import export_hf

        if self._awaits_load:
            raise _without_values()
        self.given_module.follow()
        export_hf(
            self.state,
            Path(folder),
            in_files=self.in_files,
            writers=self._writers,
            config=self.config,
            dtype=dtype or (torch.float32 if self.plan.job.precision == "fp32" else torch.bfloat16),
        )
        if self.adapter is not None:
            self.adapter.export(self.state, Path(folder) / "adapter", self._writers)

    @property
    def _writers(self) -> dict[str, int]:
        """The pipeline rank that writes each parameter."""
        return {name: ranks[0] for name, ranks in self.ties.holders.items()}


def _without_values() -> BadInput:
    return BadInput(
        "parallelize: initialize = False left the weights without values; call load(folder) before the first step"
    )
