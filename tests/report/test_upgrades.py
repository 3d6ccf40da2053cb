"""What 10 % more of a resource brings is the forecast's own answer on the changed cluster or batch, and the plan's layout stays."""

from __future__ import annotations

from typing import Any

import pytest

from ahp.cluster.better import better_clusters
from ahp.forecast.step import forecast
from ahp.plan import Parallelism, Plan
from ahp.report.upgrades import Upgrade, sentence, upgrades_of
from tests.search.small import Problem, small

LAYOUT = Parallelism(data_parallel_shard_degree=2, micro_batch_size=1, activation_checkpoint="none")


def asked(layout: Parallelism, cluster: str = "2xH100-SXM-80GB", **job: Any) -> tuple[Problem, Plan]:
    found = small(cluster=cluster)
    changed = found.job.model_copy(update=job)
    return found, Plan(job=changed, parallelism=layout, engine=found.engine.decided())


def found(layout: Parallelism, cluster: str = "2xH100-SXM-80GB", **job: Any) -> dict[str, Upgrade]:
    problem, plan = asked(layout, cluster, **job)
    return {one.change: one for one in upgrades_of(problem.graph, problem.cluster, plan)}


@pytest.mark.slow
def test_every_gain_is_a_forecast_on_the_better_cluster() -> None:
    problem, plan = asked(LAYOUT)
    told = {one.change: one for one in upgrades_of(problem.graph, problem.cluster, plan)}
    today = forecast(problem.graph, problem.cluster, plan.job, LAYOUT, plan.engine)
    better = dict(better_clusters(problem.cluster))
    assert set(better) < set(told)
    for change, cluster in better.items():
        there = forecast(problem.graph, cluster, plan.job, LAYOUT, plan.engine)
        assert told[change].gain == pytest.approx(1 - there.step_time_s / today.step_time_s)
    gains = [one.gain for one in told.values()]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0


def test_more_memory_makes_no_layout_faster() -> None:
    assert found(LAYOUT)["10 % more memory"].gain == 0.0
    assert "as much time" in found(LAYOUT)["10 % more memory"].words


@pytest.mark.parametrize(("batch", "larger"), [(8, "global batch 10, 25 % more"), (20, "global batch 22, 10 % more")])
def test_the_batch_grows_to_whole_micro_batches(batch: int, larger: str) -> None:
    problem, plan = asked(LAYOUT, global_batch_size=batch)
    (told,) = (
        one for one in upgrades_of(problem.graph, problem.cluster, plan) if one.change.startswith("global batch")
    )
    assert told.change == larger
    job = plan.job.model_copy(update={"global_batch_size": int(larger.split()[2].rstrip(","))})
    today, there = (forecast(problem.graph, problem.cluster, one, LAYOUT, plan.engine) for one in (plan.job, job))
    assert told.gain == pytest.approx(1 - today.tokens_per_s_per_device / there.tokens_per_s_per_device)


def test_the_sentence_names_the_resource_or_none() -> None:
    one, nothing = Upgrade("10 % more FLOPS", 0.061, ""), Upgrade("10 % more memory", 0.0, "")
    assert sentence([one, nothing]).endswith("10 % more FLOPS would help most: 6.1 % less time for each token.")
    assert "no single resource" in sentence([nothing])
