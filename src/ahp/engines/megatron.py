"""Megatron-LM (Megatron-Core): fused kernels, its own tensor parallelism and pipeline, a distributed optimizer."""

from __future__ import annotations

from ahp.engines import releases, steps
from ahp.engines.engine import Engine
from ahp.engines.host import host
from ahp.engines.releases import Has
from ahp.engines.support import DISPATCH, Support
from ahp.engines.traits import (
    ALL_ELEMENTS,
    ContextTraits,
    ExpertTraits,
    GatherTraits,
    GradientTraits,
    HostTraits,
    KernelTraits,
    PipelineTraits,
    ReduceTraits,
    StateTraits,
    TensorTraits,
    Traits,
)
from ahp.job import Job
from ahp.plan import AXES, EngineChoice, Parallelism

SCHEDULES_OF_ARGUMENTS = ("1F1B", "Interleaved1F1B")

SUPPORT = Support(
    precisions=("fp32", "bf16", "fp16", "fp8"),
    schedules=(*SCHEDULES_OF_ARGUMENTS, "InterleavedZeroBubble"),
    zero_stages_in_pipeline=(1,),
    compile=False,
    async_tensor="always",
    dispatch=tuple(DISPATCH),
    recomputed_layers="the same",
    folds_experts="where needed",
    mesh_orders=(AXES, ("dp_replicate", "dp_shard", "pp", "cp", "tp")),
)
"""Megatron-Core d98e8a6: 1F1B and interleaved in core/pipeline_parallel/schedules.py, zero-bubble in its published fork
(sail-sg/zero-bubble-pipeline-parallelism). The first ``--recompute-num-layers`` blocks of a stage can be recomputed in full
(``--recompute-method block``). Ranks are numbered tp-cp-ep-dp-pp, innermost first, or tp-cp-ep-pp-dp under
``--use-tp-pp-dp-mapping`` (training/initialize.py). ZeRO stage 1 is the distributed optimizer, 2 and 3 are Megatron-FSDP
(optim_grads, optim_grads_params), which has no pipeline: a block's weights are gathered and its gradients reduced together, overlapped
with the computation. In fp16 stage 3 is priced like its only published runs, Megatron's model under DeepSpeed: weights gathered one by
one, without overlap (arXiv 2104.04473, table 2)."""


LEAST_BUCKET_ELEMENTS, BUCKET_ELEMENTS_OF_RANK = 40_000_000, 1_000_000
"""Megatron-Core d98e8a6, core/distributed/distributed_data_parallel.py: gradients whose reduction overlaps with the computation go in buckets of
max(40,000,000, 1,000,000 x data-parallel ranks) elements on the first pipeline rank, and there only for the first model chunk (training.py,
disable_bucketing); all others, and all without overlap, have one bucket (as in 2021: 8aa4619f, model/distributed.py)."""


class MegatronEngine(Engine):
    """What Megatron-LM can run, and how it behaves.

    Gradients are kept in fp32 with bf16 weights (``--accumulate-allreduce-grads-in-fp32``, the default in bf16) and in
    fp16 with fp16 weights; the fp32 master weights belong to the optimizer.

    fp8 is priced with the flags of NVIDIA's recipes for it (examples/llama/train_llama3_8b_h100_fp8.sh, NeMo's performance scripts):
    gradients are kept and reduced in bf16, and weights of blocks gathered in 8 bits (``--fp8-param-gather``; their transposes take memory
    too), both overlapped with the computation, in a pipeline too; tensor-parallel collectives run in pieces overlapped with the products
    (``--tp-comm-overlap``, which needs sequence parallelism and Transformer Engine). In other precisions these flags are off, as by
    default; ``engine.enable_async_tensor_parallel`` sets the last one.

    Tensor-parallel ranks divide every expert, Megatron's default; if expert ranks must span them, each holds whole experts
    (``--expert-tensor-parallel-size 1``, as in most recipes of Megatron-Bridge; core/parallel_state.py lays expert ranks over tensor,
    context and data ranks, innermost first), which needs sequence parallelism (training/arguments.py).

    Experts on several nodes are priced like NVIDIA's recipes for them (Megatron-Bridge 067f987d, perf_recipes/): tokens travel by DeepEP or
    HybridEP (``--moe-token-dispatcher-type flex``), overlapped with the opposite pass of another micro-batch
    (``--overlap-moe-expert-parallel-comm``). On one node they travel by NCCL, without overlap. ``engine.moe_token_dispatcher_type`` and
    ``engine.overlap_moe_expert_parallel_comm`` say what a recipe really has.
    """

    name = "megatron"
    own_attention = True

    def refuses(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """The reason why it cannot run the layout (key, value, rule), or None."""
        return SUPPORT.refuses(self.name, job, parallelism, choice)

    def no_key_for(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """Why Megatron-LM's own arguments cannot express the layout (key, value, rule), or None; the caller has checked ``refuses`` first."""
        p = parallelism
        if p.num_stages == 1 or p.pipeline_parallel_schedule in SCHEDULES_OF_ARGUMENTS:
            return None
        rule = "Megatron-LM itself has 1F1B and interleaved 1F1B; zero-bubble is a fork (sail-sg/zero-bubble-pipeline-parallelism)"
        return f"pipeline_parallel_schedule = {p.pipeline_parallel_schedule!r}: {rule} (valid: {', '.join(SCHEDULES_OF_ARGUMENTS)})"

    def traits(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> Traits:
        """Its behavior for the forecast; the caller has checked ``refuses`` first."""

        def has(feature: str) -> bool:
            return releases.has(self.name, feature, choice.version)

        zero = parallelism.zero_stage if parallelism.weight_shards > 1 else 0
        half = job.precision != "fp32"
        fp8 = job.precision == "fp8"
        one_by_one = zero == 3 and job.precision == "fp16"
        # --overlap-grad-reduce and --overlap-param-gather are off by default, and on in the published recipes, which have the distributed
        # optimizer (NeMo, scripts/performance/helpers.py); Megatron-FSDP always overlaps.
        fsdp, recipes = zero >= 2 and not one_by_one, fp8 or zero == 1
        reduces_beside = fsdp or (recipes and has("overlapped_gradients"))
        gathers_beside = fsdp or (recipes and has("overlapped_gathers"))
        several = parallelism.weight_shards * parallelism.weight_replicas > 1
        each = max(LEAST_BUCKET_ELEMENTS, BUCKET_ELEMENTS_OF_RANK * parallelism.data_parallel_degree)
        bucket = 0 if one_by_one or zero >= 2 else each if reduces_beside else ALL_ELEMENTS
        grouped = host.value("grouped_forward_operators"), host.value("grouped_backward_operators")

        return Traits(
            states=StateTraits(master_weight_bytes=4, optimizer_bytes=8, compute_weight_bytes=2 if half else 0),
            gradients=_gradients(job, zero, has, averages=several and not averages_in_collective(job, parallelism)),
            gather=GatherTraits(
                each_weight=one_by_one,
                copies=one_by_one,  # core/distributed/param_and_grad_buffer.py: weights are views of param_data
                ends_apart=True,
                overlap=1.0 if gathers_beside else 0.0,
                bucket_elements=bucket,
                block_bytes=1 if fp8 else 0,
                forward="never" if zero == 0 else "per_micro_batch" if zero == 3 else "per_step",
                backward="per_micro_batch" if zero == 3 else "never",
                # core/pipeline_parallel/schedules.py: param_sync_func before the first forward
                at_start=zero in (1, 2),
                keeps_weights=zero < 3,
            ),
            reduce=ReduceTraits(
                element_bytes=_gradient_bytes(job),
                overlap=1.0 if reduces_beside else 0.0,
                bucket_elements=bucket,
                buckets_on_first_stage_alone=reduces_beside and parallelism.pipeline_parallel_degree > 1,
                every_micro_batch=zero >= 2,
                copies=False,
            ),
            tensor=TensorTraits(
                in_pieces=fp8 if choice.enable_async_tensor_parallel is None else choice.enable_async_tensor_parallel,
                few_keys="gathered",  # core/transformer/attention.py: num_query_groups below the tensor-parallel size
                # With sequence parallelism a third, the gathering of the output's gradient, has no product to overlap with.
                overlap_backward=has("async_all_reduce") * (2 / 3 if parallelism.enable_sequence_parallel else 1.0),
            ),
            context=ContextTraits(ways=("ring",)),  # cp_comm_type p2p, the default
            experts=_experts(parallelism, choice, has),
            # training/arguments.py sets deallocate_pipeline_outputs: what a stage has sent is freed (core/pipeline_parallel/schedules.py)
            pipeline=PipelineTraits(
                ends="may_be_empty", sends_split_by_tensor=has("split_messages"), keeps_outputs=False
            ),
            kernels=_kernels(job, has),
            host=HostTraits(
                operators_per_unit=0,
                launches_per_operator=steps.value("host_launches"),
                experts_operators=grouped if has("dropless_experts") else (0.0, 0.0),
                graphed=choice.cuda_graph_modules or (),
            ),
            source=(
                "Megatron-LM d98e8a6: core/distributed, core/tensor_parallel/layers.py, core/optimizer; Transformer Engine: "
                "pytorch/module/base.py initialize_ub, pytorch/attention (AttnFuncWithCPAndKVP2P)"
            ),
        )


def fuses_loss(job: Job) -> bool:
    """Whether the kernels of the loss can be fused: its backward pass returns bf16, whatever the logits are (core/fusions/fused_cross_entropy.py), and
    deterministic runs refuse it (training/determinism.py)."""
    return job.precision in ("bf16", "fp8") and not job.deterministic


def averages_in_collective(job: Job, p: Parallelism) -> bool:
    """Whether the collective that sums gradients over the data ranks divides them too (``--ddp-average-in-collective``): off by default, and on in
    the published recipes, which overlap it with the computation. Megatron-FSDP has a scale of its own."""
    zero = p.zero_stage if p.weight_shards > 1 else 0
    return p.weight_shards * p.weight_replicas > 1 and zero < 2 and (zero == 1 or job.precision == "fp8")


def _gradient_bytes(job: Job) -> int:
    """Bytes of an element of the gradients that are summed and sent."""
    return 2 if job.precision in ("fp8", "fp16") else 4


def _kernels(job: Job, has: Has) -> KernelTraits:
    # --cross-entropy-loss-fusion is off by default, and on in NVIDIA's recipes and in what `ahp export` writes, none of which is in fp16:
    # there logits are copied to fp32 and go through core/tensor_parallel/cross_entropy.py operator by operator, as in all published runs.
    fused_loss = has("fused_loss") and fuses_loss(job)
    return KernelTraits(
        fusion="fused",
        attention=None if has("cudnn_attention") else "flash2",  # Transformer Engine takes cuDNN's where torch does
        fused_loss=fused_loss,
        loss_keeps_fp32=fused_loss and not has("loss_of_transformer_engine"),
        recent_cudnn=has("recent_cudnn"),
        dropout_apart=True,  # core/transformer/dot_product_attention.py: FusedScaleMaskSoftmax, then torch.nn.Dropout
        # Transformer Engine, common/normalization/*/*_bwd_kernels.cuh, as apex's FastLayerNorm: one kernel sums the weight's gradient too.
        norms_apart=True,
        norm_weights_apart=not has("norms_in_one_kernel"),
        joined_products=True,  # core/transformer/attention.py: linear_qkv; mlp.py: linear_fc1, fusions/fused_bias_swiglu.py
        gate_apart=not has("fused_gate"),
        positions_apart=not has("fused_positions"),
        scaled_apart=has("scaled_apart"),
    )


def _gradients(job: Job, zero: int, has: Has, *, averages: bool) -> GradientTraits:
    """``averages``: gradients are divided by the data ranks before they are sent."""
    in_buffer = job.precision == "bf16" or has("gradients_in_buffer")  # fp32 gradients of bf16 have always been in one
    passes = (3 if averages else 1) if in_buffer else 6 if averages else 0
    return GradientTraits(
        element_bytes=_gradient_bytes(job),
        whole=zero < 2,
        fused_accumulation=job.precision in ("fp8", "bf16"),
        # core/distributed: a hook adds each gradient to main_grad, which zero_grad_buffer sets to zero. start_grad_sync divides it by
        # the data ranks unless it averages in the collective. Without a buffer (8aa4619f, model/distributed.py) gradients are flattened,
        # divided and copied back.
        adds_first=in_buffer and zero < 2,
        passes=0 if zero >= 2 else passes,
        # core/optimizer: _copy_model_grads_to_main_grads (the update then reads 4 bytes), _unscale_main_grads_and_check_for_nan
        before_update_bytes=(2 + 4 + 2 if _gradient_bytes(job) == 2 else 0) + (8 if job.precision == "fp16" else 0),
    )


def _experts(parallelism: Parallelism, choice: EngineChoice, has: Has) -> ExpertTraits:
    overlap = choice.overlap_moe_expert_parallel_comm
    return ExpertTraits(
        folded=SUPPORT.folded(parallelism),
        tokens_once_to_a_node=choice.moe_token_dispatcher_type != "alltoall",
        # DeepEP, csrc/kernels (is_token_in_rank) and its hybrid-ep branch (sparse_to_dense_map: one place for each token and rank)
        tokens_once_to_a_rank=choice.moe_token_dispatcher_type == "flex",
        # core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher: counts are gathered; probabilities and their gradients are sent
        numbers_sent=0 if choice.moe_token_dispatcher_type == "flex" else 3 if has("sent_probabilities") else 1,
        overlap_between_nodes=0.0 if overlap is False else 1.0,
        overlap_on_a_node=1.0 if overlap else 0.0,
        fused_permutation=has("fused_permutation"),  # --moe-permute-fusion
        # core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher: sort_chunks_by_idxs where a rank has several experts
        sorts_arrived=choice.moe_token_dispatcher_type != "flex",
        launched_one_by_one=True,  # --moe-grouped-gemm: Transformer Engine's GroupedLinear, cuBLAS on several streams
        one_after_another=not has("grouped_experts"),
        one_graph_in_mxfp8=not choice.cuda_graph_modules and has("experts_in_one_graph"),
    )
