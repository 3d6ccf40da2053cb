"""Stages priced together take what each takes alone, to the last digit; and the search's columns are the forecast's."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from ahp.engines.registry import get
from ahp.forecast.assembly import passes_behind, recompute_of
from ahp.forecast.beside_stages import gathers_s
from ahp.forecast.candidates.layer_columns import LayerColumns
from ahp.forecast.candidates.shardings import Shardings
from ahp.plan import Parallelism
from ahp.search.bounds.pipelines import Pipelines
from ahp.search.problem import Problem
from tests.search.small import small

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("ahp", {"data_parallel_shard_degree": 4, "zero_stage": 3}),
    ("ahp", {"data_parallel_replicate_degree": 4}),
    ("torchtitan", {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2, "zero_stage": 2}),
    ("megatron", {"data_parallel_shard_degree": 4, "zero_stage": 1}),
    ("deepspeed", {"data_parallel_shard_degree": 4, "zero_stage": 3}),
    ("accelerate", {"data_parallel_replicate_degree": 4}),
]
STAGES = [(0, 2, True, False), (2, 3, False, False), (3, 5, False, True), (1, 1, False, True), (0, 5, True, True)]
"""Of five layers of two kinds, one stage without any."""


def case(engine: str, keys: dict[str, Any], kind: str = "full", precision: str = "bf16") -> tuple[Problem, Parallelism]:
    asked = small("two kinds of blocks", "4xH100-SXM-80GB", engine=engine, precision=precision)
    layout = Parallelism(**keys, activation_checkpoint=kind)  # type: ignore[arg-type]
    return asked, layout


@pytest.mark.parametrize(("engine", "keys"), LAYOUTS)
@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_stages_together_take_what_each_takes_alone(
    engine: str, keys: dict[str, Any], kind: str, precision: str
) -> None:
    asked, layout = case(engine, keys, kind, precision)
    pricer, traits = asked.pricer, get(engine).traits(asked.job, layout, asked.engine)
    units, data = pricer.group.units(layout), pricer.group.data_parallel(layout, traits)
    recompute = recompute_of(kind, traits, units)
    some, behind = [1, 0, 2, 0, 3], np.array([0, 2, 1, 3, 0])
    stages = pricer.group.table(STAGES, some)
    together = pricer.group.stage_costs(units, stages, data, recompute, passes_behind=behind).rows(stages)
    for stage, count, passes, found in zip(STAGES, some, behind.tolist(), together, strict=True):
        table = pricer.group.table([stage], [count])
        assert pricer.group.stage_costs(units, table, data, recompute, passes_behind=passes).rows(table) == [found]
    # What is recomputed and gathered was not left out of all.
    assert any("recompute" in cost.backward for cost in together) == (kind != "none")
    assert all(cost.seconds[0] > 0 for cost in together)


@pytest.mark.parametrize(("engine", "keys"), LAYOUTS)
def test_columns_of_the_search_are_the_forecasts(engine: str, keys: dict[str, Any]) -> None:
    """Equal, but where a collective takes several units: the search does not know how large it is, and takes the largest."""
    asked, layout = case(engine, keys)
    pricer, traits = asked.pricer, get(engine).traits(asked.job, layout, asked.engine)
    units, m = pricer.group.units(layout), layout.num_micro_batches(asked.job)
    kinds = ["none", "full"]
    shardings = Shardings([layout, layout], [traits, traits], pricer.group.nodes, pricer.group.network)
    stages = LayerColumns(units, [recompute_of(kind, traits, units) for kind in kinds], shardings.data(0, 1))
    table, behind = pricer.group.table(STAGES), np.zeros(len(STAGES), dtype=np.int64)
    bytes_per_s = pricer.group.unit_pricer.rates.bytes_per_s
    found = stages.seconds(shardings, [0, 1], m, table, behind, bytes_per_s)
    shape = 2, len(kinds), len(STAGES)
    columns = np.stack([np.broadcast_to(seconds, shape) for seconds in found.values()], axis=-1)
    for split, (at, kind) in product(range(2), enumerate(stages.recompute)):
        data = pricer.group.data_parallel(layout, traits)
        costs = pricer.group.stage_costs(units, table, data, kind).rows(table)
        gathered = gathers_s(units, table, data, pricer.group.network)
        beside = [
            (c.first_forward.get("weight_gather", 0.0), s, c.forward["host"])
            for c, s in zip(costs, gathered, strict=True)
        ]
        exact = np.array([cost.seconds + more for cost, more in zip(costs, beside, strict=True)])
        if traits.gather.bucket_elements or traits.reduce.bucket_elements:
            own = slice(len(costs[0].seconds))  # such engines gather nothing ahead of stages
            assert (columns[split, at][:, own] <= exact[:, own] * (1 + 1e-12)).all()
            assert (columns[split, at][:, own] >= 0.5 * exact[:, own]).all()
        else:
            assert (columns[split, at] == exact).all()


def test_an_interleaved_stage_hides_no_more_than_the_search_takes_for_hidden() -> None:
    asked = small("llama", "4xH100-SXM-80GB", engine="megatron")
    cut = Pipelines(asked).cut(2, (1, 2))
    for virtual, at in cut.of.items():
        layout = Parallelism(
            pipeline_parallel_degree=2, virtual_stages_per_rank=virtual,
            pipeline_parallel_schedule="Interleaved1F1B" if virtual > 1 else "1F1B",
        )  # fmt: skip
        for stage, row in enumerate(at.tolist()):
            assert cut.passes_behind[row] >= passes_behind(layout, stage)
    assert cut.passes_behind.max() == 1
