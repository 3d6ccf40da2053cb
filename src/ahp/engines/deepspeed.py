"""DeepSpeed: ZeRO 0 to 3 and its own 1F1B pipeline, with Megatron's kernels and tensor parallelism where it has any."""

from __future__ import annotations

from ahp.engines import steps
from ahp.engines.engine import Engine, Traits
from ahp.engines.support import Support
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
Ulysses; ZeRO's ranks are all data ranks (MiCS and ZeRO++ are apart)."""


class DeepSpeedEngine(Engine):
    """What DeepSpeed can run, and how it behaves: gradients in the compute type, fp32 master weights in the optimizer."""

    name = "deepspeed"

    def refuses(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """The reason why it cannot run the layout (key, value, rule), or None."""
        return SUPPORT.refuses(self.name, job, parallelism, choice)

    def traits(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> Traits:
        """Its behaviour for the forecast; the caller has asked ``refuses`` first."""
        zero = parallelism.zero_stage if parallelism.weight_shards > 1 else 0
        half = job.precision != "fp32"
        return Traits(
            gradient_bytes=2 if half else 4,
            reduce_bytes=2 if half else 4,
            master_weight_bytes=4,
            optimizer_state_bytes=8,
            compute_weight_bytes=2 if half else 0,
            fusion="fused",
            fused_loss=False,  # Megatron's, whose logits are copied to fp32 first
            gradient_overlap=0.0,  # overlap_comm is off by default
            gathers_each_weight=zero == 3,
            parameter_gather_overlap=0.0,
            forward_gathers="never" if zero == 0 else "per_micro_batch" if zero == 3 else "per_step",
            backward_gathers="per_micro_batch" if zero == 3 else "never",
            gathers_at_start=zero in (1, 2),  # all-gathered at the end of the optimizer's step
            keeps_gathered_weights=zero < 3,
            reduces_every_micro_batch=zero >= 2,
            keeps_whole_gradients=zero < 2,
            reduce_copies=True,
            host_operators_per_unit=0,
            host_launches_per_operator=steps.value("host_launches"),
            source="DeepSpeed edaa722: runtime/engine.py, runtime/zero, runtime/pipe",
        )
