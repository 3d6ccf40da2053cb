"""A step is monotone in every input, so that the model at the least of each column is a bound of what has these columns.

A pass, and a pass with what comes once per step beside it, take no less where an input grows; a makespan takes no less where a time grows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from ahp.engines.registry import get
from ahp.forecast.assembly import recompute_of
from ahp.forecast.compute import Work
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.segment import SegmentFigures
from ahp.forecast.sharing import SharedWeights, StageUnits, UnitTimes
from ahp.forecast.stage import StageCosts, stage_costs
from ahp.forecast.stage_table import StageTable
from ahp.forecast.unit import Unit
from ahp.forecast.units import Units
from ahp.schedule.makespan import makespan
from ahp.schedule.registry import SCHEDULES as REGISTRY
from ahp.schedule.simulate import StageTimes
from tests.lower_bounds import lower_bound_s
from tests.marks import cases

from .test_stage import LAYOUTS, STAGES, case

ROUNDING = 1e-12

CASES = [
    *((engine, keys, "bf16") for engine, keys in LAYOUTS),
    ("ahp", {"data_parallel_shard_degree": 2, "zero_stage": 2, "tensor_parallel_degree": 2, "enable_sequence_parallel": True}, "bf16"),
    ("torchtitan", {"data_parallel_shard_degree": 2, "zero_stage": 3, "tensor_parallel_degree": 2, "enable_sequence_parallel": True}, "bf16"),
    ("megatron", {"data_parallel_shard_degree": 2, "zero_stage": 1, "tensor_parallel_degree": 2, "enable_sequence_parallel": True}, "bf16"),
    ("ahp", {"data_parallel_shard_degree": 2, "zero_stage": 3, "context_parallel_degree": 2, "context_parallel_method": "ring"}, "bf16"),
]  # fmt: skip


class Stages:
    """The inputs of ``stage_costs``, each of which can grow."""

    def __init__(self, engine: str, keys: dict[str, Any], precision: str, kind: str, host: float) -> None:
        asked, layout = case(engine, keys, kind, precision)
        pricer, traits = asked.pricer, get(engine).traits(asked.job, layout, asked.engine)
        self.units: Units = pricer.group.units(layout)
        data = pricer.group.data_parallel(layout, traits)
        self.data: DataParallel = replace(data, operator_s=host * data.operator_s)
        self.table: StageTable = pricer.group.table(STAGES, [1, 0, 2, 0, 3])
        self.shared = SharedWeights.of(StageUnits.of(self.units, traits, self.table), self.data, pricer.group.network)
        self.recompute = recompute_of(kind, traits, self.units)
        self.bytes_per_s = pricer.group.unit_pricer.rates.bytes_per_s

    def costs(self, units: Units, shared: SharedWeights, bytes_per_s: float) -> StageCosts:
        figures = SegmentFigures(units, [self.recompute], self.data)
        return stage_costs(figures, shared, self.data, bytes_per_s, np.array([0, 1, 1, 1, 0]))

    def grown(self, factor: float, more: float) -> Iterator[tuple[str, StageCosts]]:
        """With each input ``factor`` times as large and ``more`` beyond that, one after another."""
        for place in ("embedding", "blocks", "head"):
            for name, change in _of_unit(getattr(self.units, place), factor, more):
                yield (
                    f"{place}.{name}",
                    self.costs(replace(self.units, **{place: change}), self.shared, self.bytes_per_s),
                )
        for name, shared in _of_shared(self.shared, factor, more):
            yield f"shared.{name}", self.costs(self.units, shared, self.bytes_per_s)
        yield "bytes_per_s", self.costs(self.units, self.shared, self.bytes_per_s / factor)


def _of_unit(units: Unit | tuple[Unit, ...], factor: float, more: float) -> Iterator[tuple[str, Any]]:
    """Segments with each of their figures grown: the name, and the segments."""
    several = units if isinstance(units, tuple) else (units,)

    def grown(change: Any) -> Any:
        found = tuple(change(unit) for unit in several)
        return found if isinstance(units, tuple) else found[0]

    for field in fields(several[0].times):
        for part in fields(Work):

            def work(unit: Unit, name: str = field.name, part: str = part.name) -> Unit:
                old = getattr(unit.times, name)
                new = replace(old, **{part: factor * getattr(old, part) + more})
                return replace(unit, times=replace(unit.times, **{name: new}))

            yield f"times.{field.name}.{part.name}", grown(work)
    for part, names in (
        ("tensor", ("forward_s", "again_s", "gather_s", "backward_s", "launches")),
        ("context", ("forward_s", "again_s", "backward_s")),
    ):
        for name in names:

            def waits(unit: Unit, part: str = part, name: str = name) -> Unit:
                old = getattr(unit, part)
                return replace(unit, **{part: old._replace(**{name: factor * getattr(old, name) + more})})

            yield f"{part}.{name}", grown(waits)
    yield "expert_s", grown(lambda unit: replace(unit, expert_s=factor * unit.expert_s + more))


def _of_shared(shared: SharedWeights, factor: float, more: float) -> Iterator[tuple[str, SharedWeights]]:
    for name in ("gathers", "reduces", "replicas"):
        times: UnitTimes = getattr(shared, name)
        for field in fields(UnitTimes):
            new = replace(times, **{field.name: factor * getattr(times, field.name) + more})
            yield f"{name}.{field.name}", replace(shared, **{name: new})
    for name in ("cast_bytes", "copied_bytes"):
        yield name, replace(shared, **{name: factor * getattr(shared, name) + more})


def _passes(costs: StageCosts) -> dict[str, np.ndarray]:
    """What a schedule adds up: passes, and the first and the last pass with what comes once per step."""
    found = costs.seconds()
    return {
        **{name: found[name] for name in ("forward", "backward", "input_gradient", "weight_gradient")},
        "first forward": found["forward"] + found["first_forward"],
        "last backward": found["backward"] + found["last_backward"],
        "last weight gradient": found["input_gradient"] + found["weight_gradient"] + found["last_weight_gradient"],
    }


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "keys", "precision"), CASES)
@pytest.mark.parametrize("kind", cases(["none", "full"], fast=["none"]))
@pytest.mark.parametrize("host", cases([1.0, 0.03, 0.0], fast=[1.0], wide=[0.03]))
def test_passes_take_no_less_where_an_input_grows(
    engine: str, keys: dict[str, Any], precision: str, kind: str, host: float
) -> None:
    """``host``: seconds of a launch, over those of the device. These small blocks take less than their launches."""
    stages = Stages(engine, keys, precision, kind, host)
    base = _passes(stages.costs(stages.units, stages.shared, stages.bytes_per_s))
    typical_s = float(np.median(base["forward"]))
    grew: set[str] = set()
    for factor, more in ((1.5, 0.0), (1.0, 0.1 * typical_s), (30.0, 0.0)):
        for name, costs in stages.grown(factor, more):
            for of, seconds in _passes(costs).items():
                assert (seconds >= base[of] * (1 - ROUNDING)).all(), (name, of, factor)
                if (seconds > base[of] * (1 + ROUNDING)).any():
                    grew.add(name)
    # Inputs that change nothing would make the test worth nothing.
    assert {"blocks.times.forward.device_s", "head.times.weight_gradient.device_s"} <= grew
    assert host == 1.0 or grew & {"shared.reduces.kinds", "shared.replicas.kinds"}


SCHEDULES = [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 3),
             ("ZBVZeroBubble", 2), ("DualPipeV", 2)]  # fmt: skip


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_a_makespan_takes_no_less_where_a_time_grows(schedule: str, virtual: int) -> None:
    draw = random.Random(f"{schedule} {virtual}")
    for p, each in product((2, 3, 4), (2, 3)):
        m = p * each
        times = [_drawn(draw) for _ in range(p * virtual)]
        before_s, bound_s = _span_s(schedule, p, virtual, m, times)
        for stage in range(p * virtual):
            for name in StageTimes._fields:
                new = list(times)
                old = getattr(times[stage], name)
                new[stage] = times[stage]._replace(**{name: old * draw.choice([1.01, 2.0]) + draw.choice([0.0, 0.3])})
                grown_s, grown_bound_s = _span_s(schedule, p, virtual, m, new)
                assert grown_s >= before_s * (1 - ROUNDING), name
                # Where weight gradients wait, the closed form takes off what may come after the last gradient.
                assert REGISTRY[schedule].splits_backward or grown_bound_s >= bound_s * (1 - ROUNDING), name


def _drawn(draw: random.Random) -> StageTimes:
    found = {name: draw.choice([0.0, 0.1, draw.random()]) for name in StageTimes._fields}
    whole = {
        "forward_s": 0.5 + draw.random(),
        "input_gradient_s": 0.5 + draw.random(),
        "weight_gradient_s": draw.random(),
    }
    return StageTimes(**{**found, **whole, "backward_s": whole["input_gradient_s"] + whole["weight_gradient_s"]})


def _span_s(schedule: str, p: int, virtual: int, m: int, times: list[StageTimes]) -> tuple[float, float]:
    return makespan(schedule, p, virtual, m, times).makespan_s, lower_bound_s(schedule, p, virtual, m, times)
