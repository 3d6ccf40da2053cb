"""The native engine: FSDP2, DTensor and torch.distributed.pipelining on stock PyTorch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

from ahp.divisors import divisors
from ahp.engines import fsdp2, releases
from ahp.engines.engine import Engine
from ahp.engines.fp8 import EAGER_TORCHAO_FP8, EAGER_TORCHAO_OPERATORS, FUSED_TORCHAO_FP8, FUSED_TORCHAO_OPERATORS
from ahp.engines.host import host
from ahp.engines.support import refuses_dispatch, refuses_schedule_without_stages
from ahp.engines.traits import (
    WHOLE_DOCUMENTS,
    ContextTraits,
    ContextWay,
    ExpertTraits,
    GradientTraits,
    HostTraits,
    KernelTraits,
    PipelineTraits,
    RecomputeTraits,
    ReduceTraits,
    StateTraits,
    TensorTraits,
    Traits,
)
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.schedule.orders import splits_backward
from ahp.schedule.registry import SCHEDULES

BLOCK_OF_8_BITS = 256
"""Elements of an 8-bit moment that share one scale: torchao's own size (torchao 0.18, optim/adam.py)."""

LEAST_IN_8_BITS = 4096
"""The fewest elements of a weight whose moments are held in 8 bits, as in torchao."""

BYTES_IN_8_BITS = 2 * (1 + 4 / BLOCK_OF_8_BITS)
"""Bytes of both moments of one parameter: codes of 8 bits, and scales in fp32."""


def held_in_8_bits(shape: tuple[int, ...]) -> bool:
    """Whether ``adamw8bit`` holds the moments of a whole weight of this shape in 8 bits; else they are in fp32."""
    return len(shape) > 1 and shape[-1] % BLOCK_OF_8_BITS == 0 and math.prod(shape) >= LEAST_IN_8_BITS


PRECISIONS = ("fp32", "bf16", "fp16", "fp8")

OFFLOAD_BUCKET_BYTES = 256 * 2**20
"""Bytes of moments that are on the device at once under ``engine.offload_optimizer``, in buckets that come, are updated and go back
(runtime/optimizer/offload.py): each keeps a link of tens of GB/s busy for a millisecond, and all are little compared with what is saved."""

REPLICA_BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that replicas sum at once without FSDP2 (runtime/shard/replicas.py); DistributedDataParallel's ``bucket_cap_mb``."""

FP8_MULTIPLE = 16
"""The dims of a weight, whole and in parts, must be multiples of this for a product in 8 bits (torch._scaled_mm;
ATen/native/cuda/ScaledBlas.cpp). A layer with a whole dim that is not one computes in 16 bits."""


class AhpEngine(Engine):
    """What AHP's own runtime can run, and how it behaves.

    FSDP2 holds sharded or cast weights, with one block as the unit of communication; in fp32 with nothing sharded the weights are the module's
    own, and replicas sum their gradients in buckets of 25 MiB; so it is with all states in bf16 too (``job.dtype``). Else master weights,
    gradients and both AdamW states are fp32, and in other precisions there is a separate compute copy in 16 bits. docs/forecast/operators.md has the table.
    """

    name = "ahp"

    def refuses(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """The reason why the runtime cannot run the layout (key, value, rule), or None."""
        p = parallelism
        cannot = "the ahp engine cannot run this yet"
        if reason := releases.refuses(self.name, choice.version):
            return reason
        if p.context_parallel_degree > 1 and (reason := _refuses_context(p, choice)):
            return reason
        if reason := _refuses_experts(p):
            return reason
        if p.enable_sequence_parallel and all(tensor == 1 for _, tensor in p.widths):
            return "enable_sequence_parallel = True: needs a tensor_parallel_degree above 1 (valid: False)"
        if reason := refuses_schedule_without_stages(p):
            return reason
        if job.precision not in PRECISIONS:
            return f"precision = {job.precision!r}: {cannot} (valid: {', '.join(PRECISIONS)})"
        if job.precision == "fp8" and job.lora is not None:
            return f"job.precision = 'fp8': {cannot} with job.lora (valid: bf16, fp16, fp32)"
        if job.dtype != "fp32" and choice.offload_optimizer:
            return f"engine.offload_optimizer = True: {cannot} with job.dtype {job.dtype} (valid: False, or job.dtype fp32)"
        if choice.enable_async_tensor_parallel:
            valid = "null; or engine.name torchtitan or megatron"
            return f"engine.enable_async_tensor_parallel = True: {cannot} (valid: {valid})"
        if reason := refuses_dispatch(self.name, choice):
            return reason
        if choice.offload_optimizer and job.optimizer.name != "adamw":
            of_muon = "its momentum stays on the device, where its matrix products run"
            rule = of_muon if job.optimizer.name == "muon" else "its moments in 8 bits stay on the device"
            return f"job.optimizer.name = {job.optimizer.name!r}: {rule}; engine.offload_optimizer is for adamw (valid: adamw)"
        return _refuses_compiled(job, p, choice) if choice.compile else None

    def no_key_for(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """None: plan.yaml can express every layout."""
        return None

    def traits(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> Traits:
        """Its behavior for the forecast; the caller has checked ``refuses`` first.

        If ``compile`` is None, the cheaper traits of compiled and of eager blocks: no layout takes less with either.
        """
        p = parallelism
        zero, stops = p.zero_stage if p.weight_shards > 1 else 0, _runs_again_what_is_read(job, p, choice)
        several = p.weight_replicas > 1, p.pipeline_parallel_degree > 1, p.tensor_parallel_degree > 1
        each = *several, _context_ways(p, choice), stops, _are_experts_alone(job, p)
        return _traits(job, choice, zero, *each)  # pyright: ignore[reportArgumentType]  # frozen, and so hashed


@lru_cache(maxsize=1 << 10)
def _traits(
    job: Job, choice: EngineChoice, zero: int, replicated: bool, pipelined: bool, split: bool,
    ways: tuple[ContextWay, ...], stops_at_last_read: bool, experts_alone: bool,
) -> Traits:  # fmt: skip
    """Cached by everything in a layout that changes them: a search asks for tens of thousands of layouts, and there are a dozen."""
    fuses, sharded, state = choice.compile is not False, zero > 0, job.state_bytes
    muon, in_8_bits = job.optimizer.name == "muon", job.optimizer.share_in_8_bits
    every = zero >= 2 and not pipelined
    wrapped = sharded or job.casts_weights
    buckets = replicated and not wrapped  # runtime/shard/replicas.py
    # torch's pipeline stage defers the reduction of an FSDP module to its last micro-batch and keeps the weights
    # gathered after each backward (torch 2.13, pipelining/stage.py, backward_maybe_with_nosync). A ZeRO-3 forward
    # then finds them gathered, and frees them, so that each backward gathers once.
    return Traits(
        states=StateTraits(
            master_weight_bytes=state,
            optimizer_bytes=4 if muon else in_8_bits * BYTES_IN_8_BITS + (1 - in_8_bits) * 2 * state,
            no_matrix_bytes=4 if muon else 0,
            host_bytes=8 if choice.offload_optimizer else 0,  # runtime/optimizer/offload.py: both moments, in fp32
            host_bucket_bytes=OFFLOAD_BUCKET_BYTES if choice.offload_optimizer else 0,
            compute_weight_bytes=2 if job.casts_weights else state if sharded else 0,
            trained_share=job.trained_share,
        ),
        gradients=GradientTraits(element_bytes=state, whole=not every),
        # Embedding and head are units of their own: runtime/shard/ends.py.
        gather=fsdp2.gathers(zero, pipelined=pipelined)._replace(beside_stages=True),
        reduce=ReduceTraits(
            element_bytes=state,
            overlap=0.0 if pipelined else 1.0,
            every_micro_batch=every,
            copies=wrapped or replicated,
            bucket_elements=REPLICA_BUCKET_BYTES // state if buckets else 0,
            keeps_buckets=buckets,
            gradients_in_buckets=buckets,
            # runtime/pipeline/torch_compat.py, reduce_beside; buckets of replicas are summed when all gradients are there
            beside_stages=not buckets,
            on_own_stream=wrapped,  # of FSDP2; autograd adds up gradients where they are made
        ),
        tensor=TensorTraits(
            gathers_inputs_again=False,  # autograd keeps what the product read
            copies=True,  # runtime/tensor/collectives.py joins and cuts parts along the sequence
            few_keys="whole",  # search/slicing/solve.py; runtime/tensor/rewrite.py takes the rank's head
            sums_each_weight=True,  # runtime/tensor/collectives.py, _SumGradient
            # runtime/compute/loss.py: beside the exponentials, which become the gradient, lie the logits, and later the gradient in their type
            loss_copies=1.0 if job.precision == "fp32" else 0.5,
        ),
        context=ContextTraits(
            ways=ways,
            packs_heads=True,  # runtime/sequence/ulysses.py, _tokens_for_heads
            sums_bytes=4,  # runtime/sequence/ring.py
            # _join: a cast (6) and a sum weighted in place (12); gradients are added (10)
            joined_bytes=(18.0, 10.0),
        ),
        pipeline=PipelineTraits(receives="waiting"),  # runtime/pipeline/torch_compat.py, receive_in_turn
        recompute=RecomputeTraits(
            stops_at_last_read=stops_at_last_read,
            selective="beside_products",
            sends_again="all",
        ),
        experts=ExpertTraits(
            gather_tokens=True,  # runtime/experts/sliced_experts.py
            keeps_sums=True,  # runtime/experts/dispatch.py
            leaves_results=True,  # runtime/experts/dispatch.py, _Combined saves nothing
            numbers_sent=3,  # runtime/experts/dispatch.py: counts; the weights of a token's experts, and their gradients
            sums_tokens="both passes",  # search/slicing/placement.py, Copied
            leaves_lone=experts_alone,
            whole_biased=True,  # their result is no summand (search/slicing/solve.py)
        ),
        kernels=KernelTraits(
            attention=_attention(job, choice),
            fusion="fused" if fuses else "eager",
            fusion_at_the_ends="eager",  # runtime/stage_setup.py compiles only blocks
            loss_chunk_tokens=choice.loss_chunk_tokens,
            recent_cudnn=True,  # torch 2.11, the oldest that the runtime supports, brings cuDNN 9.19
        ),
        host=_host(job, split=split, wrapped=wrapped, fuses=fuses),
        fp8=FUSED_TORCHAO_FP8 if fuses else EAGER_TORCHAO_FP8,
        source="AHP runtime on FSDP2 (torch 2.13); overlap 1 is what FSDP2 is built for, not a measurement",
    )


def _host(job: Job, *, split: bool, wrapped: bool, fuses: bool) -> HostTraits:
    """``split``: whether there are tensor-parallel ranks; ``wrapped``: whether FSDP2 has the weights; ``fuses``: whether blocks are compiled."""
    if split:
        operators = host.value("split_operators") + (host.value("fsdp_of_split_operators") if wrapped else 0)
    else:
        operators = host.value("fsdp_operators") if wrapped else 0
    if job.precision == "fp8":
        operators += FUSED_TORCHAO_OPERATORS if fuses else EAGER_TORCHAO_OPERATORS
    return HostTraits(
        operators_per_unit=operators,
        launches_per_operator=host.value("eager_launches"),
        checkpoint=None if fuses else fsdp2.eager_checkpoint(),
    )


def _attention(job: Job, choice: EngineChoice) -> Literal["lengths"] | None:
    return "lengths" if job.document_mask and not needs_masks(job, Parallelism(), choice) else None


def needs_masks(job: Job, p: Parallelism, choice: EngineChoice) -> str | None:
    """Why a plan keeps the documents of one sequence apart by masks, rather than by kernels that work with document lengths, whatever
    the model and the device; None = it need not."""
    if job.precision == "fp32":
        return "FlashAttention computes in 16 bits, and job.precision is fp32"
    if choice.attention != "flash":
        return f"engine.attention is {choice.attention}"
    if p.context_parallel_degree > 1 and p.context_parallel_method not in WHOLE_DOCUMENTS:
        method = "null" if p.context_parallel_method is None else p.context_parallel_method
        return f"context_parallel_method is {method}: with all-to-all alone a rank has whole documents"
    return None


def _runs_again_what_is_read(job: Job, p: Parallelism, choice: EngineChoice) -> bool:
    """Whether full recompute leaves out a block's last product. The backward graph of a compiled block holds only what it reads, unless the
    block is several graphs (runtime/compute/compile.py): each of these is one operator to the checkpoint around them. For eager blocks
    torch's checkpoint stops where the last tensor is saved, but the runtime's own products (runtime/compute/fp8_product.py,
    runtime/pipeline/weight_gradients.py) save when they are done."""
    compiled = p.context_parallel_method != "ring" and p.expert_parallel_degree == 1
    eager = job.precision != "fp8" and not splits_backward(p)
    return compiled or eager if choice.compile is None else compiled if choice.compile else eager


def _are_experts_alone(job: Job, p: Parallelism) -> bool:
    """Whether each expert is on one rank and in its own precision: FSDP2 would only copy it (runtime/shard/fsdp.py)."""
    shards, degree = p.weight_shards, p.expert_parallel_degree
    return not job.casts_weights and shards == degree > 1 and p.weight_replicas == 1


def _refuses_experts(p: Parallelism) -> str | None:
    """Why the experts cannot be divided so: ranks that hold different experts are a part of those that ZeRO shards over."""
    degree, shards = p.expert_parallel_degree, p.weight_shards
    whole, tensor = p.expert_tensor_parallel_degree, p.tensor_parallel_degree
    if whole not in (None, tensor):
        rule = f"every expert is divided over all {tensor} tensor-parallel ranks, which gather each other's tokens (runtime/experts)"
        return f"expert_tensor_parallel_degree = {whole}: {rule} (valid: null, {tensor}; or engine.name megatron or torchtitan)"
    if shards % degree:
        ranks = f"data_parallel_shard_degree {p.data_parallel_shard_degree}"
        if p.context_parallel_degree > 1:
            ranks += f" x context_parallel_degree {p.context_parallel_degree} with zero_stage {p.zero_stage}"
        valid = ", ".join(map(str, divisors(shards)))
        return f"expert_parallel_degree = {degree}: must divide {ranks}, whose ranks share the experts (valid: {valid})"
    return None


def _refuses_context(p: Parallelism, choice: EngineChoice) -> str | None:
    """What ranks that share sequences cannot do."""
    if choice.attention != "flash":
        return f"attention = {choice.attention!r}: context_parallel_degree above 1 needs fused attention (valid: flash)"
    if p.mesh_order is not None and p.data_parallel_shard_degree > 1:
        order = list(p.axes)
        if order.index("cp") < order.index(
            "dp_shard"
        ):  # the two are one axis to FSDP2, and torch numbers its ranks upwards
            rule = "weights are sharded over dp_shard and cp together, with cp the inner one"
            return f"mesh_order = {order}: {rule} (valid: dp_shard before cp)"
    return None


def _context_ways(p: Parallelism, choice: EngineChoice) -> tuple[ContextWay, ...]:
    if p.context_parallel_method is not None:
        return (p.context_parallel_method,)
    return ("all-to-all",) if needs_one_graph(p, choice) else ("all-to-all", "ring")


def needs_one_graph(p: Parallelism, choice: EngineChoice) -> bool:
    """Whether nothing in a block may stay outside its compiled graph, because what it keeps is chosen only within the graph."""
    return bool(choice.compile) and p.activation_checkpoint == "selective"


def _refuses_compiled(job: Job, p: Parallelism, choice: EngineChoice) -> str | None:
    """What compiled blocks cannot do."""
    rule = "does not go with engine.compile = True"
    if splits_backward(p) and job.precision == "fp8":  # products in 8 bits make both of their gradients in the graph
        valid = ", ".join(schedule.name for schedule in SCHEDULES.values() if not schedule.splits_backward)
        return f"pipeline_parallel_schedule = {p.pipeline_parallel_schedule!r}: {rule} in fp8 (valid: {valid})"
    if not needs_one_graph(p, choice):
        return None
    ring = p.context_parallel_degree > 1 and p.context_parallel_method == "ring"
    divided = p.expert_parallel_degree > 1
    stay = [words for words, found in (("the ring", ring), ("what divided experts do", divided)) if found]
    if stay:
        changes = ["context_parallel_method all-to-all"] * ring + ["expert_parallel_degree 1"] * divided
        outside = f"{' and '.join(stay)} {'stay' if ring and divided else 'stays'} outside of a block's graph, and of one graph alone it is known what to keep"
        return (
            f"activation_checkpoint = 'selective': {rule}: {outside} (valid: none, full; or {' with '.join(changes)})"
        )
    return None
