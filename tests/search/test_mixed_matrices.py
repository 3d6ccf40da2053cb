"""How many ways there are to lay replicas over groups, without writing down those of deep pipelines."""

from __future__ import annotations

from collections import Counter
from itertools import product

from ahp.search.mixed.matrices import matrices, num_matrices


def by_brute_force(cells: tuple[int, ...], pipeline: int, replicas: int) -> int:
    kinds = list(product(range(len(cells)), repeat=pipeline))
    found = set()
    for rows in product(kinds, repeat=replicas):
        used = Counter(group for kind in rows for group in kind)
        if all(used[group] <= count for group, count in enumerate(cells)):
            found.add(tuple(sorted(rows)))
    return len(found)


def test_all_matrices_are_counted_once() -> None:
    for cells, pipeline, replicas in (((3, 3), 2, 2), ((4, 1, 1), 3, 2), ((2, 6), 2, 3)):
        expected = by_brute_force(cells, pipeline, replicas)
        assert len(set(matrices(cells, pipeline, replicas))) == expected
        assert num_matrices(cells, pipeline, replicas, 10_000) == expected


def test_deep_pipelines_are_many_at_once() -> None:
    assert num_matrices((32, 32), 32, 1, 500) == 500
