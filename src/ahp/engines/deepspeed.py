"""DeepSpeed: ZeRO 0 to 3 and its own 1F1B pipeline, with Megatron's kernels and tensor parallelism if it has any."""

from __future__ import annotations

from ahp.engines import releases, steps
from ahp.engines.engine import Engine
from ahp.engines.support import Support
from ahp.engines.traits import (
    GatherTraits,
    GradientTraits,
    HostTraits,
    KernelTraits,
    PipelineTraits,
    ReduceTraits,
    StateTraits,
    Traits,
)
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

SUPPORT = Support(
    precisions=("fp32", "bf16", "fp16"),
    schedules=("1F1B",),
    activation_checkpoints=("none", "full"),
    zero_stages_in_pipeline=(1,),
    hybrid=False,
    sequence=False,
    context=True,
    expert=True,
    compile=False,
)
"""DeepSpeed edaa722: PipelineModule runs 1F1B and refuses ZeRO 2 and 3 (runtime/pipe/engine.py); context parallelism is
Ulysses; ZeRO's ranks are all data ranks (MiCS and ZeRO++ are separate). DeepSpeed 0.19.8: a pipeline in bf16 uses BF16_Optimizer
(runtime/engine.py, _do_optimizer_sanity_check), which divides the states over data ranks in every ZeRO stage."""


REDUCE_BUCKET_ELEMENTS = ALLGATHER_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed 0.19.8, runtime/zero/config.py: defaults of reduce_bucket_size and allgather_bucket_size (5e8 since 2020); engine.py,
buffered_allreduce_fallback: the same without ZeRO."""

PREFETCH_BUCKET_ELEMENTS = 50_000_000
"""runtime/zero/config.py: stage3_prefetch_bucket_size. partitioned_param_coordinator.py: weights of the next modules are gathered
together up to this many elements."""

LIVE_ELEMENTS = 1_000_000_000
"""runtime/zero/config.py: stage3_max_live_parameters and stage3_max_reuse_distance. Each module gathers ahead until this many elements are
whole, and frees no weight that is needed again within this many."""


class DeepSpeedEngine(Engine):
    """What DeepSpeed can run, and how it behaves: gradients in the compute type, fp32 master weights in the optimizer.

    A pipeline in bf16 is priced with ``data_types.grad_accum_dtype: fp32``, as in its published runs (BLOOM, LUMI) and as
    DeepSpeed requires with many micro-batches (runtime/engine.py, _do_optimizer_sanity_check): BF16_Optimizer accumulates gradients
    in fp32 besides those of 16 bits, and reduces the fp32 ones (runtime/bf16_optimizer.py).
    """

    name = "deepspeed"

    def refuses(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """The reason why it cannot run the layout (key, value, rule), or None."""
        return SUPPORT.refuses(self.name, job, parallelism, choice) or self._refuses_replicas(job, parallelism)

    def no_key_for(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """Why its JSON cannot express the layout (key, value, rule), or None; the caller has checked ``refuses`` first."""
        if parallelism.pipeline_parallel_degree == 1:
            return None
        rule = "DeepSpeed's pipeline is a PipelineModule of your script, and its JSON has no key for it"
        return f"pipeline_parallel_degree = {parallelism.pipeline_parallel_degree}: {rule} (valid: 1)"

    def _refuses_replicas(self, job: Job, p: Parallelism) -> str | None:
        if job.precision != "bf16" or p.pipeline_parallel_degree == 1 or p.weight_shards > 1 or p.weight_replicas == 1:
            return None
        given, instead = f"zero_stage = {p.zero_stage}", "1"
        if p.data_parallel_replicate_degree > 1:
            given = f"data_parallel_replicate_degree = {p.data_parallel_replicate_degree}"
            instead = "1, with data_parallel_shard_degree and zero_stage 1"
        return f"{given}: {self.name} cannot run this (valid: {instead}: in bf16 its pipeline always divides the optimizer's states)"

    def traits(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> Traits:
        """Its behavior for the forecast; the caller has checked ``refuses`` first."""
        zero = parallelism.zero_stage if parallelism.weight_shards > 1 else 0
        half = job.precision != "fp32"
        sums_in_fp32 = job.precision == "bf16" and parallelism.pipeline_parallel_degree > 1
        sends = parallelism.weight_shards * parallelism.weight_replicas > 1
        return Traits(
            states=StateTraits(
                master_weight_bytes=4,
                optimizer_bytes=8,
                compute_weight_bytes=2 if half else 0,
                # runtime/bf16_optimizer.py, _setup_for_real_optimizer: _flatten_dense_tensors_aligned on the device, whose sources are freed
                # after. ZeRO moves them to the host first (runtime/zero/stage_1_and_2.py).
                flattened_bytes=2 if sums_in_fp32 else 0,
            ),
            gradients=GradientTraits(
                element_bytes=4 if sums_in_fp32 or not half else 2,
                beside_bytes=2 if sums_in_fp32 else 0,
                whole=zero < 2,
                # runtime/bf16_optimizer.py, _update_hp_grad: hp_grad.add_(lp.grad.to(...)), after clear_hp_grads
                adds_first=sums_in_fp32,
                cast_apart=sums_in_fp32,
                # Set to zero; a bucket is divided by the data ranks before it is reduced (average_tensor, allreduce_bucket).
                passes=int(sums_in_fp32) + 2 * int(sends),
                # runtime/zero/stage_1_and_2.py, step, and runtime/fp16/fused_optimizer.py: the gradients of the rank's part, flat and in fp32
                update_bytes=4 if half and not sums_in_fp32 and zero < 3 else 0,
                # Made from the gradients of 16 bits, joined first; the update then reads 4 bytes.
                before_update_bytes=2 + 2 + 2 + 4 + 2 if half and not sums_in_fp32 else 0,
            ),
            gather=GatherTraits(
                overlap=1.0 if zero == 3 else 0.0,
                forward="never" if zero == 0 else "per_micro_batch" if zero == 3 else "per_step",
                backward="per_micro_batch" if zero == 3 else "never",
                copies=zero == 3,  # runtime/utils.py, all_gather_dp_groups: into the flat weights themselves
                at_start=zero in (1, 2),  # all-gathered at the end of the optimizer's step
                keeps_weights=zero < 3,
                ends_apart=True,
                bucket_elements=PREFETCH_BUCKET_ELEMENTS if zero == 3 else ALLGATHER_BUCKET_ELEMENTS,
                ahead_elements=LIVE_ELEMENTS if zero == 3 else 0,
            ),
            reduce=ReduceTraits(
                element_bytes=4 if sums_in_fp32 or not half else 2,
                # runtime/zero/config.py, overlap_comm_valid: on only in stage 3.
                overlap=1.0 if zero == 3 else 0.0,
                # runtime/zero/stage_1_and_2.py, average_tensor: use_multi_rank_bucket_allreduce, the default since 2023
                to_all=zero in (1, 2),
                every_micro_batch=zero >= 2,
                copies=sends,
                bucket_elements=REDUCE_BUCKET_ELEMENTS if sends else 0,
                collects_in_bucket=zero > 0 and not sums_in_fp32,
            ),
            pipeline=PipelineTraits(
                sends_split_by_tensor=True,  # runtime/config.py: pipe_partitioned, grad_partitioned
            ),
            kernels=KernelTraits(
                fusion="fused",
                attention=None if releases.has(self.name, "flash_attention_2", None) else "flash1",
                fused_loss=False,  # Megatron's, whose logits are copied to fp32 first
                dropout_apart=True,  # Megatron's
                joined_products=True,  # query_key_value, dense_h_to_4h
                gate_apart=not releases.has(self.name, "fused_gate", None),
                positions_apart=not releases.has(self.name, "fused_positions", None),
                # Megatron-DeepSpeed 34c9b34f, model/fused_layer_norm.py: apex's, whose cuComputePartGradGammaBeta reads both tensors again
                norms_apart=True,
                norm_weights_apart=True,
            ),
            host=HostTraits(
                operators_per_unit=0,
                launches_per_operator=steps.value("host_launches"),
                waits=releases.has(self.name, "waiting_host", None),
            ),
            source="DeepSpeed edaa722: runtime/engine.py, runtime/zero, runtime/pipe",
        )
