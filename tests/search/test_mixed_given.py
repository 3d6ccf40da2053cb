"""What the user gives of each replica says how many replicas there are."""

from __future__ import annotations

from typing import Any

import pytest

from ahp.errors import BadInput
from ahp.search.counts import choose
from ahp.search.mixed.space import MixedSpace
from ahp.search.objective import Objective

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
