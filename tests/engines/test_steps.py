"""The constants from whole steps: each with its provenance, and each asked for by an engine."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from ahp.engines import steps
from ahp.engines.registry import get, names
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

LAYOUT = Job(), Parallelism()


@pytest.mark.parametrize("name", list(steps.constants()))
def test_every_constant_enters_the_engines_it_names_and_no_other(name: str) -> None:
    constant = steps.constants()[name]
    changed = {**steps.constants(), name: replace(constant, value=constant.high)}
    for engine in names():
        choice = EngineChoice(name=engine)
        before = get(engine).traits(*LAYOUT, choice)
        with patch.object(steps, "constants", return_value=changed):
            after = get(engine).traits(*LAYOUT, choice)
        assert (after != before) == (engine in constant.engines), engine


def test_a_value_outside_its_own_bounds_is_refused() -> None:
    constant = steps.constants()["host_launches"]
    with pytest.raises(AssertionError):
        replace(constant, value=2 * constant.high)
    with pytest.raises(AssertionError):
        replace(constant, unknown=constant.low / 2)
