"""Figures of many ranks and ways to share states at once are those of each alone."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.engines.registry import names
from ahp.forecast.states import Shards, Weights, cast_bytes, gradient_copy_bytes, last_copy_bytes, state_bytes
from ahp.search.bounds.block_parts import SpaceShardings
from ahp.search.space import build

from .small import small

NUMBER = st.integers(0, 10**9)


@pytest.mark.parametrize("engine", names())
@settings(max_examples=5, deadline=None)
@given(st.data())
def test_a_column_is_each_way_alone(engine: str, data: st.DataObject) -> None:
    precision = data.draw(st.sampled_from(["bf16", "fp32"]))
    asked = small("experts", "2x4xH100-SXM-80GB", engine=engine, precision=precision)
    space = build(asked)
    splits = SpaceShardings(asked, space).of(data.draw(st.integers(0, len(space.blocks) - 1)))
    ranks = [Weights(data.draw(st.integers(10**9, 10**11)), *(data.draw(NUMBER) for _ in range(6))) for _ in range(2)]
    columns = Weights(*(np.array([getattr(one, f.name) for one in ranks]) for f in fields(Weights)))
    of = splits.columns
    for m in (1, 4):
        together, moved = state_bytes(columns, of.traits, of.shards, m), of.moved_bytes(m)
        for way, (layout, traits) in enumerate(zip(splits.layouts, splits.traits, strict=True)):
            shards = Shards.of(layout, traits.experts.folded)
            for rank, weights in enumerate(ranks):
                alone = state_bytes(weights, traits, shards, m)
                assert {part: count[way, rank] for part, count in together.items()} == alone
            copied = cast_bytes(traits, shards.dense), gradient_copy_bytes(traits, shards.dense, m)
            assert tuple(part[way, 0] for part in moved) == copied
            assert last_copy_bytes(of.traits, m)[way, 0] == last_copy_bytes(traits, m)


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_columns_are_joined_and_cut_as_they_lie(data: st.DataObject) -> None:
    asked = small("experts", "2x4xH100-SXM-80GB")
    space = build(asked)
    shardings = SpaceShardings(asked, space)
    parts = [shardings.of(data.draw(st.integers(0, len(space.blocks) - 1))).columns for _ in range(2)]
    joined, count = type(parts[0]).joined(parts), len(parts[0].traits.reduce.element_bytes)
    allocated = np.array([[1e9]])
    for part, rows in zip(parts, (slice(0, count), slice(count, None)), strict=True):
        again = joined.part(rows)
        assert np.array_equal(again.shards.experts, part.shards.experts)
        assert np.array_equal(again.traits.gradients.element_bytes, part.traits.gradients.element_bytes)
        assert np.array_equal(again.device_bytes(allocated), part.device_bytes(allocated))
