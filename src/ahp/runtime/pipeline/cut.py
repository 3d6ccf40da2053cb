"""Cut an unmodified model into pipeline stages at its blocks.

Every stage runs the model's own forward, with the modules of other stages replaced: modules before the blocks return
zeros, earlier blocks return their input, the last of them returns what was received, later blocks stop the forward. So the
model's own code makes masks, positions and rotary tables, and no model family needs code here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.call import Documents, call_model, logits_of
from ahp.graph.capture import tensor_leaves
from ahp.graph.copies import plain_tensors
from ahp.graph.outline import Outline, block_input
from ahp.runtime.experts.balance_loss import Routers
from ahp.runtime.parameters import our_call
from ahp.runtime.pipeline.borders import Border
from ahp.runtime.pipeline.weight_gradients import Deferring, WeightGradients
from ahp.runtime.shard.block_calls import BlockCalls, named
from ahp.runtime.shard.ends import GatheredOnce
from ahp.runtime.transformers_compat import consecutive_positions


class Stage(nn.Module):
    """One stage: ``forward(x, **inputs)`` takes hidden states (token ids on the first stage) and returns hidden
    states (logits on the last). ``inputs``: the model's own inputs for the same rows: ``input_ids``, and ``position_ids`` if the job
    masks documents.

    With ``routers``, when gradients are computed, it also takes and returns the sums of the balance loss.
    """

    def __init__(self, model: nn.Module, receive: StageInput | None) -> None:
        super().__init__()
        self.model = model
        self.receive = [receive] if receive is not None else []  # in a list, so as not to register a submodule twice
        self.later: WeightGradients | None = None
        """Holds deferred weight gradients under a schedule that splits the backward."""
        self.routers: Routers | None = None
        self.head: GatheredOnce | None = None
        """Wraps the head if it runs on a few tokens at a time."""
        self.documents: Documents | None = None
        """How the model learns which tokens are one document, if the job masks documents."""
        self.before: Border | None = None
        self.after: Border | None = None
        """Set if the neighboring stage has another width: ``forward`` then takes, or returns, pieces of hidden states."""
        self.calls: BlockCalls | None = None
        """Set if the blocks are units of FSDP2."""
        self.after_blocks = ExitStack()
        """Holds contexts that the last block enters for the rest of the forward."""

    def forward_context(self) -> AbstractContextManager[object]:
        """The context that the model's forward runs in, also when it runs again for backward."""
        return nullcontext() if self.later is None else Deferring(self.later)

    def forward(self, x: torch.Tensor, *earlier: torch.Tensor, **inputs: torch.Tensor) -> Any:
        if self.before is not None:
            x, earlier = self.before.join((x, *earlier)), ()
        output = self._forward(x, earlier, inputs)
        return output if self.after is None else self.after.split(output)

    def _forward(self, x: torch.Tensor, earlier: tuple[torch.Tensor, ...], inputs: dict[str, torch.Tensor]) -> Any:
        if self.routers is None or not torch.is_grad_enabled():
            return self._run(x, inputs)
        self.routers.begin()
        output = self._run(x, inputs)
        start = earlier[0] if earlier else self.routers.balance.nothing(x.device)
        return output, self.routers.end(start)

    def _run(self, x: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.receive:
            self.receive[0].value = x
        numbered_by_model = nullcontext() if "position_ids" in inputs else consecutive_positions()
        try:
            with self.forward_context(), numbered_by_model, self.after_blocks:
                run = named if self.calls is None else self.calls.run
                return run(lambda: self._logits(inputs))
        except StopForward as stop:
            return stop.hidden
        finally:
            if self.receive:
                self.receive[0].value = None

    def _logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with our_call():
            return logits_of(call_model(self.model, **inputs, documents=self.documents))


class StopForward(BaseException):
    """Leaves the model's forward where the next stage takes over. Not an Exception: model code must not catch it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class PassThrough(nn.Module):
    """Replaces a block of an earlier stage: returns its input."""

    def __init__(self, output: str, num_outputs: int) -> None:
        super().__init__()
        self.output, self.num_outputs = output, num_outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_block(block_input(args, kwargs))

    def _as_block(self, hidden: torch.Tensor) -> Any:
        return (hidden, *[None] * (self.num_outputs - 1)) if self.output == "tuple" else hidden


class StageInput(PassThrough):
    """Replaces the last block of the earlier stages: returns what came from the previous stage."""

    def __init__(self, output: str, num_outputs: int) -> None:
        super().__init__(output, num_outputs)
        self.value: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.value is not None
        return self._as_block(self.value)


class Stop(nn.Module):
    """Replaces the blocks of later stages: ends the forward, with hidden states of the type and order in memory that the next stage receives."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.sent = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StopForward(block_input(args, kwargs).to(self.sent).contiguous())


class ZeroEmbedding(nn.Module):
    """Replaces a module before the blocks on a later stage: returns zeros of the right shape, one expanded element unless the
    model writes into them."""

    def __init__(self, width: int | None, dtype: torch.dtype, *, written: bool) -> None:
        super().__init__()
        self.width, self.dtype, self.written = width, dtype, written
        self.weight = torch.empty((0, width or 0), dtype=dtype)
        """Has no rows; a model may ask its embedding for the device. Neither parameter nor buffer: those would be filled, summed and saved."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ZeroEmbedding:
        self.weight = fn(self.weight)
        return super()._apply(fn, recurse)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = tensor_leaves(args, kwargs)
        x = given[0]
        if (
            self.width is not None
        ):  # row numbers of a table are [batch, sequence] at most; OPT's is given a mask of documents first
            x = next((tensor for tensor in given if tensor.dim() <= 2), x)
        shape = x.shape if self.width is None else (*x.shape, self.width)
        if self.written:
            return torch.zeros(shape, dtype=self.dtype, device=x.device)
        return torch.zeros((), dtype=self.dtype, device=x.device).expand(shape)


def cut(module: nn.Module, found: Outline, layers: range, dtype: torch.dtype) -> Stage:
    """The stage with the blocks numbered ``layers``; its parameters are those of ``module``, not copies.

    Buffers outside the blocks are copied, because each stage writes its own. ``dtype``: of the hidden states. Raises BadInput if
    the model does more between its blocks than pass hidden states on."""
    if found.uncuttable is not None:
        raise BadInput(f"{found.uncuttable}, so it cannot be cut into stages")
    first, last = layers.start == 0, layers.stop == found.num_layers
    memo: dict[int, Any] = {id(p): p for p in module.parameters()} | plain_tensors(module)
    # deepcopy of a fake tensor asks for its address, and torch warns that it has none.
    memo.update({id(b): b.detach().clone() for b in module.buffers()})
    memo.update({id(b): b for b in module.get_submodule(found.blocks_path).buffers()})
    model = copy.deepcopy(module, memo)
    blocks = model.get_submodule(found.blocks_path)
    shape = found.block_output, found.num_outputs
    receive = StageInput(*shape) if not first else None
    for number in range(found.num_layers):
        if number < layers.start:
            _stand_in(blocks, number, receive if receive and number == layers.start - 1 else PassThrough(*shape))
        elif number >= layers.stop:
            _stand_in(blocks, number, Stop(found.hidden.dtype))
    if not first and not found.shares_inputs:
        for path in separate(found.before, found.blocks_path):
            if path in found.read_early or (last and path in found.read_after):
                continue
            nothing = zeros_for(model.get_submodule(path), dtype, written=path in found.written)
            if nothing is not None:
                _put(model, path, nothing)
    if not last:
        for path in separate(found.after, found.blocks_path):
            if path not in found.read_early:
                _put(model, path, nn.Identity())
    return Stage(model, receive)


def _stand_in(blocks: nn.Module, number: int, module: PassThrough | Stop) -> None:
    name = str(number)
    blocks._modules[name] = stand_in_for(blocks.get_submodule(name), module)


def stand_in_for(block: nn.Module, module: PassThrough | Stop) -> nn.Module:
    """``module`` with the plain attributes that the model may ask the block for."""
    for key, value in vars(block).items():
        if isinstance(value, (str, int, float)) and not hasattr(module, key):
            setattr(module, key, value)
    return module


def separate(paths: tuple[str, ...], blocks_path: str) -> list[str]:
    """Modules that can be taken out: not those that contain the blocks (their own parameters stay on every stage)."""
    return [path for path in paths if path and not blocks_path.startswith(f"{path}.")]


def zeros_for(module: nn.Module, dtype: torch.dtype, *, written: bool) -> nn.Module | None:
    """The stand-in for a module before the blocks; None if its class does not tell the shape of its output: then it stays
    on every stage, where its work is wasted but correct. ``written``: whether the model writes into what it returns."""
    if isinstance(module, nn.Embedding):
        return ZeroEmbedding(module.embedding_dim, dtype, written=written)
    if isinstance(module, nn.LayerNorm) or "Norm" in type(module).__name__:
        return ZeroEmbedding(None, dtype, written=written)
    return None


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    model.get_submodule(parent)._modules[leaf] = module
