"""Carries out step 4: gives each tensor-parallel rank its part of the weights, and forwards that compute on it.

Weights become DTensors on the ``tp`` axis, so that sharding, norms and checkpoints know the whole; activations are
plain local tensors. A block's forward is its own traced graph, rewritten; the embedding and the head keep their own
forward and see a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from copy import copy
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx import GraphModule

from ahp.graph.capture import Capture, TensorLike, capture, tensor_leaves, weights_of
from ahp.graph.copies import copy_without_memory, left_as_it_was
from ahp.graph.likeness import Values
from ahp.graph.outline import block_input
from ahp.runtime.compute.fp8 import Fp8, InGraph
from ahp.runtime.experts.router_outputs import Collect, WithRouterOutputs
from ahp.runtime.experts.sliced_experts import ExpertsPlaceholder, leave_out, splits_of_experts
from ahp.runtime.tensor.collectives import cut_segments, cut_sequence, gather_sequence, sum_gradient, sum_over_ranks
from ahp.runtime.tensor.rewrite import rewrite
from ahp.runtime.torch_compat import forget_own_hooks, outside_modes, pytree, refuse_outside
from ahp.search.slicing.model import ModelSlicing
from ahp.search.slicing.placement import Placement, Split
from ahp.search.slicing.solve import LAST_RESORT, SPARING, Slicing, solve


def slice_module(
    module: nn.Module,
    slicing: ModelSlicing,
    layers: dict[int, nn.Module],
    tp: DeviceMesh,
    context_degree: int = 1,
    experts: tuple[str, ...] = (),
    fp8: Fp8 | None = None,
) -> dict[str, Split]:
    """Slice, in place, the given layers (number -> block of ``module``) and the modules split by vocabulary.

    ``context_degree``: into how many parts sequences are cut; blocks get one part, but masks of the whole sequence.
    ``experts``: paths in ``module`` of modules that are to be divided over other ranks too. Their parameters are left as they
    are, and the graph calls the modules themselves.
    ``fp8``: how the blocks compute their linear layers in 8 bits, None = they do not.
    Returns how every sliced parameter was cut, keyed by its name in ``module``; for experts, how it is to be cut.
    """
    cuts: dict[str, Split] = {}
    replaced: dict[int, nn.Parameter] = {}
    programs: dict[int, dict[Any, Any]] = {}
    of_experts: dict[tuple[int, str], dict[str, Split]] = {}
    called: dict[tuple[int, str], ExpertsPlaceholder] = {}
    for number, block in layers.items():
        kind = slicing.outline.kinds[number]
        solution = slicing.blocks[kind]
        prefix = f"{slicing.outline.blocks_path}.{number}."
        template = meta_copy(block)
        in_graph = None if fp8 is None else InGraph(fp8, template)
        inside = {path.removeprefix(prefix) for path in experts if path.startswith(prefix)}
        buffers = {name for name, _ in block.named_buffers()}
        for name, split in _splits(solution.weights):
            if name.rpartition(".")[0] not in inside and name not in buffers:
                replace_parameter(block, name, (split,), tp, replaced)
                cuts[prefix + name] = split
        for path in inside:
            if (kind, path) not in of_experts:
                stacks, width = template.get_submodule(path), slicing.outline.hidden.shape[-1]
                of_experts[kind, path] = splits_of_experts(stacks, path, solution, width, tp.size())
            splits = of_experts[kind, path]
            leave_out(template, path, is_summand=bool(splits))
            cuts.update({f"{prefix}{path}.{name}": split for name, split in splits.items()})
        run = SlicedForward(
            block, template, solution, tp.get_group(), programs.setdefault(kind, {}), context_degree, in_graph
        )
        run.experts = {
            path: (called.setdefault((kind, path), ExpertsPlaceholder()), block.get_submodule(path)) for path in inside
        }
        block.forward = run  # type: ignore[method-assign]
        if slicing.sequence_parallel:
            run.split_sequence(first=number == 0, last=number == slicing.outline.num_layers - 1)
    for path in slicing.vocabulary:
        part = dict(module.named_modules()).get(path)
        if part is None or not any(True for _ in part.parameters(recurse=False)):  # lives on another stage
            continue
        for name, parameter in list(part.named_parameters(recurse=False)):
            split = Split(0, (parameter.shape[0],))
            replace_parameter(part, name, (split,), tp, replaced)
            cuts[f"{path}.{name}"] = split
        local = _embed if isinstance(part, nn.Embedding) else _project
        part.forward = _bound(local, part, type(part).forward, tp.get_group())  # type: ignore[method-assign]
    _replace_twins(module, replaced)
    return cuts


def _splits(placed: dict[str, Placement]) -> Iterator[tuple[str, Split]]:
    for name, placement in placed.items():
        if isinstance(placement, Split):
            yield name, placement


def replace_parameter(
    module: nn.Module, name: str, splits: tuple[Split, ...], mesh: DeviceMesh, replaced: dict[int, nn.Parameter]
) -> None:
    """Put this rank's part in the place of a parameter; tied parameters stay tied. ``splits``: one for each axis of ``mesh``."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    whole = owner._parameters[leaf]
    assert whole is not None
    if isinstance(whole, DTensor):  # replaced already, under another name
        return
    if id(whole) not in replaced:
        local = whole.detach()
        for axis, split in enumerate(splits):
            local = cut_segments(local, split.dim, split.segments, mesh.size(axis), mesh.get_local_rank(axis))
        part = DTensor.from_local(
            local.clone(),
            mesh,
            [Shard(split.dim) for split in splits],
            run_check=False,
            shape=whole.shape,
            stride=whole.detach().contiguous().stride(),
        )
        replaced[id(whole)] = nn.Parameter(part, whole.requires_grad)
    owner._parameters[leaf] = replaced[id(whole)]


def _replace_twins(module: nn.Module, replaced: dict[int, nn.Parameter]) -> None:
    """Put the same part wherever else a replaced parameter is registered (BERT's output bias)."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor) and id(parameter) in replaced:
                owner._parameters[name] = replaced[id(parameter)]


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy without memory. The module's own hooks are left out: they run around the forward that is made from the copy. Hooks on its
    submodules are a part of that forward."""
    copied = copy_without_memory(module)
    forget_own_hooks(copied)
    return copied


class SlicedForward:
    """Runs a block's rewritten graph on this rank's weights; traces again for arguments of another shape.

    With sequence parallelism it takes and returns this rank's part of the hidden states [batch, sequence / ranks, hidden];
    the first block is given the whole and the last returns the whole.
    """

    def __init__(
        self,
        block: nn.Module,
        template: nn.Module,
        solution: Slicing,
        group: dist.ProcessGroup,
        programs: dict[Any, Any],
        context_degree: int,
        fp8: InGraph | None,
    ) -> None:
        self.block, self.template, self.solution, self.group, self.programs = block, template, solution, group, programs
        self.context_degree, self.fp8 = context_degree, fp8
        buffers = {name for name, _ in block.named_buffers()}
        self.parts_of_buffers = {name: split for name, split in _splits(solution.weights) if name in buffers}
        self.in_parts = self.first = self.last = False
        self.compiler: Callable[[GraphModule], Callable[..., Any]] | None = None
        """Compiles the graph; None = it runs as it is."""
        self.experts: dict[str, tuple[ExpertsPlaceholder, nn.Module]] = {}
        """Modules of experts that the graph calls, keyed by path in the block, each with its placeholder in the graph."""
        self.collect: Collect | None = None
        self.places: dict[str, tuple[dict[str, Any], str]] = {}
        """For each weight, the dict of its module that holds it, and its name there; looked up at the first call."""
        self.parts = list(block.modules())

    def split_sequence(self, *, first: bool, last: bool) -> None:
        """Work on parts of the sequence. ``first``, ``last``: whether this is the model's first or last block."""
        self.in_parts, self.first, self.last = True, first, last

    def collect_router_outputs(self, outputs: dict[str, int], collect: Collect) -> None:
        """Hand what routers of the block return to ``collect`` at each call: the rewritten graph does not call the modules.

        ``outputs``: path of a router in the block -> which of its outputs, if it has several.
        """
        self.collect = collect
        self.template.forward = WithRouterOutputs(self.template, outputs)  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.in_parts:
            return self._run(args, kwargs)
        if self.first:
            args, kwargs = with_block_input(args, kwargs, cut_sequence(block_input(args, kwargs), self.group))
        out = self._run(args, kwargs)
        if not self.last:
            return out
        return (
            (gather_sequence(out[0], self.group), *out[1:])
            if isinstance(out, tuple)
            else gather_sequence(out, self.group)
        )

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weights = self._weights()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        activations = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key = self._key(leaves, spec, next(iter(weights.values())).dtype)
        if key not in self.programs:
            with outside_modes():
                self.programs[key] = self._program(args, kwargs, weights)
        program, output_spec = self.programs[key]
        for called, module in self.experts.values():
            called.module = module
        local = [self._local(name, w) for name, w in weights.items()]
        out = pytree.tree_unflatten(program(local, activations), output_spec)
        if self.collect is None:
            return out
        for collected in out[1]:
            self.collect(collected)
        return out[0]

    def _local(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part. Buffers stay whole, because the model may read them elsewhere, and are cut at each use."""
        if isinstance(weight, DTensor):
            return weight.to_local()
        if name in self.parts_of_buffers:
            split = self.parts_of_buffers[name]
            return cut_segments(weight, split.dim, split.segments, self.group.size(), self.group.rank())
        return weight

    def _weights(self) -> dict[str, torch.Tensor]:
        """``weights_of`` the block, without a walk through its modules at each call: FSDP2 puts other tensors in the same places."""
        if not self.places:
            modules = dict(self.block.named_modules(remove_duplicate=False))
            for name in weights_of(self.block):
                path, _, leaf = name.rpartition(".")
                owner = modules[path]
                self.places[name] = owner._parameters if leaf in owner._parameters else owner._buffers, leaf
        return {name: owner[leaf] for name, (owner, leaf) in self.places.items()}  # type: ignore[misc]

    def _key(self, leaves: list[Any], spec: pytree.TreeSpec, dtype: torch.dtype) -> Any:
        """What a program depends on."""
        modes = tuple(part.training for part in self.parts), torch.is_grad_enabled()
        return tuple(_fact(leaf) for leaf in leaves), spec, modes, dtype, self.compiler

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
        captured, solution = self._solved(args, kwargs, weights)
        experts = {path: called for path, (called, _) in self.experts.items()}
        program = rewrite(captured, solution, self.group, experts, self.fp8)
        return self.compiler(program) if self.compiler else program, captured.output_spec

    def _solved(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], weights: dict[str, torch.Tensor]
    ) -> tuple[Capture, Slicing]:
        for copied, part in zip(self.template.modules(), self.parts, strict=True):
            copied.training = part.training
        shapes = {n: TensorLike(tuple(w.shape), w.dtype, w.device, w.requires_grad) for n, w in weights.items()}
        hidden, permission = None, self.solution.permission
        if self.in_parts:
            args, kwargs, hidden = self._whole_sequence(args, kwargs)
            # The permission the block had before its tokens were split, which decided where the parts of weights lie.
            permission = LAST_RESORT if permission.gathers_weights else SPARING
        if self.context_degree > 1:
            args, kwargs = self._masks_of_own_tokens(args, kwargs)
        args, kwargs = pytree.tree_map(_own_copy, (args, kwargs))
        with left_as_it_was(self.template):  # a table that it makes once is of this trace alone
            captured = capture(self.template, args, kwargs, shapes)
        pinned = {name: placement for name, placement in self.solution.weights.items() if name in captured.names}
        return captured, solve(captured, self.group.size(), pinned, hidden=hidden, permission=permission)

    def _whole_sequence(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """The arguments with hidden states of the whole shape and no memory, and their index among the activations."""
        part = block_input(args, kwargs)
        number = next(i for i, leaf in enumerate(tensor_leaves(args, kwargs)) if leaf is part)
        batch, sequence, *rest = part.shape
        whole = part.new_zeros(()).expand(batch, sequence * self.group.size(), *rest)
        return *with_block_input(args, kwargs, whole.detach().requires_grad_(part.requires_grad)), number

    def _masks_of_own_tokens(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with masks of this rank's tokens only and no memory: attention is traced with those, and runs with whole masks."""
        own = block_input(args, kwargs).shape[1]
        whole = own * self.context_degree

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
                return leaf
            rows, keys = leaf.shape[-2:]
            if keys != whole or rows not in (1, whole):  # a rotary table may be as wide as the sequence is long
                return leaf
            shape = [own if size == whole and dim >= leaf.dim() - 2 else size for dim, size in enumerate(leaf.shape)]
            return leaf.detach().new_zeros(()).expand(shape).requires_grad_(leaf.requires_grad)

        return pytree.tree_map(part, (args, kwargs))


def _own_copy(leaf: Any) -> Any:
    """A mapping's copy, so that results of a trace do not stay in that of the model."""
    return copy(leaf) if isinstance(leaf, MutableMapping) else leaf


def _fact(leaf: Any) -> Any:
    """What a graph depends on in an argument, as a part of a dict key."""
    if isinstance(leaf, torch.Tensor):
        # A gradient that is not needed is not summed: the first block's input needs none if embeddings are frozen.
        return leaf.shape, leaf.dtype, leaf.requires_grad
    # With the type, because 1, 1.0 and True are one key; a model's own object by its content, which may have changed.
    return (type(leaf), leaf) if isinstance(leaf, (bool, int, float, str, NoneType)) else Values().of(leaf)


def with_block_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block's call with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def _bound(
    local: Callable[..., Any], module: nn.Module, forward: Callable[..., Any], group: dist.ProcessGroup
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return local(module, forward, group, *args, **kwargs)

    return run


def _embed(
    module: nn.Embedding, forward: Callable[..., Any], group: dist.ProcessGroup, ids: torch.Tensor
) -> torch.Tensor:
    """Each rank looks up the tokens of its rows; the sum over ranks is the whole embedding."""
    padding = module.padding_idx
    with local_weights(module) as rows:
        first = group.rank() * rows
        refuse_outside(ids, group.size() * rows)
        elsewhere = (ids < first) | (ids >= first + rows)
        try:
            # the padding row, which gets no gradient, is counted from this rank's first row, as the ids are
            module.padding_idx = padding - first if padding is not None and first <= padding < first + rows else None
            out = forward(module, (ids - first).masked_fill(elsewhere, 0))
        finally:
            module.padding_idx = padding
    return sum_over_ranks(out.masked_fill(elsewhere.unsqueeze(-1), 0), group)


def _project(module: nn.Linear, forward: Callable[..., Any], group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """Each rank computes the logits of its rows of the vocabulary; they are not gathered."""
    with local_weights(module):
        return forward(module, sum_gradient(x, group))


@contextmanager
def local_weights(module: nn.Module) -> Iterator[int]:
    """Within, the module's own parameters are this rank's plain tensors; yields their number of rows."""
    whole = dict(module._parameters)
    rows = 0
    try:
        for name, parameter in whole.items():
            if parameter is not None:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                rows = local.shape[0]
                del module._parameters[name]
                module.__dict__[name] = local
        yield rows
    finally:
        for name, parameter in whole.items():
            module.__dict__.pop(name, None)
            module._parameters[name] = parameter
