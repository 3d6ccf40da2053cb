"""A run that stops anywhere and goes on under another layout has the curve of one that never stopped: drawn at random.

A draw is named by its seed. ``AHP_TEST_SEED=any pytest -m wide tests/runtime/test_restarts.py`` draws others than usual, and
AHP_TEST_EXAMPLES=3 three times as many.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.examples import many
from tests.marks import cases
from tests.runtime.draws import ITEMS, draw, experts, gpt2, items, llama, work
from tests.runtime.restarts import Refused, Restart, check
from tests.runtime.workers import Pool

SEED = os.environ.get("AHP_TEST_SEED", "0")
ALWAYS = (3406, 2787, 237)
"""In every run: of all choices from the first dozen of ``SOME`` in which each item is there the one that takes the least time."""
SOME = (
    *ALWAYS, 1713, 3061, 1797, 2263, 3307, 2895, 2251, 897, 1049, 3000, 1167, 2240, 3893, 513, 788, 858, 956,
    1553, 1613, 1674, 1886, 2141, 2309, 2414, 2859,
)  # fmt: skip
"""Of the first draws of seeds 0-little-0 to 0-little-3999 those with little work that try the most of what few others do."""
MORE = 300
LITTLE_WORK = 16.0
"""Of each of the first some: they take a quarter of the time of the others."""
EIGHT_BIT = ("8-4-2", "8-1-0", "8-2-16", "8-3-6", "8-5-3")
"""Draws that every layout runs, like those below: with moments in 8 bits, with moments in host memory, with parameters that are frozen for a while."""
OFFLOADED = (
    ("off-2-13", (True, True)),
    ("off-11-0", (True, False)),
    ("off-12-14", (True, False)),
    ("off-5-13", (False, True)),
)
FROZEN = (("frozen-3-8", ("h.1.", 1, 5)), ("frozen-2-3", ("attn", 0, 3)), ("frozen-15-34", ("h.1.", 1, 3)))
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
    # Frozen weights in fp32 lay in the memory of the program's, so that reading a checkpoint looked as if the program had changed them.
    "frozen-weights-in-a-pipeline": Restart(
        partial(gpt2, 0.0),
        {"micro_batch_size": 6},
        {"pipeline_parallel_degree": 2, "micro_batch_size": 6},
        job={"lora": {"r": 2, "target_modules": "all-linear"}},
    ),
    # FSDP2 looks at the types of gradients in a start's first step: of a head that was frozen then it had none, and failed when it was trained.
    "frozen-at-the-restart-in-16-bits": Restart(
        partial(llama, num_key_value_heads=6, tie_word_embeddings=False),
        {"data_parallel_shard_degree": 2, "zero_stage": 2, "micro_batch_size": 6},
        {"data_parallel_shard_degree": 2, "zero_stage": 2, "micro_batch_size": 6},
        job={"precision": "bf16"},
        frozen=("lm_head", 1, 4),
    ),
}
"""What draws have found."""


@pytest.mark.parametrize("name", cases(FOUND, wide=["last-resort-in-parts-of-the-sequence"]))
def test_what_draws_have_found(pool: Pool, tmp_path: Path, name: str) -> None:
    check(pool, FOUND[name], tmp_path)


@pytest.mark.parametrize("number", cases(SOME, wide=set(SOME) - set(ALWAYS)))
def test_a_restart_of_those_that_try_the_most_does_not_show(pool: Pool, tmp_path: Path, number: int) -> None:
    """One that is refused fails: another number has to be taken in its place."""
    if SEED == "0":
        check(pool, draw(f"0-little-{number}-0"), tmp_path)
    else:
        search(pool, f"{SEED}-little-{number}", tmp_path, LITTLE_WORK)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao (the extra low-bit) is not installed")
@pytest.mark.parametrize("seed", cases(EIGHT_BIT, wide=set(EIGHT_BIT[1:])))
def test_moments_in_8_bits_go_to_another_layout(pool: Pool, tmp_path: Path, seed: str) -> None:
    check(pool, draw(seed, eight_bit=True), tmp_path)


@pytest.mark.parametrize(("seed", "offloaded"), cases(OFFLOADED, wide=set(OFFLOADED[1:])))
def test_moments_in_host_memory_go_to_another_layout(
    pool: Pool, tmp_path: Path, seed: str, offloaded: tuple[bool, bool]
) -> None:
    """And those on the device into host memory."""
    check(pool, replace(draw(seed), offloaded=offloaded), tmp_path)


@pytest.mark.parametrize(("seed", "frozen"), cases(FROZEN, wide=set(FROZEN[1:])))
def test_what_is_frozen_for_some_steps_around_a_restart_is_trained_again(
    pool: Pool, tmp_path: Path, seed: str, frozen: tuple[str, int, int]
) -> None:
    check(pool, replace(draw(seed), frozen=frozen), tmp_path)


def test_every_item_is_drawn() -> None:
    """``-rP`` shows how often."""
    drawn = [draw(f"0-little-{number}-0") for number in ALWAYS]
    assert max(map(work, drawn)) <= LITTLE_WORK
    counts = Counter(item for restart in drawn for item in items(restart))
    print("\n".join(f"{counts[item]:3} of {len(drawn)}: {item}" for item in ITEMS))
    assert set(counts) <= set(ITEMS)
    assert all(counts[item] for item in ITEMS)
    assert counts["another layout"] >= 2


@pytest.mark.wide
@pytest.mark.parametrize("seed", [f"{SEED}-{number}" for number in range(many(MORE))])
def test_a_restart_does_not_show(pool: Pool, tmp_path: Path, seed: str) -> None:
    search(pool, seed, tmp_path)


def search(pool: Pool, seed: str, folder: Path, most_work: float = math.inf) -> None:
    """Check the first draw of a seed that can run."""
    for attempt in range(ATTEMPTS):
        restart = draw(f"{seed}-{attempt}")
        if work(restart) > most_work:
            continue
        try:
            check(pool, restart, folder / str(attempt))
        except Refused:
            continue
        except BaseException as error:
            error.add_note(f"seed {seed}, attempt {attempt}: {restart}")
            raise
        return
    raise AssertionError(f"seed {seed}: none of {ATTEMPTS} draws could run")
