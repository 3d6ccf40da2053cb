"""A run that stops anywhere and goes on under another layout has the curve of one that never stopped: drawn at random.

A draw is named by its seed. ``AHP_TEST_SEED=any pytest -m wide tests/runtime/test_restarts.py`` draws others than usual, and
AHP_TEST_EXAMPLES=3 three times as many.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.examples import many
from tests.marks import cases
from tests.runtime.draws import draw, experts, gpt2, work
from tests.runtime.restarts import Refused, Restart, check
from tests.runtime.workers import Pool

SEED = os.environ.get("AHP_TEST_SEED", "0")
SOME, MORE = 24, 300
LITTLE_WORK = 16.0
"""Of each of the first some: they take a quarter of the time of the others."""
ATTEMPTS = 100
"""A layout that the model does not allow is drawn again."""

FOUND = {
    # The model's last view asked for the whole sequence, so that it ran where a rank's tokens happened to be a multiple of that alone.
    "gpt2-view-of-own-tokens": Restart(
        partial(gpt2, 0.0), {"micro_batch_size": 3}, {"context_parallel_degree": 4, "context_parallel_method": "ring"}
    ),
    # Nothing but a last resort splits its blocks, and with sequence parallelism the graphs of a step were solved without one.
    "last-resort-in-parts-of-the-sequence": Restart(
        partial(experts, "qwen3_moe", num_experts=6),
        {"micro_batch_size": 6},
        {"tensor_parallel_degree": 3, "enable_sequence_parallel": True, "micro_batch_size": 6},
    ),
}
"""What draws have found."""


@pytest.mark.parametrize("name", cases(FOUND, wide=["last-resort-in-parts-of-the-sequence"]))
def test_what_draws_have_found(pool: Pool, tmp_path: Path, name: str) -> None:
    check(pool, FOUND[name], tmp_path)


@pytest.mark.parametrize(
    ("seed", "little"),
    [
        pytest.param(f"{SEED}-little-{number}", True, marks=pytest.mark.slow, id=f"{SEED}-little-{number}")
        for number in range(SOME)
    ]
    + [
        pytest.param(f"{SEED}-{number}", False, marks=pytest.mark.wide, id=f"{SEED}-{number}")
        for number in range(many(MORE))
    ],
)
def test_a_restart_does_not_show(pool: Pool, tmp_path: Path, seed: str, little: bool) -> None:
    for attempt in range(ATTEMPTS):
        restart = draw(f"{seed}-{attempt}")
        if little and work(restart) > LITTLE_WORK:
            continue
        try:
            check(pool, restart, tmp_path / str(attempt))
        except Refused:
            continue
        except BaseException as error:
            error.add_note(f"seed {seed}, attempt {attempt}: {restart}")
            raise
        return
    raise AssertionError(f"seed {seed}: none of {ATTEMPTS} draws could run")
