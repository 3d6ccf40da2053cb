"""The parts of a model that a layout divides: its blocks, its outline, and how its products are sliced."""

from __future__ import annotations

from torch import nn

from ahp.errors import BadInput, bad_input
from ahp.graph.blocks import BlockList, NoBlocks, find_blocks
from ahp.graph.call import Documents
from ahp.graph.fake_mode import NeedsValues
from ahp.graph.outline import Outline, outline
from ahp.plan import Parallelism, Plan
from ahp.runtime.shard.fsdp import COMPUTE_DTYPE
from ahp.search.slicing.model import ModelSlicing, slice_outline

DIVIDING = ("pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")
"""Keys of degrees that divide what is inside of a model; the first three need its blocks."""


def blocks_of(module: nn.Module, p: Parallelism) -> BlockList | None:
    """The model's blocks, None if it has none. Raises BadInput if it has none and the layout divides them."""
    try:
        return find_blocks(module)
    except NoBlocks as error:
        for key in DIVIDING[:-1]:
            if getattr(p, key) > 1:
                raise BadInput(f"{key} = {getattr(p, key)}: {error}") from None
        return None


def needs_outline(plan: Plan) -> bool:
    """Whether the plan needs the model's outline, not only its blocks. The outline takes a run on fake tensors, most of a second,
    which plans with only replicas and shards can skip."""
    p = plan.parallelism
    return any(getattr(p, key) > 1 for key in DIVIDING) or plan.engine.loss_chunk_tokens is not None


def outline_of(module: nn.Module, plan: Plan, documents: Documents | None) -> Outline:
    """The model's outline, from a run of one of the plan's micro-batches on fake tensors."""
    try:
        return outline(
            module,
            batch_size=plan.parallelism.micro_batch_size,
            sequence_length=plan.job.sequence_length,
            dtype=COMPUTE_DTYPE[plan.job.precision],
            documents=documents,
        )
    except NeedsValues as error:
        raise _needs_values(plan, error) from error


def _needs_values(plan: Plan, error: NeedsValues) -> BadInput:
    """The refusal, with the key of the plan that needs the outline."""
    p = plan.parallelism
    rule = f"{error.rule}; data_parallel_replicate_degree and data_parallel_shard_degree run it"
    divides = (key for key in DIVIDING if getattr(p, key) > 1)
    if (key := next(divides, None)) is not None:
        return bad_input(key, getattr(p, key), rule, [1])
    return bad_input("engine.loss_chunk_tokens", plan.engine.loss_chunk_tokens, rule, [None])


def slicing_of(found: Outline | None, p: Parallelism) -> ModelSlicing | None:
    """How the model is split over the tensor-parallel ranks, None if it is not."""
    if found is None or p.tensor_parallel_degree == 1:
        return None
    return slice_outline(found, p.tensor_parallel_degree, enable_sequence_parallel=p.enable_sequence_parallel)
