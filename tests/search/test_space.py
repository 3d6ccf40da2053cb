"""The table of layouts: complete, without doubles, and legal exactly where the forecast says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.config import Constraints
from ahp.divisors import divisors
from ahp.engines.registry import names
from ahp.errors import BadInput
from ahp.forecast import rules
from ahp.forecast.axes import axes_of
from ahp.forecast.rules import illegal
from ahp.plan import Parallelism
from ahp.search.choices import ShardingChoice
from ahp.search.problem import Problem
from ahp.search.space import build

from .small import everything, problems, small


def reason(asked: Problem, layout: Parallelism) -> str | None:
    return illegal(asked.graph, asked.cluster, asked.job, layout, asked.engine)


def legal_of(asked: Problem, combinations: list[Parallelism]) -> list[Parallelism]:
    """Those that a search offers: legal, and such that a file of the engine can say them."""
    return [layout for layout in combinations if not (reason(asked, layout) or asked.untold(layout))]


@pytest.mark.parametrize("engine", names())
@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [("llama", "4xH100-SXM-80GB", 4), ("experts", "4xH100-SXM-80GB", 2), ("tied gpt2", "3xH100-SXM-80GB", 6)],
)
def test_the_table_is_every_legal_layout_once(model: str, cluster: str, batch: int, engine: str) -> None:
    asked = small(model, cluster, engine=engine, batch=batch)
    space, combinations = build(asked), everything(asked)
    found, legal = list(space), legal_of(asked, combinations)
    assert len(set(found)) == len(found) == space.num_legal, "a layout stands twice"
    assert set(found) == set(map(asked.first_alike, legal))
    assert len(legal) == space.num_legal + space.num_alike
    assert space.size == len(combinations)
    assert space.size - len(legal) <= sum(rule.broken for rule in space.rules)


@pytest.mark.parametrize(
    ("model", "cluster", "batch"), [("experts", "2xH100-SXM-80GB", 2), ("llama", "8xH100-SXM-80GB", 1)]
)
def test_compiled_blocks_keep_their_products_alone_where_they_are_one_graph(
    model: str, cluster: str, batch: int
) -> None:
    """Not where experts are divided, nor where attention goes round a ring because eight ranks do not divide four heads."""
    asked = small(model, cluster, batch=batch, compiled=True)
    space, combinations = build(asked), everything(asked)
    assert set(space) == set(map(asked.first_alike, legal_of(asked, combinations)))
    assert space.num_legal == len(set(space))
    kinds = {(x.expert_parallel_degree > 1, x.context_parallel_degree, x.activation_checkpoint) for x in space}
    assert (False, 1, "selective") in kinds
    assert ({(True, 1, "selective"), (False, 8, "selective")} & kinds) == set()
    assert {(True, 1, "full"), (False, 8, "full")} & kinds


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(problems(("1xH100-SXM-80GB", "3xH100-SXM-80GB", "4xA100-SXM-40GB", "2x3xB200")))
def test_any_table_is_every_legal_layout(asked: Problem) -> None:
    space, combinations = build(asked), everything(asked)
    found = [layout for layout in space if layout.mesh_order is None]
    assert set(found) == set(map(asked.first_alike, legal_of(asked, combinations)))
    assert space.size == len(combinations) or space.has_orders


@settings(max_examples=15, deadline=None)
@given(problems(), st.data())
def test_a_row_is_what_its_block_says(asked: Problem, data: st.DataObject) -> None:
    space = build(asked)
    if not len(space.blocks):
        return
    block = data.draw(st.integers(0, len(space.blocks) - 1))
    layout = space.layout(block, data.draw(st.integers(0, int(space.blocks.rows[block]) - 1)))
    assert layout.world_size == asked.cluster.num_devices
    assert layout.num_micro_batches(asked.job) == space.blocks.micro_batches[block]
    assert layout.data_parallel_degree == space.blocks.data[block]
    assert len(space.rows(block)) == space.blocks.rows[block]
    assert reason(asked, layout) is None


@pytest.mark.parametrize(
    ("model", "cluster", "given"),
    [
        ("llama", "3x4xA100-SXM-80GB", {}),
        pytest.param("llama", "4x3xA100-SXM-80GB", {}, marks=pytest.mark.slow),
        ("llama", "2x6xA100-SXM-80GB", {"tensor_parallel_degree": 4}),
        ("experts", "4x3xA100-SXM-80GB", {"expert_parallel_degree": 2}),
    ],
)
def test_groups_lie_on_the_nodes_that_the_forecast_says(model: str, cluster: str, given: dict) -> None:
    """Also where an axis does not fill nodes evenly, so that some of its groups lie on more nodes than the first."""
    asked = small(model, cluster, batch=12, constraints=given)
    space, per_node, beyond = build(asked), asked.cluster.groups[0].devices_per_node, 0
    local = space.local(space.blocks.mesh)
    for block in range(len(space.blocks)):
        found = space.axes(block)
        assert local[block].tolist() == [group.local for group in (found.tensor, found.context, found.expert)]
        for row in range(int(space.blocks.rows[block])):
            layout = space.layout(block, row)
            own = axes_of(layout, per_node, asked.traits(layout).experts.folded)
            assert own._replace(expert=found.expert) == found
            assert own.expert.local <= found.expert.local  # of ranks that share experts some rows' lie further apart
            assert own.expert.nodes >= found.expert.nodes
        beyond += found.tensor.nodes > 1 and found.tensor.size <= per_node
    assert beyond


def test_a_method_is_of_layouts_that_share_sequences() -> None:
    found = list(build(small(cluster="4xH100-SXM-80GB", constraints={"context_parallel_method": "all-to-all"})))
    assert {(x.context_parallel_degree, x.context_parallel_method) for x in found} == {
        (2, "all-to-all"),
        (4, "all-to-all"),
    }
    assert max(x.context_parallel_degree * x.tensor_parallel_degree for x in found) == 4  # of 4 heads


def test_rules_count_the_rows_that_break_them() -> None:
    asked = small("llama", "8xH100-SXM-80GB", batch=12)
    rules, combinations = {rule.name: rule for rule in build(asked).rules}, everything(asked)
    counted = {
        "tensor": sum(x.tensor_parallel_degree > 4 for x in combinations),
        "batch": sum(12 % (x.data_parallel_degree * x.micro_batch_size) != 0 for x in combinations),
        "layers": sum(x.num_stages > 4 for x in combinations),
    }
    assert {name: rules[name].broken for name in counted} == counted
    assert "does not divide num_attention_heads 4" in rules["tensor"].says


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel_degree": 2},
        {"data_parallel_shard_degree": 2},
        {"data_parallel_replicate_degree": 1, "zero_stage": 1},
        {"pipeline_parallel_degree": 1, "zero_stage": 2},
        {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2},
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
        {"micro_batch_size": 3, "activation_checkpoint": "full"},
        {"enable_sequence_parallel": False, "context_parallel_degree": 2},
        {"zero_stage": 0},
    ],
    ids=str,
)
def test_what_the_user_fixed_is_kept_and_nothing_else_is_lost(given: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = Constraints(**given)
    asked = small("llama", "4xH100-SXM-80GB", engine="torchtitan", batch=6, constraints=constraints)
    found = set(build(asked))
    monkeypatch.setattr(Problem, "untold", lambda self, layout: None)
    free = build(small("llama", "4xH100-SXM-80GB", engine="torchtitan", batch=6))
    monkeypatch.undo()
    assert found == {layout for layout in free if constraints.admits(layout) and not asked.untold(layout)}
    assert found


OF_ENGINES = [
    pytest.param(model, batch, engine, marks=() if model == "llama" or engine == "ahp" else pytest.mark.slow)
    for model, batch in [("llama", 4), ("experts", 2)]
    for engine in names()
]


@pytest.mark.parametrize(("model", "batch", "engine"), OF_ENGINES)
def test_every_value_of_a_legal_layout_may_be_fixed(model: str, batch: int, engine: str) -> None:
    """Alone: another key of the layout may be needed, and is then the search's to find."""
    cluster = "4xH100-SXM-80GB"
    layouts = list(build(small(model, cluster, engine=engine, batch=batch)))
    values = {
        (key, value)
        for layout in layouts
        for key, value in layout
        if key in Constraints.model_fields and value is not None
    }
    for key, value in sorted(values, key=str):
        constraints = Constraints(**{key: value})
        found = set(build(small(model, cluster, engine=engine, batch=batch, constraints=constraints)))
        assert found >= {layout for layout in layouts if getattr(layout, key) == value}, (key, value)


def test_experts_that_cannot_be_shared_so_are_refused_by_their_own_key() -> None:
    with pytest.raises(
        BadInput, match=r"^expert_parallel_degree = 3: does not divide num_experts 4 \(valid: 1, 2, 4\)$"
    ):
        small("experts", constraints={"expert_parallel_degree": 3})


def test_uneven_stages_that_the_user_gives() -> None:
    given = {"pipeline_parallel_degree": 2, "layers_per_stage": (1, 3)}
    asked = small("llama", "4xH100-SXM-80GB", constraints=given)
    found = list(build(asked))
    assert {layout.layers_per_stage for layout in found} == {(1, 3)}
    assert all(reason(asked, layout) is None for layout in found)


def test_layouts_without_a_pipeline_have_the_default_schedule() -> None:
    asked = small("llama", "2xH100-SXM-80GB", constraints={"pipeline_parallel_schedule": "GPipe"})
    found = {layout.pipeline_parallel_degree: layout for layout in build(asked)}
    assert {p: layout.pipeline_parallel_schedule for p, layout in found.items()} == {1: "1F1B", 2: "GPipe"}
    assert all(map(asked.constraints.admits, found.values()))


def test_a_zero_stage_without_shards_only_where_the_user_says_so() -> None:
    def splits(**given: int) -> set[ShardingChoice]:
        space = build(small("llama", "2xH100-SXM-80GB", constraints=given))
        return {split for block in range(len(space.blocks)) for split in space.rows(block).splits}

    alone = {"context_parallel_degree": 1}
    assert splits(zero_stage=3, **alone) == {ShardingChoice(1, 2, 3)}
    assert splits(zero_stage=3, data_parallel_shard_degree=1, **alone) == {
        ShardingChoice(1, 1, 3),
        ShardingChoice(2, 1, 3),
    }


@pytest.mark.parametrize(
    ("engine", "stages"), [("ahp", {0, 1, 2, 3}), ("accelerate", {2, 3}), ("deepspeed", {0, 1, 2, 3})]
)
def test_context_ranks_alone_may_share_states(engine: str, stages: set[int]) -> None:
    given = {"context_parallel_degree": 2, "data_parallel_shard_degree": 1}
    found = list(build(small("llama", "2x2xH100-SXM-80GB", engine=engine, constraints=given)))
    assert {layout.zero_stage for layout in found} == stages
    of_replicas = {layout.zero_stage for layout in found if layout.data_parallel_replicate_degree == 2}
    assert of_replicas == (stages if engine != "deepspeed" else {0})  # whose ZeRO has no replicas
    only = {
        layout.zero_stage for layout in build(small(cluster="2xH100-SXM-80GB", constraints=given | {"zero_stage": 2}))
    }
    assert only == {2}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tensor_parallel_degree": 3}, "tensor_parallel_degree = 3: must divide the 8 devices"),
        ({"tensor_parallel_degree": 4, "pipeline_parallel_degree": 4}, "no layout of 8 devices has"),
        ({"zero_stage": 0, "data_parallel_shard_degree": 2}, "no layout|shards nothing"),
        ({"zero_stage": 2, "tensor_parallel_degree": 8}, "zero_stage 2"),
    ],
    ids=str,
)
def test_contradictions_are_refused(given: dict, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        build(small("llama", "8xH100-SXM-80GB", constraints=given))


def test_a_large_table_is_counted_not_written_out() -> None:
    space = build(small("llama", "512x8xH100-SXM-80GB", engine="torchtitan", batch=4096))
    assert space.size > 500_000
    assert len(space.blocks) < 5_000
    assert np.all(space.blocks.rows > 0)


def test_degrees_that_break_a_rule_are_laid_on_nodes_in_one_order() -> None:
    """Six tensor ranks divide no four heads: nothing is looked for where no layout is legal."""
    asked = small("llama", "3x4xH100-SXM-80GB", batch=12)
    space = build(asked)
    orders: dict[bool, set[bool]] = {True: set(), False: set()}
    for mesh in space._meshes:
        good = (
            rules.tensor(asked.graph, asked.job, Parallelism(tensor_parallel_degree=mesh.degrees.tensor), asked.engine)
            is None
        )
        orders[good] |= {split.order is not None for split in mesh.splits}
    assert orders == {True: {False, True}, False: {False}}


def test_divisors() -> None:
    assert [divisors(n) for n in (1, 7, 12)] == [[1], [1, 7], [1, 2, 3, 4, 6, 12]]
    assert divisors(16384) == [2**k for k in range(15)]


def test_the_native_engine_shares_experts_among_ranks_that_shard() -> None:
    space = build(small("experts", "4xH100-SXM-80GB", batch=8))
    degrees = {layout.expert_parallel_degree: layout for layout in space if layout.expert_parallel_degree > 1}
    assert set(degrees) == {2, 4}
    for layout in space:
        assert layout.weight_shards % layout.expert_parallel_degree == 0
    assert any(
        x.data_parallel_shard_degree == 1 and x.expert_parallel_degree == 4 for x in space
    )  # context ranks alone
    given = small("experts", "4xH100-SXM-80GB", batch=8, constraints=Constraints(expert_parallel_degree=4))
    given.check()
    ways = {(layout.data_parallel_shard_degree, layout.context_parallel_degree) for layout in build(given)}
    assert ways == {(4, 1), (2, 2), (1, 4)}
