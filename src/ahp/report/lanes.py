"""A timeline as lanes, one for each rank, which the page's script zooms; time without a bar before the last action is bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ahp.report.charts import nice_ticks
from ahp.report.html_parts import legend
from ahp.schedule.simulate import Timeline
from ahp.words import percent, seconds

MOST_BARS = 6_000
"""[Empirical] Most bars that a phone's browser can lay out at once."""
KINDS = {
    "F": "F: forward",
    "B": "B: backward",
    "I": "I: backward, gradient of the input",
    "W": "W: backward, gradient of the weights",
    "other": "communication, optimizer and other waiting",
    "gap": "not drawn",
}
"""Colors of page.css, and what they stand for."""
NOT_DRAWN = "actions not drawn"
"""What ``ahp.forecast.timeline`` calls the gap in a timeline that is too long."""


@dataclass(frozen=True)
class Bar:
    """Something that a rank does; ``depth``: the number of bars that it lies in."""

    start_s: float
    end_s: float
    name: str
    depth: int = 0

    @property
    def kind(self) -> str:
        """One of ``KINDS``, from torch's name of the action, such as ``2F0``."""
        if self.name.endswith(NOT_DRAWN):
            return "gap"
        letters = self.name.lstrip("0123456789")
        is_action = letters[:1] in KINDS and letters[1:].strip("0123456789 ") == "" and letters != self.name
        return letters[0] if is_action else "other"


@dataclass(frozen=True)
class Lane:
    """What one rank does, in the order of time."""

    name: str
    bars: Sequence[Bar]

    @property
    def actions(self) -> list[Bar]:
        return [bar for bar in self.bars if bar.depth == 0 and bar.kind not in ("other", "gap")]

    def bubble(self, until_s: float) -> float:
        """Share of the time until ``until_s`` in which the rank does nothing."""
        covered_s = sum(min(bar.end_s, until_s) - min(bar.start_s, until_s) for bar in self.bars if bar.depth == 0)
        return max(0.0, 1 - covered_s / until_s) if until_s else 0.0


def lanes_of(timeline: Timeline) -> list[Lane]:
    """The lanes of a schedule, rank by rank."""
    return [
        Lane(f"rank {rank}", [Bar(span.start_s, span.end_s, str(span.action)) for span in spans])
        for rank, spans in enumerate(timeline.ranks)
    ]


def picture(lanes: Sequence[Lane], whole_s: float = 0.0) -> str:
    """All lanes with one time axis; ``whole_s``: the length of the axis, if longer than the lanes."""
    lanes, left_out = _fewer(lanes)
    whole_s = max([whole_s, *(bar.end_s for lane in lanes for bar in lane.bars)])
    acting_s = max((bar.end_s for lane in lanes for bar in lane.actions), default=0.0)
    shown = {bar.kind for lane in lanes for bar in lane.bars}
    waits = any(lane.bubble(acting_s) > 0.0005 for lane in lanes)
    keys = [(f"k{kind}", words) for kind, words in KINDS.items() if kind in shown]
    keys += [("bubble", "bubble: the rank waits for others")] if waits else []
    words = " ".join(filter(None, [_naming(lanes), left_out]))
    named = f"<p class='note'>{escape(words)}</p>" if words else ""
    drawn = "".join(_lane(lane, whole_s, acting_s, waits=waits) for lane in lanes)
    ticks = "".join(
        f"<span style='left:{100 * at / whole_s:.2f}%'>{seconds(at)}</span>" for at in nice_ticks(0, whole_s)
    )
    tools = (
        "<div class='tools'><button data-zoom='2'>zoom in</button><button data-zoom='0.5'>zoom out</button>"
        "<button data-zoom='0'>whole step</button><output></output></div>"
    )
    return (
        f"<figure class='timeline' data-seconds='{whole_s:.6g}'>{legend(keys)}{tools}"
        f"<div class='scroll'><div class='lanes'>{drawn}<div class='x'>{ticks}</div></div></div>{named}</figure>"
    )


def _naming(lanes: Sequence[Lane]) -> str:
    """How to read the name of an action, with the last one as the example."""
    for action in (bar for lane in reversed(lanes) for bar in reversed(lane.actions)):
        stage, micro_batch = action.name.split()[0].split(action.kind)
        _, _, words = KINDS[action.kind].partition(": ")
        return f"{action.name} is stage {stage}, {words}, micro-batch {micro_batch}."
    return ""


def _lane(lane: Lane, whole_s: float, acting_s: float, *, waits: bool) -> str:
    bars = "".join(_bar(bar, whole_s) for bar in lane.bars)
    share = lane.bubble(acting_s)
    words = f"{lane.name}, bubble {percent(share)}" if waits and lane.actions else lane.name
    hatched = f"<u style='width:{100 * acting_s / whole_s:.3f}%'></u>" if waits and lane.actions else ""
    return f"<div class='lane-name'><span>{escape(words)}</span></div><div class='lane'>{hatched}{bars}</div>"


def _bar(bar: Bar, whole_s: float) -> str:
    words = f"{bar.name}: {seconds(bar.end_s - bar.start_s)} from {seconds(bar.start_s)}"
    place = f"left:{100 * bar.start_s / whole_s:.4g}%;width:{100 * (bar.end_s - bar.start_s) / whole_s:.3g}%"
    inner = " in" if bar.depth else ""
    return f"<i class='k{bar.kind}{inner}' style='{place}' title='{escape(words, quote=True)}'></i>"


def _fewer(lanes: Sequence[Lane]) -> tuple[Sequence[Lane], str]:
    """Lanes that a browser can draw, and what was left out, in words: first what lies inside actions, then the last ranks."""
    if sum(len(lane.bars) for lane in lanes) <= MOST_BARS:
        return lanes, ""
    plain = [Lane(lane.name, [bar for bar in lane.bars if bar.depth == 0]) for lane in lanes]
    words = "The operators inside an action are not drawn"
    kept: list[Lane] = []
    room = MOST_BARS
    for lane in plain:
        if kept and len(lane.bars) > room:
            break
        kept.append(lane)
        room -= len(lane.bars)
    if len(kept) < len(plain):
        words += f", and {len(plain) - len(kept)} of {len(plain)} lanes"
    return kept, f"{words}: ahp simulate PLAN --trace trace.json has all."
