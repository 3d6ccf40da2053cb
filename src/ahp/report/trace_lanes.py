"""A Chrome trace (``ahp.forecast.timeline``, or a file that anybody may have changed) as lanes of a timeline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ahp.report.lanes import Bar, Lane
from ahp.run_files import LARGEST

Event = Mapping[str, Any]

INSIDE_ITS_ACTION = ("forward", "backward", "input gradient", "weight gradient")
"""Parts of an action that its own bar shows already: only what keeps it from computing is drawn inside it."""
ON_THE_WAY = "pipeline sends"
"""Thread of sends that a rank does not wait for: they would lie across the bars of its actions."""

ROUNDING = 1e-3
"""Share of an event by which it can begin before the last one has ended and still count as later: times are rounded."""


def lanes_of_trace(trace: Any) -> list[Lane]:
    """A lane for each process that the trace names, with all its threads, else for each thread; entries that are not events are left out."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        return []
    sound = [event for event in events if _is_event(event)]
    processes, threads = _names(sound, "process_name"), _names(sound, "thread_name")
    drawn = [event for event in sound if _is_drawn(event, threads)]
    places: dict[tuple[int, ...], list[Event]] = {}
    for event in sorted(drawn, key=lambda e: (e["ts"], -e["dur"])):
        process, thread = (event["pid"],), (event["pid"], event["tid"])
        places.setdefault(process if process in processes else thread, []).append(event)
    named = processes | threads
    return [
        Lane(named.get(place, f"rank {place[0]}" if place[-1] == place[0] else "/".join(map(str, place))), _bars(own))
        for place, own in sorted(places.items())
    ]


def _is_event(event: Any) -> bool:
    """Whether an entry is a complete event, or the name of a process or a thread."""
    if not isinstance(event, dict):
        return False
    if not all(isinstance(event.get(key), kind) for key, kind in {"name": str, "pid": int}.items()):
        return False
    if event.get("ph") == "M":
        named = isinstance(event.get("args"), dict) and isinstance(event["args"].get("name"), str)
        return named and (event["name"] == "process_name" or isinstance(event.get("tid"), int))
    numbers = [event.get(key) for key in ("ts", "dur", "tid")]
    return event.get("ph") == "X" and all(isinstance(n, int | float) and abs(n) < LARGEST for n in numbers)


def _is_drawn(event: Event, threads: Mapping[tuple[int, ...], str]) -> bool:
    if event["ph"] != "X" or event["dur"] <= 0 or event["ts"] < 0 or event["name"] in INSIDE_ITS_ACTION:
        return False
    return threads.get((event["pid"], event["tid"])) != ON_THE_WAY


def _names(events: Iterable[Event], what: str) -> dict[tuple[int, ...], str]:
    """The trace's names of its processes, keyed by (pid,), or of its threads, keyed by (pid, tid)."""
    entries = (e for e in events if e["ph"] == "M" and e["name"] == what)
    return {(e["pid"],) if what == "process_name" else (e["pid"], e["tid"]): _short(e["args"]["name"]) for e in entries}


def _short(name: str) -> str:
    """``rank 8 on a, stands for ranks 8 to 15``: a name without its words in brackets."""
    return re.sub(r" ?\([^()]*\)", "", name)


def _bars(events: Sequence[Event]) -> list[Bar]:
    """Bars in order of time, longer ones first, each with the number of bars it lies in. Times in a trace are microseconds."""
    ends: list[float] = []
    bars = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        while ends and ends[-1] <= start + ROUNDING * event["dur"]:
            ends.pop()
        bars.append(Bar(start / 1e6, end / 1e6, event["name"], len(ends)))
        ends.append(end)
    return bars
