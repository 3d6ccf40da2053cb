"""Whether a model's attention can be given the starts of documents instead of a mask: kernels that work with document lengths need no
more, and no mask [sequence, sequence] takes memory.

The starts are bool [batch, 1, 1, sequence], true at the first token of each document. As a mask they would be wrong. So they are passed
only if the traced blocks prove that they arrive at every call of ``scaled_dot_product_attention``, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from ahp.errors import BadInput
from ahp.graph.blocks import find_blocks
from ahp.graph.call import Documents, Sight, call_model
from ahp.graph.capture import Capture, tensor_leaves
from ahp.graph.copies import fake_copy
from ahp.graph.document_mask import NotApart, Probe
from ahp.graph.fake_mode import as_on_data
from ahp.graph.fake_run import in_training
from ahp.graph.outline import outline
from ahp.graph.torch_compat import FakeTensorMode

BATCH = 2
LONGEST_PROBED = 4096
"""The most tokens with which a model is probed for how far they see: such a mask takes 17 MB per row. Longer windows are looked up in the config."""

WINDOWS = ("window", "local", "chunk")
"""Parts of the names that transformers' configs have for how far a token sees."""

WIDEST_HEAD, HEAD_STEP = 256, 8
"""Limits of FlashAttention (torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd)."""

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
HANDING_ON = {
    aten.slice.Tensor, aten.view.default, aten.reshape.default, aten.expand.default, aten.alias.default, aten.detach.default,
    aten.contiguous.default, aten.clone.default, aten.to.dtype, aten.to.device, aten._to_copy.default,
}  # fmt: skip
"""Operators that return the same values, if shape and type stay the same."""


@dataclass(frozen=True)
class DocumentStarts:
    """How a model is called so that its attention is given the starts of documents."""

    documents: Documents
    sights: tuple[Sight, ...]
    """For each block, how far a token sees in its document."""


def document_starts(module: nn.Module, documents: Documents, sequence_length: int) -> DocumentStarts | str:
    """How to call the model with document starts, or the reason why it needs masks. ``documents``: how it is called with masks."""
    if "attention_mask" not in inspect.signature(module.forward).parameters:
        return "its forward takes no attention_mask"
    probe = Probe(module)
    try:
        sights = probe.sights(min(sequence_length, LONGEST_PROBED))
        if not sights:
            return "a block is given no mask"
        handed = replace(documents, masks=probe.named(sights), starts=True)
        reason = (
            _lost(probe, handed) or _long_window(module, sequence_length) or _misread(module, handed, sequence_length)
        )
    except NotApart as error:
        return error.reason
    except BadInput as error:
        return str(error)
    return reason or DocumentStarts(handed, sights)


def _lost(probe: Probe, documents: Documents) -> str | None:
    """Why starts do not work: a block does not get them, or positions differ from those with masks."""
    if not probe.restarts(documents):
        return "its positions would differ from those with masks"
    given = probe.given(documents.arguments(probe.positions))
    shape = (len(probe.positions), 1, 1, probe.positions.shape[1])
    for number in range(len(probe.blocks)):
        if sum(tensor.dtype == torch.bool and tensor.shape == shape for tensor in given.get(number, [])) != 1:
            return f"block {probe.blocks.path}.{number} does not get what the model is given"
    return None


def _long_window(module: nn.Module, sequence_length: int) -> str | None:
    """A window that is too long for the probe to see, and shorter than the sequence."""
    config = getattr(module, "config", None)
    if sequence_length <= LONGEST_PROBED:
        return None
    if config is None:
        return f"how far its tokens see is looked at with up to {LONGEST_PROBED} tokens, and it has no config"
    for key, value in vars(config).items():
        named = any(word in key for word in WINDOWS)
        if named and isinstance(value, int) and LONGEST_PROBED <= value < sequence_length:
            return f"its config has {key} {value}, longer than what is looked at ({LONGEST_PROBED} tokens)"
    return None


def _misread(module: nn.Module, documents: Documents, sequence_length: int) -> str | None:
    """What a block does with the starts besides passing them unchanged to each of its attentions."""
    with in_training(module):
        if read := _read_outside(module, documents, sequence_length):
            return read
        found = outline(module, batch_size=BATCH, sequence_length=sequence_length, documents=documents)
    for captured in found.captures:
        if isinstance(captured, BadInput):
            return str(captured)
        if reason := _misread_in(captured, (BATCH, 1, 1, sequence_length)):
            return reason
    return None


def _read_outside(module: nn.Module, documents: Documents, sequence_length: int) -> str | None:
    """Attention outside the blocks, or another function there that computes numbers from the starts."""
    with FakeTensorMode():
        fake = fake_copy(module)
        outside = _Outside(find_blocks(fake).blocks)
        ids = torch.zeros(BATCH, sequence_length, dtype=torch.int64)
        with as_on_data(fake, document_mask=True), torch.no_grad(), outside:
            call_model(fake, ids, ids, documents)
    return None if outside.found is None else f"it is read outside of the blocks ({outside.found})"


class _Outside(TorchFunctionMode):
    """Watches what runs outside the blocks."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.depth = 0
        self.found: str | None = None
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: self._step(1))
            block.register_forward_hook(lambda *_: self._step(-1))

    def _step(self, further: int) -> None:
        self.depth += further

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.depth and self.found is None:
            given = [x for x in tensor_leaves(args, kwargs or {}) if x.dtype == torch.bool and x.dim() == 4]
            numbers = isinstance(out, torch.Tensor) and out.is_floating_point()
            if func is torch.nn.functional.scaled_dot_product_attention or (given and numbers):
                self.found = getattr(func, "__name__", str(func))
        return out


def _misread_in(captured: Capture, shape: tuple[int, ...]) -> str | None:
    found = [n for n in captured.activation_nodes() if _value(n).shape == shape and _value(n).dtype == torch.bool]
    if len(found) != 1:
        return f"a block is given {len(found)} tensors that look like it"
    same = {found[0]}
    for node in captured.nodes:
        if node.op != "call_function" or not same & set(node.all_input_nodes):
            continue
        if node.target is ATTENTION:
            if _argument(node, 3, "attn_mask", None) not in same:
                return "a block computes with it"
        elif node.target in HANDING_ON and (_value(node).shape, _value(node).dtype) == (shape, torch.bool):
            same.add(node)
        else:
            return f"a block computes with it ({node.target})"
    attentions = [node for node in captured.nodes if node.target is ATTENTION]
    if not attentions:
        return "a block has no fused attention"
    return next((reason for node in attentions if (reason := _misfit(node, same))), None)


def _misfit(attention: Node, starts: set[Node]) -> str | None:
    """Why a call of attention does not work with starts: it takes another mask or dropout, or no kernel has its shape."""
    if _argument(attention, 3, "attn_mask", None) not in starts:
        return "a block's attention has another mask"
    if _argument(attention, 4, "dropout_p", 0.0):
        return "its attention has dropout"
    query, key, value = (
        _value(_argument(attention, i, name, None)) for i, name in enumerate(("query", "key", "value"))
    )
    widths = {query.shape[-1], key.shape[-1], value.shape[-1]}
    if len(widths) > 1 or query.shape[-1] > WIDEST_HEAD or query.shape[-1] % HEAD_STEP:
        return f"its heads have widths of {sorted(widths)}; the kernel takes one, a multiple of {HEAD_STEP} up to {WIDEST_HEAD}"
    if query.shape[-2] != key.shape[-2]:
        return "its attention has other numbers of keys than of queries"
    return None


def _argument(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _value(node: Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
