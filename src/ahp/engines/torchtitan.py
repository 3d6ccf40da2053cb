"""torchtitan: FSDP2, DTensor and torch's pipeline on its own model code."""

from __future__ import annotations

from ahp.engines import fsdp2, releases
from ahp.engines.engine import Engine
from ahp.engines.fp8 import (
    EAGER_TORCHAO_FP8,
    EAGER_TORCHAO_OPERATORS,
    FUSED_TORCHAO_FP8,
    FUSED_TORCHAO_OPERATORS,
    with_gathers_in_8_bits,
)
from ahp.engines.host import host
from ahp.engines.releases import Has
from ahp.engines.support import Support
from ahp.engines.torch_ring import torch_ring
from ahp.engines.traits import (
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
from ahp.schedule.registry import SCHEDULES

SUPPORT = Support(
    precisions=("fp32", "bf16", "fp8"),
    dtypes=("fp32", "bf16"),
    async_tensor="compiled",
    dispatch=("moe_token_dispatcher_type",),
    folds_experts="always",  # distributed/parallel_dims.py: ep spans dp_shard x cp x tp, innermost first; until 0.2.2 where expert_tensor_parallel_degree is 1
    schedules=tuple(schedule.name for schedule in SCHEDULES.values() if schedule.in_torch),
)
"""torchtitan b5bcd76: all of torch's schedules; ``TrainingConfig.dtype`` is bfloat16 or float32, fp16 was closed (#2363).
ZeRO stages 1 and 2 are FSDP2 with ``reshard_after_forward`` never, without and with a reduction for every micro-batch."""

ALWAYS_SEQUENCE_PARALLEL = "torchtitan 0.2.2 has it on with tensor parallelism (valid: True)"


class TorchtitanEngine(Engine):
    """What torchtitan can run, and how it behaves: FSDP2 with bf16 gathers and fp32 reductions."""

    name = "torchtitan"
    own_attention = True

    def refuses(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """The reason why it cannot run the layout (key, value, rule), or None."""
        return SUPPORT.refuses(self.name, job, parallelism, choice) or _refuses_deepep(parallelism, choice)

    def no_key_for(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """Why torchtitan's own configuration cannot express the layout (key, value, rule), or None; the caller has checked ``refuses`` first."""
        p = parallelism
        stage = f"zero_stage = {p.zero_stage}"
        if p.context_parallel_degree > 1 and p.zero_stage == 0:
            return f"{stage}: torchtitan shards weights over context ranks (valid: 2, 3)"
        if p.weight_shards == 1 and p.data_parallel_replicate_degree not in (1, p.world_size):
            rule = "nothing is sharded, and torchtitan then only replicates over all ranks (DDP with one axis)"
            return f"{stage}: {rule} (valid: 2, 3, with data_parallel_shard_degree above 1)"
        if p.weight_shards > 1 and p.zero_stage == 1 and p.pipeline_parallel_degree == 1:
            rule = (
                "without a pipeline torchtitan reduces gradients after every micro-batch, so that they are sharded too"
            )
            return f"{stage}: {rule} (valid: 2, 3)"
        old = choice.version == "0.2.2" or job.precision == "fp8"  # fp8 has no key from 0.3.0 on
        if old and p.tensor_parallel_degree > 1 and not p.enable_sequence_parallel:
            return f"enable_sequence_parallel = False: {ALWAYS_SEQUENCE_PARALLEL}"
        return None

    def traits(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> Traits:
        """Its behavior for the forecast; the caller has checked ``refuses`` first."""
        sharded = parallelism.weight_shards > 1
        zero = parallelism.zero_stage if sharded else 0
        state, half = job.state_bytes, job.casts_weights
        pipelined = parallelism.pipeline_parallel_degree > 1
        every = zero >= 2 and not pipelined
        # torch 2.13, _fsdp_param.py, to_accumulated_grad_if_needed: what waits for its reduction is in the type that is sent
        in_fp32 = not every and sharded
        recipe = FUSED_TORCHAO_FP8 if choice.compile else EAGER_TORCHAO_FP8
        casts = FUSED_TORCHAO_OPERATORS if choice.compile else EAGER_TORCHAO_OPERATORS

        def has(feature: str) -> bool:
            return releases.has(self.name, feature, choice.version)

        compiled_loss = has("compiled_loss") if choice.compile else has("compiled_loss_alone")
        deepep = choice.moe_token_dispatcher_type == "flex"
        return Traits(
            states=StateTraits(
                master_weight_bytes=state,
                optimizer_bytes=2 * state,
                compute_weight_bytes=2 if half else state if sharded else 0,
            ),
            gradients=GradientTraits(element_bytes=4 if in_fp32 else state, whole=not every),
            # distributed/fsdp.py, apply_fsdp_to_decoder; tied weights are one unit
            # docs/float8.md: --float8.enable_fsdp_float8_all_gather, which recipes in 8 bits and ``ahp export`` set
            gather=fsdp2.gathers(zero, pipelined=pipelined)._replace(
                ends_apart=has("ends_apart"), block_bytes=1 if job.precision == "fp8" and zero else 0
            ),
            reduce=ReduceTraits(
                element_bytes=4,  # training.mixed_precision_reduce has no other value
                overlap=0.0 if pipelined else 1.0,
                every_micro_batch=every,
                copies=True,
                on_own_stream=zero > 0,
            ),
            tensor=_tensor(has, choice, compiled_loss=compiled_loss),
            # 3f20451b, models/llama/model.py: repeat_kv before F.scaled_dot_product_attention
            context=torch_ring(compiled=bool(choice.compile), repeats_keys=has("repeated_keys")),
            pipeline=PipelineTraits(
                receives="all",
                torch_orders=True,
                ends="count_as_layers",  # generate_llm_fqn_per_model_part, input and output weight 1
            ),
            recompute=RecomputeTraits(
                # ActivationCheckpointConfig.early_stop is off, but a compiled checkpoint does not run operators whose results are not read.
                stops_at_last_read=bool(choice.compile),
                selective="every_second_product",  # distributed/activation_checkpoint.py
                keeps_cudnn_attention=has("keeps_cudnn_attention"),
                sends_again="gathers",  # results of reduce-scatters are on the list of what to keep
                keeps_arrived=has("keeps_arrived_tokens"),
            ),
            experts=_experts(has, parallelism, choice),
            kernels=_kernels(has, compiled=bool(choice.compile), fused_loss=compiled_loss, deepep=deepep),
            host=HostTraits(
                operators_per_unit=casts if job.precision == "fp8" else 0,
                launches_per_operator=host.value("eager_launches"),
                checkpoint=None if choice.compile else fsdp2.eager_checkpoint(),
            ),
            # 0.2.2, models/llama3/infra/parallelize.py: tensorwise scales
            fp8=with_gathers_in_8_bits(recipe, sharded=zero > 0),
            source="torchtitan b5bcd76: distributed/parallelize.py, FSDP2 of torch 2.13",
        )


def _refuses_deepep(p: Parallelism, choice: EngineChoice) -> str | None:
    """v0.2.2, models/llama4/infra/parallelize.py: DeepEP raises without expert ranks, and where tensor-parallel ranks divide experts."""
    if choice.moe_token_dispatcher_type != "flex":
        return None
    words, other = "engine.moe_token_dispatcher_type = 'flex'", "null, alltoall"
    if not releases.has("torchtitan", "deepep", choice.version):
        rule = f"torchtitan of {choice.version} does not have DeepEP"
        return f"{words}: {rule} (valid: {other}; or engine.version 0.2.1)"
    if p.expert_parallel_degree == 1:
        rule = "torchtitan has no DeepEP on a single expert rank"
        return f"{words}: {rule} (valid: {other}; or expert_parallel_degree above 1)"
    if p.tensor_parallel_degree > 1 and not SUPPORT.folded(p):
        rule = "DeepEP sends tokens to whole experts"
        return f"{words}: {rule} (valid: {other}; or expert_tensor_parallel_degree 1, with enable_sequence_parallel)"
    return None


def _tensor(has: Has, choice: EngineChoice, *, compiled_loss: bool) -> TensorTraits:
    return TensorTraits(
        # DTensor gathers the input once (PrepareModuleInput), and autograd keeps what the product read.
        gathers_inputs_again=False,
        # distributed/compile.py, _maybe_enable_async_tp: inductor's pass over a compiled block; off by default
        in_pieces=bool(choice.enable_async_tensor_parallel),
        copies=True,  # torch 2.13 distributed/_functional_collectives.py: all_gather_single, reduce_scatter_single
        gathers_normed=not has("normed_heads_apart"),
        # torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py, _get_grad_inner_tensor: redistributes a DTensor that is Partial
        sums_each_weight=True,
        # torch 2.13 distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward: (grad_input + exp(x)) * grad_output
        loss_copies=None if compiled_loss else 3.0,
    )


def _experts(has: Has, parallelism: Parallelism, choice: EngineChoice) -> ExpertTraits:
    deepep = choice.moe_token_dispatcher_type == "flex"
    return ExpertTraits(
        folded=SUPPORT.folded(parallelism),
        tokens_once_to_a_node=deepep,
        tokens_once_to_a_rank=deepep,
        # PrepareModuleInputOutput around a mixture: Replicate() in, Partial() out. cbdb3113, distributed/expert_parallel.py, TensorParallel:
        # gradients of routed_input are Partial().
        sums_tokens="forward",
        # distributed/expert_parallel.py, ExpertParallel: num_tokens_per_expert
        numbers_sent=0 if deepep else 1,
        keeps_sums=deepep,  # its kernels add up results before they send them
        # models/common/token_dispatcher.py, AllToAllTokenDispatcher: _permute, _unpermute. distributed/deepep/deepep.py orders tokens only once,
        # where they arrive, and waits for dispatch and combine.
        sorts_arrived=not deepep,
        sorts_by_torch=has("experts_by_torch") and not (choice.compile and has("compiled_experts")),
    )


def _kernels(has: Has, *, compiled: bool, fused_loss: bool, deepep: bool) -> KernelTraits:
    of_cudnn = {"hopper": "cudnn_attention", "blackwell": "cudnn_attention_on_blackwell"}
    summed = "atomic" if deepep else "scattered" if has("scattered_sum") else "batched"
    return KernelTraits(
        fusion="fused" if compiled else "modules" if has("norm_kernel") else "eager",
        fusion_at_the_ends="modules",  # 0.2.2, models/llama3/infra/parallelize.py: apply_compile takes only blocks
        fused_loss=fused_loss,
        flash2_on=tuple(generation for generation, feature in of_cudnn.items() if not has(feature)),
        norm_weights_apart=not has("norms_in_one_kernel"),
        recent_cudnn=has("recent_cudnn"),
        complex_positions=has("complex_positions"),
        repeated_keys=has("repeated_keys"),
        experts_summed=summed if has("experts_by_torch") else None,
        experts_compiled=compiled and has("compiled_experts"),
        loss_chunks=8 if has("loss_in_chunks") else 1,  # components/loss.py, ChunkedLossWrapper
    )
