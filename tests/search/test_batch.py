"""A batch too small for the devices is remarked, with the batch that would do; the figures are those of a forecast."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ahp.job import MOST_SEQUENCES
from ahp.plan import Plan
from ahp.search.batch import small_batch
from ahp.search.problem import Problem
from ahp.search.ranking import search

from .small import small

PIPELINE = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "1F1B", "micro_batch_size": 1}


def best_of(batch: int) -> tuple[Problem, Plan]:
    asked = small("llama", "4xH100-SXM-80GB", batch=batch, constraints=PIPELINE)
    best = search(asked.graph, asked.cluster, asked.job, constraints=asked.constraints, engine=asked.engine).best
    return asked, best


def test_a_small_batch_is_remarked_with_what_a_larger_one_reaches() -> None:
    asked, best = best_of(4)
    told = small_batch(asked, best)
    assert told is not None
    assert told.startswith("4 sequences a step are few for 4 devices: MFU ")
    named = re.search(r"the same layout with (\d+) would reach (\S+) times as much ", told)
    assert named is not None
    job = asked.job.model_copy(update={"global_batch_size": int(named[1])})
    larger = replace(asked, job=job, engine=best.engine).priced(best.parallelism).forecast
    assert best.forecast is not None
    assert larger.mfu > best.forecast.mfu
    assert f"{larger.mfu / best.forecast.mfu:.1f}" == named[2], "both shares read as 0.0 %"


@pytest.mark.parametrize("batch", [512])
def test_a_batch_that_is_enough_is_not(batch: int) -> None:
    assert small_batch(*best_of(batch)) is None


def test_no_batch_is_looked_at_that_a_job_cannot_have() -> None:
    asked, best = best_of(4)
    most = asked.job.model_copy(update={"global_batch_size": MOST_SEQUENCES})
    assert small_batch(replace(asked, job=most), best) is None
