"""Garbage is collected at the same steps on every rank, and afterwards as before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from ahp.runtime.run.garbage_collection import EVERY_STEPS, GarbageCollection


class InACycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector_is_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.unfreeze()
    gc.disable()


@pytest.mark.slow
def test_garbage_is_collected_after_the_first_step_and_every_fiftieth() -> None:
    collected = []
    with GarbageCollection() as collection:
        for step in range(8, 8 + 3 * EVERY_STEPS):  # a run that goes on from step 7
            left = weakref.ref(InACycle())
            collection.after(step)
            if left() is None:
                collected.append(step)
    assert collected == [8, 50, 100, 150]


@pytest.mark.slow
def test_nothing_is_collected_in_between_however_many_objects_there_are() -> None:
    with GarbageCollection() as collection:
        collection.after(1)
        left = [weakref.ref(InACycle()) for _ in range(200_000)]  # Python's own threshold is 700
        assert all(one() is not None for one in left)
    gc.collect()
    assert all(one() is None for one in left)


@pytest.mark.slow
def test_the_collector_is_as_before_afterwards() -> None:
    with GarbageCollection() as collection:
        collection.after(1)
        assert not gc.isenabled()
        assert gc.get_freeze_count()
    assert gc.isenabled()
    assert not gc.get_freeze_count()


@pytest.mark.slow
def test_the_collector_is_as_before_after_a_failure() -> None:
    def fail() -> None:
        with GarbageCollection() as collection:
            collection.after(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_a_collector_that_the_program_turned_off_stays_off() -> None:
    gc.disable()
    with GarbageCollection() as collection:
        left = weakref.ref(InACycle())
        collection.after(1)
        assert left() is not None
    assert not gc.isenabled()


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    with GarbageCollection() as collection:
        assert gc.isenabled()
        collection.after(1)
    assert gc.get_freeze_count()
