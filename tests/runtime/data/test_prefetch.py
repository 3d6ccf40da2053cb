"""Batches are made a step ahead, in a thread, and are those that were asked for."""

from __future__ import annotations

import threading

import pytest
import torch

from ahp.runtime.data.prefetch import Prefetch, Rows


class Made:
    """Makes batches, and notes which."""

    def __init__(self, bad: int | None = None) -> None:
        self.steps: list[int] = []
        self.threads: set[int] = set()
        self.bad = bad
        self.made = threading.Condition()

    def __call__(self, step: int, rows: range) -> Rows:
        with self.made:
            self.steps.append(step)
            self.threads.add(threading.get_ident())
            self.made.notify_all()
        if step == self.bad:
            raise ValueError(f"no batch {step}")
        return {"input_ids": torch.tensor([step, rows.start, rows.stop])}

    def wait_for(self, step: int) -> None:
        with self.made:
            assert self.made.wait_for(lambda: step in self.steps, timeout=60)


def prefetch(made: Made, num_steps: int = 4) -> Prefetch:
    return Prefetch(made, range(2, 5), num_steps=num_steps, device=torch.device("cpu"))


def test_the_next_batch_is_made_while_a_step_runs_and_none_after_the_last() -> None:
    made = Made()
    with prefetch(made) as batches:
        for step in range(4):
            assert batches.take(step)["input_ids"].tolist() == [step, 2, 5]
            if step < 3:
                made.wait_for(step + 1)  # nobody has asked for it
    assert made.steps == [0, 1, 2, 3]
    assert threading.get_ident() not in made.threads


def test_an_error_is_raised_at_the_step_that_it_belongs_to() -> None:
    made = Made(bad=2)
    with prefetch(made) as batches:
        batches.take(0)
        batches.take(1)
        made.wait_for(2)
        with pytest.raises(ValueError, match="no batch 2"):
            batches.take(2)
        assert batches.take(3)["input_ids"].tolist() == [3, 2, 5]


def test_a_step_that_nobody_foresaw_is_made_when_it_is_asked_for() -> None:
    made = Made()
    with prefetch(made, num_steps=100) as batches:
        for step in (7, 8, 3, 4, 90):
            assert batches.take(step)["input_ids"].tolist() == [step, 2, 5]


def test_no_thread_is_left_whatever_happens() -> None:
    before = set(threading.enumerate())

    def fail() -> None:
        with prefetch(Made()) as batches:
            batches.take(0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert set(threading.enumerate()) == before
