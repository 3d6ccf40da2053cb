"""Refuses what a plan asks and this runtime, its devices or the model cannot do, before anything is changed."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import nn

from ahp.engines import registry
from ahp.engines.ahp import needs_one_graph
from ahp.errors import BadInput, NotExpressible, bad_input
from ahp.forecast import rules
from ahp.forecast.mixed_rules import widths_of_ranks
from ahp.graph.blocks import BlockList
from ahp.graph.call import Documents
from ahp.graph.outline import Outline
from ahp.graph.positions import refuse_longer
from ahp.job import Job
from ahp.plan import ContextMethod, Parallelism, Plan
from ahp.runtime.compute.fp8 import check_linear
from ahp.runtime.compute.one_graph import why_several_graphs
from ahp.runtime.device_limits import compiles_sliced_blocks, refuse_kernels
from ahp.runtime.experts.balance_loss import balance_of
from ahp.runtime.experts.dispatch import check_experts
from ahp.runtime.optimizer.eight_bit import refuse_without_torchao
from ahp.runtime.sequence.own_tokens import check_after_blocks
from ahp.runtime.tensor.sliced_dropout import drops_parts
from ahp.runtime.torch_compat import has_gradient_hook
from ahp.schedule.orders import splits_backward
from ahp.schedule.registry import PLAIN
from ahp.schedule.stages import layers_of_stages
from ahp.search.slicing.model import ModelSlicing


def refuse_arguments(module: Any, plan: Any) -> None:
    """Raises BadInput for arguments of ``parallelize`` of other types than it takes."""
    if not isinstance(module, nn.Module):
        raise bad_input("module", type(module).__name__, "must be a torch.nn.Module")
    if isinstance(plan, (str, PathLike)):
        raise bad_input("plan", str(plan), "must be a Plan or a dict, not a path", [f"ahp.Plan.load({str(plan)!r})"])


def refuse_plan(plan: Plan, device: torch.device) -> None:
    """Raises NotExpressible, BadInput or HardwareMismatch for a plan that no model could run under on this device."""
    p, job = plan.parallelism, plan.job
    if plan.engine.name != "ahp":
        raise NotExpressible(f"engine.name = {plan.engine.name!r}: this runtime runs plans for 'ahp' only")
    if reason := registry.get("ahp").refuses(job, p, plan.engine):
        raise NotExpressible(reason)
    if reason := (
        rules.batch(job, p)
        or next(filter(None, (rules.sequence(job, each) for each in p.layouts_of_ranks)), None)
        or widths_of_ranks(p)
        or rules.unlike_widths(job, p)
        or rules.schedules(job, p, in_torch=False)
    ):
        raise BadInput(reason)
    if job.optimizer.name == "adamw8bit":
        refuse_without_torchao()
    refuse_kernels(plan.engine, device)
    if plan.engine.compile and any(tensor > 1 for _, tensor in p.widths) and not compiles_sliced_blocks():
        rule = f"torch {torch.__version__} leaves out sums of gradients over tensor-parallel ranks in compiled blocks"
        raise bad_input("engine.compile", True, rule, ["False", "or torch 2.13 or later"])


def refuse_length(job: Job, layout: Parallelism, length: int) -> None:
    """Raises BadInput if a step's sequences are shorter or longer than the job's and the layout cannot run that length."""
    if length == job.sequence_length:
        return
    if layout.num_stages > 1:
        rule = (
            f"what passes between the stages of a pipeline has the length of job.sequence_length {job.sequence_length}"
        )
        raise bad_input("part: sequence length", length, rule, [job.sequence_length])
    if reason := rules.sequence(job.model_copy(update={"sequence_length": length}), layout):
        raise BadInput(f"part: sequence length = {length}: {reason}")


def refuse_micro_batches(layout: Parallelism, count: int, ordered: int | None) -> None:
    """Raises BadInput for a number of micro-batches that a pipeline cannot run. ``ordered``: the number that a given order has, None = no
    order is given."""
    p, v, name = (layout.pipeline_parallel_degree, layout.virtual_stages_per_rank, layout.pipeline_parallel_schedule)
    if ordered is not None:
        reason = None if count == ordered else f"pipeline_parallel_order has {ordered} (valid: {ordered})"
    else:
        reason = rules.schedule(name, p, v, count, in_torch=False)
    if reason:
        size = layout.micro_batch_size
        raise BadInput(f"part = {count * size} rows: {count} micro-batches of micro_batch_size {size}; {reason}")


def refuse_model(
    module: nn.Module, blocks: BlockList | None, found: Outline | None, plan: Plan, documents: Documents | None = None
) -> None:
    """Raises BadInput for a model that cannot run under this plan. ``found``: also None if the plan does not need it. ``documents``: the input
    that keeps documents apart, if the job does."""
    p = plan.parallelism
    refuse_longer(module, plan.job.sequence_length)
    if blocks:
        layers_of_stages(p, len(blocks))  # raises if the layers do not fit the stages
        if reason := rules.recomputed(len(blocks), plan.job, p, plan.engine):
            raise BadInput(reason)
    _refuse_for_fsdp2(module, blocks, plan)
    _refuse_batch_norm(module, plan)
    _refuse_gradient_hooks(module, plan)
    _refuse_max_norm(module, plan)
    check_experts(module, found, p.expert_parallel_degree)
    if p.has_unlike_widths and balance_of(module) is not None:
        raise BadInput(rules.BALANCE_OF_UNLIKE_WIDTHS)
    if plan.job.precision == "fp8":
        check_linear(blocks)
    if found and (reason := rules.between_blocks(found.uncuttable, found.other_dims, p, plan.engine)):
        raise BadInput(reason)
    if found:
        _refuse_own_recompute(found, plan)
        _refuse_kept_weights(found, plan)
    if plan.engine.loss_chunk_tokens is not None:
        _refuse_chunks(plan.engine.loss_chunk_tokens, module, found, plan.job)
    if blocks and rules.wants_one_graph(p, plan.engine):
        several = why_several_graphs(module, plan.job, documents)
        if several is not None:
            raise BadInput(rules.not_one_graph(several))


def _refuse_own_recompute(found: Outline, plan: Plan) -> None:
    """torch's second run of a function has neither what context ranks put around attention, unless it is a whole block's call, nor what puts off
    weight gradients; and a reentrant one, around blocks, has no graph of the hidden states at which a stage ends or begins."""
    p = plan.parallelism
    rule = "the model calls torch.utils.checkpoint itself, whose second run would compute something else"
    own = ["the model without it (gradient_checkpointing_disable()) and activation_checkpoint full"]
    again = found.recomputes if plan.engine.compile else found.recomputes - {"not reentrant, a whole block"}
    if p.context_parallel_degree > 1 and again:
        raise bad_input("context_parallel_degree", p.context_parallel_degree, rule, [1, *own])
    if splits_backward(p) and any(one.startswith("not reentrant") for one in found.recomputes):
        raise bad_input("pipeline_parallel_schedule", p.pipeline_parallel_schedule, rule, [PLAIN, *own])
    if p.num_stages > 1 and "reentrant around blocks" in found.recomputes:
        raise bad_input("pipeline_parallel_degree", p.pipeline_parallel_degree, rule, [1, "use_reentrant=False", *own])


def _refuse_kept_weights(found: Outline, plan: Plan) -> None:
    """Stages are copies of the module's parts, and under FSDP2 their weights are other tensors than those that the module's code keeps."""
    p = plan.parallelism
    if p.num_stages == 1 or found.keeps is None:
        return
    rule = f"{found.keeps}, and stages of a pipeline would compute with another"
    if any(each.weight_shards > 1 for each in p.layouts_of_ranks):
        raise bad_input("zero_stage", p.zero_stage, rule, [0, "self of a method"])
    if plan.job.casts_weights:
        raise bad_input("job.precision", plan.job.precision, rule, ["fp32", "self of a method"])


def refuse_what_stays_outside(plan: Plan, sliced: ModelSlicing | None, method: ContextMethod | None) -> None:
    """Raises BadInput if a block must be one compiled graph and a part of it would stay outside.

    ``method``: how ranks share sequences, None if they do not.
    """
    if not needs_one_graph(plan.parallelism, plan.engine):
        return
    if method == "ring":
        what = "the ring of context parallelism, which is taken because all-to-all does not divide the attention heads"
    elif sliced is not None and any(map(drops_parts, sliced.blocks)):
        what = "dropout of a tensor that tensor-parallel ranks have parts of"
    else:
        return
    raise BadInput(
        f"activation_checkpoint = 'selective': with engine.compile = True a block must be one graph, and outside of it stays {what} "
        "(valid: none, full)"
    )


def _refuse_chunks(tokens: int, module: nn.Module, found: Outline | None, job: Job) -> None:
    """Raises BadInput for a model without blocks, as the chunks run what follows the blocks, and for one that reads other tokens there."""
    rule = "the model has no blocks, and what follows them is what it computes in chunks"
    if found is not None:
        try:
            check_after_blocks(module, found, job)
            return
        except BadInput as error:
            rule = f"a chunk of tokens runs what follows {found.blocks_path} alone: {error}"
    raise bad_input("engine.loss_chunk_tokens", tokens, rule, [None])


def _refuse_for_fsdp2(module: nn.Module, blocks: BlockList | None, plan: Plan) -> None:
    """FSDP2, which both shards and casts, needs parameters with at least one dim and one element, held by one block only."""
    what = _scalar(module) or _empty(module) or _shared(module, blocks)
    if what is None:
        return
    if any(each.weight_shards > 1 for each in plan.parallelism.layouts_of_ranks):
        rule = f"{what}, which FSDP2 does not shard; or use data_parallel_replicate_degree"
        raise bad_input("zero_stage", plan.parallelism.zero_stage, rule, [0])
    if plan.job.casts_weights:
        raise bad_input("job.precision", plan.job.precision, f"{what}, which FSDP2 does not cast", ["fp32"])


def _refuse_batch_norm(module: nn.Module, plan: Plan) -> None:
    """torch's kernels want its averages in the type of its weights, and averages in 16 bits would hardly move."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    norms = (n for n, m in module.named_modules() if isinstance(m, kinds) and m.affine and m.track_running_stats)
    name = next(norms, None)
    if name is not None and plan.job.precision != "fp32":
        rule = f"{name} is a batch norm, whose averages stay in fp32 beside weights in 16 bits"
        raise bad_input("job.precision", plan.job.precision, rule, ["fp32", "or a batch norm with affine=False"])


def _refuse_gradient_hooks(module: nn.Module, plan: Plan) -> None:
    """A tensor that replaces a parameter does not have its hooks, and code that adds to a gradient directly runs none."""
    name = next((name for name, parameter in module.named_parameters() if has_gradient_hook(parameter)), None)
    if name is None:
        return
    p = plan.parallelism
    rule = f"{name} has a hook on its gradient, which would not run"
    asked: list[tuple[str, Any, bool, Any]] = [
        ("tensor_parallel_degree", p.tensor_parallel_degree, any(tensor > 1 for _, tensor in p.widths), 1),
        ("zero_stage", p.zero_stage, any(each.weight_shards > 1 for each in p.layouts_of_ranks), 0),
        ("job.precision", plan.job.precision, plan.job.casts_weights, "fp32"),
        ("pipeline_parallel_schedule", p.pipeline_parallel_schedule, splits_backward(p), PLAIN),
    ]
    for key, value, drops, valid in asked:
        if drops:
            raise bad_input(key, value, rule, [valid, "or a parameter without it"])


def _refuse_max_norm(module: nn.Module, plan: Plan) -> None:
    """Refuse an embedding that scales the rows it looks up: each rank would scale those of its own tokens, or of a gathered copy."""
    of_rows = (nn.Embedding, nn.EmbeddingBag)
    named = module.named_modules()
    name = next((n for n, part in named if isinstance(part, of_rows) and part.max_norm is not None), None)
    if name is None:
        return
    p = plan.parallelism
    rule = f"{name} has a max_norm, by which each rank would change the rows of its own tokens alone"
    if p.data_parallel_replicate_degree > 1:
        raise bad_input("data_parallel_replicate_degree", p.data_parallel_replicate_degree, rule, [1])
    if any(each.weight_shards > 1 for each in p.layouts_of_ranks):
        raise bad_input("zero_stage", p.zero_stage, rule, [0])


def _scalar(module: nn.Module) -> str | None:
    name = next((name for name, parameter in module.named_parameters() if parameter.ndim == 0), None)
    return name and f"{name} is a scalar (give it one element in one dim, as nn.Parameter(torch.ones(1)) has)"


def _empty(module: nn.Module) -> str | None:
    """torch's ``_chunk_cat`` refuses a gradient without elements."""
    name = next((name for name, parameter in module.named_parameters() if parameter.numel() == 0), None)
    return name and f"{name} has no elements"


def _shared(module: nn.Module, blocks: BlockList | None) -> str | None:
    """A parameter held by several blocks, or by a block and a module outside of the blocks."""
    if blocks is None:
        return None
    holders: dict[int, set[int | None]] = {}
    children = blocks.blocks._modules  # a list may have a parameter of its own
    for name, parameter in module.named_parameters(remove_duplicate=False):
        below = name.removeprefix(f"{blocks.path}.")
        block = None if below == name else children.get(below.partition(".")[0])
        holders.setdefault(id(parameter), set()).add(None if block is None else id(block))
    shared = (name for name, p in module.named_parameters() if len(holders[id(p)]) > 1)
    name = next(shared, None)
    return name and f"{name} is held by more than one block, or outside of them too"
