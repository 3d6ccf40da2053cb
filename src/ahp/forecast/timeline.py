"""The timeline of a priced layout as a Chrome trace: one track per pipeline rank, parts inside their action."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ahp.forecast.pricer import Priced
from ahp.forecast.stage import StageCost
from ahp.schedule.actions import Action, Kind
from ahp.schedule.simulate import Span

US_PER_S = 1.0e6
"""The trace format counts in microseconds."""


def chrome_trace(priced: Priced) -> dict[str, Any]:
    """The trace as data for ``chrome://tracing`` or Perfetto; also what ``ahp report`` draws.

    A track stands for all ranks at one place of the pipeline: data and tensor ranks do the same at the same time.
    Actions carry torch's names (``2F0``: stage 2, forward, micro-batch 0); the parts of an action lie inside it,
    one after another.
    """
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(priced.timeline.ranks):
        stages = [s for s, holder in enumerate(priced.schedule.stage_rank) if holder == rank]
        name = f"pipeline rank {rank} (stage {', '.join(map(str, stages))})"
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": name}})
        for span in spans:
            events.extend(_action(span, rank, priced))
        after_s = priced.forecast.step_time_s - priced.optimizer_s
        events.append(_event("optimizer", rank, after_s, priced.forecast.step_time_s, {}))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"layout": priced.parallelism.short()}}


def write(priced: Priced, path: str | Path) -> None:
    """Write the trace: aside first, then renamed, so that a reader never sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(chrome_trace(priced)))
    aside.replace(path)


def _action(span: Span, rank: int, priced: Priced) -> Iterator[dict[str, Any]]:
    action = span.action
    args = {"stage": action.stage, "micro_batch": action.micro_batch}
    yield _event(str(action), rank, span.start_s, span.end_s, args)
    start_s = span.start_s
    for part, seconds in _parts(priced.stages[action.stage], action, priced.schedule.num_micro_batches):
        # Rounding must not let the last part end after its action.
        end_s = min(start_s + seconds, span.end_s)
        if end_s > start_s:
            yield _event(part.replace("_", " "), rank, start_s, end_s, {})
        start_s = end_s


def _parts(cost: StageCost, action: Action, micro_batches: int) -> Iterator[tuple[str, float]]:
    """The parts of an action in the order in which they are drawn."""
    if action.kind is Kind.FORWARD:
        if action.micro_batch == 0:
            yield from cost.first_forward.items()
        yield from cost.forward.items()
    else:
        yield from cost.backward.items()
        if action.micro_batch == micro_batches - 1:
            yield from cost.last_backward.items()


def _event(name: str, rank: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    start_us, end_us = start_s * US_PER_S, end_s * US_PER_S
    return {"ph": "X", "name": name, "pid": 0, "tid": rank, "ts": start_us, "dur": end_us - start_us, "args": args}
