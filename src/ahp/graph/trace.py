"""Step 1: from a model to its compute graph, forward and backward, traced on tensors that hold no data.

The model runs its own code; nothing here knows a family of models. Each kind of block runs once and the other blocks pass
their input on, so that a 405 B model costs as much as one of its layers.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ahp.errors import BadInput, bad_input, whole_number
from ahp.graph.blocks import NoBlocks, Stack, find_blocks
from ahp.graph.call import Documents
from ahp.graph.document_mask import documents_apart
from ahp.graph.document_starts import DocumentStarts, document_starts
from ahp.graph.engine_operator import known_to_transformers
from ahp.graph.fake_mode import DEPENDS_ON_VALUES, UNALIGNED
from ahp.graph.fake_run import EMBEDDING, HEAD, FakeRun, Subject, fake_run
from ahp.graph.growth import grows_alike
from ahp.graph.lora import adapted_copy, with_adapters
from ahp.graph.models import (
    ATTENTION,
    ENGINE,
    NOTHING_TRAINED,
    build_model,
    describe,
    is_masked,
    load_config,
    names_of_parameters,
    plain,
)
from ahp.graph.operators import ModelGraph, Operator, Parameter, Segment
from ahp.graph.outline import why_uncuttable
from ahp.graph.own_modes import own_modes
from ahp.graph.positions import warn_of_longer
from ahp.graph.record import Recorded
from ahp.graph.sequences import warn_of_mixed
from ahp.graph.two_types import is_of_two_types, may_be_of_two_types, why_two_types
from ahp.job import Job
from ahp.plan import validated

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""fp8 recipes keep activations in bf16 and cast the operands of matrix products inside the product."""

FACTS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_local_experts": "num_experts",
    "num_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "max_position_embeddings": "max_position_embeddings",
}
"""transformers' config keys -> the graph's."""


@own_modes()
def analyze(
    model: Any, job: Job | dict[str, Any] | None = None, *, micro_batch_size: int = 1, attention: str = "flash"
) -> ModelGraph:
    """Trace one micro-batch of ``model`` under ``job`` (its sequence length, precision, document mask and adapters are used).

    ``model`` as in ``ahp.graph.models``; a live module is run in place and left as it was. ``attention``: ``flash``
    (one fused operator), ``math`` (scores are materialized), or ``engine`` (``ahp.graph.engine_attention``). Raises BadInput when the model cannot be built, or
    cannot run on tensors without data.
    """
    contract = validated(Job, {} if job is None else job, "job")
    micro_batch_size = whole_number("micro_batch_size", micro_batch_size, 1, "a whole number of sequences, at least 1")
    if not isinstance(attention, str) or attention not in ATTENTION:
        raise bad_input("attention", attention, "unknown kernel", ATTENTION)
    if attention == ENGINE:
        with known_to_transformers():
            return _analyzed(model, contract, micro_batch_size, attention)
    return _analyzed(model, contract, micro_batch_size, attention)


def _analyzed(model: Any, contract: Job, micro_batch_size: int, attention: str) -> ModelGraph:
    module = build_model(model, dtype=COMPUTE_DTYPE[contract.precision], attention=attention)
    module = (adapted_copy if module is model else with_adapters)(module, contract.lora)
    warn_of_longer(module, contract.sequence_length)
    tracer = _Tracer(module, model, contract, attention)
    graph = tracer.grown(micro_batch_size, tracer.documents)
    in_16_bits = any(buffer.dtype in (torch.bfloat16, torch.float16) for buffer in module.buffers())
    live = isinstance(model, nn.Module)
    if (in_16_bits and not live) or may_be_of_two_types(graph):
        in_fp32 = module if live else with_adapters(build_model(model, attention=attention), contract.lora)
        subject = _Tracer(in_fp32, model, contract, attention).subjects(tracer.documents)[-1]
        graph = replace(graph, two_types=why_two_types(subject, contract.sequence_length))
    _warn_of_hidden_states(graph)
    _warn_of_images_and_sound(graph.name, module if (config := load_config(model)) is None else config)
    warn_of_mixed(tracer.subjects(tracer.documents), contract.sequence_length)
    # The kernels that go by lengths compute in 16 bits.
    if tracer.documents is None or attention != "flash" or contract.precision == "fp32":
        return graph
    found = document_starts(module, tracer.documents, contract.sequence_length)
    if isinstance(found, DocumentStarts):
        return replace(graph, by_lengths=tracer.grown(micro_batch_size, found.documents))
    return replace(graph, needs_masks=found)


def _warn_of_hidden_states(graph: ModelGraph) -> None:
    """Warn if what the model returns is as wide as the rows of its first embedding, and this has more rows: so many tokens have no logits."""
    looked_up = (op.inputs[0].shape for op in graph.embedding.operators if op.name == "aten.embedding")
    rows, width = next(looked_up, (0, 0))
    if graph.config["vocab_size"] == width < rows:
        returned = f"its forward returns [batch, sequence, {width}], as wide as its embedding of {rows} tokens: hidden states, by their shape"
        warnings.warn(
            f"model = {graph.name!r}: {returned}; training needs logits [batch, sequence, {rows}]", stacklevel=4
        )


NOT_TEXT = ("vision", "image", "audio", "vq_")
"""Parts of the names of sub-configs of what reads or makes something else than text (transformers, ``PretrainedConfig.sub_configs``)."""


def _warn_of_images_and_sound(name: str, described: Any) -> None:
    """Warn that a model of images or sound is given text alone. ``described``: its config, or a module that has one."""
    config = getattr(described, "config", described)
    parts = [
        key for key in getattr(config, "sub_configs", ()) if key.startswith(NOT_TEXT) and getattr(config, key, None)
    ]
    if parts:
        rule = f"only its text part is planned and trained, on text; {' and '.join(parts)} of its config are not used"
        warnings.warn(f"model = {name!r}: {rule}", stacklevel=4)


class _Tracer:
    """A module prepared for tracing: its blocks, their kinds, its parameters by part."""

    def __init__(self, module: nn.Module, model: Any, job: Job, attention: str) -> None:
        self._module, self._job = module, job
        self._name, self._plain = describe(model), plain(model)
        try:
            self._blocks = find_blocks(module)
            self._kinds = self._blocks.kinds()
        except NoBlocks:
            self._blocks, self._kinds = None, ()
        self._first = [self._kinds.index(kind) for kind in range(len(set(self._kinds)))]
        self._kept = frozenset(self._first)
        self._shared = _shared(self._blocks.blocks) if self._blocks is not None else frozenset()
        self._masked = is_masked(module)
        self.documents = documents_apart(module, job.sequence_length) if job.document_mask else None
        """How the model is called with masks, if documents of one sequence do not see each other."""
        self._dtype = COMPUTE_DTYPE[job.precision]
        self._fused = ATTENTION[attention] != "eager"

    def grown(self, micro_batch_size: int, documents: Documents | None) -> ModelGraph:
        """The graph with its law of growth. ``documents``: the input that keeps documents apart."""
        first, second = self._graph(micro_batch_size, documents), self._graph(micro_batch_size + 1, documents)
        if grows_alike(first, second):
            return replace(first, larger=second)
        third = self._graph(micro_batch_size + 2, documents)
        return replace(first, larger=replace(second, larger=third)) if grows_alike(second, third) else first

    def _graph(self, micro_batch_size: int, documents: Documents | None) -> ModelGraph:
        run = self._run(micro_batch_size, documents)
        embedding, head = self._outer_parameters(run)
        labels = {("block", position): kind for kind, position in enumerate(self._first)}
        parts: dict[Any, list[int]] = {EMBEDDING: [], HEAD: []} | {place: [] for place in labels}
        for index, operator in enumerate(run.operators):
            if operator.place in parts:
                parts[operator.place].append(index)
        names = ["block"] if len(labels) == 1 else [f"block.{kind}" for kind in range(len(labels))]
        return ModelGraph(
            name=self._name,
            model=self._plain,
            micro_batch_size=micro_batch_size,
            sequence_length=self._job.sequence_length,
            dtype=str(self._dtype).removeprefix("torch."),
            embedding=_segment("embedding", run, parts[EMBEDDING], EMBEDDING, embedding),
            blocks=tuple(
                _segment(name, run, parts[place], place, self._block_parameters(place[1]), self._prefix(place[1]))
                for name, place in zip(names, labels, strict=True)
            ),
            layers=self._kinds,
            head=_segment("head", run, parts[HEAD], None, head),
            tied=tuple(tuple(names) for names in names_of_parameters(self._module) if len(names) > 1),
            config=_facts(self._module, run.vocab_size),
            document_mask=self._job.document_mask,
            lora=None if self._job.lora is None else self._job.lora.model_dump(mode="json"),
            uncuttable=self._uncuttable,
        )

    @cached_property
    def _uncuttable(self) -> str | None:
        if self._blocks is None:
            return None
        try:
            return why_uncuttable(self._module, sequence_length=self._job.sequence_length, documents=self.documents)
        except BadInput:  # the runtime refuses such a model for more than its cuts
            return None

    def _run(self, micro_batch_size: int, documents: Documents | None) -> FakeRun:
        error: Exception | None = None
        for subject in self.subjects(documents):
            try:
                return fake_run(subject, micro_batch_size, self._job.sequence_length)
            except Exception as caught:
                error = caught
        assert error is not None
        says = str(error).partition("\n")[0]  # torch appends its C++ frames
        if UNALIGNED in says:
            elements = 16 // self._dtype.itemsize
            says += f" (experts: hidden size and intermediate size must be multiples of {elements} in {self._job.precision})"
        if type(error).__name__ in DEPENDS_ON_VALUES:
            why = f"cannot be traced without data: what it does next depends on the values of a tensor, as with .item() or if ({says})"
        elif isinstance(error, RuntimeError) and is_of_two_types(error):
            why = f"it mixes an fp32 tensor with weights in 16 bits (valid: cast the tensor with .to(x.dtype); or job.precision fp32): {says}"
        elif isinstance(error, BadInput):
            why = says.removeprefix("model: ")
        elif not any(p.requires_grad for p in self._module.parameters()):
            why = NOTHING_TRAINED
        else:
            why = f"cannot be traced in {self._job.precision}: {type(error).__name__}: {says}"
            if not hasattr(self._module, "config"):
                why += (
                    "; forward must take token ids [batch, sequence] alone and return logits, and AHP computes the loss"
                )
        raise BadInput(f"model = {self._name!r}: {why}") from error

    def subjects(self, documents: Documents | None) -> list[Subject]:
        """The model with one block of each kind, and with all blocks if it does not run that way."""
        everything = frozenset(range(len(self._kinds)))
        return [
            Subject(self._module, self._blocks, kept, self._masked, self._dtype, self._fused, documents)
            for kept in dict.fromkeys([self._kept, everything])
        ]

    def _prefix(self, position: int) -> str:
        assert self._blocks is not None
        return f"{self._blocks.path}.{position}."

    def _block_parameters(self, position: int) -> list[Parameter]:
        assert self._blocks is not None
        own = self._blocks.blocks[position].named_parameters()
        return [Parameter(name, tuple(p.shape), p.requires_grad) for name, p in own if id(p) not in self._shared]

    def _outer_parameters(self, run: FakeRun) -> tuple[list[Parameter], list[Parameter]]:
        """Parameters of the embedding and of the head, outside the blocks or shared by several: the head's are those that it reads first."""
        seen: dict[str, Any] = {}
        for operator in run.operators:
            for name in operator.parameters:
                seen.setdefault(name, operator.place)
        prefix = f"{self._blocks.path}." if self._blocks is not None else None
        embedding, head = [], []
        for name, p in self._module.named_parameters():
            if prefix is None or not name.startswith(prefix) or id(p) in self._shared:
                part = head if self._blocks is not None and seen.get(name) == HEAD else embedding
                part.append(Parameter(name, tuple(p.shape), p.requires_grad))
        return embedding, head


def _segment(
    name: str, run: FakeRun, indices: list[int], place: Any, parameters: list[Parameter], prefix: str = ""
) -> Segment:
    """Cut one part out of the run: operators numbered from 0, dependencies on other parts left out."""
    number = {index: position for position, index in enumerate(indices)}
    operators = tuple(_operator(number[i], run.operators[i], number, prefix) for i in indices)
    return Segment(name, operators, tuple(parameters), None if place is None else run.outputs.get(place))


def _operator(index: int, recorded: Recorded, number: dict[int, int], prefix: str) -> Operator:
    return Operator(
        index=index,
        name=recorded.name,
        module=recorded.module,
        phase=recorded.phase,
        inputs=recorded.inputs,
        outputs=recorded.outputs,
        depends_on=tuple(number[i] for i in recorded.depends_on if i in number),
        parameters=tuple(p.removeprefix(prefix) for p in recorded.parameters),
        flops=recorded.flops,
        bytes_read=recorded.bytes_read,
        bytes_written=recorded.bytes_written,
        saved_bytes=recorded.saved_bytes,
    )


def _shared(blocks: Stack) -> frozenset[int]:
    """Ids of the parameters that several blocks hold: they exist once, so they belong to no single block."""
    counts = Counter(id(p) for block in blocks for p in block.parameters())
    return frozenset(identity for identity, count in counts.items() if count > 1)


def _facts(module: nn.Module, vocab_size: int) -> dict[str, Any]:
    config = getattr(module, "config", None)
    found: dict[str, Any] = {"vocab_size": vocab_size}
    for key, ours in FACTS.items():
        value = _fact(config, key)
        if value is not None:
            found.setdefault(ours, value)
    if "hidden_size" in found and hasattr(config, "n_inner"):  # GPT-2's rule: None means four times the width
        found["intermediate_size"] = _fact(config, "n_inner") or 4 * found["hidden_size"]
    if "num_attention_heads" in found:
        found.setdefault("num_key_value_heads", found["num_attention_heads"])
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0):
        found["balance_loss"] = True
    if any(isinstance(part, nn.MultiheadAttention) for part in module.modules()):
        found["attention_module"] = True
    return found


def _fact(config: Any, key: str) -> int | None:
    try:
        value = getattr(config, key, None)
    except Exception:  # transformers raises an error of its own for a key that differs from layer to layer
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
