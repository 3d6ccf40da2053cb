"""Events of Chrome's trace event format: names, spans, arrows. Times are given in seconds."""

from __future__ import annotations

from typing import Any

US_PER_S = 1.0e6
"""The format counts in microseconds."""

NS_DIGITS = 3
"""Decimals of a time: Perfetto keeps whole nanoseconds."""

Event = dict[str, Any]


def named(what: str, rank: int, stream: int | None, **args: str | int) -> Event:
    """A metadata event: the name of a process or of one of its threads, or where it is shown."""
    thread = {} if stream is None else {"tid": stream}
    return {"ph": "M", "name": what, "pid": rank, **thread, "args": args}


def span(name: str, rank: int, stream: int, start_s: float, end_s: float, args: dict[str, Any] | None = None) -> Event:
    """A complete event of a thread."""
    start_us, end_us = round(start_s * US_PER_S, NS_DIGITS), round(end_s * US_PER_S, NS_DIGITS)
    event = {"ph": "X", "name": name, "pid": rank, "tid": stream, "ts": start_us}
    event["dur"] = round(end_us - start_us, NS_DIGITS)
    return event if args is None else {**event, "args": args}


def arrow(number: int, sender: tuple[int, float], receiver: tuple[int, float]) -> tuple[Event, Event]:
    """An arrow between two spans of thread 0, each given as (rank, a time within the span)."""
    either = {"cat": "send", "name": "send", "id": number, "tid": 0}
    return (
        {"ph": "s", **either, "pid": sender[0], "ts": round(sender[1] * US_PER_S, NS_DIGITS)},
        {"ph": "f", "bp": "e", **either, "pid": receiver[0], "ts": round(receiver[1] * US_PER_S, NS_DIGITS)},
    )


def stretched(event: Event, times: float) -> Event:
    """The event with all its times multiplied by ``times``."""
    if times == 1.0:
        return event
    start_us = round(event["ts"] * times, NS_DIGITS)
    if "dur" not in event:
        return {**event, "ts": start_us}
    end_us = round((event["ts"] + event["dur"]) * times, NS_DIGITS)
    return {**event, "ts": start_us, "dur": round(end_us - start_us, NS_DIGITS)}


def free_lane(busy_until_s: list[float], start_s: float, end_s: float) -> int:
    """The first thread that is free from ``start_s`` on, taken until ``end_s``; spans of one thread must not overlap."""
    for lane, until_s in enumerate(busy_until_s):
        if until_s <= start_s:
            busy_until_s[lane] = end_s
            return lane
    busy_until_s.append(end_s)
    return len(busy_until_s) - 1
