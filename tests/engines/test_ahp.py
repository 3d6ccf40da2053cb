import pytest

from ahp.engines.ahp import AhpEngine
from ahp.engines.registry import get, names
from ahp.errors import BadInput
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.schedule.registry import SCHEDULES


@pytest.mark.parametrize(
    ("parallelism", "job", "choice", "key"),
    [
        ({"context_parallel_degree": 2}, {}, {"attention": "math"}, "attention = 'math'"),
        ({"expert_parallel_degree": 4}, {}, {}, "expert_parallel_degree = 4"),
        ({"expert_parallel_degree": 4, "data_parallel_shard_degree": 2}, {}, {}, "expert_parallel_degree = 4"),
        (
            {"expert_parallel_degree": 2, "context_parallel_degree": 2, "zero_stage": 0},
            {},
            {},
            "expert_parallel_degree = 2: must divide data_parallel_shard_degree 1 x context_parallel_degree 2 with zero_stage 0",
        ),
        ({"enable_sequence_parallel": True}, {}, {}, "enable_sequence_parallel = True"),
        ({}, {"optimizer": "muon"}, {"offload_optimizer": True}, "job.optimizer.name = 'muon'"),
        ({}, {"dtype": "bf16"}, {"offload_optimizer": True}, "engine.offload_optimizer = True"),
        (
            {"activation_checkpoint": "selective", "context_parallel_degree": 2, "context_parallel_method": "ring"},
            {},
            {"compile": True},
            "activation_checkpoint = 'selective'",
        ),
        (
            {"activation_checkpoint": "selective", "data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
            {},
            {"compile": True},
            "activation_checkpoint = 'selective'",
        ),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"},
            {"precision": "fp8"},
            {"compile": True},
            "pipeline_parallel_schedule = 'InterleavedZeroBubble'",
        ),
        ({"pipeline_parallel_schedule": "GPipe"}, {}, {}, "pipeline_parallel_schedule = 'GPipe'"),
    ],
)
def test_refused_by_the_users_own_key(parallelism, job, choice, key):
    reason = AhpEngine().refuses(Job(**job), Parallelism(**parallelism), EngineChoice(**choice))
    assert reason is not None
    assert reason.startswith(key)
    assert "valid: " in reason


def test_each_way_out_that_a_refusal_of_selective_recompute_names_is_one():
    """With a ring and divided experts it named all-to-all alone, which is refused for the experts."""
    ring = {"context_parallel_degree": 2, "context_parallel_method": "ring"}
    experts = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}
    named = {
        "context_parallel_method all-to-all": {"context_parallel_method": "all-to-all"},
        "expert_parallel_degree 1": {"expert_parallel_degree": 1},
    }
    for layout in (ring, experts, ring | experts):
        both = layout | {"activation_checkpoint": "selective"}
        reason = _refused_compiled(both)
        assert reason is not None
        others, _, changes = reason.partition("(valid: ")[2].rstrip(")").partition("; or ")
        ways = [{"activation_checkpoint": kind} for kind in others.split(", ")]
        ways.append({key: value for change in changes.split(" with ") for key, value in named[change].items()})
        assert [_refused_compiled(both | way) for way in ways] == [None] * 3


def _refused_compiled(layout):
    return AhpEngine().refuses(Job(), Parallelism(**layout), EngineChoice(compile=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_what_the_runtime_runs_is_not_refused(schedule, recompute, precision):
    parallelism = Parallelism(
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule=schedule,
        virtual_stages_per_rank=1 if schedule in ("GPipe", "1F1B") else 2,
        data_parallel_shard_degree=2,
        tensor_parallel_degree=2,
        enable_sequence_parallel=True,
        context_parallel_degree=2,
        activation_checkpoint=recompute,
    )
    experts = parallelism.model_copy(update={"expert_parallel_degree": 2})
    for layout in (parallelism, experts):
        assert AhpEngine().refuses(Job(precision=precision), layout, EngineChoice()) is None
        compiled = AhpEngine().refuses(Job(precision=precision), layout, EngineChoice(compile=True))
        in_one_graph = recompute != "selective" or layout is parallelism
        apart = not SCHEDULES[schedule].splits_backward or precision != "fp8"
        assert (compiled is None) == (apart and in_one_graph)


@pytest.mark.parametrize(
    ("zero", "pipeline", "forward", "backward", "keeps_weights", "reduces_each", "whole_gradients"),
    [
        (0, 1, "never", "never", True, False, True),
        (1, 1, "per_step", "never", True, False, True),
        (2, 1, "per_step", "never", True, True, False),
        (3, 1, "per_micro_batch", "per_micro_batch", False, True, False),
        (3, 2, "per_step", "per_micro_batch", True, False, True),
        (2, 2, "per_step", "never", True, False, True),
    ],
)
def test_the_table_of_zero_stages(zero, pipeline, forward, backward, keeps_weights, reduces_each, whole_gradients):
    parallelism = Parallelism(
        zero_stage=zero, data_parallel_shard_degree=2 if zero else 1, pipeline_parallel_degree=pipeline
    )
    traits = AhpEngine().traits(Job(), parallelism, EngineChoice())
    assert (traits.gather.forward, traits.gather.backward) == (forward, backward)
    assert traits.gather.keeps_weights == keeps_weights
    assert traits.reduce.every_micro_batch == reduces_each
    assert traits.gradients.whole == whole_gradients


@pytest.mark.parametrize(
    ("precision", "degrees", "compute_bytes", "copies", "hooks"),
    [
        ("fp32", {}, 0, False, False),
        ("fp32", {"data_parallel_replicate_degree": 2}, 0, True, False),
        ("fp32", {"data_parallel_shard_degree": 2, "zero_stage": 2}, 4, True, True),
        ("bf16", {}, 2, True, True),
        ("fp16", {}, 2, True, True),
    ],
)
def test_weights_are_wrapped_where_they_are_sharded_or_cast(precision, degrees, compute_bytes, copies, hooks):
    traits = AhpEngine().traits(Job(precision=precision), Parallelism(**degrees), EngineChoice())
    assert (traits.states.compute_weight_bytes, traits.reduce.copies) == (compute_bytes, copies)
    assert traits.reduce.on_own_stream == hooks
    assert (traits.host.operators_per_unit > 0) == hooks
    split = Parallelism(**degrees, tensor_parallel_degree=2)
    more = AhpEngine().traits(Job(precision=precision), split, EngineChoice())
    assert more.host.operators_per_unit > traits.host.operators_per_unit


@pytest.mark.parametrize("degrees", [{}, {"data_parallel_replicate_degree": 2}, {"data_parallel_shard_degree": 2}])
def test_states_in_16_bits_are_wrapped_where_those_in_32_are(degrees):
    layout = Parallelism(**degrees)
    half, whole = (
        AhpEngine().traits(job, layout, EngineChoice()) for job in (Job(dtype="bf16"), Job(precision="fp32"))
    )
    assert half.states._replace(trained_share=1.0) == whole.states._replace(
        master_weight_bytes=2,
        optimizer_bytes=4,
        compute_weight_bytes=whole.states.compute_weight_bytes // 2,
    )
    assert half.gradients == whole.gradients._replace(element_bytes=2)
    buckets = 2 * whole.reduce.bucket_elements  # of as many bytes
    assert half.reduce == whole.reduce._replace(element_bytes=2, bucket_elements=buckets)
    assert half.host == whole.host


def test_compiled_blocks_are_fused():
    traits = [AhpEngine().traits(Job(), Parallelism(), EngineChoice(compile=compiled)) for compiled in (False, True)]
    assert [t.kernels.fusion for t in traits] == ["eager", "fused"]


def test_engines_by_name():
    assert names() == ["ahp", "torchtitan", "megatron", "deepspeed", "accelerate"]
    assert all(get(name).name == name for name in names())
    with pytest.raises(BadInput, match=r"engine.name = 'jax'"):
        get("jax")
