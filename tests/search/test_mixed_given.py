"""What the user gives of stages and replicas on a mixed cluster is kept, or refused where it does not go together or with the model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.errors import BadInput, NothingFits
from ahp.plan import Parallelism
from ahp.search.counts import choose
from ahp.search.mixed.space import MixedSpace, layout_of
from ahp.search.objective import Objective
from ahp.search.ranking import search

from .small import MODELS, graph
from .test_mixed import A100, H100, cluster_of, mixed, on_two, ranking_of

CELLS = cluster_of((H100, 1, 2), (A100, 1, 2), gbps=100)


def stages(*recomputed: Any) -> list[dict[str, Any]]:
    names = [group.name for group in CELLS.groups]
    found = [{"group": tuple(names), "layers": 2} for _ in range(2)]
    for stage, some in zip(found, recomputed, strict=False):
        stage |= {"recomputed_layers": some}
    return found


@pytest.mark.parametrize(
    "given",
    [
        {"micro_batches_per_replica": (3, 1)},
        {"stages": stages()},
        {"stages": stages((1, 0)), "activation_checkpoint": "full"},
        {"stages": stages(), "micro_batches_per_replica": (3, 1), "data_parallel_replicate_degree": 2},
    ],
)
def test_only_as_many_replicas_are_searched(given: dict[str, Any]) -> None:
    """Others ended the search in an error of Python's own."""
    asked = mixed(CELLS, batch=4, constraints={"micro_batch_size": 1, **given})
    for plan in ranking_of(asked).plans:
        assert plan.parallelism.data_parallel_replicate_degree == 2
        if "micro_batches_per_replica" in given:
            assert plan.parallelism.micro_batches_per_replica == (3, 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"micro_batches_per_replica": (3, 2, 1), "data_parallel_replicate_degree": 2}, "micro_batches_per_replica of 3, data_parallel"),
        ({"stages": stages(), "micro_batches_per_replica": (2, 1, 1)}, "micro_batches_per_replica of 3, stages.group of 2 replicas"),
    ],
)  # fmt: skip
def test_unlike_numbers_of_replicas_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        MixedSpace(mixed(CELLS, batch=4, constraints=given))


def test_micro_batches_that_do_not_sum_to_the_batch_are_a_rule_that_shapes_break() -> None:
    space = MixedSpace(on_two(micro_batches_per_replica=(3, 1)))
    assert not space.alike
    assert any("must sum to global_batch_size 6" in rule.says for rule in space.rules.values())


def test_no_group_alone_stands_for_a_cluster_whose_replicas_are_given() -> None:
    """A plan of one group had no use for the key, and was made as if it were not there."""
    asked = mixed(CELLS, batch=4, constraints={"micro_batch_size": 1, "micro_batches_per_replica": (3, 1)})
    found = choose(asked, Objective(name="tokens-per-day"), 5)
    for one in (found.first, *found.others):
        assert one.found.problem.cluster.is_mixed
        assert one.found.best is not None
        assert one.found.best[0].micro_batches_per_replica == (3, 1)


NUM_LAYERS = MODELS["llama"]["num_hidden_layers"]


def on(*names: str, layers: Any = None, **each: Any) -> list[dict[str, Any]]:
    """Stages on these groups, of as many layers; what ``each`` has of the first."""
    found = [{"group": name, "layers": n} for name, n in zip(names, layers or [1] * len(names), strict=True)]
    found[0] |= each
    return found


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"layers_per_stage": (2, 3, 2)}, r"layers_per_stage = \[2, 3, 2\]: sums to 7, the model has 4"),
        ({"layers_per_stage": (4, 0)}, "every stage needs at least one layer"),
        ({"layers_per_stage": ()}, r"layers_per_stage = \[\]: needs 1 entries"),
        ({"layers_per_stage": (2, 2), "pipeline_parallel_degree": 3}, "needs 3 entries, one for each of pipeline_parallel_degree 3"),
        ({"layers_per_stage": (2, 2), "recomputed_layers_per_stage": (3, 0)}, r"the stages have \[2, 2\] layers"),
        ({"layers_per_stage": (2, 2), "recomputed_layers_per_stage": (1, 1, 1)}, "3 numbers, pipeline_parallel_degree 2"),
        ({"recomputed_layers_per_stage": (3, 2)}, "stages with so many need 5 layers, the model has 4"),
        ({"recomputed_layers_per_stage": (-1, 1)}, "fewer than 0"),
        ({"recomputed_layers_per_stage": (1, 1), "activation_checkpoint": "none"}, "does not say what of these blocks"),
        ({"stages": on("a", "b", layers=(2, 3))}, r"stages.layers = \[2, 3\]: sums to 5, the model has 4"),
        ({"stages": on("a", "c", layers=(2, 2))}, r"stages.group = 'c': no group of the cluster has this name \(valid: a, b\)"),
        ({"stages": on("a", "b", layers=(2, 2)), "layers_per_stage": (2, 2)}, "stages has the layers of each stage"),
        ({"stages": on("a", "b", layers=(2, 2)), "recomputed_layers_per_stage": (1, 1)}, "on a mixed cluster it is given in stages"),
        ({"stages": on("a", "b", layers=(2, 2)), "pipeline_parallel_degree": 3}, "2 stages, it needs 3: pipeline_parallel_degree 3"),
        ({"stages": on("a", "b", layers=(2, 2), recomputed_layers=3)}, "the stage has 2 layers"),
        ({"stages": on("a", "b", "b", "b"), "pipeline_parallel_degree": 2}, "no stages and replicas .* go with .*stages = .'a', 'b', 'b', 'b'"),
        ({"stages": []}, "0 stages, it needs 1"),
        ({"micro_batches_per_replica": (4, 0)}, "every replica needs at least one"),
        ({"micro_batches_per_replica": (1,) * 5}, "5 cells, and the cluster has 4 devices"),
        ({"pipeline_parallel_degree": 5}, "pipeline_parallel_degree = 5: .* the model has 4 layers"),
        ({"pipeline_parallel_degree": 3, "data_parallel_replicate_degree": 2}, "6 cells, and the cluster has 4 devices"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_its_key(fixed: dict[str, Any], words: str) -> None:
    """Some ended in an error of Python's own, others in words about the batch, and layers beside stages were not looked at."""
    with pytest.raises(BadInput, match=words):
        ranking_of(mixed(CELLS, batch=4, constraints={"micro_batch_size": 1, **fixed}))


def test_stages_on_a_group_that_does_not_compute_in_the_precision_say_so() -> None:
    cells = cluster_of((H100, 1, 2), ("V100-SXM-32GB", 1, 2), (A100, 1, 2), gbps=100)
    two = cells.model_copy(update={"groups": cells.groups[:2], "links": cells.links[:1]})
    words = {
        r"stages.group = 'b': its devices do not compute in bf16 \(valid: a, c\)": cells,
        r"stages = \['a', 'b'\]: the devices of b do not compute in bf16": two,
    }
    for says, cluster in words.items():
        job = mixed(cluster).job
        with pytest.raises(BadInput, match=says):
            search(graph("llama"), cluster, job, constraints={"stages": on("a", "b", layers=(2, 2))})


def test_stages_of_their_own_width_say_how_many_ranks_there_are() -> None:
    placed = on("a", "b", layers=(2, 2), tensor_parallel_degree=2)
    for plan in ranking_of(mixed(CELLS, constraints={"stages": placed})).plans:
        assert plan.parallelism.pipeline_parallel_degree == 2
        assert plan.parallelism.widths == ((1, 2), (1, 1))


def keeps(layout: Parallelism, fixed: Mapping[str, Any]) -> bool:
    """Whether a layout has what was given of its stages and replicas, in whatever key it says so."""
    replicas, some = layout.data_parallel_replicate_degree, fixed.get("recomputed_layers_per_stage")
    layers, places = fixed.get("layers_per_stage"), fixed.get("stages", ())
    kept = all(
        getattr(layout, key) == value for key, value in fixed.items() if key.endswith(("degree", "rank", "replica"))
    )
    kept &= layers in (None, layout.given_layers)
    for replica in range(replicas):
        found = layout.recomputed_layers(replica) or (0,) * layout.num_stages  # None if no layer is recomputed
        kept &= some in (None, found)
    for given_one, one in zip(places, layout.stages or (), strict=bool(places)):
        kept &= given_one.layers == one.layers and given_one.groups(replicas) == one.groups(replicas)
        kept &= given_one.recomputed_layers is None or given_one.recomputed(replicas) == one.recomputed(replicas)
    return kept


def parts(total: int, count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Numbers from 1 on, mostly with that sum."""

    def of(marks: list[int]) -> tuple[int, ...]:
        ends = [0, *sorted(marks), total]
        return tuple(max(1, b - a) for a, b in pairwise(ends))

    return st.lists(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1).map(of)


@st.composite
def fixed_keys(draw: st.DrawFn) -> dict[str, Any]:
    num_stages, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    group = st.sampled_from("ab") | st.tuples(*[st.sampled_from("ab")] * replicas)
    cut = draw(parts(NUM_LAYERS, num_stages))
    number = [st.integers(0, n) for n in cut]
    placed = [
        {"group": draw(group), "layers": n, "recomputed_layers": draw(st.none() | some | st.tuples(*[some] * replicas))}
        for n, some in zip(cut, number, strict=True)
    ]
    keys: dict[str, st.SearchStrategy[Any]] = {
        "stages": st.just(placed),
        "layers_per_stage": st.just(cut),
        "recomputed_layers_per_stage": st.tuples(*number),
        "micro_batches_per_replica": parts(4, replicas),
        "data_parallel_replicate_degree": st.just(replicas),
        "pipeline_parallel_degree": st.sampled_from([num_stages, max(1, num_stages // 2)]),
        "virtual_stages_per_rank": st.sampled_from([1, 2]),
        "activation_checkpoint": st.just("full"),
    }
    chosen = draw(st.lists(st.sampled_from(list(keys)), min_size=1, max_size=3, unique=True))
    return {key: draw(keys[key]) for key in chosen}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(fixed_keys())
def test_whatever_is_given_is_kept_or_refused(fixed: dict[str, Any]) -> None:
    asked = mixed(CELLS, batch=4, constraints={"micro_batch_size": 1, "tensor_parallel_degree": 1, **fixed})
    try:
        found = ranking_of(asked)
    except (BadInput, NothingFits):
        return
    for plan in found.plans:
        assert keeps(plan.parallelism, asked.constraints.given), plan.parallelism.short()


@pytest.mark.slow
def test_the_usual_order_of_ranks_can_be_given() -> None:
    """A search with the fastest layout as its constraints was refused, because these name the usual order: it was asked for and not taken."""
    asked = mixed(CELLS, batch=4)
    best = ranking_of(asked).fastest
    again = ranking_of(mixed(CELLS, batch=4, constraints=best.parallelism)).fastest
    assert again.parallelism == best.parallelism
    assert again.priced.step_time_s == best.priced.step_time_s


@pytest.mark.parametrize(
    "order",
    [
        ("pp", "dp_replicate"),
        ("dp_replicate",),
        pytest.param(("pp", "dp_shard"), marks=pytest.mark.slow),
        pytest.param(("pp", "cp"), marks=pytest.mark.slow),
    ],
)
def test_an_order_says_which_axes_have_a_degree_above_one(order: tuple[str, ...]) -> None:
    space = MixedSpace(mixed(CELLS, batch=4, constraints={"mesh_order": order}))
    found = {
        axes
        for alike in space.alike
        for grid in [space.grid(alike.width, space.micro_batches(alike))]
        for pipeline, replicas in zip(grid.pipeline.tolist(), grid.replicas.tolist(), strict=True)
        for axes in [layout_of(alike, pipeline, replicas).axes]
    }
    assert found == {order}
    assert {plan.parallelism.axes for plan in ranking_of(space.asked).plans} == {order}
