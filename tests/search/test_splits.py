"""States of many ranks and splits at once are those that the forecast counts for each."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.engines.registry import names
from ahp.forecast import memory
from ahp.forecast.groups import shard_ranks
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.bounds.split_columns import WeightColumns
from ahp.search.space import build

from .small import small


@pytest.mark.parametrize("engine", names())
@settings(max_examples=5, deadline=None)
@given(st.data())
def test_states_are_the_forecasts(engine: str, data: st.DataObject) -> None:
    precision = data.draw(st.sampled_from(["bf16", "fp32"]))
    asked = small("experts", "2x4xH100-SXM-80GB", engine=engine, precision=precision)
    space = build(asked)
    splits = Bounds(asked).splits(space, data.draw(st.integers(0, len(space.blocks) - 1)))
    number = st.integers(0, 10**9)
    weights = [
        memory.RankWeights(
            data.draw(st.integers(10**9, 10**11)), *(data.draw(number) for _ in range(5)), largest_without_experts=data.draw(number)
        ) for _ in range(2)
    ]  # fmt: skip
    names_of = [field.name for field in fields(WeightColumns)]
    columns = WeightColumns(*(np.array([getattr(one, name) for one in weights], dtype=float) for name in names_of))
    for m in (1, 4):
        states, gradients = splits.columns.states(columns, m)
        states = states + splits.columns.buckets(columns)
        for split, (layout, traits) in enumerate(zip(splits.layouts, splits.traits, strict=True)):
            for at, one in enumerate(weights):
                parts = memory.state_bytes(
                    one,
                    traits,
                    shards=shard_ranks(layout),
                    micro_batches=m,
                    expert_ranks=layout.expert_parallel_degree,
                )
                assert states[split, at] == sum(parts.values())
                assert gradients[split, at] == (parts["gradients"] if m == 1 else 0)
