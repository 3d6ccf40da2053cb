"""Runs a module's forward, loss and backward once on tensors without data, and records which part ran which operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ahp.graph.blocks import BlockList
from ahp.graph.call import Documents, logits_of, model_arguments
from ahp.graph.fake_mode import as_on_data
from ahp.graph.operators import LOSS, TensorSpec
from ahp.graph.record import Recorded, Recorder, Where, spec
from ahp.graph.torch_compat import FakeTensorMode, pytree

EMBEDDING, HEAD = "embedding", "head"
"""Places before the first block and after the last; block ``i`` is the place ``("block", i)``."""

IGNORED_LABEL = -100
"""Label that is not scored, as in torch.nn.functional.cross_entropy and transformers."""


@dataclass
class FakeRun:
    """The results of one run: operators in order of execution, and what each place passes to the next."""

    operators: list[Recorded]
    outputs: dict[Any, TensorSpec] = field(default_factory=dict)
    vocab_size: int = 0


@dataclass(frozen=True)
class Subject:
    """What to run: ``kept`` are the positions of the blocks that really run, the others only pass their input on."""

    module: nn.Module
    blocks: BlockList | None
    kept: frozenset[int]
    masked: bool
    """A masked language model: labels are not shifted."""
    dtype: torch.dtype
    fused_attention: bool
    documents: Documents | None = None
    """The input that gives the model its documents, if several share a sequence and do not see each other."""


def fake_run(subject: Subject, batch: int, sequence: int) -> FakeRun:
    """Run once with ``input_ids`` int64 [batch, sequence]; the module is left as it was found."""
    where = Where(EMBEDDING)
    run = FakeRun([])
    with _prepared(subject, batch, sequence, where, run) as (parameters, buffers, forward):
        labels = torch.empty(batch, sequence, dtype=torch.int64)
        with Recorder(where, parameters, buffers) as recorder:
            with recorder.saving():
                logits = forward()
                run.outputs.setdefault(EMBEDDING, spec(logits))
                where.place, where.modules = HEAD, [LOSS]
                loss = next_token_loss(logits, labels, shift=not subject.masked)
            recorder.begin_backward()
            loss.backward()
            run.operators = recorder.finish()
            run.vocab_size = int(logits.shape[-1])
    return run


@contextmanager
def forward_run(subject: Subject, batch: int, sequence: int, where: Where) -> Iterator[Callable[[], torch.Tensor]]:
    """The forward alone of ``fake_run``, as a function that returns the logits; ``where`` moves as it runs."""
    with _prepared(subject, batch, sequence, where, FakeRun([])) as (_, _, forward), torch.no_grad():
        yield forward


@contextmanager
def _prepared(
    subject: Subject, batch: int, sequence: int, where: Where, run: FakeRun
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Callable[[], torch.Tensor]]]:
    """Stand-ins for parameters and buffers, and a function that runs the forward with them and returns the logits."""
    with ExitStack() as stack:
        stack.enter_context(in_training(subject.module))
        stack.enter_context(others_pass_on(subject.blocks, subject.kept))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(as_on_data(subject.module, document_mask=subject.documents is not None))
        parameters, buffers = _without_data(subject)
        input_ids, positions = (torch.empty(batch, sequence, dtype=torch.int64) for _ in range(2))
        places = positions if subject.documents else None
        args, kwargs = model_arguments(subject.module, input_ids, places, subject.documents)
        stack.enter_context(_follow(subject, where, run))

        def forward() -> torch.Tensor:
            with _FusedAttention() if subject.fused_attention else nullcontext():
                output = torch.func.functional_call(subject.module, (parameters, buffers), args, kwargs)
                return logits_of(output, input_ids)

        yield parameters, buffers, forward


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor, *, shift: bool) -> torch.Tensor:
    """Mean cross-entropy in fp32, as transformers computes it (loss/loss_utils.py, ForCausalLMLoss).

    logits [B, S, V], labels int64 [B, S]; with ``shift`` token ``i`` predicts label ``i + 1`` and the last is not scored.
    """
    scores = logits.float()
    if shift:
        labels = nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:].contiguous()
    return nn.functional.cross_entropy(scores.view(-1, scores.shape[-1]), labels.view(-1), ignore_index=IGNORED_LABEL)


class _Passing(nn.Module):
    """Replaces a block that is not run: returns its input in the form of the last real block's output.

    Attributes that the model reads from a block (``attention_type``) are the real block's.
    """

    def __init__(self, block: nn.Module, answer: list[Any]) -> None:
        super().__init__()
        self.__dict__["_block"] = block
        self.__dict__["_answer"] = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        last = self.__dict__["_answer"][0]
        if not isinstance(last, tuple):
            return given[0]
        return tuple(given[i] if i < len(given) and _alike(given[i], item) else item for i, item in enumerate(last))


def _alike(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape


@contextmanager
def others_pass_on(found: BlockList | None, kept: frozenset[int]) -> Iterator[None]:
    """Replace all blocks except those at the positions ``kept``, and put them back at the end."""
    if found is None:
        yield
        return
    blocks = found.blocks
    originals = list(blocks)
    answer: list[Any] = [None]

    def remember(module: nn.Module, args: Any, output: Any) -> None:
        answer[0] = output

    handles = [originals[i].register_forward_hook(remember) for i in kept]
    try:
        for position, block in enumerate(originals):
            if position not in kept:
                blocks[position] = _Passing(block, answer)
        yield
    finally:
        answer.clear()
        for handle in handles:
            handle.remove()
        for position, block in enumerate(originals):
            blocks[position] = block


def train_whole(module: nn.Module) -> None:
    """Put a module that is in evaluation mode, as ``from_pretrained`` leaves it, into training mode. Within one that is in training mode, parts
    in evaluation mode (a frozen batch norm) stay so."""
    if not module.training:
        module.train()


@contextmanager
def in_training(module: nn.Module) -> Iterator[None]:
    """``train_whole``; restore each part's mode at the end."""
    modes = {part: part.training for part in module.modules()}
    train_whole(module)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


class _FusedAttention(TorchFunctionMode):
    """Keeps attention in one operator, as on a GPU, where the CPU would fall back to plain products: with dropout, and with values of another
    width than queries. The kernels of GPUs take or pad values that are narrower (multi-head latent attention) or wider (differential attention).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given: dict[str, Any] = dict(
            zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)
        )
        given |= (kwargs or {}) | {"dropout_p": 0.0}
        width, of_value = given["query"].shape[-1], given["value"].shape[-1]
        if of_value < width:
            given["value"] = nn.functional.pad(given["value"], (0, width - of_value))
            return func(**given)[..., :of_value]
        if of_value > width:
            for name in ("query", "key"):
                given[name] = nn.functional.pad(given[name], (0, of_value - width))
            given["scale"] = given.get("scale") or width**-0.5
        return func(**given)


def _without_data(subject: Subject) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Stand-ins for parameters and buffers on the CPU: floating parameters in the compute dtype, buffers in their own."""

    def empty(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype, device="cpu")

    parameters = {
        name: empty(p, subject.dtype if p.is_floating_point() else p.dtype).requires_grad_(p.requires_grad)
        for name, p in subject.module.named_parameters()
    }
    return parameters, {name: empty(b, b.dtype) for name, b in subject.module.named_buffers()}


@contextmanager
def _follow(subject: Subject, where: Where, run: FakeRun) -> Iterator[None]:
    """Hooks on every module that keep ``where`` up to date and record what the places pass on."""
    handles: list[Any] = []
    prefix = "" if subject.blocks is None else f"{subject.blocks.path}."
    try:
        for path, part in subject.module.named_modules():
            head, _, rest = (
                path.removeprefix(prefix).partition(".") if prefix and path.startswith(prefix) else ("", "", "")
            )
            short = rest if head.isdigit() else path
            before, after = _steps(where, run, short, int(head) if head.isdigit() and not rest else None, subject)
            handles.append(part.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(part.register_forward_hook(after))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _steps(
    where: Where, run: FakeRun, short: str, position: int | None, subject: Subject
) -> tuple[Callable[..., None], Callable[..., None]]:
    """The hooks before and after one module; ``position`` is given for a block."""
    count = len(subject.blocks) if subject.blocks is not None else 0

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if position is not None:
            if position == 0:
                run.outputs[EMBEDDING] = _first_spec((args, kwargs))
            where.place = ("block", position)
        where.modules.append(short)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        where.modules.pop()
        if position is not None:
            run.outputs[where.place] = _first_spec(output)
            if position == count - 1:
                where.place = HEAD

    return before, after


def _first_spec(values: Any) -> TensorSpec:
    return spec(next(t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)))
