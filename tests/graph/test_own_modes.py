"""A model is traced the same under whatever modes of torch a program calls it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch

import ahp
from ahp.graph.trace import analyze
from ahp.job import Job

from .small import SEQUENCE, Custom

FP32 = Job(sequence_length=SEQUENCE, precision="fp32")
MODES = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_modes_of_the_caller_change_nothing(mode: Callable[[], AbstractContextManager[object]]) -> None:
    model = Custom(layers=2)
    expected, split = analyze(model, FP32), ahp.slicing(model, 2)
    with mode():
        found, again = analyze(model, FP32), ahp.slicing(model, 2)
    assert (found, again) == (expected, split)


def test_threads_trace_one_after_the_other() -> None:
    models = [Custom(layers=2, width=width) for width in (16, 32, 64)]
    expected = [ahp.slicing(model, 2) for model in models]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda model: ahp.slicing(model, 2), models)) == expected
