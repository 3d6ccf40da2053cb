"""How attention keeps the documents of one sequence apart under ``job.document_mask``, and why: the reasons of the runtime
(``ahp.runtime.sequence.document_attention``), which prices follow too (``KernelOptions``)."""

from __future__ import annotations

from collections.abc import Sequence

from ahp.cluster.model import Device, NodeGroup
from ahp.engines import ahp
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.gpu import Gpu, kernel_of_lengths
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism


def needs_masks(
    graph: ModelGraph, device: Device, job: Job, parallelism: Parallelism, choice: EngineChoice
) -> str | None:
    """Why ranks on such devices run attention with masks [sequence, sequence]; None if it goes by the lengths of documents."""
    if reason := ahp.needs_masks(job, parallelism, choice):
        return reason
    if is_cpu(device) or kernel_of_lengths(Gpu(device).generation) is None:
        return (
            f"FlashAttention by lengths is for NVIDIA's GPUs from compute capability 8.0 on, and this is {device.name}"
        )
    return None if graph.by_lengths is not None else graph.needs_masks or "the graph was not traced by lengths"


def attention_words(
    graph: ModelGraph, groups: Sequence[NodeGroup], job: Job, parallelism: Parallelism, choice: EngineChoice
) -> list[str]:
    """A line for each way in which attention keeps documents apart on some of the ``groups``; none if they see each other."""
    if not job.document_mask:
        return []
    on: dict[str, list[str]] = {}
    for group in groups:
        reason = needs_masks(graph, group.device, job, parallelism, choice)
        on.setdefault(BY_LENGTHS if reason is None else WITH_MASKS.format(reason), []).append(group.device.name)
    return [line if len(on) == 1 else f"on {', '.join(dict.fromkeys(names))} {line}" for line, names in on.items()]


BY_LENGTHS = (
    "by the lengths of documents (FlashAttention-2), without a mask; priced as if each sequence were one document, because the job "
    "does not say how long documents are, so shorter ones take less time"
)
WITH_MASKS = "with a mask [sequence, sequence], and computes the scores of all pairs of tokens, because {}"
