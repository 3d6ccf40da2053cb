"""Computes the loss of a large vocabulary in chunks: logits and their gradient exist for a few tokens at a time.

The model's forward ends at its last block. The model's own code then runs what comes after the blocks (norm, head, scaling,
soft cap) on a few tokens, with stand-ins for everything before, so no model family needs code here. The gradient of a chunk
is computed at once, while its logits exist: nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ahp.errors import BadInput
from ahp.forecast.chunked_head import chunks
from ahp.graph.call import call_model, logits_of
from ahp.graph.outline import Outline
from ahp.runtime.parameters import our_call
from ahp.runtime.pipeline.cut import PassThrough, StageInput, StopForward, separate, stand_in_for, zeros_for
from ahp.runtime.shard.block_calls import named
from ahp.runtime.shard.ends import GatheredOnce
from ahp.runtime.torch_compat import like_distributed, local_tensor

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [batch, sequence, vocabulary], targets [batch, sequence]) -> their loss, a scalar that adds up over tokens."""


class Tail:
    """The part of a model after its blocks, which treats each token by itself."""

    def __init__(
        self,
        model: nn.Module,
        found: Outline,
        dtype: torch.dtype,
        chunk_tokens: int,
        head: GatheredOnce | None = None,
    ) -> None:
        """``model``: of the last stage, ready to run; from now on its forward returns only hidden states, of ``dtype``. ``head``: the
        wrapper to call around its head, if any."""
        self.model, self.chunk_tokens, self.head = model, chunk_tokens, head
        self.blocks = model.get_submodule(found.blocks_path)
        inside = {id(module) for module in self.blocks.modules()}
        self.outside = [module for module in model.modules() if id(module) not in inside]
        shape = found.block_output, found.num_outputs
        self.received = StageInput(*shape)
        *earlier, last = self.blocks._modules.items()
        self.stand_ins = {name: stand_in_for(_module(block), PassThrough(*shape)) for name, block in earlier}
        self.stand_ins[last[0]] = stand_in_for(_module(last[1]), self.received)
        zeros = {} if found.shares_inputs else dict(_zero_embeddings(model, found, dtype))
        self.zero_embeddings = [
            (parent._modules, name, child, zeros[child])
            for parent in self.outside
            for name, child in parent._modules.items()
            if child in zeros
        ]
        _module(last[1]).register_forward_hook(_stop)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor, score: Score) -> torch.Tensor:
        """The sum of ``score`` over all chunks of ``hidden`` [batch, sequence, hidden]; ``targets`` int64 [batch, sequence]."""

        def of_chunk(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return score(self._logits(x), wanted)

        def of_all(x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                return _Chunked.apply(x, targets, self.chunk_tokens, of_chunk, *self._weights())  # type: ignore[no-any-return]
            parts = chunks(targets.shape[0], targets.shape[1], self.chunk_tokens)
            return torch.stack([of_chunk(x[part], targets[part]) for part in parts]).sum()

        with self._alone():
            return of_all(hidden) if self.head is None else self.head(hidden, of_all)  # type: ignore[no-any-return]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.received.value = hidden
        try:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
            with our_call():
                logits = named(lambda: logits_of(call_model(self.model, ids)))
        finally:
            self.received.value = None
        if logits.shape[:2] != hidden.shape[:2]:
            raise BadInput(
                f"engine.loss_chunk_tokens = {self.chunk_tokens}: of hidden states {list(hidden.shape)} this model makes logits "
                f"{list(logits.shape)}, so it cannot be computed in chunks of tokens (valid: null)"
            )
        return logits

    def _weights(self) -> list[nn.Parameter]:
        """The trainable parameters outside of the blocks, looked up now: FSDP2 puts other tensors in their place."""
        found = (p for module in self.outside for p in module._parameters.values() if p is not None and p.requires_grad)
        return list({id(p): p for p in found}.values())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within, blocks return their input, the last one what was received, and embeddings return zeros."""
        blocks = dict(self.blocks._modules)
        self.blocks._modules.update(self.stand_ins)
        for siblings, name, _, nothing in self.zero_embeddings:
            siblings[name] = nothing
        try:
            yield
        finally:
            self.blocks._modules.update(blocks)
            for siblings, name, module, _ in self.zero_embeddings:
                siblings[name] = module


class _Chunked(torch.autograd.Function):
    """The sum of ``of_chunk`` over chunks. Gradients are made in the forward pass and handed out in the backward pass.

    Gradients of weights are added up in fp32, however few bits a chunk's own gradient has.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        chunk_tokens: int,
        of_chunk: Score,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden: torch.Tensor | None = None
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        in_place = _SummedInPlace(weights)
        for part in chunks(targets.shape[0], targets.shape[1], chunk_tokens):
            x = hidden[part].detach().requires_grad_()
            with torch.enable_grad(), in_place:
                loss = of_chunk(x, targets[part])
            of_x, *found = torch.autograd.grad(loss, (x, *weights), allow_unused=True)
            if of_x is not None:  # as for each chunk, unless the model detaches what it gives to its head
                of_hidden = torch.empty_like(hidden) if of_hidden is None else of_hidden
                of_hidden[part] = of_x
            for i, gradient in enumerate(found):
                of_weights[i] = _added(of_weights[i], gradient)
            total += loss.detach()
        for i, weight in enumerate(weights):
            of_weights[i] = _added(in_place.sums.get(id(weight)), of_weights[i])
        ctx.gradients, ctx.weights = (of_hidden, of_weights), weights
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_hidden, of_weights), ctx.gradients = ctx.gradients, None
        scaled = [
            None if found is None else like_distributed(found.mul_(gradients[0]).to(weight.dtype), weight)
            for found, weight in zip(of_weights, ctx.weights, strict=True)
        ]
        return None if of_hidden is None else of_hidden.mul_(gradients[0]), None, None, None, *scaled


class _SummedInPlace(TorchFunctionMode):
    """Within, the backward of a product with one of the weights adds to the sum of that weight's gradients in place. This saves a tensor
    of the head's size for each chunk, and its reading and writing.

    For fp32 weights only: torch adds products of 16 bits up in fp32 on GPUs only, from 2.8 on.
    """

    def __init__(self, weights: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        plain = (torch.Tensor, nn.Parameter)
        self.weights = {id(w) for w in weights if type(w) in plain and w.dtype == torch.float32}
        self.sums: dict[int, torch.Tensor] = {}
        """Keyed by ``id`` of the weight, which the function that uses the sums keeps alive."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # of a product with an input that is detached, ``_Linear`` would get no backward
        adds = func is F.linear and not kwargs and id(args[1]) in self.weights
        if adds and args[0].dtype == torch.float32 and args[0].requires_grad:
            x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
            if id(weight) not in self.sums:
                self.sums[id(weight)] = torch.zeros_like(weight)
            return _Linear.apply(x, weight.detach(), bias, self.sums[id(weight)])
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """``linear`` of x [..., in], weight [out, in], bias [out]; in backward the weight's gradient is added to ``of_weight`` [out, in]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, of_weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.of_weight = of_weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        ctx.of_weight.addmm_(gradient.t(), x.flatten(0, -2))
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return gradients[0] @ weight, None, of_bias, None


def _added(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return total
    local = local_tensor(gradient)
    return local.to(torch.float32, copy=True) if total is None else total.add_(local)


def _zero_embeddings(model: nn.Module, found: Outline, dtype: torch.dtype) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Modules before the blocks, each with a stand-in that returns zeros; a later stage has such stand-ins already."""
    modules = dict(model.named_modules())
    for path in separate(found.before, found.blocks_path):
        if path not in modules or path in found.read_early | found.read_after:
            continue
        if (nothing := zeros_for(modules[path], dtype, written=path in found.written)) is not None:
            yield modules[path], nothing


def _module(block: nn.Module | None) -> nn.Module:
    assert block is not None
    return block


def _stop(module: nn.Module, args: Any, output: Any) -> None:
    raise StopForward(output[0] if isinstance(output, tuple) else output)
