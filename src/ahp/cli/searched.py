"""The search of the commands: once more if the best plan needs blocks that are one compiled graph, and they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ahp.cluster.model import Cluster
from ahp.forecast import rules
from ahp.graph.kept import is_description
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.search.ranking import Ranking, search


def searched(model: str | dict[str, Any], graph: ModelGraph, cluster: Cluster, job: Job, **asked: Any) -> Ranking:
    """``search`` with these arguments. If the best plan needs one compiled graph of each block and the model is code, its blocks are compiled
    without data, which takes 2 s; if they are several graphs, the search is repeated without such plans."""
    ranking = search(graph, cluster, job, **asked)
    best = ranking.best
    if is_description(model) or not rules.wants_one_graph(best.parallelism, best.engine):
        return ranking
    from ahp.graph.models import build_model
    from ahp.runtime.compute.one_graph import why_several_graphs

    several = why_several_graphs(build_model(model), job)
    return ranking if several is None else search(replace(graph, several_graphs=several), cluster, job, **asked)
