"""Records every operator that a module's forward and backward run, on tensors that hold no data.

The recorder sits below autograd, so it sees what the device would run. It also uses two facts about autograd:
- a forward operator runs right after its autograd node took a sequence number, and the same node runs its backward;
  so a backward operator is given the place and the module of the forward operator with that number. torch.fx's
  tracer uses the same rule (torch/fx/proxy.py, ``seq_nr``).
- hooks on saved tensors see what is kept from forward to backward.
Tensors are identified by storage, offset, shape and strides; storages are kept alive while recording (fake storages
hold no memory), so that no address is used twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ahp.graph.costs import flops, traffic
from ahp.graph.operators import Phase, TensorSpec
from ahp.graph.torch_compat import Watching, backward_number, forward_number, memory_of, pytree

ALIASES = {"aten.detach", "aten.alias", "aten.lift_fresh", "aten.lift"}
"""Calls that return the same tensor under another name; they are not recorded as operators."""

SAME_DATA = {"aten._to_copy", "aten.clone", "aten.contiguous"}
"""Besides views, operators whose result is still "the parameter": a cast or a copy of it."""


@dataclass(slots=True)
class Recorded:
    """One operator call; ``depends_on`` has indices into the whole trace."""

    name: str
    phase: Phase
    place: Any
    """Part of the model that ran it, as the caller of the recorder names parts."""
    module: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    depends_on: tuple[int, ...]
    parameters: tuple[str, ...]
    flops: int
    bytes_read: int
    bytes_written: int
    saved_bytes: int = 0


@dataclass(slots=True)
class Where:
    """Where in the model the forward pass is; the caller moves it with hooks on modules."""

    place: Any
    modules: list[str] = field(default_factory=list)

    @property
    def module(self) -> str:
        return self.modules[-1] if self.modules else ""


def spec(tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of a tensor."""
    return TensorSpec(tuple(int(size) for size in tensor.shape), str(tensor.dtype).removeprefix("torch."))


class Recorder(Watching):
    """Enter it around forward and backward, inside a FakeTensorMode; then read ``operators``."""

    def __init__(self, where: Where, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.operators: list[Recorded] = []
        self._where = where
        self._phase: Phase = "forward"
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._writer: dict[int, int] = {}  # storage -> operator that wrote it last
        self._maker: dict[
            tuple[Any, Any], int
        ] = {}  # place (or None: any) and geometry -> operator that made this view
        self._parameter_of: dict[int, str] = {}  # storage -> parameter whose data it holds
        self._node: dict[int, tuple[Any, str]] = {}  # sequence number -> place and module
        self._saved: set[int] = set()
        self._saved_from_outside: dict[int, int] = {}  # index of the next operator -> bytes
        for name, tensor in parameters.items():
            self._parameter_of[self._key(tensor)] = name
        self._kept_anyway = set(self._parameter_of) | {self._key(tensor) for tensor in buffers.values()}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enter it around the forward pass: counts what autograd saves, each storage once, without parameters and buffers."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def begin_backward(self) -> None:
        self._phase = "backward"

    def finish(self) -> list[Recorded]:
        """The operators; saved tensors of the caller's own are charged to the operator that first saved them."""
        for index, count in self._saved_from_outside.items():
            self.operators[min(index, len(self.operators) - 1)].saved_bytes += count
        self._saved_from_outside.clear()
        return self.operators

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        name = str(func.overloadpacket)
        if name in ALIASES:
            self._alias(inputs[0], outputs[0])
            return
        if not outputs:
            return
        mutates = func._schema.is_mutable
        input_keys = {self._key(t) for t in inputs}
        is_view = not mutates and bool(inputs) and all(self._key(t) in input_keys for t in outputs)
        place, module, depends_on = self._locate(inputs)
        read, written = traffic(func, inputs, outputs, is_view)
        index = len(self.operators)
        self.operators.append(
            Recorded(
                name=name,
                phase=self._phase,
                place=place,
                module=module,
                inputs=tuple(map(spec, inputs)),
                outputs=tuple(map(spec, outputs)),
                depends_on=depends_on,
                parameters=tuple(dict.fromkeys(p for p in map(self._parameter, inputs) if p is not None)),
                flops=flops(func, args, kwargs, out),
                bytes_read=read,
                bytes_written=written,
            )
        )
        self._note_outputs(index, name, inputs, outputs, is_view)

    def _note_outputs(
        self, index: int, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], is_view: bool
    ) -> None:
        for tensor in outputs:
            key = self._key(tensor)
            geometry = self._geometry(tensor)
            self._maker[(self.operators[index].place, geometry)] = self._maker[(None, geometry)] = index
            if not is_view:
                self._writer[key] = index
        if name in SAME_DATA and len(inputs) == 1 and (parameter := self._parameter(inputs[0])) is not None:
            self._parameter_of[self._key(outputs[0])] = parameter

    def _depends_on(self, inputs: list[torch.Tensor], place: Any) -> tuple[int, ...]:
        """The operator that made each input: exactly this view, or the last write to its storage if that came later.

        Every block can take the same view of something shared (rotary tables); a block's own comes first.
        """
        found = set()
        for tensor in inputs:
            geometry = self._geometry(tensor)
            maker = self._maker.get((place, geometry), self._maker.get((None, geometry), -1))
            index = max(maker, self._writer.get(self._key(tensor), -1))
            if index >= 0:
                found.add(index)
        return tuple(sorted(found))

    def _locate(self, inputs: list[torch.Tensor]) -> tuple[Any, str, tuple[int, ...]]:
        """Place and module of the operator that runs now, and the operators that it depends on."""
        if self._phase == "forward":
            place, module = self._where.place, self._where.module
            if (number := forward_number() - 1) >= 0:  # else autograd has recorded nothing in this thread yet
                self._node.setdefault(number, (place, module))
            return place, module, self._depends_on(inputs, place)
        number = backward_number()
        if number in self._node:
            place, module = self._node[number]
            return place, module, self._depends_on(inputs, place)
        depends_on = self._depends_on(inputs, None)
        if not depends_on:
            return self._where.place, self._where.module, ()
        last = self.operators[depends_on[-1]]  # autograd's own work on a gradient belongs to the operator that made it
        return last.place, last.module, depends_on

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self._key(tensor)
        if key not in self._saved and key not in self._kept_anyway:
            self._saved.add(key)
            count = tensor.untyped_storage().nbytes()
            if key in self._writer:
                self.operators[self._writer[key]].saved_bytes += count
            else:
                index = len(self.operators)
                self._saved_from_outside[index] = self._saved_from_outside.get(index, 0) + count
        return tensor

    def _parameter(self, tensor: torch.Tensor) -> str | None:
        return self._parameter_of.get(self._key(tensor))

    def _alias(self, source: torch.Tensor, result: torch.Tensor) -> None:
        maker = self._maker.get((None, self._geometry(source)))
        if maker is not None:
            geometry = self._geometry(result)
            self._maker[(self.operators[maker].place, geometry)] = self._maker[(None, geometry)] = maker

    def _key(self, tensor: torch.Tensor) -> int:
        key = memory_of(tensor)
        self._storages.setdefault(key, tensor.untyped_storage())
        return key

    def _geometry(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return (self._key(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
