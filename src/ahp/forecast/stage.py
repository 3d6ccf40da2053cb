"""Times of pipeline stages: those that the schedule needs, part by part, for all stages at once.

Dims: J = ways to shard states with equal engine traits, R = kinds of recompute, S = stages, K = kinds of layers, L = layers of the
longest stage. Sums add the layers of a stage one after another, so that a stage takes exactly the same whatever it is priced
together with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from ahp.arrays import Floats, Ints, added
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.segment import BACKWARD, FORWARD, SegmentFigures
from ahp.forecast.sharing import Parts, SharedWeights, WeightCommunication
from ahp.forecast.stage_table import StageTable


@dataclass(frozen=True)
class StageCost:
    """Seconds of one stage: per micro-batch by part, and once per step by part.

    What comes once is on top of the pass it belongs to, except for the part that fits into the device's wait for the host there.
    """

    forward: dict[str, float]
    backward: dict[str, float]
    """The whole backward."""
    input_gradient: dict[str, float]
    """Where a schedule splits the backward: all of it except for weight gradients."""
    weight_gradient: dict[str, float]
    """The weight gradients, which can wait there. The two halves are launched apart, so that each waits for the host by itself."""
    first_forward: dict[str, float]
    last_backward: dict[str, float]
    last_weight_gradient: dict[str, float]
    """The same as ``last_backward`` where a schedule splits the backward."""

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The seven fields, each summed over its parts."""
        return tuple(added(getattr(self, field.name).values()) for field in fields(self))

    def __hash__(self) -> int:
        return hash(self.seconds)

    def scaled(self, factor: float) -> StageCost:
        """The same stage with all its seconds times ``factor``."""
        names = [field.name for field in fields(self)]
        return StageCost(*({part: factor * s for part, s in getattr(self, name).items()} for name in names))


@dataclass(frozen=True)
class StageCosts:
    """``StageCost`` of many stages; each part broadcasts to [J, R, S]."""

    forward: Parts
    backward: Parts
    input_gradient: Parts
    weight_gradient: Parts
    first_forward: Parts
    last_backward: Parts
    last_weight_gradient: Parts

    def seconds(self) -> dict[str, Floats]:
        """The seven fields, each summed over its parts; each sum broadcasts to [J, R, S]."""
        return {field.name: _sum(getattr(self, field.name).values()) for field in fields(self)}

    def rows(self, table: StageTable) -> list[StageCost]:
        """The cost of each stage of one layout; only stages that recompute a layer have the part ``recompute``."""
        columns = {
            (field.name, part): _of_each(seconds[0, 0], len(table.layers))
            for field in fields(self)
            for part, seconds in getattr(self, field.name).items()
        }
        some = (table.num_recomputed > 0).tolist()
        found = []
        for stage, has in enumerate(some):
            each: dict[str, dict[str, float]] = {field.name: {} for field in fields(self)}
            for (name, part), seconds in columns.items():
                if has or part != "recompute":
                    each[name][part] = seconds[stage]
            found.append(StageCost(**each))
        return found


def stage_costs(
    figures: SegmentFigures,
    shared: SharedWeights,
    data: DataParallel,
    bytes_per_s: float,
    passes_behind: Ints | int = 0,
) -> StageCosts:
    """Price the stages of ``shared``, which holds the times of some ways to shard states, or lower bounds. ``data``: of any of these ways.

    ``passes_behind`` [S]: backward passes of other stages that the rank computes after this stage's last one, behind which
    gradients can still travel.
    """
    traits, table = data.traits, shared.units.table
    layers = _Layers(table, figures)
    forward, backward = layers.forward(), layers.backward()
    first_forward: Parts = {}
    last_backward: Parts = {}
    sharing = WeightCommunication(shared, layers.windows_forward_s(), layers.windows_backward_s(), data)
    sharing.add_gathers(forward, backward, first_forward, bytes_per_s)
    if traits.gather.at_start:  # the other stages' gathers are done while the pipeline fills
        first_forward["weight_gather"] = first_forward["weight_gather"] * table.first
    sharing.add_reductions(backward, last_backward, bytes_per_s, passes_behind)
    weights_s = layers.sums["weight_gradient"]
    weight_gradient: Parts = {"weight_gradient": weights_s}
    rest = {part: seconds for part, seconds in backward.items() if part != "backward"}
    # Where weight gradients wait, tensor-parallel collectives cannot hide behind them.
    rest["tensor_parallel"] = rest["tensor_parallel"] + layers.sums["tensor_hidden"]
    input_gradient: Parts = {"input_gradient": backward["backward"] - weights_s, **rest}
    collectives, own = layers.sums["tensor_launches"], (table.layers + 1) * traits.host.operators_per_unit / 2
    of_inputs = layers.sums["input_gradient_launches"] + layers.again["launches"] + collectives
    of_weights = layers.sums["weight_gradient_launches"]
    first, again = layers.again["beside_forward"], layers.again["beside_backward"]
    stalled = layers.sums["stalled_launches"]
    _add_host(forward, layers.sums["forward_launches"] + collectives, own, data, beside=first, stalled=stalled)
    _add_host(backward, of_inputs + of_weights, own, data, beside=again)
    _add_host(input_gradient, of_inputs, own, data, beside=again)
    _add_host(weight_gradient, of_weights, 0.0, data)
    last_weight_gradient = _beyond_host(last_backward, data, input_gradient, weight_gradient)
    first_forward = _beyond_host(first_forward, data, forward)
    last_backward = _beyond_host(last_backward, data, backward)
    return StageCosts(
        forward, backward, input_gradient, weight_gradient, first_forward, last_backward, last_weight_gradient
    )


class _Layers:
    """The layers of some stages, and what their passes take."""

    def __init__(self, table: StageTable, figures: SegmentFigures) -> None:
        self.table, self.figures = table, figures

    @cached_property
    def sums(self) -> dict[str, Floats]:
        """[1, 1, S] The sum of each figure over the layers and ends of a stage."""
        figures = np.array([*self.figures.plain.values()])
        layers = self.table.of_layers(figures[:, :-2])
        ends = figures[:, -2:, None] * np.array([self.table.first, self.table.last])
        found = np.concatenate([layers, np.moveaxis(ends, 1, -1)], axis=-1).cumsum(axis=-1)[..., -1]
        return dict(zip(self.figures.plain, found[:, None, None], strict=True))

    @cached_property
    def again(self) -> dict[str, Floats]:
        """[1, R, S] The sum of each figure of recompute over the recomputed layers; collectives of tensor and context ranks are added, one
        layer after another, to those of the backward pass."""
        of_kinds = self.figures.again
        layers = self._recomputed(np.array([*of_kinds.values()]))
        found = np.concatenate([np.zeros((*layers.shape[:-1], 1)), layers], axis=-1)
        for at, part in enumerate(of_kinds):
            if part in ("tensor_parallel", "context_parallel"):
                found[at, ..., 0] = self.sums[BACKWARD[part]][0]
        return dict(zip(of_kinds, found.cumsum(axis=-1)[:, None, ..., -1], strict=True))

    def forward(self) -> Parts:
        return {part: self.sums[figure] for part, figure in FORWARD.items()}

    def backward(self) -> Parts:
        parts = {part: self.sums[figure] for part, figure in BACKWARD.items()}
        if any(kind != "none" for kind in self.figures.recompute):
            parts |= {part: self.again[part] for part in ("recompute", "tensor_parallel", "context_parallel")}
            parts["expert_parallel"] = parts["expert_parallel"] + self.again["expert_parallel"]
        return parts

    def windows_forward_s(self) -> Floats:
        """[S, L] Seconds of each layer that collectives of weights can hide behind."""
        return self.table.of_layers(self.figures.window_forward_s)

    def windows_backward_s(self) -> Floats:
        """[R, S, L] The same in the backward pass, in its order of layers."""
        plain = self.table.of_layers(self.figures.plain_window_backward_s)
        layers = self._recomputed(self.figures.window_backward_s, plain)
        return np.take_along_axis(layers, self.table.backwards[None], axis=-1)

    def _recomputed(self, of_kinds: Floats, otherwise: Floats | float = 0.0) -> Floats:
        """[..., R, S, L] A figure of each recomputed layer, from [..., R, K]; ``otherwise``: of all other layers."""
        return np.where(self.table.is_recomputed, self.table.of_layers(of_kinds), otherwise)


def _of_each(seconds: Floats, num_stages: int) -> list[float]:
    """Seconds of each stage, from one number for all stages or one for each."""
    found = seconds.tolist()
    return found if len(found) == num_stages else found * num_stages


def _sum(parts: Iterable[Floats]) -> Floats:
    """The sum of the parts, added one after another."""
    return sum(parts, np.zeros((1, 1, 1)))


def _add_host(
    parts: Parts, launches: Floats, own_launches: Floats | float, data: DataParallel, *,
    beside: Floats | float = 0.0, stalled: Floats | float = 0.0,
) -> None:  # fmt: skip
    """Add the time that the device waits for the host. On a CPU the operators' times hold their own launches, so only the engine's are
    added; a GPU waits where all launches of a pass take longer than what they launch (for all of them if the host waits for each kernel), and
    while ``stalled`` launches are prepared.
    ``beside``: the host's work for recompute, as a number of the model's operators."""
    if data.host_is_device:
        parts["host"] = np.reshape(own_launches, (1, 1, -1)) * data.operator_s + beside * data.operator_s
        return
    host_s = ((launches + beside) * data.traits.host.launches_per_operator + own_launches) * data.operator_s
    stalled_s = stalled * data.traits.host.launches_per_operator * data.operator_s
    hidden_s = 0.0 if data.traits.host.waits else _sum(parts.values())
    parts["host"] = np.maximum(host_s - hidden_s, 0.0) + stalled_s


def _beyond_host(once: Parts, data: DataParallel, *passes: Parts) -> Parts:
    """The part of ``once`` beyond the device's wait for the host in its passes: both run at the same time, and the longer counts."""
    if data.host_is_device or data.traits.host.waits or not once:
        return once
    total_s, waited_s = _sum(once.values()), _sum(parts["host"] for parts in passes)
    hidden = np.divide(
        waited_s, total_s, out=np.zeros(np.broadcast_shapes(waited_s.shape, total_s.shape)), where=total_s != 0
    )
    share = np.maximum(1.0 - hidden, 0.0)
    return {part: share * seconds for part, seconds in once.items()}
