"""The timeline of a priced layout in Chrome's trace event format, which Perfetto and chrome://tracing open.

Each drawn rank is a process, each of its streams a thread. Ranks at one place of the pipeline do the same at the same
time, so one rank stands for all. docs/forecast/timeline.md explains how to read it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ahp.errors import bad_input
from ahp.forecast.mesh import pipeline_axis
from ahp.forecast.priced import Priced, Replica
from ahp.forecast.stage import StageCost
from ahp.forecast.trace_events import Event, arrow, free_lane, named, span, stretched
from ahp.schedule.actions import Action, Kind
from ahp.schedule.makespan import Makespan
from ahp.schedule.simulate import Timeline
from ahp.whole_files import save
from ahp.words import part_words

STREAMS = ("compute", "tensor, context and expert collectives", "data-parallel collectives", "host", "pipeline sends")
"""Threads of a rank, in the order in which they are shown. Sends that overlap take further threads of the last name."""

SENDS = STREAMS.index("pipeline sends")

STREAM_OF = {
    "tensor_parallel": 1,
    "context_parallel": 1,
    "expert_parallel": 1,
    "weight_gather": 2,
    "gradient_reduce": 2,
    "host": 3,
}
"""The thread of a part of an action; any other part is computation."""

MOST_PLACES = 64
"""The most places of the pipeline that are drawn, half from either end. More tracks are not readable."""

MOST_NAMED = 4
"""The most ranks that a track's name lists of those it stands for, where their numbers are not consecutive."""

MOST_EVENTS = 150_000
"""Events that fit into 20 MB: an event takes 60 to 130 bytes."""

LEAST_ACTIONS = 8
"""With fewer actions per rank a timeline shows nothing useful."""

INSIDE = 1e-3
"""Arrows leave and arrive this share of an action away from its edge, because at the edge itself they belong to no
action."""


def chrome_trace(priced: Priced, *, all_ranks: bool = False) -> dict[str, Any]:
    """The trace as data; also what ``ahp report`` draws.

    Actions carry torch's names (``2F0``: stage 2, forward, micro-batch 0). Inside an action lie its parts, one after
    another: computation on the compute thread, the device's waits for collectives and for the host on threads of their
    own. Arrows go from the action whose result is sent to the action that needs it.

    ``all_ranks`` draws every rank, not one for each place of the pipeline. A trace of more than ``MOST_EVENTS`` keeps
    the first and the last actions of each rank; a span marks the gap and ``otherData`` notes it. Raises BadInput when
    there are too many ranks even for that.
    """
    pipelines = _pipelines(priced, all_ranks=all_ranks)
    drawings = [_Drawing(priced, all_ranks, pipeline, len(pipelines)) for pipeline in pipelines]
    events = [event for drawing in drawings for rank, place in drawing.ranks for event in drawing.rank(rank, place)]
    arrows = itertools.count()
    events += [event for drawing in drawings for event in drawing.sends(arrows)]
    streams = {(event["pid"], event["tid"]) for event in events}
    names = [event for drawing in drawings for event in drawing.names()]
    shown = sum(len(drawing.ranks) for drawing in drawings)
    events = [*names, *_stream_names(streams), *(stretched(event, priced.ratio) for event in events)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": drawings[0].about(shown)}


def write(priced: Priced, path: str | Path, *, all_ranks: bool = False) -> None:
    """Write ``chrome_trace`` to a temporary file, then rename it, so that a reader never sees half of it. Raises BadInput where that fails."""
    save(path, json.dumps(chrome_trace(priced, all_ranks=all_ranks), separators=(",", ":")))


@dataclass(frozen=True, slots=True)
class _Done:
    """An action whose result another action needs, and when that result leaves: before the action reduces gradients."""

    place: int
    action: Action
    start_s: float
    leaves_s: float

    @property
    def forward(self) -> bool:
        return self.action.kind is Kind.FORWARD

    @property
    def inside_s(self) -> tuple[float, float]:
        """Where an arrow arrives and where one leaves."""
        edge_s = INSIDE * (self.leaves_s - self.start_s)
        return self.start_s + edge_s, self.leaves_s - edge_s


@dataclass(frozen=True)
class _Pipeline:
    """Pipelines that do the same at the same time: all replicas on a plain cluster, replicas of one kind on a mixed one."""

    span: Makespan
    stages: tuple[StageCost, ...]
    first_rank: tuple[int, ...]
    """The first rank at each place of the pipeline."""
    offsets: tuple[tuple[int, ...], ...]
    """The ranks at each place, counted from its first rank."""
    groups: tuple[str, ...] = ()
    """On a mixed cluster, the group of devices at each place."""
    num_replicas: int = 1
    """How many replicas the drawn ranks stand for, on a mixed cluster."""


def _pipelines(priced: Priced, *, all_ranks: bool) -> list[_Pipeline]:
    if not priced.replicas:
        axis = pipeline_axis(priced.parallelism)
        first = tuple(place * axis.stride for place in range(priced.span.p))
        return [_Pipeline(priced.span, priced.stages, first, (axis.offsets,) * priced.span.p)]
    alike: dict[tuple[object, ...], list[Replica]] = {}
    for number, replica in enumerate(priced.replicas):
        kind = number if all_ranks else (replica.span.m, replica.span.times, *(cell.group for cell in replica.cells))
        alike.setdefault((kind,), []).append(replica)
    return [
        _Pipeline(
            replicas[0].span,
            replicas[0].stages,
            tuple(cell.first_rank for cell in replicas[0].cells),
            tuple(tuple(range(cell.width)) for cell in replicas[0].cells),
            tuple(cell.group for cell in replicas[0].cells),
            len(replicas),
        )
        for replicas in alike.values()
    ]


@dataclass(frozen=True)
class _Drawing:
    """One pipeline of a trace: which ranks and actions it shows, and their events."""

    priced: Priced
    all_ranks: bool
    pipeline: _Pipeline
    num_drawings: int
    """Drawings in the trace, which share its room for events."""

    @cached_property
    def timeline(self) -> Timeline:
        return self.pipeline.span.timeline

    @cached_property
    def ranks(self) -> list[tuple[int, int]]:
        """(rank, its place in the pipeline) of each drawn rank."""
        places, first = range(len(self.timeline.starts_s)), self.pipeline.first_rank
        if self.all_ranks:
            return [(first[place] + offset, place) for place in places for offset in self.pipeline.offsets[place]]
        if len(places) > MOST_PLACES:
            places = [*places[: MOST_PLACES // 2], *places[-MOST_PLACES // 2 :]]
        return [(first[place], place) for place in places]

    @cached_property
    def most_actions(self) -> int:
        """The most actions of one rank that fit: each takes an event for itself, its parts, a send and the two ends of an arrow."""
        parts = max(len(_shown(c.forward) | _shown(c.backward)) for c in self.pipeline.stages)
        fitting = MOST_EVENTS // (self.num_drawings * len(self.ranks) * (parts + 4))
        if fitting < LEAST_ACTIONS:
            most = MOST_EVENTS // (LEAST_ACTIONS * (parts + 4))
            rule = f"a timeline of {self.num_drawings * len(self.ranks)} ranks is too large, {most} fit; without it one stands for all alike"
            raise bad_input("--all-ranks", True, rule, [False])
        return fitting

    def drawn(self, place: int) -> list[int]:
        """Positions of the drawn actions in the rank's order."""
        count = len(self.timeline.starts_s[place])
        if count <= self.most_actions:
            return list(range(count))
        half = self.most_actions // 2
        return [*range(half), *range(count - half, count)]

    @cached_property
    def last_of_stage(self) -> set[tuple[Kind, int, int]]:
        """For each stage, the action after which its gradients are complete."""
        last: dict[int, Action] = {}
        for order in self.timeline.schedule.ranks:
            last |= {a.stage: a for a in order if a.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)}
        return {(a.kind, a.stage, a.micro_batch) for a in last.values()}

    def names(self) -> Iterator[Event]:
        """Events that name the drawn ranks and give the order in which they are shown."""
        places = len(self.timeline.starts_s)
        for rank, place in self.ranks:
            stages = [s for s, holder in enumerate(self.timeline.schedule.stage_rank) if holder == place]
            held = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
            where = f" (pipeline place {place + 1} of {places}, {held})" if places > 1 else ""
            alone = self.all_ranks or len(self.pipeline.offsets[place]) == 1
            for_whom = "" if alone else f", stands for {self._alike(rank, place)}"
            on = f" on {self.pipeline.groups[place]}" if self.pipeline.groups else ""
            alike = f", one of {self.pipeline.num_replicas} replicas alike" if self.pipeline.num_replicas > 1 else ""
            yield named("process_name", rank, None, name=f"rank {rank}{on}{where}{for_whom}{alike}")
            yield named("process_sort_index", rank, None, sort_index=rank)

    def _alike(self, rank: int, place: int) -> str:
        """Words for the ranks of a place; ``rank`` is its first rank."""
        offsets = self.pipeline.offsets[place]
        count, last = len(offsets), rank + offsets[-1]
        if offsets[-1] == count - 1:
            return f"ranks {rank} to {last} ({count})"
        shown = ", ".join(str(rank + offset) for offset in offsets[:MOST_NAMED])
        return f"ranks {shown}{f' .. {last}' if count > MOST_NAMED else ''} ({count})"

    def rank(self, rank: int, place: int) -> Iterator[Event]:
        """The spans of one rank."""
        starts, ends = self.timeline.starts_s[place], self.timeline.ends_s[place]
        before = -1
        for at in self.drawn(place):
            if at != before + 1:
                yield self._gap(rank, place, before + 1, at)
            yield from self._action(rank, self.timeline.schedule.ranks[place][at], starts[at], ends[at])
            before = at
        if tail_s := self.timeline.reducing_s[place]:  # the rest of a reduction that overlapped with the actions
            yield span(part_words("gradient_reduce"), rank, STREAM_OF["gradient_reduce"], ends[-1], ends[-1] + tail_s)
        at_s = self.priced.span.makespan_s
        for part, seconds in self.after:
            # The only reduction here is that of tied embeddings, between the two ends of the pipeline.
            if part != "gradient_reduce" or place in self.ends:
                yield span(part_words(part), rank, STREAM_OF.get(part, 0), at_s, at_s + seconds)
            at_s += seconds

    @property
    def ends(self) -> tuple[int, int]:
        """Places of the first and the last stage."""
        return self.timeline.schedule.stage_rank[0], self.timeline.schedule.stage_rank[-1]

    @cached_property
    def after(self) -> list[tuple[str, float]]:
        """What comes after all actions: each part of the step less its seconds in the actions of the rank that ends last."""
        timeline, stages = self.priced.timeline, self.priced.stages
        m = timeline.schedule.num_micro_batches
        slowest = max(range(len(timeline.ends_s)), key=lambda place: (timeline.end_s(place), timeline.busy_s[place]))
        step = self.priced.forecast.step.items()
        left = {part: seconds / self.priced.ratio for part, seconds in step if part != "bubble"}
        own = (cost for cost, place in zip(stages, timeline.schedule.stage_rank, strict=True) if place == slowest)
        for cost in own:
            each = (cost.forward, m), (cost.backward, m), (cost.first_forward, 1), (cost.last_backward, 1)
            for parts, times in each:
                for part, seconds in parts.items():
                    left[part] = left.get(part, 0.0) - times * seconds
        ran = self.priced.span  # weights that a rank waits for come before the actions
        left["weight_gather"] = left.get("weight_gather", 0.0) - ran.gathering_s[slowest]
        reduced_s = left.get("gradient_reduce", 0.0)
        left["gradient_reduce"] = reduced_s - ran.reducing_s[slowest] - timeline.slowed_s[slowest]
        rounding_s = 1e-9 * self.priced.forecast.step_time_s
        order = {"gradient_reduce": 0, "optimizer": 1}
        found = [(part, seconds) for part, seconds in left.items() if seconds > rounding_s]
        return sorted(found, key=lambda item: order.get(item[0], 2))

    def _gap(self, rank: int, place: int, first: int, end: int) -> Event:
        """A span in the place of actions that are not drawn."""
        order = self.timeline.schedule.ranks[place]
        start_s, end_s = self.timeline.starts_s[place][first], self.timeline.ends_s[place][end - 1]
        args = {"first": str(order[first]), "last": str(order[end - 1])}
        return span(f"{end - first} actions not drawn", rank, 0, start_s, end_s, args)

    def _action(self, rank: int, action: Action, start_s: float, end_s: float) -> Iterator[Event]:
        yield span(str(action), rank, 0, start_s, end_s, {"stage": action.stage, "micro_batch": action.micro_batch})
        at_s = start_s
        for part, seconds in self._parts(action):
            # Rounding must not let the last part end after its action.
            until_s = min(at_s + seconds, end_s)
            if until_s > at_s:
                yield span(part_words(part), rank, STREAM_OF.get(part, 0), at_s, until_s)
                at_s = until_s

    def _parts(self, action: Action) -> Iterator[tuple[str, float]]:
        """The parts of an action in the order in which they are drawn."""
        cost = self.pipeline.stages[action.stage]
        if action.kind is Kind.FORWARD:
            return iter(_in_order(cost.forward, cost.first_forward if action.micro_batch == 0 else {}))
        last = (action.kind, action.stage, action.micro_batch) in self.last_of_stage
        whole = action.kind is Kind.BACKWARD
        once = cost.last_backward if whole else cost.last_weight_gradient
        return iter(_in_order(_backward(cost, action.kind), once if last else {}))

    def sends(self, arrows: Iterator[int]) -> Iterator[Event]:
        """Sends between ranks as spans of the sender, and an arrow from each action to the one that needs its result."""
        found: dict[tuple[bool, int, int], _Done] = {}
        for place in dict.fromkeys(place for _, place in self.ranks):
            found |= {(done.forward, done.action.stage, done.action.micro_batch): done for done in self._done(place)}
        lanes: dict[int, list[float]] = {}
        for done in sorted(found.values(), key=lambda done: done.leaves_s):
            stage = done.action.stage + (1 if done.forward else -1)
            if not 0 <= stage < self.timeline.schedule.num_stages:
                continue
            target = self.timeline.schedule.stage_rank[stage]
            if target == done.place:
                continue
            times = self.pipeline.span.times[done.action.stage]
            arrives_s = done.leaves_s + (times.send_forward_s if done.forward else times.send_backward_s)
            lane = free_lane(lanes.setdefault(done.place, []), done.leaves_s, arrives_s)
            needs = found.get((done.forward, stage, done.action.micro_batch))
            for sender, receiver in self._pairs(done.place, target):
                if arrives_s > done.leaves_s:
                    name = f"{done.action} to rank {receiver}"
                    yield span(name, sender, SENDS + lane, done.leaves_s, arrives_s)
                if needs is not None:
                    yield from arrow(next(arrows), (sender, done.inside_s[1]), (receiver, needs.inside_s[0]))

    def _pairs(self, place: int, target: int) -> Iterator[tuple[int, int]]:
        """(sender, receiver) of drawn ranks at two places; each rank of the wider place comes once."""
        ways = [self.pipeline.offsets[at] if self.all_ranks else (0,) for at in (place, target)]
        most = max(map(len, ways))
        for number in range(most):
            sender, receiver = (
                self.pipeline.first_rank[at] + offsets[number * len(offsets) // most]
                for at, offsets in zip((place, target), ways, strict=True)
            )
            yield sender, receiver

    def _done(self, place: int) -> Iterator[_Done]:
        """The drawn actions of a place of the pipeline whose results another action needs."""
        starts, ends = self.timeline.starts_s[place], self.timeline.ends_s[place]
        for at in self.drawn(place):
            action = self.timeline.schedule.ranks[place][at]
            if action.kind is Kind.WEIGHT_GRADIENT:
                continue
            last = (action.kind, action.stage, action.micro_batch) in self.last_of_stage
            late_s = self.pipeline.span.times[action.stage].last_backward_extra_s if last else 0.0
            yield _Done(place, action, starts[at], ends[at] - late_s)

    def about(self, num_ranks: int) -> dict[str, str]:
        """What a reader must know, which Perfetto shows under the trace's information; ``num_ranks``: how many are drawn."""
        world, places = self.priced.parallelism.world_size, len(self.timeline.starts_s)
        shown = f"{num_ranks} of {world}"
        if len(self.ranks) < places:
            shown += f": {MOST_PLACES // 2} places from either end of {places}"
        counts = self.priced.parallelism.micro_batches_per_replica
        most = not self.pipeline.groups and counts is not None and len(set(counts)) > 1
        cut = any(len(starts) > self.most_actions for starts in self.timeline.starts_s)
        return {
            "layout": self.priced.parallelism.short(),
            "step_time_s": f"{self.priced.forecast.step_time_s:.6g}",
            "ranks drawn": shown,
            "actions drawn": f"the first and the last {self.most_actions // 2} of each rank" if cut else "all",
            **({"replicas": "drawn as the one that computes the most micro-batches"} if most else {}),
            "parts": "sums over an action, one after another; of collectives only the exposed part",
        }


def _shown(parts: dict[str, float]) -> set[str]:
    return {part for part, seconds in parts.items() if seconds > 0}


def _backward(cost: StageCost, kind: Kind) -> dict[str, float]:
    """Parts of a backward action, whole or one of its halves."""
    if kind is Kind.BACKWARD:
        return cost.backward
    return cost.weight_gradient if kind is Kind.WEIGHT_GRADIENT else cost.input_gradient


def _in_order(parts: dict[str, float], once: dict[str, float]) -> list[tuple[str, float]]:
    """Parts in order: weights are gathered before the computation, gradients reduced after it. ``once``: parts of this pass alone."""
    parts = {part: parts.get(part, 0.0) + once.get(part, 0.0) for part in parts | once}
    place = {"weight_gather": 0, "recompute": 1, "gradient_reduce": 3}
    return sorted(parts.items(), key=lambda item: place.get(item[0], 2))


def _stream_names(streams: set[tuple[int, int]]) -> Iterator[Event]:
    for rank, stream in sorted(streams):
        words = (
            STREAMS[stream] if stream < SENDS else f"{STREAMS[SENDS]}{f' ({stream - SENDS + 1})' * (stream > SENDS)}"
        )
        yield named("thread_name", rank, stream, name=words)
        yield named("thread_sort_index", rank, stream, sort_index=stream)
