"""The initial values of a model on the meta device, made so that every rank makes only its own part of them.

The model's own initialization runs once on tensors without memory, and a tape records its operators (deferred initialization, as in
torchdistX). Nearly every parameter is filled element by element, from a distribution or with a constant. A part of it is then made
alone, with random numbers that depend on the seed, the parameter's name and the element's place.
Other parameters are made whole, on the CPU, by the recorded operators themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ahp.errors import BadInput, first_line
from ahp.graph.lora import base_name
from ahp.runtime.shard.parameter_layout import ParameterLayout, Ranges, part_of
from ahp.runtime.torch_compat import TorchDispatchMode, local_tensor, pytree, recordable_trunc_normal
from ahp.runtime.weights.elementwise import Call, Fill, elementwise


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if found := tuple(_meta_tensors((args, kwargs, output))):
            self.calls.append(Call(func, args, kwargs, output, found))
        return output


@dataclass(frozen=True)
class Part:
    """Parameters that are initialized together, mostly just one, and the calls that do it, in order."""

    parameters: dict[str, torch.Tensor]
    """Keyed by name, without memory."""
    calls: list[Call]

    def key(self, seed: int, number: int) -> int:
        """A key of 64 bits for the ``number``-th call under a job's seed."""
        return int(
            np.random.SeedSequence([seed, *_words(min(self.parameters)), number]).generate_state(1, np.uint64)[0]
        )

    def fill(self) -> Fill | None:
        """How to make some elements alone, None if they depend on each other."""
        if len(self.parameters) > 1:
            return None
        return elementwise(next(iter(self.parameters.values())), self.calls)

    def values(self, seed: int) -> dict[str, torch.Tensor]:
        """The whole parameters, on the CPU."""
        real = {id(p): torch.zeros(p.shape, dtype=p.dtype) for p in self.parameters.values()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for number, call in enumerate(self.calls):
                if torch.Tag.nondeterministic_seeded in call.func.tags:
                    torch.manual_seed(self.key(seed, number) >> 1)
                args, kwargs = pytree.tree_map(lambda leaf: _real(leaf, real), (call.args, call.kwargs))
                output = call.func(*args, **kwargs)
                made = zip(pytree.tree_leaves(call.output), pytree.tree_leaves(output), strict=True)
                real.update((id(before), now) for before, now in made if isinstance(before, torch.Tensor))
        return {name: real[id(p)] for name, p in self.parameters.items()}


class InitialWeights:
    """The initial values of a model's parameters without memory."""

    def __init__(
        self, names: dict[int, str], parameters: Sequence[torch.Tensor], seed: int, initialise: Callable[[], None]
    ):
        """``names``: of each parameter, keyed by its id; ``initialise`` writes all ``parameters``, in place.

        Raises BadInput when it leaves one out, or reads values.
        """
        self.seed, tape = seed, _Tape()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), recordable_trunc_normal(), tape:
                torch.manual_seed(seed)  # for buffers, which have memory and are made here and now
                initialise()
        except (NotImplementedError, RuntimeError) as error:
            raise BadInput(
                f"module: its initialisation cannot run on the meta device ({first_line(error)}); start from weights "
                "(init_from), or build the module with real ones, alike on every rank"
            ) from error
        self.parts = _parts({names[id(p)]: p for p in parameters}, tape.calls)
        written = {id(t) for call in tape.calls for t in call.tensors}
        left = [name for part in self.parts for name, p in part.parameters.items() if id(p) not in written]
        if left:
            raise BadInput(
                f"module: its initialisation leaves out {', '.join(left[:3])} ({len(left)} in all), so that they would have no "
                "values on the meta device; start from weights (init_from), or build the module with real ones, alike on every rank"
            )

    def fill(self, parts: Mapping[str, torch.Tensor], ranges: Callable[[str], dict[int, Ranges]]) -> None:
        """Write parts of parameters, in place, on whatever device they are. ``ranges``: what a part holds of its parameter."""
        with torch.no_grad():
            for one in self.parts:
                wanted = {name: parts[name] for name in one.parameters if name in parts and parts[name].numel() > 0}
                fill = one.fill() if wanted else None
                if fill is not None:
                    ((name, part),) = wanted.items()
                    fill.write(part, ranges(name), lambda number, one=one: one.key(self.seed, number))
                elif wanted:
                    values = one.values(self.seed)
                    for name, part in wanted.items():
                        part.copy_(part_of(values[name], ranges(name)))


def fill_initial(layout: ParameterLayout, initial: InitialWeights) -> None:
    """Make this rank's parts of its parameters. No collective: every rank makes its own. ``initial`` uses the names of the model without
    adapters."""
    names = {base_name(name): name for name in layout.parameters}
    parts = {plain: local_tensor(layout.parameters[name].detach()) for plain, name in names.items()}
    initial.fill(parts, lambda plain: layout.ranges(names[plain]))


def _parts(parameters: dict[str, torch.Tensor], calls: list[Call]) -> list[Part]:
    """One part for each parameter, except that parameters connected by a chain of operators share one."""
    root: dict[int, int] = {}

    def find(key: int) -> int:
        while root.setdefault(key, key) != key:
            root[key] = key = root[root[key]]
        return key

    for call in calls:
        first, *others = call.tensors
        for other in others:
            root[find(id(other))] = find(id(first))
    parts: dict[int, Part] = {}
    for name, parameter in parameters.items():
        parts.setdefault(find(id(parameter)), Part({}, [])).parameters[name] = parameter
    for call in calls:
        if (part := parts.get(find(id(call.tensors[0])))) is not None:
            part.calls.append(call)
    return list(parts.values())


def _meta_tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_meta)


def _real(leaf: Any, real: dict[int, torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        return real[id(leaf)]
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf


def _words(name: str) -> list[int]:
    """A hash of a name: 128 bits, as numbers of 32."""
    return np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u4").tolist()
