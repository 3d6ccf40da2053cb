"""The outline of a model: what runs before its blocks, the blocks, what runs after them, and where the logits come from.

Found by running the model's own forward once on fake tensors, so no family of models is known by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ahp.errors import BadInput
from ahp.graph.blocks import Stack, counting_keys, find_blocks
from ahp.graph.call import Documents, call_model, logits_of
from ahp.graph.capture import Capture, TensorLike, capture, tensor_leaves
from ahp.graph.changed_arguments import ChangedArguments
from ahp.graph.copies import fake_copy
from ahp.graph.effects import Draws, NotInGraph, in_graph_alone
from ahp.graph.experts import Watch
from ahp.graph.fake_mode import DEPENDS_ON_VALUES, NeedsValues, as_on_data
from ahp.graph.fake_run import others_pass_on, train_whole
from ahp.graph.flow import BEFORE, Flow, Recompute
from ahp.graph.host_numbers import Generators
from ahp.graph.likeness import ModulesUsed, watched
from ahp.graph.operators import other_dims
from ahp.graph.torch_compat import FakeTensorMode, pytree
from ahp.graph.two_types import is_of_two_types
from ahp.graph.weight_reads import WeightReads

OF_OPERATORS = "GeneratedBackwardFor_"
"""torch's name for the backward of a registered operator begins so; the operator has that backward wherever it runs."""

AS_TRACED = ("GeLUFunction",)
"""Functions (of BLOOM) whose backward is the derivative of their forward, so that the traced forward has the same backward."""


@dataclass(frozen=True)
class Outline:
    """Names are paths of submodules. Modules count when they hold parameters of their own and lie outside the blocks."""

    blocks_path: str
    kinds: tuple[int, ...]
    """``kinds[i]``: the kind of block ``i``; blocks of one kind are alike."""
    before: tuple[str, ...]
    """Modules that ran before the first block, in order."""
    after: tuple[str, ...]
    """Modules that ran after the last block, in order."""
    token_embedding: str | None
    """The embedding of the token ids, if it holds nothing except its rows."""
    head: str | None
    """The linear module whose output is the logits; None when there is no such module, or it holds more than its rows."""
    hidden: TensorLike
    """The hidden states between blocks, for the batch and sequence that were traced; their type may be another before the first."""
    logits: TensorLike
    block_output: str
    """``tensor`` or ``tuple``: whether a block returns its hidden states bare or first in a tuple."""
    num_outputs: int
    """Length of the tuple that a block returns; 1 if it returns a bare tensor."""
    shares_inputs: bool
    """Whether blocks read, besides the hidden states, trainable tensors or results from before the blocks (a table of relative positions,
    the embeddings once more): whatever makes these must be on every stage."""
    uncuttable: str | None
    """Why the model cannot be cut between its blocks, None when it can."""
    written: frozenset[str]
    """Modules before the blocks whose output the model writes into (CTRL scales its embeddings in place)."""
    read_early: frozenset[str]
    """Modules outside of the blocks whose weights are read before or in the blocks, and not by the modules: every stage needs them."""
    read_after: frozenset[str]
    """Those whose weights are read so after the blocks (a head that is ``x @ embedding.weight.T``): the last stage needs them."""
    own_backward: str | None
    """A function up to the last block with a backward of its own, which a graph of the forward alone lacks; None = there is none."""
    captures: tuple[Capture | BadInput, ...] = field(repr=False)
    """For each kind of block, its forward graph, or why it cannot be traced."""
    changes: str | None = None
    """The block that changes an object which the model passes to it, if there is one: neither its graph nor a stand-in for it does that."""
    reads_unseen: str | None = None
    """The block that reads an activation, or another module's weight, which is not among its arguments, if there is one: its graph has no
    input for it."""
    reads_blocks: str | None = None
    """The weight of a block that is read outside of the block, if there is one."""
    reads_beside: bool = False
    """Whether the model computes with what its blocks return besides their hidden states."""
    experts: tuple[str, ...] = ()
    """Modules of the blocks that hold a mixture's experts (``ahp.graph.experts``)."""
    recomputes: frozenset[Recompute] = frozenset()
    keeps: str | None = None
    """A weight that code keeps apart from ``self`` (a closure, a weak reference), in words: copies of the module compute with the module's own."""
    blocks_keep: str | None = None
    """The same of a weight that a block computes with."""

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @property
    def other_dims(self) -> str | None:
        """A reason if hidden states are not [batch, sequence, ..] between the blocks, else None."""
        return other_dims(self.hidden.shape, self.logits.shape[:2])


def outline(
    module: nn.Module,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: torch.dtype | None = None,
    documents: Documents | None = None,
) -> Outline:
    """Run ``module(input_ids int64[batch, sequence])`` on fake tensors and record what happens.

    The module is neither changed nor copied into memory; it can be on the meta device. ``dtype`` is that of the computation,
    None = that of the parameters. ``documents``: the input that says which tokens are one document, if several share a
    sequence and do not see each other. Raises BadInput when the module has no blocks or cannot run.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # a table that is no part of the module
    with mode:
        fake = fake_copy(module, dtype)
    found = find_blocks(module)  # where tensors have values
    record = _Record(fake, found.path, found.kinds())
    record.weights.watch_kept(module)
    counts = _where(fake.get_submodule(found.path), counting_keys(found.blocks))
    with watched({part: {name: vars(part)[name] for name in names} for part, names in counts.items()}) as read:
        logits = _run(record, mode, batch_size, sequence_length, documents)
    if read:
        record.kinds = found.kinds({key for part, name in read for key in counts[part][name]})
    if (reason := record.puts_others()) is not None:
        raise BadInput(
            f"model = {type(module).__name__}: {reason}, and a layout that divides blocks needs those that will run"
        )
    record.kinds = record.used.apart(record.kinds)
    return record.outline(logits, mode)


def _where(blocks: nn.Module, keys: set[str]) -> dict[nn.Module, dict[str, list[str]]]:
    """{module: {attribute: keys}} for the modules of the blocks: a module can occur in several places and so under several keys."""
    found: dict[nn.Module, dict[str, list[str]]] = {}
    for block in blocks.children():
        for path, part in block.named_modules():
            for key in keys:
                at, _, name = key.rpartition(".")
                if at == path and name in vars(part):
                    found.setdefault(part, {}).setdefault(name, []).append(key)
    return found


def _run(
    record: _Record, mode: Any, batch_size: int, sequence_length: int, documents: Documents | None
) -> torch.Tensor:
    """Run the recorded copy, in training, as every layout does; its logits. Ranks draw the same numbers, so that all refuse alike."""
    train_whole(record.fake)
    with (
        as_on_data(record.fake, document_mask=documents is not None),
        mode,
        torch.enable_grad(),
        record.flow,
        Generators(record.fake).seeded(0),
    ):
        input_ids = torch.zeros((batch_size, sequence_length), dtype=torch.int64)
        position_ids = torch.zeros_like(input_ids) if documents else None
        record.draws.enter()
        try:
            logits = logits_of(call_model(record.fake, input_ids, position_ids, documents), input_ids)
            record.draws.leave()
            return logits
        except (_NoHidden, BadInput):
            raise
        except Exception as error:
            if type(error).__name__ in DEPENDS_ON_VALUES:
                raise NeedsValues(type(record.fake).__name__, str(error)) from error
            rule = "its forward(input_ids) fails on fake tensors"
            if isinstance(error, RuntimeError) and is_of_two_types(error):
                rule = "it mixes an fp32 tensor, such as a buffer, with weights in 16 bits (valid: cast the tensor with .to(x.dtype); or job.precision fp32)"
            raise BadInput(f"model = {type(record.fake).__name__}: {rule}: {error}") from error


def why_uncuttable(module: nn.Module, *, sequence_length: int, documents: Documents | None = None) -> str | None:
    """``Outline.uncuttable``, faster for many layers: only the first block of each kind and the last block run, or all blocks if the model
    does not run that way. Raises BadInput like ``outline``."""
    kinds = find_blocks(module).kinds()
    first = {kinds.index(kind) for kind in range(max(kinds) + 1)}
    try:
        return _why_uncuttable(module, frozenset({*first, len(kinds) - 1}), sequence_length, documents)
    except BadInput:
        return _why_uncuttable(module, frozenset(range(len(kinds))), sequence_length, documents)


def _why_uncuttable(
    module: nn.Module, kept: frozenset[int], sequence_length: int, documents: Documents | None
) -> str | None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # a table that is no part of the module
    with mode:
        fake = fake_copy(module)
    found = find_blocks(fake)
    with others_pass_on(found, kept):
        record = _Record(fake, found.path, found.kinds())
        return record.why_uncuttable(_run(record, mode, 1, sequence_length, documents))


class _NoHidden(BadInput):
    pass


class _Record:
    """Hooks on a fake copy that record the order of its modules and the calls of its blocks."""

    def __init__(self, fake: nn.Module, blocks_path: str, kinds: tuple[int, ...]) -> None:
        self.fake, self.blocks_path, self.kinds = fake, blocks_path, kinds
        self.blocks = list(cast(Stack, fake.get_submodule(blocks_path)))
        """By place in the list: one that stands in several places goes by its first number."""
        self.calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.order: list[int] = []
        """Numbers of the blocks, in the order in which they ran."""
        self.ran: list[tuple[str, nn.Module, tuple[Any, ...], Any]] = []
        self.first_block_at: int | None = None
        self.block_output = "tensor"
        self.num_outputs = 1
        self.beside: list[torch.Tensor] = []
        """Tensors that blocks returned besides their hidden states."""
        self.versions: dict[str, int] = {}
        """How often each module's output had been written to when the module returned it."""
        self.last_output: torch.Tensor | None = None
        self.outputs: list[torch.Tensor] = []
        """Outputs of the blocks, in the order in which they ran."""
        self.last_version = 0
        """The version of the last block's output when the block returned it: writing in place raises it."""
        self.weights = WeightReads(fake, self.blocks)
        self.flow = Flow(self.weights, self.blocks)
        self.changed = ChangedArguments(self.flow)
        self.shared: list[torch.Tensor] | None = None
        self.uncuttable: str | None = None
        self.draws = Draws(fake)
        self.used = ModulesUsed(self.blocks)
        self.experts = Watch(fake, [f"{blocks_path}.{number}" for number in range(len(self.blocks))])
        self.inside = {m for block in self.blocks for m in block.modules()}
        for name, module in fake.named_modules():
            if module not in self.inside and next(module.parameters(recurse=False), None) is not None:
                module.register_forward_hook(self._note(name))
        for block in dict.fromkeys(self.blocks):
            block.register_forward_pre_hook(self._note_block(self.blocks.index(block)), with_kwargs=True)
            block.register_forward_hook(self._note_output)

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.ran.append((name, module, args, output))
            if self.first_block_at is None:
                self.flow.mark(tensor_leaves((output,), {}), frozenset({BEFORE}))
            if isinstance(output, torch.Tensor):
                self.versions[name] = output._version

        return hook

    def _note_block(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.first_block_at is None:
                self.first_block_at = len(self.ran)
            self.draws.leave()
            self.calls.setdefault(index, (args, kwargs))
            self.order.append(index)
            self.used.block = index
            self._look_between(index, args, kwargs)
            self.flow.enter(index, block_input(args, kwargs), tensor_leaves(args, kwargs))
            self.changed.enter(args, kwargs)

        return hook

    def _look_between(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A cut is possible when a block's output is the next one's input unchanged, and nothing else trainable passes."""
        hidden, path = block_input(args, kwargs), self.blocks_path
        given = tensor_leaves(args, kwargs)
        del given[next(i for i, x in enumerate(given) if x is hidden)]  # once: block 0 may be given them a second time
        others = [x for x in given if x.requires_grad]
        if self.shared is None:
            self.shared = others
        elif hidden is not self.last_output or hidden._version != self.last_version:
            self.uncuttable = f"the model changes the hidden states between blocks {index - 1} and {index} of {path}"
        elif len(others) != len(self.shared) or any(a is not b for a, b in zip(others, self.shared, strict=True)):
            self.uncuttable = f"block {index} of {self.blocks_path} is given trainable tensors that block 0 is not (a skip connection?)"
        elif self.flow.of(given) - {BEFORE} or any(x is earlier for x in given for earlier in self.beside):
            self.uncuttable = f"block {index} of {path} is given more of an earlier block than its hidden states"
        if index and BEFORE in self.flow.of(given):
            self.flow.reads_before = True

    def _note_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        times, places = self.order.count(self.order[-1]), self.blocks.count(module)
        self.flow.leave(last=module is self.blocks[-1] and times >= places)
        self.draws.enter()
        self.block_output = "tuple" if isinstance(output, tuple) else "tensor"
        hidden: Any = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(hidden, torch.Tensor):
            raise _NoHidden(
                f"model: its blocks return {type(hidden).__name__}; hidden states were expected, alone or first in a tuple"
            )
        self.changed.leave(self.order[-1], self.blocks_path, hidden)
        if isinstance(output, tuple):
            self.num_outputs = len(output)
            self.beside += tensor_leaves(output[1:], {})
            self.flow.watch(tensor_leaves(output[1:], {}), beside=hidden)
        self.last_output, self.last_version = hidden, hidden._version
        self.outputs.append(hidden)

    def _before(self) -> list[Any]:
        if self.first_block_at is None:
            raise BadInput(
                f"model = {type(self.fake).__name__}: its forward never calls the blocks in {self.blocks_path!r}"
            )
        return self.ran[: self.first_block_at]

    def why_uncuttable(self, logits: torch.Tensor) -> str | None:
        before = self._before()
        return (
            self.puts_others()
            or self.draws.why_uncuttable()
            or self._runs_otherwise()
            or self.uncuttable
            or self.weights.of_blocks()
            or self._reads_beside()
            or self._reads_earlier(before, logits)
        )

    def outline(self, logits: torch.Tensor, mode: FakeTensorMode) -> Outline:
        before, after = self._before(), self.ran[self.first_block_at :]
        again = {name for name, *_ in before} & {name for name, *_ in after}
        args, kwargs = next(iter(self.calls.values()))
        hidden = block_input(args, kwargs)
        return Outline(
            blocks_path=self.blocks_path,
            kinds=self.kinds,
            before=tuple(name for name, *_ in before),
            after=tuple(name for name, *_ in after if name not in again),
            token_embedding=self._token_embedding(before, logits),
            head=self._head(after, logits),
            hidden=replace(TensorLike.of(hidden), dtype=self.outputs[-1].dtype),
            logits=TensorLike.of(logits),
            block_output=self.block_output,
            num_outputs=self.num_outputs,
            shares_inputs=bool(self.shared) or self.flow.reads_before,
            uncuttable=self.why_uncuttable(logits),
            written=frozenset(
                name for name, _, _, out in before if name in self.versions and out._version > self.versions[name]
            ),
            read_early=frozenset(name for name, module, *_ in self.ran if self.weights.of(module) - {"after"}),
            read_after=frozenset(name for name, module, *_ in self.ran if "after" in self.weights.of(module)) | again,
            own_backward=_own_backward(self.outputs[-1]),
            reads_beside=self.flow.reads_watched,
            changes=self.changed.reason,
            reads_unseen=self._reads_unseen(),
            reads_blocks=self.weights.of_blocks(),
            experts=self.experts.found(),
            recomputes=frozenset(self.flow.recomputes),
            keeps=self.weights.keeps(),
            blocks_keep=self.weights.keeps(in_blocks=True),
            captures=tuple(self._capture(kind, mode) for kind in range(max(self.kinds) + 1)),
        )

    def puts_others(self) -> str | None:
        """A reason if the forward changed the blocks themselves, else None: BigBird takes another attention for short sequences."""
        if all(module in self.inside for block in self.blocks for module in block.modules()):
            return None
        return f"its forward puts other modules into the blocks of {self.blocks_path}"

    def _runs_otherwise(self) -> str | None:
        """A reason if the blocks do not run once each, in order, else None: work due at the first and last block would be done at others."""
        for index in range(len(self.blocks)):
            if (times := self.order.count(index)) != 1:
                often = "never" if times == 0 else f"{times} times"
                return f"the model runs block {index} of {self.blocks_path} {often}"
        if (early := next((i for place, i in enumerate(self.order) if i != place), None)) is not None:
            return f"the model runs block {early} of {self.blocks_path} before block {self.order.index(early)}"
        return None

    def _reads_unseen(self) -> str | None:
        if self.weights.unseen is not None:
            block, weight = self.weights.unseen
            return (
                f"block {block} of {self.blocks_path} reads {weight}, which is neither its own nor among its arguments"
            )
        if (block := self.flow.reads_unseen) is None:
            return None
        return f"block {block} of {self.blocks_path} reads a tensor that was computed before it and is not among its arguments"

    def _reads_beside(self) -> str | None:
        """A reason if a block reads what an earlier one left in a shared object or a module, else None."""
        if self.flow.reads_other is None:
            return None
        block, earlier = self.flow.reads_other
        return f"block {block} of {self.blocks_path} reads what block {earlier} left behind beside its hidden states"

    def _reads_earlier(self, before: list[Any], logits: torch.Tensor) -> str | None:
        """A reason if the logits depend on something before the last block's output other than through that output, else None."""
        if self.flow.of([logits]) - {self.order[-1]}:
            return f"what follows {self.blocks_path} reads more than the output of the last block"
        *earlier, last = self.outputs
        made = {x.grad_fn for x in (*earlier, *tensor_leaves(tuple(out for *_, out in before), {})) if x.grad_fn}
        if any(node in made for node in _nodes_behind(logits, last.grad_fn)):
            return f"what follows {self.blocks_path} reads more than the output of the last block"
        return None

    def _token_embedding(self, before: list[Any], logits: torch.Tensor) -> str | None:
        """The embedding with a row for each token; position and type embeddings have other sizes."""
        names = [
            n
            for n, m, *_ in before
            if isinstance(m, nn.Embedding) and m.num_embeddings == logits.shape[-1] and looks_up_rows(m)
        ]
        return names[0] if names and not self._read_elsewhere(names[0]) else None

    def _head(self, after: list[Any], logits: torch.Tensor) -> str | None:
        """The linear module whose output is the logits, if it does nothing else."""
        name = next((n for n, m, _, out in reversed(after) if is_head(m) and out is logits), None)
        if name is None or sum(ran == name for ran, *_ in self.ran) > 1 or self._read_elsewhere(name):
            return None
        return name if logits._version == self.versions[name] else None  # the model may write into some columns

    def _read_elsewhere(self, name: str) -> bool:
        """Whether anything else reads the weights of this module: it would get one rank's part of them."""
        return bool(self.weights.of(self.fake.get_submodule(name)))

    def _capture(self, kind: int, mode: FakeTensorMode) -> Capture | BadInput:
        number = next((i for i in self.order if self.kinds[i] == kind), self.kinds.index(kind))
        block = self.blocks[number]
        if number not in self.calls:
            return BadInput(f"block {type(block).__name__} cannot be traced: the model never runs it")
        args, kwargs = self.calls[number]
        for hooks in (block._forward_pre_hooks, block._forward_pre_hooks_with_kwargs, block._forward_hooks):
            hooks.clear()
        try:
            with mode, in_graph_alone(block):
                return capture(block, args, kwargs)
        except NotInGraph as error:
            return BadInput(f"block {type(block).__name__} {error}")
        except Exception as error:
            words = f"block {type(block).__name__} cannot be traced: {type(error).__name__}: {error}"
            return BadInput(self.changed.reason or words)


def _own_backward(hidden: torch.Tensor) -> str | None:
    for node in _nodes_behind(hidden):
        name = type(node).__name__.removesuffix("Backward")
        if isinstance(node, BackwardCFunction) and not name.startswith(OF_OPERATORS) and name not in AS_TRACED:
            return name
    return None


def _nodes_behind(tensor: torch.Tensor, end: Any = None) -> Iterator[Any]:
    """Each node of autograd's graph that ``tensor`` depends on, but not ``end`` and what is reached through it alone."""
    waiting, seen = [tensor.grad_fn], {end}
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [source for source, _ in node.next_functions]


def looks_up_rows(embedding: nn.Embedding) -> bool:
    """Whether rows are only looked up: no renormalization, no gradient that depends on the other tokens."""
    return (
        embedding.max_norm is None
        and not embedding.sparse
        and not embedding.scale_grad_by_freq
        and _has_rows_alone(embedding)
    )


def is_head(module: nn.Module) -> bool:
    """Whether it is a linear module that holds nothing except its rows."""
    return isinstance(module, nn.Linear) and _has_rows_alone(module)


def _has_rows_alone(module: nn.Module) -> bool:
    """Whether every parameter has a row for each token. A norm inside the module (Inkling's embedding) has not: a rank with some of the
    rows would have its gradient for their tokens only."""
    return {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


def block_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states that a block was called with: its first positional argument, else ``hidden_states``."""
    candidate = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(candidate, torch.Tensor) or not candidate.is_floating_point():
        kinds = [type(leaf).__name__ for leaf in pytree.tree_leaves((args, kwargs))][:4]
        raise _NoHidden(f"model: its blocks take {kinds}; hidden states were expected as the first argument")
    return candidate
