"""What columns say of the memory of cells, against the forecast: never more, and mostly the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest

import ahp
from ahp.arrays import Mask
from ahp.errors import BadInput, NotExpressible
from ahp.search.fewest import fewest
from ahp.search.mixed.find import Budget, Finder
from ahp.search.mixed.several import SeveralTask
from ahp.search.mixed.solve import Placement, Row, Task
from ahp.search.mixed.space import MixedSpace, Shape
from ahp.search.problem import problem

Fits = Callable[[Sequence[int]], Sequence[bool]]

CASES = [
    ("llama3-8b", 2048, 32, (("L4-24GB", 1, 4), ("H100-SXM-80GB", 1, 2)), 0.93),
    pytest.param(
        "mixtral-8x7b", 4096, 64, (("H100-SXM-80GB", 1, 8), ("A100-SXM-80GB", 1, 8)), 0.96, marks=pytest.mark.slow
    ),
]
"""Model, tokens, sequences, groups; and the share of cells with whose fewest layers both agree."""

DRAWS = 300


def finder_of(model: str, tokens: int, batch: int, groups: tuple[tuple[str, int, int], ...]) -> Finder:
    job = ahp.Job(sequence_length=tokens, global_batch_size=batch, precision="bf16")
    cluster = ahp.Cluster.from_dict({
        "groups": [
            {"name": f"g{number}", "nodes": nodes, "devices_per_node": devices, "device": device}
            for number, (device, nodes, devices) in enumerate(groups)
        ]
    })  # fmt: skip
    asked = problem(ahp.analyze(model, job), cluster, job, None, {"name": "ahp", "compile": True})
    return Finder(asked, MixedSpace(asked), Budget(), float("inf"))


def placements(finder: Finder, draw: random.Random) -> Iterator[tuple[Task, Placement]]:
    """Cells of one replica in any order, cut at random, of shapes whose stages may recompute some of their layers."""
    space, layers = finder.space, finder.asked.graph.num_layers
    choices = [alike for alike in space.alike if space.has_choice(alike)]
    for _ in range(DRAWS):
        alike, p = draw.choice(choices), draw.randint(2, 4)
        cells = [group for group, count in enumerate(space.cells(alike.width)) for _ in range(count)]
        if len(cells) < p:
            continue
        task = finder.task(Shape(alike, p, 1, draw.choice(space.schedules(p))))
        pipe = draw.choice(task.pipes) if isinstance(task, SeveralTask) else task.pipes[0]
        stages, kind = p * pipe.virtual, tuple(draw.sample(cells, p))
        ends = sorted(draw.sample(range(1, layers), stages - 1))
        cut = tuple(np.diff([0, *ends, layers]).tolist())
        yield task, Placement((Row(kind, task.total, (0,) * stages),), cut, 0.0, pipe)


def told(task: Task, placement: Placement, fits: Fits) -> tuple[Mask, list[int], Mask, list[int]]:
    """Of each cell whether columns say that it fits and the fewest layers that it recomputes, and the same by the forecast."""
    row, cut, none = placement.rows[0], placement.layers, (0,) * len(placement.layers)
    kinds, count = np.array(row.kind), np.array(row.micro_batches)
    if not isinstance(task, SeveralTask):
        of_stages = task.tables.stages(kinds, cut, count)
        asked = list(fewest(fits, none, cut))
        return of_stages.fits, of_stages.recomputed.tolist(), np.array(fits(asked)) | np.array(fits(none)), asked
    costs, asked = task._costs(placement.pipe, kinds, cut, count), task._fewest(placement, none, fits)
    of_ranks = [task._ranks(placement.pipe) == rank for rank in range(task.shape.pipeline)]
    each = ([int(np.array(some)[own].sum()) for own in of_ranks] for some in (costs.recomputed, asked))
    return costs.fits, next(each), np.array(fits(asked)), next(each)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tokens", "batch", "groups", "alike"), CASES)
def test_columns_say_what_the_forecast_asks_for(
    model: str, tokens: int, batch: int, groups: tuple[tuple[str, int, int], ...], alike: float
) -> None:
    finder, same = finder_of(model, tokens, batch, groups), list[bool]()
    for task, placement in placements(finder, random.Random(0)):
        try:
            fits = partial(finder.asked.mixed_pricer.cells_fit(placement.of(task.shape, finder.names)), 0)
        except (BadInput, NotExpressible):
            continue
        for may, at_least, fit, asked in zip(*told(task, placement, fits), strict=True):
            assert not fit or (may and at_least <= asked), placement
            same.append(may == fit and (not fit or at_least == asked))
    assert len(same) >= 100
    assert sum(same) >= alike * len(same)
