"""The table of layouts: complete, without doubles, and legal exactly where the rules say."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ahp.config import Constraints
from ahp.errors import BadInput
from ahp.job import Job
from ahp.plan import Parallelism
from ahp.schedule import patterns
from ahp.search.space import DEEPEST_UNEVEN_VIRTUAL, Shape, Space, build, divisors, legal, only


def heads(count: int):
    return lambda t: f"tensor_parallel_degree = {t}: must divide {count} heads" if count % t else None


def layouts(space: Space) -> set[Parallelism]:
    return {space.row(i) for i in range(len(space))}


def by_hand(shape: Shape, num_heads: int) -> set[Parallelism]:
    """Every legal layout, from the rules written out one after the other."""
    found = set()
    world, batch = shape.num_devices, shape.global_batch_size
    sizes = range(1, world + 1)
    for r, s, t, p in product(sizes, sizes, sizes, sizes):
        if r * s * t * p != world or num_heads % t or p > max(shape.num_layers, 1):
            continue
        for mb in range(1, batch + 1):
            if batch % (r * s * mb):
                continue
            m = batch // (r * s * mb)
            for name, v in product(patterns.GENERATED, range(1, DEEPEST_UNEVEN_VIRTUAL + 1)):
                if p == 1 and (name, v) != ("1F1B", 1):
                    continue
                if p > 1 and (p * v > shape.num_layers or patterns.illegal_in_torch(name, p, v, m)):
                    continue
                for zero, recompute in product([0] if s == 1 else [1, 2, 3], ["none", "full"]):
                    found.add(
                        Parallelism(
                            data_parallel_replicate_degree=r,
                            data_parallel_shard_degree=s,
                            zero_stage=zero,
                            tensor_parallel_degree=t,
                            pipeline_parallel_degree=p,
                            pipeline_parallel_schedule=name,  # type: ignore[arg-type]
                            virtual_stages_per_rank=v,
                            micro_batch_size=mb,
                            activation_checkpoint=recompute,  # type: ignore[arg-type]
                        )
                    )
    return found


@pytest.mark.parametrize(
    ("world", "layers", "batch", "num_heads"),
    [(1, 6, 16, 8), (2, 6, 16, 8), (7, 6, 16, 8), (8, 4, 12, 4), (12, 5, 6, 6), (5, 5, 1, 5), (4, 0, 4, 4)],
)
def test_the_table_is_every_legal_layout_once(world: int, layers: int, batch: int, num_heads: int) -> None:
    shape = Shape(world, layers, batch)
    space = build(shape)
    ok, _ = legal(space, heads(num_heads))
    kept = only(space, np.flatnonzero(ok))
    assert len(layouts(space)) == len(space), "a layout stands twice"
    assert layouts(kept) == by_hand(shape, num_heads)


def test_micro_batches_are_those_of_the_layout() -> None:
    space = build(Shape(8, 4, 12))
    job = Job(global_batch_size=12)
    for i in np.flatnonzero(space.micro_batches):
        assert space.row(i).num_micro_batches(job) == space.micro_batches[i]


def test_rules_count_the_rows_that_break_them() -> None:
    space = build(Shape(8, 4, 12))
    ok, rules = legal(space, heads(4))
    counts = {rule.name: rule.broken for rule in rules}
    assert counts["tensor"] == int((space.tensor == 8).sum())
    assert counts["layers"] == int((space.pipeline * space.virtual > 4).sum())
    assert counts["batch"] == sum(
        12 % int(space.data_parallel[i] * space.micro_batch[i]) != 0 for i in range(len(space))
    )
    assert (~ok).sum() <= sum(counts.values())
    assert "must divide 4 heads" in next(rule.says for rule in rules if rule.name == "tensor")


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel_degree": 2},
        {"data_parallel_shard_degree": 4},
        {"data_parallel_replicate_degree": 2, "zero_stage": 2},
        {"pipeline_parallel_schedule": "GPipe"},
        {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2},
        {"micro_batch_size": 3, "activation_checkpoint": "full"},
        {"zero_stage": 0},
        {"pipeline_parallel_degree": 2, "layers_per_stage": (1, 3)},
    ],
    ids=str,
)
def test_what_the_user_fixed_is_kept_and_nothing_else_is_lost(given: dict) -> None:
    shape = Shape(8, 4, 12)
    constraints = Constraints(**given)
    space = build(shape, constraints)
    ok, _ = legal(space, heads(4))
    kept = layouts(only(space, np.flatnonzero(ok)))
    assert kept
    assert all(constraints.admits(layout) for layout in kept)
    if "layers_per_stage" not in given:
        everything = by_hand(shape, 4)
        single = {x for x in everything if x.pipeline_parallel_degree == 1}
        admitted = {x for x in everything if constraints.admits(x)}
        if "pipeline_parallel_schedule" in given:  # without a pipeline any schedule is the same layout
            admitted |= {x.model_copy(update={"pipeline_parallel_schedule": "GPipe"}) for x in single}
        assert kept == admitted


def test_a_zero_stage_without_shards_only_where_the_user_says_so() -> None:
    shape = Shape(2, 4, 4)
    assert {int(s) for s in build(shape, Constraints(zero_stage=3)).shard} == {2}
    forced = build(shape, Constraints(zero_stage=3, data_parallel_shard_degree=1))
    assert {int(s) for s in forced.shard} == {1}
    assert {int(z) for z in forced.zero} == {3}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tensor_parallel_degree": 3}, "tensor_parallel_degree = 3: must divide the 8 devices"),
        ({"tensor_parallel_degree": 4, "pipeline_parallel_degree": 4}, "no layout of 8 devices has"),
        ({"zero_stage": 0, "data_parallel_shard_degree": 2}, "no layout|shards nothing"),
        ({"zero_stage": 2, "tensor_parallel_degree": 8}, "zero_stage 2"),
        ({"pipeline_parallel_schedule": "DualPipeV", "pipeline_parallel_degree": 2}, "not generated yet"),
    ],
    ids=str,
)
def test_contradictions_are_refused(given: dict, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        build(Shape(8, 4, 12), Constraints(**given))


def test_divisors() -> None:
    assert [divisors(n) for n in (1, 7, 12)] == [[1], [1, 7], [1, 2, 3, 4, 6, 12]]
    assert divisors(16384) == [2**k for k in range(15)]
