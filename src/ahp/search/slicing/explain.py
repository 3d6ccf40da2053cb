"""How a model is split over its tensor-parallel ranks, in words: the modules by kind of split, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ahp.errors import BadInput
from ahp.graph.kept import kept
from ahp.graph.lora import key_of
from ahp.words import gib, percent

if TYPE_CHECKING:
    from ahp.plan import Plan
    from ahp.search.slicing.model import ModelSlicing
    from ahp.search.slicing.solve import Slicing

MEANING = {
    "column": "n: each rank has some of the output columns",
    "row": "k: each rank has some of the input rows, and the ranks' results are added up",
    "sequence": "m: each rank has some positions of every sequence",
    "batch": "each rank has some of the sequences, or of the matrices of a stack",
    "replicated": "the same on every rank",
}


def plan_slicing(plan: Plan) -> ModelSlicing:
    """The slicing for a plan's tensor-parallel degree, at the plan's own micro-batch and sequence length.

    Raises BadInput when the model's blocks cannot be sliced.
    """
    import torch

    from ahp.graph.document_mask import documents_apart
    from ahp.graph.lora import with_adapters
    from ahp.graph.models import build_model
    from ahp.graph.outline import outline
    from ahp.graph.own_modes import own_modes
    from ahp.search.slicing.model import slice_outline

    p, job = plan.parallelism, plan.job
    dtype = torch.float32 if job.precision == "fp32" else torch.bfloat16  # values sent between ranks have 4 bytes or 2
    with own_modes():
        module = with_adapters(build_model(plan.model), job.lora)
        found = outline(
            module,
            batch_size=p.micro_batch_size,
            sequence_length=job.sequence_length,
            dtype=dtype,
            documents=documents_apart(module, job.sequence_length) if job.document_mask else None,
        )
        return slice_outline(found, p.tensor_parallel_degree, enable_sequence_parallel=p.enable_sequence_parallel)


def lines(sliced: ModelSlicing) -> list[str]:
    """A line for each kind of split with the modules that have it, and a line for each kind of block with its costs."""
    modules: dict[str, list[str]] = {}
    for module, word in sliced.by_module().items():
        modules.setdefault(word, []).append(module.removeprefix(f"{sliced.outline.blocks_path}.*."))
    lines = [f"{word} ({MEANING[word]}): {', '.join(modules[word])}" for word in MEANING if word in modules]
    kinds = sliced.outline.kinds
    for kind, slicing in enumerate(sliced.blocks):
        name = (
            "each block"
            if len(sliced.blocks) == 1
            else f"each of the {kinds.count(kind)} blocks like {kinds.index(kind)}"
        )
        lines.append(f"{name}: {_cost(slicing, sliced.degree)}")
    return lines


def _cost(slicing: Slicing, degree: int) -> str:
    """What a rank computes, holds and sends, compared with one device that does all."""
    flops, elements, moved, _ = slicing.cost
    all_flops, all_elements = slicing.undivided
    return (
        f"a rank of {degree} does {percent(flops / max(all_flops, 1))} of the arithmetic, holds "
        f"{percent(elements / max(all_elements, 1))} of the matrices and sends {_size(moved)} for each micro-batch, "
        "forward and backward"
    )


def _size(count_bytes: int) -> str:
    return gib(count_bytes) if count_bytes >= 2**20 else f"{count_bytes / 2**10:.0f} KiB"


def lines_of(plan: Plan) -> list[str]:
    """The lines for a plan; none without tensor parallelism, the reason where its model cannot be sliced."""
    p, job = plan.parallelism, plan.job
    if p.tensor_parallel_degree == 1:
        return []
    key = {
        "of": "words of its slicing",
        "tensor_parallel_degree": p.tensor_parallel_degree,
        "enable_sequence_parallel": p.enable_sequence_parallel,
        "micro_batch_size": p.micro_batch_size,
        "sequence_length": job.sequence_length,
        "precision": job.precision,
        "document_mask": job.document_mask,
    }
    try:
        key |= key_of(job.lora)
        return kept(plan.model, key, lambda: lines(plan_slicing(plan)), made_by=Path(__file__).parent)
    except BadInput as reason:
        return [f"not possible: {reason}"]
