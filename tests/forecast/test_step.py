"""Whole forecasts: parts add up, closed forms hold, and the plain interface refuses what it should."""

import math
from dataclasses import replace

import pytest

from ahp.cluster.model import Measurements
from ahp.engines import releases
from ahp.engines.host import host
from ahp.errors import BadInput, NotExpressible
from ahp.forecast.assembly import NORMAL_90, band_s
from ahp.forecast.constants import margins
from ahp.forecast.efficiency import Rates
from ahp.forecast.pricer import slowest_share
from ahp.forecast.step import _pricer, forecast, price, pricer, simulate
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster

JOB = Job(sequence_length=128, global_batch_size=32)

LAYOUTS = [
    {},
    {"micro_batch_size": 4},
    {"data_parallel_replicate_degree": 4},
    {"data_parallel_shard_degree": 4, "zero_stage": 1},
    {"data_parallel_shard_degree": 4, "zero_stage": 2},
    {"data_parallel_shard_degree": 4, "zero_stage": 3, "activation_checkpoint": "full"},
    {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    {"tensor_parallel_degree": 4},
    {"pipeline_parallel_degree": 3},
    {"pipeline_parallel_degree": 3, "pipeline_parallel_schedule": "GPipe"},
    {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2, "data_parallel_shard_degree": 2},
    {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2},
]


def price_on_one_node(graph, layout, job=JOB, **cluster):
    parallelism = Parallelism(**layout)
    return price(graph, make_cluster(per_node=parallelism.world_size, **cluster), job, parallelism)


def test_the_same_devices_share_what_kernels_take(tiny):
    """However many there are, and whatever the engine; but what was measured is about so many workers of a node."""

    def segments(engine=None, **cluster):
        return pricer(tiny, make_cluster(**cluster), JOB, engine or EngineChoice()).group.unit_pricer.segments

    one = segments(per_node=8)
    assert segments(per_node=7) is segments(nodes=3) is segments(EngineChoice(name="megatron")) is one
    assert segments(memory_bytes=1) is not one
    measured = segments(per_node=8, measured=Measurements())
    assert measured is not one
    assert segments(per_node=8, measured=Measurements()) is measured
    assert segments(per_node=4, measured=Measurements()) is not measured


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: Parallelism(**layout).short())
def test_what_is_shared_changes_no_forecast(tiny, layout):
    for engine in (
        EngineChoice(compile=True),
        EngineChoice(compile=False),
    ):  # the second finds the first one's kernels there
        parallelism = Parallelism(**layout)
        shared, fresh = (
            price(graph, make_cluster(per_node=parallelism.world_size), JOB, parallelism, engine)
            for graph in (tiny, replace(tiny))
        )
        assert shared.forecast.step_time_s == fresh.forecast.step_time_s
        assert shared.forecast.memory == fresh.forecast.memory


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: Parallelism(**layout).short())
def test_parts_add_up(tiny, layout):
    priced = price_on_one_node(tiny, layout, launch_s=5e-6)
    f, world = priced.forecast, priced.parallelism.world_size
    assert sum(f.step.values()) == pytest.approx(f.step_time_s)
    assert min(f.step.values()) > 0
    assert f.step_time_low_s < f.step_time_s < f.step_time_high_s
    assert (f.step_time_low_s, f.step_time_high_s) == band_s(f.step_time_s, margins.value("step_error_catalogue"))
    assert f.tokens_per_s_per_device * world * f.step_time_s == pytest.approx(32 * 128)
    outside = ("allocator_slack", "communicators", "context")
    assert f.memory_allocated_bytes == sum(v for k, v in f.memory.items() if k not in outside)
    assert f.memory_reserved_bytes == f.memory_allocated_bytes + f.memory["allocator_slack"]
    assert 0 < f.mfu < 1
    assert f.fits == (f.fit_probability >= 0.95)


def test_one_device_takes_the_sum_of_its_operators(tiny):
    priced = price_on_one_node(tiny, {"micro_batch_size": 32})
    stage = priced.stages[0]
    f = priced.forecast
    assert f.step["forward"] == stage.forward["forward"]
    assert f.step["backward"] == stage.backward["backward"]
    assert "bubble" not in f.step
    assert "gradient_reduce" not in f.step
    assert f.mfu == pytest.approx(3 * tiny.at(32).flops("forward") / (f.step_time_s * 1e14))


def test_recompute_costs_one_more_forward_and_saves_memory(tiny):
    plain = price_on_one_node(tiny, {"micro_batch_size": 8}).forecast
    again = price_on_one_node(tiny, {"micro_batch_size": 8, "activation_checkpoint": "full"}).forecast
    assert 0.5 * again.step["forward"] < again.step["recompute"] < again.step["forward"]  # blocks, not the ends
    assert again.memory["activations"] < plain.memory["activations"] / 3


def test_the_bubble_is_the_idle_time_of_the_rank_that_ends_last(hand_graph):
    job = Job(sequence_length=64, global_batch_size=8)
    priced = price(hand_graph, make_cluster(per_node=4), job, Parallelism(pipeline_parallel_degree=4))
    timeline = priced.timeline
    last = max(range(4), key=timeline.end_s)
    assert timeline.end_s(last) == timeline.makespan_s
    assert priced.forecast.step["bubble"] == pytest.approx(timeline.makespan_s - timeline.busy_s[last])
    assert priced.forecast.step_time_s == pytest.approx(
        (timeline.makespan_s + priced.forecast.step["optimizer"]) * (1 + slowest_share(4))
    )


def test_tied_weights_are_summed_over_first_and_last_stage(hand_graph):
    job, layout = Job(sequence_length=64, global_batch_size=8), Parallelism(pipeline_parallel_degree=4)
    tied = replace(hand_graph, tied=(("embed.weight", "lm_head.weight"),), head=replace(hand_graph.head, parameters=()))
    untied, shared = (price(g, make_cluster(per_node=4), job, layout) for g in (hand_graph, tied))
    assert shared.memory.weights.total[-1] == untied.memory.weights.total[-1]  # the last stage holds a copy
    assert shared.forecast.step["gradient_reduce"] > untied.forecast.step.get("gradient_reduce", 0.0)
    alone = price(tied, make_cluster(per_node=1), job, Parallelism())
    assert alone.memory.weights.total.tolist() == [tied.num_parameters]


def test_sharding_divides_states_by_stage(tiny):
    whole = price_on_one_node(tiny, {"data_parallel_replicate_degree": 4}).forecast.memory
    for zero in (1, 2, 3):
        sharded = price_on_one_node(tiny, {"data_parallel_shard_degree": 4, "zero_stage": zero}).forecast.memory
        assert sharded["optimizer_states"] == pytest.approx(whole["optimizer_states"] / 4, abs=4)
    assert whole["parameters"] == 4 * tiny.num_parameters


def test_tensor_parallel_ranks_hold_their_part(tiny):
    layouts = ({"tensor_parallel_degree": degree} for degree in (1, 2))
    whole, half = (price_on_one_node(tiny, layout).memory.weights.total[0] for layout in layouts)
    norms = sum(p.numel for s in tiny.segments() for p in s.parameters if len(p.shape) == 1)
    assert whole == tiny.num_parameters
    assert half == (whole - norms) // 2 + norms


def test_nothing_hides_on_a_cpu(tiny):
    layout = {"data_parallel_replicate_degree": 4}
    gpu = price_on_one_node(tiny, layout).forecast
    cpu = price_on_one_node(tiny, layout, name="cpu").forecast
    assert cpu.step["gradient_reduce"] > gpu.step["gradient_reduce"]


def test_what_the_engine_does_at_each_block_adds_up_on_a_cpu(tiny):
    layout = {"data_parallel_shard_degree": 4, "zero_stage": 2, "micro_batch_size": 8}
    cpu = price_on_one_node(tiny, layout, name="cpu", launch_s=1e-5)
    units = tiny.num_layers + 1
    assert cpu.forecast.step["host"] == pytest.approx(
        host.value("fsdp_operators") * 1e-5 * units * cpu.schedule.num_micro_batches
    )


def test_a_gpu_waits_for_the_host_only_where_that_is_slower(tiny):
    layout = {"data_parallel_shard_degree": 4, "zero_stage": 2, "micro_batch_size": 8}
    ahead = price_on_one_node(tiny, layout, launch_s=1e-9).forecast
    behind = price_on_one_node(tiny, layout, launch_s=1e-4).forecast
    assert "host" not in ahead.step
    assert behind.step["host"] > 0
    # All that the device does is hidden behind the launches then: half the launches, half the step.
    faster = price_on_one_node(tiny, layout, launch_s=5e-5).forecast
    assert behind.step_time_s / faster.step_time_s == pytest.approx(2, rel=0.1)


def test_a_host_that_waits_for_each_kernel_adds_all_its_launches(tiny, monkeypatch):
    def step(launch_s, waits):
        monkeypatch.setattr(releases, "has", lambda engine, feature, version: feature != "waiting_host" or waits)
        nodes = make_cluster(per_node=4, launch_s=launch_s)
        layout = Parallelism(data_parallel_shard_degree=4, zero_stage=1, micro_batch_size=8)
        _pricer.cache_clear()
        try:
            return price(tiny, nodes, JOB, layout, EngineChoice(name="deepspeed")).forecast.step
        finally:
            _pricer.cache_clear()

    hidden, alone, beside = step(1e-9, False), step(1e-9, True), step(2e-9, True)
    assert "host" not in hidden
    assert beside["host"] == pytest.approx(2 * alone["host"])
    for part in ("forward", "backward", "gradient_reduce"):  # the reduction at the end hides behind no launch
        assert beside[part] == pytest.approx(hidden[part])


def test_fp32_replicas_copy_nothing_but_what_they_send(tiny):
    fp32 = JOB.model_copy(update={"precision": "fp32"})
    alone = price_on_one_node(tiny, {"micro_batch_size": 32}, fp32).forecast
    assert "casts" not in alone.step
    replicas = {"data_parallel_replicate_degree": 4, "micro_batch_size": 8}
    once = price_on_one_node(tiny, replicas, fp32).forecast
    assert once.step["casts"] == pytest.approx(
        8 * tiny.num_parameters / Rates(make_cluster().groups[0].device, None, 4).bytes_per_s
    )
    assert once.memory["gathered_weights"] == 0


def test_auto_is_the_lightest_that_fits(tiny):
    layout = {"micro_batch_size": 32, "activation_checkpoint": "auto"}
    assert price_on_one_node(tiny, layout).parallelism.activation_checkpoint == "none"
    for heavier, lighter in (("selective", "none"), ("full", "selective")):
        given = {"micro_batch_size": 32, "activation_checkpoint": lighter}
        need = price_on_one_node(tiny, given).forecast.memory_reserved_bytes
        small = price_on_one_node(tiny, layout, memory_bytes=need)
        assert small.parallelism.activation_checkpoint == heavier
        assert small.forecast.fits


@pytest.mark.parametrize(
    ("engine", "least", "most"), [("ahp", 1.2, 2.0), ("torchtitan", 1.1, 1.5), ("megatron", 1.0, 1.0)]
)
def test_selective_recompute_sends_again_what_the_engine_does(tiny, engine, least, most):
    def sent_s(kind):
        layout = {
            "tensor_parallel_degree": 2,
            "enable_sequence_parallel": True,
            "micro_batch_size": 32,
            "activation_checkpoint": kind,
        }
        priced = price(tiny, make_cluster(per_node=2), JOB, Parallelism(**layout), EngineChoice(name=engine))
        return priced.forecast.step["tensor_parallel"]

    assert least <= sent_s("selective") / sent_s("none") <= most


def test_torchtitan_computes_every_second_product_again(tiny):
    """Half of the products of a block are run again there, none on the native engine; and their results are not kept."""

    def priced(engine, kind):
        layout = Parallelism(micro_batch_size=32, activation_checkpoint=kind)
        return price(
            tiny, make_cluster(per_node=1), JOB, layout, EngineChoice(name=engine, compile=engine == "torchtitan")
        ).forecast

    titan, native = priced("torchtitan", "selective"), priced("ahp", "selective")
    assert titan.memory["activations"] < native.memory["activations"]
    again = titan.step["recompute"] / priced("torchtitan", "full").step["recompute"]
    assert 0.2 < again < 0.8


PLAIN = {
    "cluster": {"nodes": 1, "devices_per_node": 2, "device": "A100-SXM-80GB"},
    "job": {"sequence_length": 128, "global_batch_size": 4},
    "parallelism": {"data_parallel_shard_degree": 2},
}


def test_simulate_takes_plain_and_typed(tiny):
    plain = simulate(model=tiny, **PLAIN)
    typed = simulate(
        model=tiny, cluster=PLAIN["cluster"], job=Job(**PLAIN["job"]), parallelism=Parallelism(**PLAIN["parallelism"])
    )
    assert plain == typed
    assert plain.mfu_peak.startswith("A100-SXM-80GB, dense bf16 peak 312")
    named = simulate(model="tiny", **PLAIN)
    assert named == plain


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job": {"sequence_lenght": 128}}, "sequence_lenght: unknown key"),
        ({"parallelism": {"tensor_parallel": 2}}, "tensor_parallel: unknown key"),
        ({"engine": {"name": "ahp", "speed": 9}}, "speed: unknown key"),
        ({"parallelism": {"data_parallel_shard_degree": 3}}, "has 2 devices"),
        ({"job": {"sequence_length": 256}}, "sequence_length = 256"),
        (
            {"job": {"precision": "int8"}},
            r"precision = 'int8': there is no such value \(valid: fp32, bf16, fp16, fp8\)",
        ),
        ({"engine": {"name": "foo"}}, r"name = 'foo': .*\(valid: ahp, torchtitan, megatron, deepspeed, accelerate\)"),
        ({"engine": "foo"}, r"name = 'foo': .*\(valid: ahp, torchtitan, megatron, deepspeed, accelerate\)"),
        ({"engine": ""}, "name = ''"),
        ({"engine": []}, r"engine = \[\]: must be a mapping of keys, such as name, attention"),
        ({"engine": False}, "engine = False: must be a mapping"),
        ({"parallelism": "tp8"}, "parallelism = 'tp8': must be a mapping of keys, such as data_parallel"),
        ({"cluster": {"nodes": 2}}, "device: missing"),
    ],
)
def test_simulate_refuses_by_key(tiny, change, words):
    with pytest.raises(BadInput, match=words):
        simulate(**{"model": tiny, **PLAIN, **change})


def test_an_engine_by_its_name_alone(tiny):
    assert simulate(model=tiny, engine="megatron", **PLAIN) == simulate(
        model=tiny, engine={"name": "megatron"}, **PLAIN
    )


def test_simulate_refuses_what_the_engine_cannot_run(tiny):
    expert = {**PLAIN, "parallelism": {"expert_parallel_degree": 2}}
    with pytest.raises(NotExpressible, match="expert_parallel_degree = 2"):
        simulate(model=tiny, **expert)
    assert simulate(model=tiny, engine={"name": "megatron"}, **PLAIN).step_time_s > 0


def test_forecast_of_an_illegal_layout_says_why(tiny):
    with pytest.raises(BadInput, match="tensor_parallel_degree = 3"):
        forecast(tiny, make_cluster(per_node=3), JOB, Parallelism(tensor_parallel_degree=3), EngineChoice())


def test_the_band_is_as_wide_as_the_errors_that_were_measured(tiny):
    def half_width(**device):
        found = price_on_one_node(tiny, {"micro_batch_size": 32}, **device).forecast
        below, above = found.step_time_s / found.step_time_low_s, found.step_time_high_s / found.step_time_s
        assert math.log(above) == pytest.approx(1.5 * math.log(below))  # a run is slower more often than faster
        return (math.log(below) + math.log(above)) / (2 * NORMAL_90)

    assert half_width() == pytest.approx(margins.value("step_error_catalogue"))
    assert half_width(name="cpu") == pytest.approx(margins.value("step_error_cpu_sensed"))


def test_the_band_is_narrower_after_a_probe_on_every_kind_of_device(tiny):
    layout = Parallelism(data_parallel_replicate_degree=2)
    for name in ("cpu", "toy", "A100-SXM-80GB"):
        cluster = make_cluster(per_node=2, name=name)
        nodes = cluster.groups[0].model_copy(update={"measured": Measurements()})
        unknown, probed = (
            forecast(tiny, one, JOB, layout, EngineChoice())
            for one in (cluster, cluster.model_copy(update={"groups": (nodes,)}))
        )
        assert probed.step_time_high_s / probed.step_time_low_s < unknown.step_time_high_s / unknown.step_time_low_s


@pytest.mark.parametrize(
    ("device", "margin"),
    [
        ("A100-SXM-80GB", "step_error_published"),
        ("B200-SXM", "step_error_catalogue"),
        ({"base": "H100-SXM-80GB", "power_limit_w": 500}, "step_error_catalogue"),
    ],
)
def test_the_band_is_wider_on_devices_whose_steps_two_publishers_did_not_measure(tiny, device, margin):
    cluster = {**PLAIN["cluster"], "device": device}
    found = simulate(model=tiny, **{**PLAIN, "cluster": cluster})
    width = math.log(found.step_time_high_s / found.step_time_low_s) / (2 * NORMAL_90)
    assert width == pytest.approx(margins.value(margin))


def test_the_host_that_recomputes_eager_blocks_is_waited_for(tiny):
    """Their launches decide alone: 0.54 and 2.96 more forward of each operator, 2.26 and 4.45 in all where it runs again."""
    cluster, job = make_cluster(per_node=1, launch_s=1e-4), JOB

    def host_s(kind, *, name="ahp", compile=False):
        layout = Parallelism(activation_checkpoint=kind, micro_batch_size=8)
        found = price(tiny, cluster, job, layout, EngineChoice(name=name, compile=compile))
        return found.forecast.step_time_s

    none, full, selective = map(host_s, ("none", "full", "selective"))
    launches = sum(
        pricer(tiny, cluster, job, EngineChoice(compile=False))
        .group.units(Parallelism(micro_batch_size=8))
        .blocks[kind]
        .times.forward.launches
        for kind in tiny.layers
    )
    one_s = launches * host.value("eager_launches") * 1e-4 * job.global_batch_size / 8
    assert full - none == pytest.approx((0.54 + 2.26) * one_s, rel=0.02)
    assert selective - none == pytest.approx((2.96 + 4.45) * one_s, rel=0.02)
    compiled = [host_s(kind, compile=True) for kind in ("none", "selective")]
    assert compiled[1] - compiled[0] < 0.2 * (selective - none)
    assert host_s("selective", name="megatron") - host_s("none", name="megatron") < 0.2 * (selective - none)


def test_a_cpu_computes_what_its_host_does_to_recompute(tiny):
    layout = {"micro_batch_size": 8, "activation_checkpoint": "selective"}
    found = price_on_one_node(tiny, layout, name="cpu", launch_s=1e-5).forecast
    plain = price_on_one_node(tiny, {"micro_batch_size": 8}, name="cpu", launch_s=1e-5).forecast
    assert found.step["host"] - plain.step.get("host", 0.0) > 1e-5 * tiny.num_layers
