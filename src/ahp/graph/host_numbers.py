"""Generators from which a forward may draw besides torch's own: those of Python and NumPy, and those that a model's modules hold.

torch's own tools (``checkpoint``, ``fork_rng``) keep the state of torch's default generators alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Generator:
    name: str
    state: Callable[[], Any]
    put: Callable[[Any], object]
    """Go on from a state."""
    seed: Callable[[int], object]
    """Start from a seed below 2^63."""
    value: object = None
    """The module's own object."""

    @property
    def of_torch(self) -> bool:
        return isinstance(self.value, torch.Generator)


PYTHON = Generator("random", random.getstate, random.setstate, random.seed)
NUMPY = Generator("numpy.random", np.random.get_state, np.random.set_state, lambda seed: np.random.seed(seed % 2**32))


class Generators:
    """Python's and NumPy's, and those that modules hold as attributes, also in a list, tuple or dict."""

    def __init__(self, *modules: nn.Module) -> None:
        held: dict[int, Generator] = {}
        for path, part in (named for module in modules for named in module.named_modules()):
            for name, value in vars(part).items():
                for each in _flat(value):
                    if id(each) not in held and (found := _generator(f"{path}.{name}".removeprefix("."), each)):
                        held[id(each)] = found
        self.own = list(held.values())
        self._all = [PYTHON, NUMPY, *self.own]

    def state(self) -> list[Any]:
        return [generator.state() for generator in self._all]

    @contextmanager
    def from_state(self, start: list[Any]) -> Iterator[None]:
        """Within, the generators go on from ``start``; afterwards from where they were."""
        before = self.state()
        self._put(start)
        try:
            yield
        finally:
            self._put(before)

    @contextmanager
    def seeded(self, seed: int, of_torch: int | None = None) -> Iterator[None]:
        """Within, the generators start from ``seed``, torch's own kind from ``of_torch`` if it is given, and modules draw numbers that differ;
        afterwards they go on from where they were."""
        before = self.state()
        PYTHON.seed(seed)
        NUMPY.seed(seed)
        for number, generator in enumerate(self.own, 1):
            begin = seed if of_torch is None or not generator.of_torch else of_torch
            generator.seed(seed_of(begin, number))
        try:
            yield
        finally:
            self._put(before)

    def drawn_since(self, before: list[Any]) -> str | None:
        """The name of the first that gave numbers since then, None = none did. Not of torch's kind: on tensors without data they give none."""
        known = (pair for pair in zip(self._all, before, strict=True) if not pair[0].of_torch)
        changed = (generator.name for generator, was in known if not _alike(generator.state(), was))
        return next(changed, None)

    def _put(self, to: list[Any]) -> None:
        for generator, state in zip(self._all, to, strict=True):
            generator.put(state)


def seed_of(*place: int) -> int:
    """A seed below 2^63 that belongs to these numbers."""
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)


def _generator(name: str, value: object) -> Generator | None:
    if isinstance(value, torch.Generator):
        return Generator(name, value.get_state, value.set_state, value.manual_seed, value)
    if isinstance(value, random.Random):
        return Generator(name, value.getstate, value.setstate, value.seed, value)
    if isinstance(value, np.random.RandomState):
        return Generator(name, value.get_state, value.set_state, lambda seed: value.seed(seed % 2**32), value)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator

        def put(state: Any) -> None:
            bits.state = state

        return Generator(name, lambda: bits.state, put, lambda seed: put(type(bits)(seed).state), value)
    return None


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    else:
        yield value


def _alike(one: Any, other: Any) -> bool:
    """Whether two states are the same: numbers or arrays, alone or in a tuple or dict."""
    if isinstance(one, dict):
        return all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(_alike, one, other))
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
