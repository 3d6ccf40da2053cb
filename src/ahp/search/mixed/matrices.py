"""The group of a mixed cluster on which each cell of a layout lies: replicas by the groups along their pipeline.

Replicas with the same groups in the same stages are of one kind, and replicas can be exchanged freely, so a matrix of cells is
the number of replicas of each kind. Where there are few matrices, all are looked at; otherwise those of four families: all replicas
alike, with one group after another along the pipeline; every replica within one group; groups in parts, each with pipelines of its
own; and the cells of the groups in some order filled in, stage by stage or replica by replica, regardless of where a group ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, islice, permutations, product

Kind = tuple[int, ...]
"""The index of the group of each stage, in pipeline order."""

Matrix = tuple[tuple[Kind, int], ...]
"""Kinds of replicas in rising order, each with its number of replicas."""

Cells = Sequence[int]
"""Cells that each group has."""


def matrix_of(rows: Sequence[Kind]) -> Matrix:
    """The matrix of these replicas, in any order."""
    return tuple(sorted(Counter(rows).items()))


MANY_KINDS = 10_000
"""With more kinds of replicas than this, matrices are not counted: deep pipelines have millions of kinds."""


def num_matrices(cells: Cells, pipeline: int, replicas: int, most: int) -> int:
    """The number of matrices, counted up to ``most``; ``most`` where there are more than ``MANY_KINDS`` kinds."""
    if sum(count > 0 for count in cells) ** pipeline > MANY_KINDS:
        return most
    return sum(1 for _ in islice(matrices(cells, pipeline, replicas), most))


def matrices(cells: Cells, pipeline: int, replicas: int) -> Iterator[Matrix]:
    """Every matrix for which the groups have enough cells."""
    groups = [group for group, count in enumerate(cells) if count]
    kinds = [
        (kind, [(group, kind.count(group)) for group in sorted(set(kind))]) for kind in product(groups, repeat=pipeline)
    ]

    def more(first: Matrix, at: int, left: list[int], rows: int) -> Iterator[Matrix]:
        if rows == 0:
            yield first
            return
        for index in range(at, len(kinds)):
            kind, needs = kinds[index]
            for count in range(min(rows, *(left[group] // each for group, each in needs)), 0, -1):
                after = left.copy()
                for group, each in needs:
                    after[group] -= count * each
                yield from more((*first, (kind, count)), index + 1, after, rows - count)

    return more((), 0, list(cells), replicas)


def families(cells: Cells, pipeline: int, replicas: int, fastest_first: Sequence[int]) -> list[Matrix]:
    """Matrices of the four families, without repeats. Where not all cells are needed, those of the slowest groups are left out first."""
    found: dict[Matrix, None] = {}
    groups = [group for group in fastest_first if cells[group]]
    for count in range(1, len(groups) + 1):
        for chosen in combinations(groups, count):
            for parts in _partitions(chosen):
                for matrix in _of_parts(parts, cells, pipeline, replicas, fastest_first):
                    found[matrix] = None
    return list(found)


def _partitions(groups: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put groups into parts, and to order each part."""
    if not groups:
        yield ()
        return
    first, rest = groups[0], groups[1:]
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = [group for group in rest if group not in others]
            for order in permutations((first, *others)):
                for parts in _partitions(left):
                    yield (order, *parts)


def _of_parts(
    parts: tuple[tuple[int, ...], ...], cells: Cells, pipeline: int, replicas: int, fastest_first: Sequence[int]
) -> Iterator[Matrix]:
    room = [sum(cells[group] for group in part) // pipeline for part in parts]
    if sum(room) >= replicas:
        left, rows, aligned = replicas, [], []
        for part, most in zip(parts, room, strict=True):  # the part with the fastest group first
            count = min(most, left)
            left -= count
            used = _kept(part, cells, count * pipeline, fastest_first)
            rows += _by_columns(part, used, count)
            whole = _whole_columns(part, cells, pipeline, count, fastest_first)
            aligned += [] if whole is None else [whole] * count
        yield matrix_of(rows)
        if len(aligned) == replicas:
            yield matrix_of(aligned)
    if len(parts) == 1:
        used = _kept(parts[0], cells, replicas * pipeline, fastest_first)
        if sum(used.values()) == replicas * pipeline:
            yield matrix_of(_by_rows(parts[0], used, pipeline, replicas))


def _kept(part: Sequence[int], cells: Cells, needed: int, fastest_first: Sequence[int]) -> dict[int, int]:
    """Cells used of each group when ``needed`` are taken from a part, the fastest groups first."""
    used = {}
    for group in sorted(part, key=fastest_first.index):
        used[group] = min(cells[group], needed)
        needed -= used[group]
    return used


def _in_order(part: Sequence[int], used: dict[int, int]) -> list[int]:
    return [group for group in part for _ in range(used[group])]


def _by_columns(part: Sequence[int], used: dict[int, int], replicas: int) -> list[Kind]:
    """Replicas from cells filled in stage by stage; a stage can lie on two groups."""
    order = _in_order(part, used)
    return [tuple(order[replica::replicas]) for replica in range(replicas)] if order else []


def _by_rows(part: Sequence[int], used: dict[int, int], pipeline: int, replicas: int) -> list[Kind]:
    """Replicas from cells filled in one replica after another; a replica can lie on two groups."""
    order = _in_order(part, used)
    return [tuple(order[replica * pipeline : (replica + 1) * pipeline]) for replica in range(replicas)]


def _whole_columns(
    part: Sequence[int], cells: Cells, pipeline: int, replicas: int, fastest_first: Sequence[int]
) -> Kind | None:
    """One kind for all replicas, with every stage on one group; None where the groups have too few cells for it."""
    if not replicas:
        return None
    columns, needed = {}, pipeline
    for group in sorted(part, key=fastest_first.index):
        columns[group] = min(cells[group] // replicas, needed)
        needed -= columns[group]
    return None if needed else tuple(_in_order(part, columns))
