"""How much of a model a job trains, and how much of that has moments in 8 bits: known once both job and graph are."""

from __future__ import annotations

from ahp.engines.ahp import held_in_8_bits
from ahp.graph.operators import ModelGraph
from ahp.job import Job


def on_graph(job: Job, graph: ModelGraph) -> Job:
    """The job with the facts about its model that prices need."""
    if job.lora is None and job.optimizer.name != "adamw8bit":
        return job
    trained = [p for segment in graph.segments() for p in segment.parameters if p.trainable]
    in_8_bits = sum(p.numel for p in trained if held_in_8_bits(p.shape))
    return job.on_model(graph.trained_share, in_8_bits / max(1, sum(p.numel for p in trained)))
