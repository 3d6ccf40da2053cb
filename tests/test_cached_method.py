"""A cached method computes each result once for each object, and goes with its object."""

from __future__ import annotations

import gc
import weakref

from ahp.cached_method import cached_method


class Adder:
    """Adds to its own number, and counts how often it computes."""

    def __init__(self, own: int) -> None:
        self.own, self.computed = own, 0

    @cached_method
    def plus(self, more: int) -> int:
        """The sum."""
        self.computed += 1
        return self.own + more


def test_each_object_computes_each_result_once() -> None:
    one, two = Adder(1), Adder(2)
    assert [one.plus(1), one.plus(1), one.plus(2), two.plus(1)] == [2, 2, 3, 3]
    assert (one.computed, two.computed) == (2, 1)


def test_results_keep_no_object_alive() -> None:
    gc.freeze()  # else garbage is looked for among all that other tests have left, 3 s
    try:
        adder = Adder(1)
        adder.plus(1)
        gone = weakref.ref(adder)
        del adder
        gc.collect()
        assert gone() is None
    finally:
        gc.unfreeze()


def test_the_class_has_the_method_itself() -> None:
    assert Adder.plus.__doc__ == "The sum."
    assert Adder.plus(Adder(3), 4) == 7
