"""A schedule as lines of text: what each rank does when, and where it waits."""

from __future__ import annotations

from ahp.schedule.simulate import Timeline

WAITS = "."
"""A moment at which a rank does nothing."""


def drawing(timeline: Timeline, width: int = 96, whole_s: float | None = None) -> list[str]:
    """One line per rank, with ``width`` moments of the step: the letter of the action (F, B, I, W), in capitals for the rank's lowest
    stage and in small letters for its others.

    ``whole_s``: seconds that the width stands for, to draw several steps to one scale; the length of the step if not given. An action
    shorter than a moment may be invisible.
    """
    each_s = (whole_s or timeline.makespan_s) / width
    lines = []
    for spans in timeline.ranks:
        lowest = min(span.action.stage for span in spans)
        line = [WAITS] * width
        for span in spans:
            letter = span.action.kind.value
            first, last = (int(at / each_s + 0.5) for at in (span.start_s, span.end_s))
            for moment in range(first, min(last, width)):
                line[moment] = letter if span.action.stage == lowest else letter.lower()
        lines.append("".join(line))
    return lines
