"""Both bounds stay under the forecast, on every kind of layout; that is what makes the certificate true."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from ahp.engines.registry import get, names
from ahp.forecast.pricer import Pricer
from ahp.graph.trace import analyze
from ahp.job import Job
from ahp.search.bounds import Bounds
from ahp.search.problem import Problem, problem
from ahp.search.space import build, legal

SMALL_GPT = {"model_type": "gpt2", "n_embd": 64, "n_layer": 5, "n_head": 4, "vocab_size": 512, "n_positions": 128}

CASES = {
    "llama on nodes": ("tiny", "4x4xH100-SXM-80GB", "bf16"),
    "tied gpt2, prime layers": (SMALL_GPT, "12xA100-SXM-40GB", "bf16"),
    "fp32": (SMALL_GPT, "2x4xV100-SXM-32GB", "fp32"),
}


@cache
def subject(name: str, engine: str = "ahp") -> Problem:
    model, cluster, precision = CASES[name]
    job = Job(sequence_length=128, global_batch_size=48, precision=precision)  # type: ignore[arg-type]
    return problem(analyze(model, job), cluster, job, engine={"name": engine})


@pytest.mark.parametrize(
    ("name", "engine"), [*((name, "ahp") for name in CASES), *(("llama on nodes", e) for e in names() if e != "ahp")]
)
def test_bounds_are_under_the_forecast(name: str, engine: str) -> None:
    asked = subject(name, engine)
    space = build(asked.shape)
    mask, _ = legal(space, asked.tensor_reason)
    bounds = Bounds(asked)
    times, needs = bounds.time_s(space, mask), bounds.memory_bytes(space, mask)
    pricer = Pricer(asked.graph, asked.cluster, asked.job, asked.engine)
    rows = random.Random(0).sample(list(np.flatnonzero(mask)), 150)
    for row in rows:
        layout = space.row(int(row))
        if get(engine).refuses(asked.job, layout, asked.engine):
            continue
        forecast = pricer.price(layout).forecast
        assert times[row] <= forecast.step_time_s * (1 + 1e-9), layout.short()
        assert needs[row] <= sum(forecast.memory.values()) + 1, layout.short()
        assert forecast.fits == (sum(forecast.memory.values()) <= bounds.most_that_fits_bytes())


def test_time_bound_is_worth_something() -> None:
    """A bound far below the forecast would be right and useless: the median of the share it knows."""
    asked = subject("llama on nodes")
    space = build(asked.shape)
    mask, _ = legal(space, asked.tensor_reason)
    times = Bounds(asked).time_s(space, mask)
    pricer = Pricer(asked.graph, asked.cluster, asked.job, asked.engine)
    rows = random.Random(1).sample(list(np.flatnonzero(mask)), 60)
    share = [times[row] / pricer.price(space.row(int(row))).forecast.step_time_s for row in rows]
    assert np.median(share) > 0.6


def test_illegal_rows_are_not_bounded() -> None:
    asked = subject("llama on nodes")
    space = build(asked.shape)
    mask = np.zeros(len(space), dtype=bool)
    assert np.isinf(Bounds(asked).time_s(space, mask)).all()
