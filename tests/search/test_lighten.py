"""Recomputing no more layers than memory asks for: against every choice there is, and told."""

from __future__ import annotations

from itertools import product

import pytest

from ahp.errors import BadInput, NotExpressible
from ahp.forecast import memory
from ahp.plan import Parallelism
from ahp.schedule.stages import layers_of_stages
from ahp.search.lighten import LAYOUTS as LOOKED_AT
from ahp.search.lighten import _promising, _words, lighten
from ahp.search.pairs import Improved
from ahp.search.problem import Problem

from .small import small

MUCH = 40_000_000_000
PIPELINE = {"pipeline_parallel_degree": 2, "data_parallel_replicate_degree": 2, "activation_checkpoint": "full"}
LAYOUTS = [
    ("ahp", Parallelism(**PIPELINE)),
    ("ahp", Parallelism(**PIPELINE, pipeline_parallel_schedule="GPipe")),
    ("ahp", Parallelism(data_parallel_replicate_degree=4, activation_checkpoint="full")),
    ("megatron", Parallelism(**PIPELINE)),
]


def tight(engine: str, layout: Parallelism, share: float) -> Problem:
    """A device with memory for the layout, and for so much of what recompute saves it beside."""
    asked = small("llama", "4xA100-SXM-40GB", engine=engine, batch=16, memory_bytes=MUCH)
    least, most = (
        sum(asked.price(layout.model_copy(update={"activation_checkpoint": kind})).memory.values())
        for kind in ("full", "none")
    )
    capacity = round((least + share * (most - least)) / memory.most_that_fits(1.0))
    return small("llama", "4xA100-SXM-40GB", engine=engine, batch=16, memory_bytes=capacity)


@pytest.mark.parametrize(("engine", "layout"), LAYOUTS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_no_choice_that_fits_is_faster(engine: str, layout: Parallelism, share: float) -> None:
    asked = tight(engine, layout, share)
    whole = asked.price(layout)
    layers = layers_of_stages(layout, asked.graph.num_layers)
    times = [whole.step_time_s] if whole.fits else []
    for some in filter(any, product(*(range(count + 1) for count in layers))):
        fewer = layout.model_copy(update={"recomputed_layers_per_stage": some})
        if asked.refused(fewer) is None and (forecast := asked.price(fewer)).fits:
            times.append(forecast.step_time_s)
    found = lighten(asked, Improved([(layout, whole)]))
    assert found.lightened > 0
    ((best, forecast),) = found.ranked
    assert forecast == asked.price(best)
    if share == 0.9 and layout.num_stages > 1:
        assert best.recomputed_layers_per_stage is not None
        assert sum(best.recomputed_layers_per_stage) < asked.graph.num_layers
    if times:
        assert forecast.fits
        assert forecast.step_time_s == pytest.approx(min(times), rel=1e-3)


def test_all_and_none_are_the_kinds_without_a_number() -> None:
    asked, layout = small(), Parallelism(pipeline_parallel_degree=4, activation_checkpoint="full")
    counts = layers_of_stages(layout, asked.graph.num_layers)
    every = layout.model_copy(update={"recomputed_layers_per_stage": counts})
    assert asked.price(every) == asked.price(layout)
    none = asked.price(layout.model_copy(update={"recomputed_layers_per_stage": (0,) * 4}))
    without = asked.price(layout.model_copy(update={"activation_checkpoint": "none"}))
    assert none.step_time_s == without.step_time_s
    assert none.memory == without.memory


def test_what_cannot_be_is_refused() -> None:
    some = {"recomputed_layers_per_stage": (1, 0), "pipeline_parallel_degree": 2, "activation_checkpoint": "full"}
    layout = Parallelism(**some, data_parallel_replicate_degree=2)
    for engine in ("torchtitan", "megatron"):
        with pytest.raises(NotExpressible, match="recomputed_layers_per_stage"):
            small(engine=engine).price(layout)
    assert small(engine="megatron").price(layout.model_copy(update={"recomputed_layers_per_stage": (1, 1)}))
    with pytest.raises(BadInput, match="the stages have"):
        small().price(layout.model_copy(update={"recomputed_layers_per_stage": (3, 0)}))
    for wrong in ({"recomputed_layers_per_stage": (1,)}, {"activation_checkpoint": "none"}):
        with pytest.raises(ValueError, match="recomputed_layers_per_stage"):
            Parallelism(**{**some, **wrong})


def test_a_given_number_is_kept() -> None:
    from ahp.search.ranking import search

    given = {"pipeline_parallel_degree": 2, "recomputed_layers_per_stage": (1, 2)}
    asked = small(constraints=given)
    ranking = search(asked.graph, asked.cluster, asked.job, constraints=given, engine=asked.engine)
    assert ranking.certificate.proven
    for plan in ranking:
        assert plan.parallelism.recomputed_layers_per_stage == (1, 2)
        assert plan.parallelism.activation_checkpoint in ("selective", "full")
        assert plan.forecast == asked.price(plan.parallelism)


def test_the_layouts_that_would_be_fastest_without_their_recompute_are_looked_at() -> None:
    forecast = small("llama", "4xA100-SXM-40GB").price(Parallelism(data_parallel_replicate_degree=4))
    steps = [(1.0, 0.0), (1.1, 0.05), (1.2, 0.21), (1.3, 0.4), (1.4, 0.7), (1.5, 0.6), (1.6, 0.9)]
    ranked = [
        (
            Parallelism(micro_batch_size=at + 1, activation_checkpoint="full" if again_s else "none"),
            forecast.model_copy(update={"step_time_s": step_s, "step": {"recompute": again_s}}),
        )
        for at, (step_s, again_s) in enumerate(steps)
    ]
    assert _promising(ranked) == [4, 6, 3, 5][:LOOKED_AT]
    assert _promising(ranked[:2]) == [], "it is slower without its recompute too"


@pytest.mark.parametrize(("layers", "told"), [(1, "1 layer is recomputed"), (2, "2 layers are recomputed")])
def test_one_layer_is_told_as_one(layers: int, told: str) -> None:
    assert _words((layers,), 0.25).startswith(told)
