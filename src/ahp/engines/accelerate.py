"""accelerate (and Composer, which drives FSDP in the same way): FSDP on the model's own modules."""

from __future__ import annotations

from ahp.engines import fsdp2, releases
from ahp.engines.engine import Engine
from ahp.engines.host import host
from ahp.engines.support import Support
from ahp.engines.torch_ring import torch_ring
from ahp.engines.traits import GatherTraits, GradientTraits, HostTraits, KernelTraits, ReduceTraits, StateTraits, Traits
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

SUPPORT = Support(
    precisions=("fp32", "bf16", "fp16", "fp8"),
    schedules=(),
    activation_checkpoints=("none", "full"),
    zero_stages=(2, 3),
    sequence=False,
    expert=False,
)
"""accelerate 16cb6eb: FULL_SHARD is stage 3, SHARD_GRAD_OP stage 2, HYBRID_SHARD a replicate and a shard degree; fp8 through
Transformer Engine or torchao; ``ParallelismConfig`` adds tensor and context degrees; no pipeline for training."""


BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that torch's DistributedDataParallel sums at once (torch 2.13, bucket_cap_mb), in buckets that take memory besides the
gradients (gradient_as_bucket_view is off by default)."""


ON_CUDNN = ("hopper", "blackwell")
"""Generations of GPUs on which torch's scaled_dot_product_attention takes cuDNN."""


class AccelerateEngine(Engine):
    """What accelerate can run, and how it behaves.

    Priced like the only published set of runs of this kind, Composer's llm-foundry: norms, activations and the loss are single
    kernels, and attention is Triton's first-generation FlashAttention. With ``compile`` whole chains are fused and attention is
    torch's own. The mixed precision of its FSDP plugin sends gradients in the compute type and keeps fp32 shards of weights,
    gradients and states.
    """

    name = "accelerate"

    def refuses(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """The reason why it cannot run the layout (key, value, rule), or None."""
        return SUPPORT.refuses(self.name, job, parallelism, choice)

    def no_key_for(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """Why the launcher's YAML cannot express the layout (key, value, rule), or None; the caller has checked ``refuses`` first."""
        p = parallelism
        if p.tensor_parallel_degree == 1 == p.context_parallel_degree:
            return None
        if p.weight_shards == 1:
            rule = "nothing is sharded, and accelerate launch has tensor and context parallelism with FSDP alone"
            return f"zero_stage = {p.zero_stage}: {rule} (valid: 2, 3, with data_parallel_shard_degree above 1)"
        if p.data_parallel_replicate_degree > 1 == p.data_parallel_shard_degree:
            rule = "with tensor or context parallelism accelerate replicates what is sharded over data ranks alone"
            return f"data_parallel_shard_degree = 1: {rule} (valid: above 1, or data_parallel_replicate_degree 1)"
        return None

    def traits(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> Traits:
        """Its behavior for the forecast; the caller has checked ``refuses`` first."""
        sharded = parallelism.weight_shards > 1
        zero = parallelism.zero_stage if sharded else 0
        half = job.precision != "fp32"
        ddp = not sharded and parallelism.weight_replicas > 1
        return Traits(
            states=StateTraits(
                master_weight_bytes=4, optimizer_bytes=8, compute_weight_bytes=2 if half else 4 if sharded else 0
            ),
            gradients=GradientTraits(element_bytes=4, whole=zero < 2),
            gather=GatherTraits(
                overlap=1.0,
                forward="never" if zero == 0 else "per_micro_batch",
                backward="per_micro_batch" if zero == 3 else "never",
                keeps_weights=zero < 3,
                ends_apart=not sharded,
            ),
            reduce=ReduceTraits(
                element_bytes=2 if half and sharded else 4,
                overlap=1.0,
                every_micro_batch=zero >= 2,
                copies=sharded or ddp,
                bucket_elements=BUCKET_BYTES // 4 if ddp else 0,
                keeps_buckets=ddp,
                on_own_stream=sharded,
            ),
            # accelerator.py, maybe_context_parallel
            context=torch_ring(compiled=bool(choice.compile)),
            kernels=KernelTraits(
                fusion="fused" if choice.compile else "modules",
                attention=None if choice.compile else "flash1",
                flash2_on=() if not choice.compile or releases.has(self.name, "cudnn_attention", None) else ON_CUDNN,
                fused_loss=True,
            ),
            host=HostTraits(
                operators_per_unit=0,
                launches_per_operator=host.value("eager_launches"),
                checkpoint=None if choice.compile else fsdp2.eager_checkpoint(),
            ),
            source="accelerate 16cb6eb: utils/dataclasses.py FullyShardedDataParallelPlugin; FSDP and DistributedDataParallel of torch",
        )
