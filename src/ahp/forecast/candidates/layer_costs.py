"""Least seconds that one more layer adds to its stage, under many ways to shard states at once.

``sharing`` prices whole stages, whose first layers have nothing to hide collectives behind. Here every layer has neighbors, as long as
the longest of the model, so that no stage takes less than the sum of its layers.

Dims: N = ways to shard states, of one or several sets of layers; R = kinds of recompute, K = kinds of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats, Ints
from ahp.forecast.candidates.layer_columns import LayerColumns
from ahp.forecast.candidates.sharding_columns import ShardingColumns
from ahp.forecast.candidates.shardings import CollectiveTimes
from ahp.forecast.overlap import shown_behind_s, shown_s
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

    def each(figure: Callable[[LayerColumns], Floats]) -> Floats:
        return np.array([*map(figure, layers)])[of]

    parameters, forward_s, window_forward_s, weights_s = (
        each(figure)[:, None]
        for figure in (
            lambda one: one.parameters, lambda one: one.forward_s[:-2], lambda one: one.window_forward_s,
            lambda one: one.plain["weight_gradient"][:-2],
        )
    )  # fmt: skip
    backward_s, windows_s = each(lambda one: one.backward_of_kinds), each(lambda one: one.window_backward_s)
    casts, copies = (part[..., None] / bytes_per_s * parameters for part in ways.moved_bytes(micro_batches))
    gather, reduce, replicas = (part[:, None] for part in (sent.gather, sent.reduce, sent.replicas))

    overlap = data.overlap * traits.gather.overlap[..., None]
    shown = shown_s(gather, window_forward_s.max(axis=-1, keepdims=True), overlap)
    gathered = traits.gather.is_waited_for[..., None] * shown
    in_each = traits.gather.in_each_forward[..., None]
    forward = forward_s + in_each * (casts + gathered)
    first = (1.0 - in_each) * casts, (1.0 - in_each) * gathered
    shown = shown_s(gather, windows_s.max(axis=-1, keepdims=True), overlap)
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
    parts = forward, backward, backward - weights_s, *first, last
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

    own_s = traits.host.operators_per_unit[..., None] / 2 * data.operator_s
    forward, backward, weights, stalled = (
        np.array(part)[of] for part in zip(*(one.host_of_kinds for one in layers), strict=True)
    )
    forward, backward = forward + own_s, backward + own_s
    passes = forward, backward, backward - weights[:, None]
    waits = [host - device for host, device in zip(passes, costs[:3], strict=True)]
    first, last, inputs = (np.where((wait @ shares > 0)[..., None], wait, 0.0) for wait in waits)
    if not (first.any() or last.any() or inputs.any()):
        return None
    first = first + stalled[:, None]
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
