"""Attention as engines with kernels of their own compute it: one operator, whatever transformers has for the model.

transformers computes attention to a learned sink (gpt-oss) in parts, and gives sliding windows to torch's kernel as masks, so that every pair of
tokens is computed. Megatron (Transformer Engine, cuDNN) and torchtitan (flex attention) have kernels that know both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ahp.errors import BadInput
from ahp.graph import kept
from ahp.graph.catalogue import CATALOGUE
from ahp.graph.identity import Same
from ahp.graph.key_heads import has_fused_attention
from ahp.graph.models import ENGINE, read_keys
from ahp.graph.operators import ModelGraph
from ahp.job import Job

TRACED = "engine_attention"
"""Key of ``ModelGraph.config`` in graphs that were traced like this."""


def with_engine_attention(graph: ModelGraph, job: Job) -> ModelGraph:
    """The graph of the same model with attention as such an engine computes it: the same object where that is no other graph."""
    return _traced(Same(graph), job.model_dump_json(include={"sequence_length", "precision"}))


@lru_cache(maxsize=32)
def _traced(of: Same, job: str) -> ModelGraph:
    graph: ModelGraph = of.value
    if TRACED in graph.config or not kept.is_description(graph.model):  # a live module is not traced a second time
        return graph
    if graph.document_mask or graph.lora is not None:  # such engines refuse both
        return graph
    if has_fused_attention(graph) and not _has_window(graph):
        return graph
    try:
        found = kept.analyze(
            graph.model, Job.model_validate_json(job), micro_batch_size=graph.micro_batch_size, attention=ENGINE
        )
    except BadInput:  # its attention cannot be replaced
        return graph
    same = replace(found, name=graph.name, model=graph.model, config={**found.config, TRACED: True})
    return same if has_fused_attention(found) else graph


def _has_window(graph: ModelGraph) -> bool:
    """Whether some layers see fewer tokens than a sequence has."""
    try:
        keys = _keys(graph.model)
    except BadInput:
        return False
    window = keys.get("sliding_window") if keys.get("use_sliding_window", True) else None
    return isinstance(window, int) and window < graph.sequence_length


def _keys(model: Any) -> Mapping[str, Any]:
    if isinstance(model, dict):
        return model
    name = str(model)
    return CATALOGUE[name].config if name in CATALOGUE else read_keys(Path(name).expanduser())
