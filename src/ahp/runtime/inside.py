"""The parts of a model that a layout divides: its blocks, its outline, and how its products are sliced."""

from __future__ import annotations

from torch import nn

from ahp.errors import BadInput
from ahp.graph.blocks import BlockList, NoBlocks, find_blocks
from ahp.graph.call import Documents
from ahp.graph.outline import Outline, outline
from ahp.plan import Parallelism, Plan
from ahp.runtime.shard.fsdp import COMPUTE_DTYPE
from ahp.search.slicing.model import ModelSlicing, slice_outline


def blocks_of(module: nn.Module, p: Parallelism) -> BlockList | None:
    """The model's blocks, None if it has none. Raises BadInput if it has none and the layout divides them."""
    try:
        return find_blocks(module)
    except NoBlocks as error:
        for key in ("pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"):
            if getattr(p, key) > 1:
                raise BadInput(f"{key} = {getattr(p, key)}: {error}") from None
        return None


def needs_outline(plan: Plan) -> bool:
    """Whether the plan needs the model's outline, not only its blocks. The outline takes a run on fake tensors, most of a second,
    which plans with only replicas and shards can skip."""
    p = plan.parallelism
    inside = p.pipeline_parallel_degree, p.tensor_parallel_degree, p.context_parallel_degree, p.expert_parallel_degree
    return max(inside) > 1 or plan.engine.loss_chunk_tokens is not None


def outline_of(module: nn.Module, plan: Plan, documents: Documents | None) -> Outline:
    """The model's outline, from a run of one of the plan's micro-batches on fake tensors."""
    return outline(
        module,
        batch_size=plan.parallelism.micro_batch_size,
        sequence_length=plan.job.sequence_length,
        dtype=COMPUTE_DTYPE[plan.job.precision],
        documents=documents,
    )


def slicing_of(found: Outline | None, p: Parallelism) -> ModelSlicing | None:
    """How the model is split over the tensor-parallel ranks, None if it is not."""
    if found is None or p.tensor_parallel_degree == 1:
        return None
    return slice_outline(found, p.tensor_parallel_degree, enable_sequence_parallel=p.enable_sequence_parallel)
