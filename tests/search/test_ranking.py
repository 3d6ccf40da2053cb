"""The verb: what it finds is the best of everything, what it says adds up, what it cannot do it refuses clearly."""

from __future__ import annotations

import gc
import re
from functools import cache

import pytest

import ahp
from ahp.cluster.model import Cluster
from ahp.config import Constraints
from ahp.errors import BadInput, NotExpressible, NothingFits
from ahp.frozen_objects import has_frozen
from ahp.graph.kept import analyze
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.search import explain
from ahp.search.feasible_space import legal_rows
from ahp.search.gc_pause import among_new_objects
from ahp.search.problem import problem
from ahp.search.ranking import search
from ahp.search.result import Ranking
from ahp.search.space import build
from tests.marks import cases

from .small import small

JOB = Job(sequence_length=128, global_batch_size=16)


@cache
def tiny() -> ModelGraph:
    return analyze("tiny", JOB)


@cache
def on_eight() -> Ranking:
    return search(tiny(), "2x4xH100-SXM-80GB", JOB)


def roomless(cluster: str, memory_bytes: int) -> Cluster:
    """A cluster whose devices have very little memory, and nothing of it taken by a driver."""
    group = Cluster.parse(cluster).groups[0]
    device = group.device.model_copy(update={"memory_bytes": memory_bytes, "reserved_memory_bytes": 0})
    return Cluster(groups=(group.model_copy(update={"device": device}),))


@pytest.mark.parametrize("cluster", cases(["4xH100-SXM-80GB", "2x4xH100-SXM-80GB"], wide=["2x4xH100-SXM-80GB"]))
def test_the_best_is_the_best_of_every_legal_layout(cluster: str) -> None:
    asked, ranked = problem(tiny(), cluster, JOB, None, {"compile": True}), search(tiny(), cluster, JOB)
    priced = [(layout.model_copy(update={"zero_stage": 0}), asked.price(layout)) for layout in build(asked)]
    # Stages of ZeRO that cost the same are told once.
    told = {(layout, one.step_time_s, one.memory_reserved_bytes) for layout, one in priced if one.fits}
    times = sorted(step_time_s for _, step_time_s, _ in told)
    assert ranked.certificate.proven
    found = sorted(plan.forecast.step_time_s for plan in ranked if plan.forecast is not None)
    # The last rows may be the best of a family that is always looked for.
    assert found[:9] == pytest.approx(times[:9])
    assert any(found[9] == pytest.approx(one_s) for one_s in times[9:])
    assert len(found) == 10
    assert ranked.best.engine.compile is True
    eager = search(tiny(), cluster, JOB, engine=EngineChoice(compile=False)).best.forecast
    assert eager is not None
    assert found[0] <= eager.step_time_s


@pytest.mark.parametrize("pipeline", [1, 2])
def test_stages_of_zero_that_an_engine_runs_alike_are_forecast_once(pipeline: int) -> None:
    asked = small(cluster="4xH100-SXM-80GB", batch=8)
    one, two = (
        Parallelism(data_parallel_shard_degree=4 // pipeline, zero_stage=stage, pipeline_parallel_degree=pipeline)
        for stage in (1, 2)
    )
    assert (asked.price(one) is asked.price(two)) == (pipeline == 2)
    assert asked.price(two) == asked.priced(two).forecast


@pytest.mark.slow
def test_the_certificate_adds_up() -> None:
    searched, left_out, _ = on_eight().proof
    certificate = on_eight().certificate
    legal = certificate.alike + certificate.not_fit + certificate.fit + certificate.left
    assert certificate.broken + legal == certificate.rows
    assert f"{certificate.alike:,} same as another" in left_out
    assert certificate.lowest_bound_left_s is None or certificate.lowest_bound_left_s >= certificate.best_s
    assert searched.startswith(f"searched: {certificate.rows:,} layouts")


def test_zero_stages_that_an_engine_runs_alike_are_one_plan() -> None:
    given = {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2, "micro_batch_size": 1}
    asked = small("llama", "4xH100-SXM-80GB", batch=8, constraints=given)
    ranking = search(asked.graph, asked.cluster, asked.job, constraints=given, keep=40)
    assert {plan.parallelism.zero_stage for plan in ranking} <= {1, 3}
    assert ranking.best.parallelism.zero_stage == 1
    assert "ZeRO-1 costs the same as ZeRO-2 here: one row stands for these stages" in ranking.best.why


def test_zero_stages_that_cost_the_same_are_one_plan() -> None:
    one, two, three = (Parallelism(data_parallel_shard_degree=4, zero_stage=stage) for stage in (1, 2, 3))
    price = small().price
    pairs = [(one, price(one)), (two, price(one)), (three, price(three))]
    assert explain.different(pairs) == [pairs[0], pairs[2]]
    other = (one.model_copy(update={"micro_batch_size": 2}), price(one))
    assert explain.different([pairs[0], other]) == [pairs[0], other]


@pytest.mark.slow
def test_every_plan_says_why() -> None:
    ranking = on_eight()
    best = ranking.best
    assert best is ranking.plans[0]
    assert best.why[0].startswith("simplest of the 25 layouts that are tied with the fastest")
    assert len(best.rejected) >= 9
    assert all(len(plan.why) == 1 and re.match(r"as fast|tied, \d|\d", plan.why[0]) for plan in ranking.plans[1:])
    assert {"ahp", "torch", "transformers"} <= set(best.versions)
    assert best.model == "tiny"
    assert Cluster.resolve(best.cluster or {}) == Cluster.parse("2x4xH100-SXM-80GB")


def test_a_plan_survives_its_file(tmp_path) -> None:
    on_eight().best.save(tmp_path / "plan.yaml")
    assert ahp.Plan.load(tmp_path / "plan.yaml") == on_eight().best


@pytest.mark.slow
def test_the_package_is_the_verb() -> None:
    ranking = ahp.search(tiny(), "2x4xH100-SXM-80GB", JOB, keep=1)
    assert [plan.parallelism for plan in ranking] == [on_eight().best.parallelism]


@pytest.mark.parametrize(
    "given",
    [pytest.param({"tensor_parallel_degree": 2}, marks=pytest.mark.slow), {"zero_stage": 3, "micro_batch_size": 1}],
    ids=str,
)
def test_constraints_are_kept(given: dict) -> None:
    ranking = search(tiny(), "2x4xH100-SXM-80GB", JOB, constraints=given)
    assert all(Constraints(**given).admits(plan.parallelism) for plan in ranking)


def test_a_whole_layout_leaves_one_plan() -> None:
    layout = Parallelism(data_parallel_replicate_degree=2, tensor_parallel_degree=4, activation_checkpoint="full")
    ranking = search(tiny(), "2x4xH100-SXM-80GB", JOB, constraints=layout)
    assert [plan.parallelism for plan in ranking] == [layout]


def test_one_device() -> None:
    best = search(tiny(), "1xH100-SXM-80GB", JOB).best
    assert best.parallelism.world_size == 1
    assert best.parallelism.zero_stage == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "batch", "used"),
    [
        ("7xH100-SXM-80GB", 16, 4),  # six are slower
        ("3x4xH100-SXM-80GB", 16, 12),
        ("1x13xH100-SXM-80GB", 1, 8),  # and so are twelve
        ("64x8xH100-SXM-80GB", 1, 512),
    ],
)
def test_devices_that_nothing_can_use_are_left_and_told(cluster: str, batch: int, used: int) -> None:
    ranking = search(tiny(), cluster, JOB.model_copy(update={"global_batch_size": batch}))
    total = Cluster.parse(cluster).num_devices
    assert ranking.best.parallelism.world_size == used
    assert Cluster.resolve(ranking.best.cluster or {}).num_devices == used
    if used < total:
        more = search(
            tiny(), f"1x{6 if batch > 1 else 12}xH100-SXM-80GB", JOB.model_copy(update={"global_batch_size": batch})
        )
        assert ranking.fastest.priced.step_time_s < more.fastest.priced.step_time_s
        assert f"{used} of {total} devices are used" in ranking.notes[0]
        assert ranking.notes[0] in ranking.best.why
    else:
        assert ranking.notes == ()


def test_as_many_devices_of_each_node_are_used() -> None:
    ranking = search(tiny(), "2x3xH100-SXM-80GB", JOB, engine={"name": "accelerate"})
    group = Cluster.resolve(ranking.best.cluster or {}).groups[0]
    assert (group.nodes, group.devices_per_node) == (2, 2)
    assert "4 of 6 devices, 2 of each of 2 nodes, are used" in ranking.notes[0]
    assert "global_batch_size 16" in ranking.notes[0], (
        "not that the engine has no pipelines, which no other batch would change"
    )


@pytest.mark.parametrize(
    ("cluster", "given", "told"),
    [
        ("8xH100-SXM-80GB", {"tensor_parallel_degree": 3}, r"tensor_parallel_degree = 3: must divide the 8 devices"),
        ("2x8xH100-SXM-80GB", {"tensor_parallel_degree": 16}, r"does not divide num_attention_heads 8"),
        (
            "7xH100-SXM-80GB",
            {"pipeline_parallel_degree": 7},
            r"7 devices: pipeline_parallel_degree = 7: must not exceed 4 layers \(valid: 1 to 4\)",
        ),
        (
            "8xH100-SXM-80GB",
            {"virtual_stages_per_rank": 3},
            r"virtual_stages_per_rank = 3: that many times pipeline_parallel_degree must not exceed 4 layers \(valid: 1 to 2\)",
        ),
        (
            "8xH100-SXM-80GB",
            {"virtual_stages_per_rank": 2, "pipeline_parallel_degree": 4},
            r"virtual_stages_per_rank = 2: that many .* \(valid: 1\)",
        ),
        ("7xH100-SXM-80GB", {"data_parallel_shard_degree": 7}, r"no legal layout of 7 devices: global_batch_size 16"),
        (
            "8xH100-SXM-80GB",
            {"data_parallel_shard_degree": 2, "micro_batch_size": 3},
            r"and so of data_parallel_shard_degree x micro_batch_size = 6 \(valid: global_batch_size 12, 18\)",
        ),
        (
            "1x12xH100-SXM-80GB",
            {"data_parallel_shard_degree": 5},
            r"data_parallel_shard_degree = 5: must divide the 12 devices \(valid: 1, 2, 4\)",  # not 3, which the batch of 16 excludes
        ),
        ("8xH100-SXM-80GB", {"tensor_degree": 2}, r"tensor_degree: unknown key"),
        ("8xH100-SXM-80GB", {"micro_batch_size": 5}, r"global_batch_size 16 must be a multiple of"),
    ],
    ids=str,
)
def test_contradictions_name_the_key(cluster: str, given: dict, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        search(tiny(), cluster, JOB, constraints=given)


def test_a_graph_of_another_job_is_refused() -> None:
    with pytest.raises(BadInput, match=r"sequence_length = 64: the graph was traced for sequences of 128"):
        search(tiny(), "8xH100-SXM-80GB", Job(sequence_length=64))


@pytest.mark.parametrize(
    ("given", "engine", "told"),
    [
        ({"expert_parallel_degree": 2}, {"name": "accelerate"}, "accelerate"),
        (
            {"context_parallel_method": "ring"},
            {"name": "megatron"},
            r"context_parallel_method = 'ring': .*\(valid: null\)",
        ),
        (
            {"activation_checkpoint": "selective", "context_parallel_degree": 2, "context_parallel_method": "ring"},
            {"compile": True},
            r"activation_checkpoint = 'selective'",
        ),
    ],
    ids=str,
)
def test_what_the_engine_cannot_express(given: dict, engine: dict, told: str) -> None:
    with pytest.raises(NotExpressible, match=told) as refused:
        search(tiny(), "8xH100-SXM-80GB", JOB, constraints=given, engine=engine)
    assert refused.value.exit_code == 5


@pytest.mark.parametrize("engine", ["ahp", "megatron"])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"pipeline_parallel_schedule": "GPipe", "pipeline_parallel_degree": 1},
            r"parallelism.pipeline_parallel_schedule = 'GPipe': needs a pipeline_parallel_degree above 1 \(valid: 1F1B\)",
        ),
        (
            {"pipeline_parallel_schedule": "Synthesized", "pipeline_parallel_degree": 1},
            r"parallelism.pipeline_parallel_schedule = 'Synthesized': needs a pipeline_parallel_degree above 1",
        ),
        (
            {"enable_sequence_parallel": True, "tensor_parallel_degree": 1},
            r"parallelism.enable_sequence_parallel = True: needs a tensor_parallel_degree above 1 \(valid: False\)",
        ),
    ],
)
def test_a_key_without_the_degree_that_it_needs_is_refused(given: dict, told: str, engine: str) -> None:
    with pytest.raises(BadInput, match=told):
        search(tiny(), "8xH100-SXM-80GB", JOB, constraints=given, engine={"name": engine})


@pytest.mark.parametrize(("dtype", "told"), [("fp32", 0), ("bf16", 1)])
def test_what_states_in_16_bits_cost_is_told(dtype: str, told: int) -> None:
    asked = small(dtype=dtype)
    ranking = search(asked.graph, asked.cluster, asked.job)
    assert sum("updates below about 1/500 of a weight are lost" in note for note in ranking.notes) == told
    assert sum("updates below about 1/500 of a weight are lost" in reason for reason in ranking.best.why) == told


def test_a_precision_that_the_device_has_not() -> None:
    with pytest.raises(BadInput, match=r"precision = 'bf16': V100"):
        search(tiny(), "8xV100-SXM-32GB", JOB)


@pytest.mark.slow
def test_nothing_fits_names_the_nearest_miss_and_checked_remedies() -> None:
    graph, cluster = analyze("llama3.2-1b", JOB), roomless("1x1xH100-SXM-80GB", 12 * 2**30)
    with pytest.raises(NothingFits) as missed:
        search(graph, cluster, JOB)
    text = str(missed.value)
    assert missed.value.exit_code == 3
    assert re.search(r"nearest miss, dp1x1 zero0 mb16 full, needs 2\d\.\d of 12\.0 GiB", text)
    assert "too much (most of it: " in text
    remedies = re.findall(r"would fit: (\d+) nodes", text)
    assert remedies
    for words in remedies:
        nodes = cluster.groups[0].model_copy(
            update={"nodes": int(words), "inter_node": Cluster.parse("2x8xH100-SXM-80GB").groups[0].inter_node}
        )
        assert search(graph, Cluster(groups=(nodes,)), JOB).fastest.forecast is not None


def test_a_constraint_that_makes_it_too_large_is_named() -> None:
    given = {"micro_batch_size": 16, "activation_checkpoint": "none"}
    large = search(tiny(), roomless("1x1xH100-SXM-80GB", 2**36), JOB, constraints=given).best.forecast
    assert large is not None
    tight = roomless("1x1xH100-SXM-80GB", int(0.7 * sum(large.memory.values())))
    with pytest.raises(NothingFits, match=r"would fit: parallelism\.micro_batch_size free instead of 16 \(dp1x1"):
        search(tiny(), tight, JOB, constraints=given)


def test_a_rule_about_what_was_given_is_named_before_one_that_more_layouts_break() -> None:
    """Most kinds of schedules are not DeepSpeed's, but 1F1B is: it is the replicas that its pipeline cannot have."""
    given = {"data_parallel_replicate_degree": 2, "pipeline_parallel_degree": 2}
    with pytest.raises(NotExpressible, match=r"devices: data_parallel_replicate_degree = 2: deepspeed cannot"):
        search(tiny(), "1x8xA100-SXM-80GB", JOB, constraints=given, engine={"name": "deepspeed"})


def test_fewer_rows_are_left_when_the_rules_are_the_same() -> None:
    asked = problem(tiny(), "2x4xH100-SXM-80GB", JOB)
    table = legal_rows(asked)
    assert table.problem is asked
    assert table.notes == ()
    legal = table.space.num_legal + table.space.num_alike
    assert sum(rule.broken for rule in table.space.rules) >= table.space.size - legal


@pytest.mark.slow
def test_the_garbage_collector_is_left_as_it_was() -> None:
    assert not has_frozen()
    usual = gc.get_threshold()
    with among_new_objects():
        with among_new_objects():
            assert has_frozen()
        assert has_frozen(), "the outer one is still open"
        assert gc.get_threshold() > usual, "looks for garbage less often"
    assert not has_frozen()
    assert gc.get_threshold() == usual
    with pytest.raises(BadInput):
        search(tiny(), "2x4xH100-SXM-80GB", JOB, method="anneal", objective="cost")
    assert not has_frozen()
    gc.freeze()
    search(tiny(), "1x1xH100-SXM-80GB", JOB)
    assert has_frozen(), "somebody else's"
    gc.unfreeze()


@pytest.mark.parametrize("degree", [{}, {"tensor_parallel_degree": 2}])
def test_sequence_parallelism_can_be_fixed(degree: dict[str, int]) -> None:
    asked = small(cluster="2xH100-SXM-80GB", constraints={"enable_sequence_parallel": True, **degree})
    best = search(asked.graph, asked.cluster, asked.job, constraints=asked.constraints, engine=asked.engine).best
    assert best.parallelism.enable_sequence_parallel
    assert best.parallelism.tensor_parallel_degree == 2
