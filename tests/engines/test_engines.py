"""What each engine refuses, by the user's own key, and what its traits say of precision and sharding."""

import pytest

from ahp.engines.registry import ENGINES, get
from ahp.engines.traits import ALL_ELEMENTS
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.schedule.orders import any_order
from ahp.schedule.registry import SCHEDULES


@pytest.mark.parametrize(
    ("name", "layout", "job", "choice", "key"),
    [
        ("megatron", {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe"}, {}, {}, "pipeline_parallel_schedule = 'GPipe'"),
        ("megatron", {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2, "zero_stage": 3}, {}, {}, "zero_stage = 3"),
        ("megatron", {}, {}, {"compile": True}, "engine.compile = True"),
        ("torchtitan", {}, {}, {"loss_chunk_tokens": 512}, "engine.loss_chunk_tokens = 512"),
        ("deepspeed", {}, {}, {"offload_optimizer": True}, "engine.offload_optimizer = True"),
        ("torchtitan", {}, {}, {"enable_async_tensor_parallel": True}, "engine.enable_async_tensor_parallel = True"),
        ("deepspeed", {}, {}, {"enable_async_tensor_parallel": True}, "engine.enable_async_tensor_parallel = True"),
        ("deepspeed", {}, {}, {"moe_token_dispatcher_type": "flex"}, "engine.moe_token_dispatcher_type = 'flex'"),
        ("torchtitan", {}, {}, {"overlap_moe_expert_parallel_comm": True}, "engine.overlap_moe_expert_parallel_comm = True"),
        ("accelerate", {}, {}, {"overlap_moe_expert_parallel_comm": False}, "engine.overlap_moe_expert_parallel_comm = False"),
        ("ahp", {}, {}, {"moe_token_dispatcher_type": "alltoall"}, "engine.moe_token_dispatcher_type = 'alltoall'"),
        ("torchtitan", {}, {}, {"cuda_graph_modules": ("attn",)}, "engine.cuda_graph_modules = ('attn',)"),
        ("megatron", {"activation_checkpoint": "full"}, {}, {"cuda_graph_modules": ("attn",)}, "engine.cuda_graph_modules = ['attn']"),
        ("torchtitan", {}, {"precision": "fp16"}, {}, "job.precision = 'fp16'"),
        ("deepspeed", {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}, {}, {}, "data_parallel_replicate_degree = 2"),
        ("deepspeed", {"activation_checkpoint": "selective"}, {}, {}, "activation_checkpoint = 'selective'"),
        ("deepspeed", {"tensor_parallel_degree": 2, "enable_sequence_parallel": True}, {}, {}, "enable_sequence_parallel = True"),
        ("deepspeed", {"data_parallel_replicate_degree": 2, "pipeline_parallel_degree": 2}, {}, {}, "data_parallel_replicate_degree = 2"),
        ("deepspeed", {"context_parallel_degree": 2, "pipeline_parallel_degree": 2, "zero_stage": 0}, {}, {}, "zero_stage = 0"),
        ("accelerate", {"pipeline_parallel_degree": 2}, {}, {}, "pipeline_parallel_degree = 2"),
        ("accelerate", {"data_parallel_shard_degree": 2, "zero_stage": 1}, {}, {}, "zero_stage = 1"),
        ("accelerate", {"context_parallel_degree": 2, "zero_stage": 1}, {}, {}, "zero_stage = 1"),
        ("megatron", {"context_parallel_degree": 2, "zero_stage": 3, "pipeline_parallel_degree": 2}, {}, {}, "zero_stage = 3"),
        ("deepspeed", {"data_parallel_replicate_degree": 2, "context_parallel_degree": 2, "zero_stage": 3}, {}, {}, "data_parallel_replicate_degree = 2"),
        ("accelerate", {"expert_parallel_degree": 2}, {}, {}, "expert_parallel_degree = 2"),
        ("megatron", {}, {"document_mask": True}, {}, "job.document_mask = True"),
        ("torchtitan", {}, {"optimizer": "muon"}, {}, "job.optimizer.name = 'muon'"),
    ],
)  # fmt: skip
def test_refused_by_the_users_own_key(name, layout, job, choice, key):
    reason = get(name).refuses(Job(**job), Parallelism(**layout), EngineChoice(name=name, **choice))
    assert reason is not None
    in_pipeline = " in a pipeline" if "pipeline_parallel_degree" in layout and key == "zero_stage = 3" else ""
    assert reason.startswith(f"{key}: {name} cannot run this{in_pipeline} (valid: ")


@pytest.mark.parametrize("name", ["ahp", "torchtitan", "megatron", "deepspeed", "accelerate"])
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_schedule": "GPipe"},
        {"pipeline_parallel_schedule": "ZBVZeroBubble", "tensor_parallel_degree": 2},
    ],
)
def test_a_schedule_without_a_pipeline_is_refused(name, layout):
    reason = get(name).refuses(Job(), Parallelism(**layout), EngineChoice(name=name))
    schedule = layout["pipeline_parallel_schedule"]
    assert (
        reason
        == f"pipeline_parallel_schedule = '{schedule}': needs a pipeline_parallel_degree above 1 (valid: 1F1B, the default)"
    )


@pytest.mark.parametrize(
    ("layout", "version", "valid"),
    [
        ({"data_parallel_shard_degree": 8, "expert_parallel_degree": 8}, "2025-12-16", "or engine.version 0.2.1"),
        ({"data_parallel_shard_degree": 8, "expert_parallel_degree": 8}, "0.2.1", None),
        ({"data_parallel_shard_degree": 8}, None, "or expert_parallel_degree above 1"),
        ({"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2, "expert_parallel_degree": 4}, None, "or expert_tensor_parallel_degree 1"),
        ({"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2, "enable_sequence_parallel": True, "expert_parallel_degree": 8}, None, None),
    ],
)  # fmt: skip
def test_torchtitan_has_deepep_for_whole_experts_of_several_ranks_since_december_2025(layout, version, valid):
    choice = EngineChoice(name="torchtitan", moe_token_dispatcher_type="flex", version=version)
    reason = get("torchtitan").refuses(Job(), Parallelism(zero_stage=3, **layout), choice)
    assert reason is None if valid is None else reason is not None and f"(valid: null, alltoall; {valid}" in reason
    alltoall = choice.model_copy(update={"moe_token_dispatcher_type": "alltoall"})
    assert get("torchtitan").refuses(Job(), Parallelism(zero_stage=3, **layout), alltoall) is None


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_states_in_16_bits(engine):
    reason = engine.refuses(Job(dtype="bf16"), Parallelism(), EngineChoice(name=engine.name))
    assert (reason is None) == (engine.name in ("ahp", "torchtitan"))
    rule = f"job.dtype = 'bf16': states in 16 bits are not priced for {engine.name} (valid: fp32; or engine.name ahp or torchtitan)"
    assert reason in (None, rule)


def test_what_is_valid_is_told_whole():
    of_torchtitan = get("torchtitan").refuses(Job(), any_order(), EngineChoice(name="torchtitan"))
    assert of_torchtitan is not None
    assert all(schedule.name in of_torchtitan for schedule in SCHEDULES.values() if schedule.in_torch)
    piped = Parallelism(data_parallel_shard_degree=2, zero_stage=3, pipeline_parallel_degree=2)
    of_megatron = get("megatron").refuses(Job(), piped, EngineChoice(name="megatron"))
    assert (
        of_megatron
        == "zero_stage = 3: megatron cannot run this in a pipeline (valid: 1; or pipeline_parallel_degree 1)"
    )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("stage", [2, 3])
def test_context_ranks_alone_share_states_as_data_ranks_do(engine, stage):
    over = [
        Parallelism(**{key: 2}, zero_stage=stage) for key in ("data_parallel_shard_degree", "context_parallel_degree")
    ]
    shared, alone = (engine.traits(Job(), layout, EngineChoice(name=engine.name)) for layout in over)
    assert alone == shared
    assert alone.gather.forward != "never"


@pytest.mark.parametrize(
    ("name", "order", "valid"),
    [
        ("ahp", ("tp", "dp_shard", "pp"), None),
        ("megatron", ("dp_shard", "pp", "tp"), None),
        ("megatron", ("tp", "dp_shard", "pp"), "['pp', 'dp_shard', 'tp'], or ['dp_shard', 'pp', 'tp']"),
        ("torchtitan", ("dp_shard", "pp", "tp"), "['pp', 'dp_shard', 'tp']"),
    ],
)
def test_orders_of_ranks(name, order, valid):
    degrees = {
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "zero_stage": 1,
    }
    reason = get(name).refuses(Job(), Parallelism(**degrees, mesh_order=order), EngineChoice(name=name))
    if valid is None:
        assert reason is None
    else:
        words = (
            f"mesh_order = {list(order)}: {name} numbers ranks in a fixed order (valid: {valid}; or engine.name ahp)"
        )
        assert reason == words


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [2, 3])
def test_every_engine_runs_sharded_data_parallelism(engine, precision, zero):
    layout = Parallelism(data_parallel_shard_degree=4, zero_stage=zero)
    job, choice = Job(precision=precision), EngineChoice(name=engine.name)
    assert engine.refuses(job, layout, choice) is None
    traits = engine.traits(job, layout, choice)
    assert traits.source
    assert traits.states.optimizer_bytes == 8
    assert traits.reduce.every_micro_batch
    assert traits.gather.keeps_weights == (zero == 2)
    if precision == "bf16":
        assert traits.states.compute_weight_bytes == 2


@pytest.mark.parametrize(("precision", "fused"), [("fp16", False), ("fp32", False), ("bf16", True), ("fp8", True)])
def test_megatrons_loss_is_fused_where_its_recipes_fuse_it(precision, fused):
    traits = get("megatron").traits(Job(precision=precision), Parallelism(), EngineChoice(name="megatron"))
    assert traits.kernels.fused_loss is fused
    exact = get("megatron").traits(
        Job(precision=precision, deterministic=True), Parallelism(), EngineChoice(name="megatron")
    )
    assert not exact.kernels.fused_loss  # Megatron-LM refuses the two together


def test_megatron_keeps_fp32_gradients_beside_bf16_weights_alone():
    def gradient_bytes(precision):
        return get("megatron").traits(Job(precision=precision), Parallelism(), EngineChoice()).gradients.element_bytes

    assert (gradient_bytes("fp16"), gradient_bytes("bf16"), gradient_bytes("fp32")) == (2, 4, 4)


@pytest.mark.parametrize(
    ("precision", "stage", "overlaps"),
    [
        ("fp16", 0, False),
        ("bf16", 0, False),
        ("bf16", 1, True),
        ("fp16", 3, False),
        ("bf16", 3, True),
        ("fp8", 0, True),
    ],
)
def test_megatron_hides_gradients_in_fp8_and_where_states_are_divided(precision, stage, overlaps):
    layout = Parallelism(data_parallel_shard_degree=2 if stage else 1, zero_stage=stage)
    traits = get("megatron").traits(Job(precision=precision), layout, EngineChoice(name="megatron"))
    assert traits.reduce.overlap == traits.gather.overlap == float(overlaps)
    # All gradients of a rank at once where nothing hides them; Megatron-FSDP sends blocks, ZeRO-3 in fp16 single weights.
    bucket = 0 if stage == 3 else 40_000_000 if overlaps else ALL_ELEMENTS
    assert traits.reduce.bucket_elements == traits.gather.bucket_elements == bucket


def test_megatrons_buckets_grow_with_the_ranks_and_are_of_the_first_stage_alone():
    def traits(**degrees):
        layout = Parallelism(zero_stage=1, **degrees)
        return get("megatron").traits(Job(precision="bf16"), layout, EngineChoice(name="megatron"))

    assert traits(data_parallel_shard_degree=64).reduce.bucket_elements == 64_000_000
    assert not traits(data_parallel_shard_degree=64).reduce.buckets_on_first_stage_alone
    assert traits(data_parallel_shard_degree=2, pipeline_parallel_degree=2).reduce.buckets_on_first_stage_alone


@pytest.mark.parametrize(
    ("stage", "to_all", "overlap"), [(0, False, 0.0), (1, True, 0.0), (2, True, 0.0), (3, False, 1.0)]
)
def test_deepspeed_sums_gradients_whole_and_hides_them_in_stage_3_alone(stage, to_all, overlap):
    layout = Parallelism(data_parallel_shard_degree=2 if stage else 1, zero_stage=stage)
    traits = get("deepspeed").traits(Job(precision="bf16"), layout, EngineChoice(name="deepspeed"))
    assert (traits.reduce.to_all, traits.reduce.overlap, traits.gather.overlap) == (
        to_all,
        overlap,
        overlap,
    )
