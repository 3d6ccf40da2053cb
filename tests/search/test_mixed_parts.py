"""Parts of the space of a mixed cluster: groups that nothing joins are searched apart, and questions about a known layout near it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.forecast.mixed_rules import together
from ahp.plan import Parallelism
from ahp.search.fastest import fastest
from ahp.search.mixed.space import NEAR, MixedSpace, spaces_of
from ahp.search.problem import Problem
from tests.examples import many

from .test_mixed import A100, H100, cluster_of, mixed, problems, ranking_of

MI300X = "MI300X"
FIXED = {"micro_batch_size": 1, "activation_checkpoint": "none"}


def named(cluster: Cluster) -> list[str]:
    return ["".join(group.name for group in of) for of in together(cluster)]


def test_groups_are_apart_where_no_library_or_link_joins_them() -> None:
    assert named(cluster_of((H100, 1, 2), (MI300X, 1, 2), (A100, 1, 2), gbps=100)) == ["b", "ac"]
    three = cluster_of((H100, 1, 2), (A100, 1, 2), (A100, 1, 1), gbps=100)
    assert named(three) == ["abc"]
    chain = three.model_copy(update={"links": tuple(link for link in three.links if set(link.between) != {"a", "c"})})
    assert named(chain) == ["abc"], "a layout may lie on a and b, or on b and c"
    assert named(three.model_copy(update={"links": three.links[:1]})) == ["ab", "c"]


@pytest.mark.slow
def test_no_layout_lies_on_groups_that_nothing_joins_and_the_best_is_proven() -> None:
    cluster = cluster_of((H100, 1, 2), (MI300X, 1, 2), (A100, 1, 1), gbps=400)
    asked = mixed(cluster, batch=6, constraints=FIXED)
    found = ranking_of(asked, keep=40)
    for plan in found.plans:
        names = {
            name
            for stage in plan.parallelism.stages or ()
            for name in stage.groups(plan.parallelism.data_parallel_replicate_degree)
        }
        assert "b" not in names or len(names) == 1
    assert found.certificate.proven
    parts = [
        cluster.model_copy(update={"groups": (cluster.groups[0], cluster.groups[2])}),
        Cluster(groups=cluster.groups[1:2]),
    ]
    best_s = [ranking_of(mixed(part, batch=6, constraints=FIXED)).fastest.priced.step_time_s for part in parts]
    assert found.fastest.priced.step_time_s == pytest.approx(min(best_s), rel=1e-12)


def test_degrees_that_one_part_has_the_devices_for_are_not_refused() -> None:
    """Without stages the ranks would fill the groups in their order, over both libraries."""
    cluster = cluster_of((H100, 1, 2), (MI300X, 1, 4), gbps=400)
    found = ranking_of(mixed(cluster, batch=8, constraints={**FIXED, "pipeline_parallel_degree": 4}))
    for plan in found.plans:
        assert plan.parallelism.pipeline_parallel_degree == 4
        assert {name for stage in plan.parallelism.stages or () for name in stage.groups(1)} <= {"b"}
    words = "communicates by NCCL and .* by RCCL, and no library spans both"
    with pytest.raises(BadInput, match=words):
        ranking_of(
            mixed(cluster, batch=8, constraints={"stages": [{"group": "a", "layers": 2}, {"group": "b", "layers": 2}]})
        )


@pytest.mark.parametrize("given", [{"data_parallel_shard_degree": 2}, {"tensor_parallel_degree": 1}])
def test_a_group_alone_leaves_devices_over_although_a_degree_is_fixed(given: dict[str, int]) -> None:
    """Two of the three H100 were not looked at, and the plan was that of the other group."""
    asked = mixed(
        cluster_of((H100, 1, 3), ("MI250X", 1, 2)),
        batch=4,
        constraints={**FIXED, "pipeline_parallel_degree": 1, **given},
    )
    best = ranking_of(asked).best
    assert best.cluster is not None
    assert [(group["name"], group["devices_per_node"]) for group in best.cluster["groups"]] == [("a", 2)]
    assert "a: 1 of 3 devices is left over" in best.why


def test_each_part_has_the_shapes_of_its_own_groups() -> None:
    cluster = cluster_of((H100, 1, 2), (MI300X, 1, 2), (A100, 1, 1), gbps=400)
    (space,) = spaces_of(mixed(cluster, batch=6, constraints=FIXED))
    assert space.cells(1) == (2, 0, 1)
    alone = MixedSpace(
        mixed(cluster.model_copy(update={"groups": (cluster.groups[0], cluster.groups[2])}), batch=6, constraints=FIXED)
    )
    assert (space.alike, space.size, space.legal) == (alone.alike, alone.size, alone.legal)
    placed = mixed(cluster, batch=6, constraints={**FIXED, "stages": [{"group": "b", "layers": 4}]})
    assert [one.cells(1) for one in spaces_of(placed)] == [(0, 2, 0), (2, 0, 1)]


@pytest.mark.slow
def test_where_nothing_joins_any_groups_each_is_searched_alone_and_why_is_said() -> None:
    cluster = cluster_of((H100, 1, 2), (MI300X, 1, 2), gbps=400)
    asked = mixed(cluster, batch=6)
    assert spaces_of(asked) == []
    found = ranking_of(asked)
    alone = [ranking_of(mixed(Cluster(groups=(group,)), batch=6)).fastest for group in cluster.groups]
    best = min(alone, key=lambda plan: plan.priced.step_time_s)
    assert found.fastest.parallelism == best.parallelism
    assert found.certificate.proven
    assert any("no library spans both" in note for note in found.notes)
    assert "0 shapes" not in found.certificate.lines()[0]
    answer = fastest(asked)
    assert answer is not None
    assert answer.best is not None
    assert answer.best[1].step_time_s == pytest.approx(best.priced.step_time_s, rel=1e-9)


def test_near_a_layout_is_what_has_no_degree_much_larger_or_smaller() -> None:
    asked = mixed(cluster_of((H100, 1, 8), (A100, 1, 8), gbps=400), batch=64)
    near = Parallelism(data_parallel_shard_degree=8, micro_batch_size=8, zero_stage=3)
    of = MixedSpace(asked, near).alike
    every = MixedSpace(asked).alike
    assert of == [
        a for a in every if 2 <= a.shard <= 32 and 2 <= a.micro_batch <= 32 and a.tensor <= NEAR and a.context <= NEAR
    ]
    assert len(of) < len(every)


@pytest.mark.slow
@settings(max_examples=many(8), deadline=None)
@given(problems(most_cells=4))
def test_the_best_near_the_best_is_the_best(asked: Problem) -> None:
    known = fastest(asked)
    if known is None or known.best is None:
        return
    found = fastest(asked, like=known.best[0])
    assert found is not None
    assert found.best is not None
    assert found.best[1].step_time_s == pytest.approx(known.best[1].step_time_s, rel=1e-12)


def test_all_is_searched_where_nothing_near_fits() -> None:
    groups, batch = ((H100, 1, 1), (A100, 1, 1)), 64
    fixed = {"activation_checkpoint": "none", "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1}
    ample = mixed(cluster_of(*groups, gbps=400, memory=dict.fromkeys("ab", 10**12)), batch=batch, constraints=fixed)

    def needs_bytes(size: int) -> int:
        one = ample.on(Cluster(groups=ample.cluster.groups[:1]))
        return sum(one.price(Parallelism(micro_batch_size=size, activation_checkpoint="none")).memory.values())

    memory = (needs_bytes(1) + needs_bytes(16)) // 2
    asked = mixed(cluster_of(*groups, gbps=400, memory=dict.fromkeys("ab", memory)), batch=batch, constraints=fixed)
    known, found = fastest(asked), fastest(asked, like=Parallelism(micro_batch_size=64))
    assert known is not None
    assert found is not None
    assert known.best is not None
    assert known.best[0].micro_batch_size < 16
    assert found.best == known.best
