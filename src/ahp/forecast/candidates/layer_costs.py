"""Least seconds that one more layer adds to its stage, under many ways to shard states at once.

``sharing`` prices whole stages, whose first layers have nothing to hide collectives behind. Here every layer has neighbors, as long as
the longest of the model, so that no stage takes less than the sum of its layers.

Dims: N = ways to shard states, of one or several sets of layers; R = kinds of recompute, K = kinds of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats, Ints
from ahp.forecast.candidates.layer_columns import LayerColumns
from ahp.forecast.candidates.sharding_columns import ShardingColumns
from ahp.forecast.candidates.shardings import CollectiveTimes
from ahp.forecast.overlap import shown_behind_s, shown_columns_s
from ahp.forecast.states import TraitColumns, last_copy_bytes


class LayerCosts(NamedTuple):
    """Seconds that a layer adds to its stage: in the passes of a micro-batch and once per step, each [N, R, K]; or [N, R] for one layer."""

    forward: Floats
    backward: Floats
    input_gradient: Floats
    """The backward pass without weight gradients."""
    first_forward: Floats
    """Without the weights that are gathered then."""
    first_gather: Floats
    last_backward: Floats

    def part(self, rows: slice) -> LayerCosts:
        return LayerCosts(*(part[rows] for part in self))


def layer_costs(
    ways: ShardingColumns,
    sent: CollectiveTimes,
    layers: Sequence[LayerColumns],
    of: Ints,
    micro_batches: Ints,
    is_whole: NDArray[np.bool_],
    bytes_per_s: float,
) -> LayerCosts:
    """[N, R, K] Seconds that each kind of layer adds.

    Args:
        ways: how states are sharded.
        sent: seconds to gather and to reduce each kind of layer, [N, K].
        layers: sets of layers on devices of one kind.
        of: the number of the set of layers that each way is for, [N].
        micro_batches: of each way, [N, 1].
        is_whole: whether a rank holds the whole model, so that no other stage hides gradients, [N, 1, 1].
        bytes_per_s: of memory.
    """
    traits, data = ways.traits, layers[0].data

    def each(name: str) -> Floats:
        return np.array([getattr(one, name) for one in layers])[of]

    parameters, forward_s, window_forward_s = (
        each(name)[:, None] for name in ("parameters", "forward_of_kinds", "work_forward")
    )
    backward_s, windows_s = each("backward_of_kinds"), each("work_backward")
    casts, copies = (part[..., None] / bytes_per_s * parameters for part in ways.moved_bytes(micro_batches))
    gather, reduce, replicas = (part[:, None] for part in (sent.gather, sent.reduce, sent.replicas))

    overlap = data.overlap * traits.gather.overlap[..., None]
    shown = shown_columns_s(gather, window_forward_s.max(axis=-1, keepdims=True), overlap)
    gathered = traits.gather.is_waited_for[..., None] * shown
    in_each = traits.gather.in_each_forward[..., None]
    forward = forward_s + in_each * (casts + gathered)
    first = (1.0 - in_each) * casts, (1.0 - in_each) * gathered
    shown = shown_columns_s(gather, windows_s.max(axis=-1, keepdims=True), overlap)
    again = traits.gather.in_each_backward[..., None] * (shown + casts)

    overlap = data.overlap * traits.reduce.overlap[..., None]

    def behind(reduces: Floats) -> Floats:
        longer = np.maximum((reduces - windows_s).min(axis=-1, keepdims=True), 0.0)
        return shown_behind_s(reduces, is_whole * longer, overlap)

    in_each = traits.reduce.every_micro_batch[..., None]
    backward = backward_s + again + copies + in_each * behind(reduce)
    last_bytes = np.asarray(last_copy_bytes(traits, micro_batches))[..., None]
    last = behind(replicas + (1.0 - in_each) * reduce) + last_bytes / bytes_per_s * parameters
    if data.host_is_device:
        own_s = traits.host.operators_per_unit[..., None] / 2 * data.operator_s
        forward, backward = forward + own_s, backward + own_s
    parts = forward, backward, backward - each("weight_gradient_of_kinds")[:, None], *first, last
    return LayerCosts(*(np.broadcast_to(part, backward.shape) for part in parts))


def launched(
    costs: LayerCosts, traits: TraitColumns, layers: Sequence[LayerColumns], of: Ints, shares: Floats
) -> LayerCosts | None:
    """``costs`` with each pass as long as its launch by the host where that is longer for a layer of average kind, and with the part of what
    comes once that does not fit into the device's waits there. The head is not counted: its computation can hide behind these waits. None
    where the host holds nothing up.

    ``traits``: of each way; ``shares`` [K]: each kind's share of all layers; the other arguments as for ``layer_costs``.
    """
    data = layers[0].data
    if data.host_is_device:
        return None

    def each(name: str) -> Floats:
        return np.array([getattr(one, name) for one in layers])[of]

    own_s = traits.host.operators_per_unit[..., None] / 2 * data.operator_s
    forward, backward = (each(name) + own_s for name in ("host_forward_of_kinds", "host_backward_of_kinds"))
    passes = forward, backward, backward - each("host_weight_gradient_of_kinds")[:, None]
    waits = [host - device for host, device in zip(passes, costs[:3], strict=True)]
    first, last, inputs = (np.where((wait @ shares > 0)[..., None], wait, 0.0) for wait in waits)
    if not (first.any() or last.any() or inputs.any()):
        return None
    first = first + each("stalled_of_kinds")[:, None]
    return LayerCosts(
        forward=costs.forward + first,
        backward=costs.backward + last,
        input_gradient=costs.input_gradient + inputs,
        first_forward=_left(costs.first_forward + costs.first_gather, first) * costs.first_forward,
        first_gather=_left(costs.first_gather, first) * costs.first_gather,
        last_backward=_left(costs.last_backward, last) * costs.last_backward,
    )


def _left(once_s: Floats, waits_s: Floats) -> Floats:
    """[N, R, 1] Least share of what comes once that the waits of its pass do not hide, whatever layers a stage has."""
    waits_s = np.maximum(waits_s, 0.0)
    hidden = np.divide(waits_s, once_s, out=np.where(waits_s > 0, np.inf, 0.0), where=once_s > 0)
    return np.maximum(1.0 - hidden.max(axis=-1, keepdims=True), 0.0)
