"""What a schedule made for the stages at hand is worth: beside the best fixed pattern that fits, and beside what none can beat.

    python benchmarks/schedules.py                                 three minutes
    python benchmarks/schedules.py --quick                         a smoke run
    python benchmarks/schedules.py --draw                          only the pictures of some schedules
    python benchmarks/schedules.py --markdown docs/schedules.md    the tables into the page

All times are of the schedule's simulation; nothing is run. Seconds are processor time of one core. Stages and ranks are drawn at
random (``schedule_problems.py``), the same ones each time. stdout: the tables; stderr: progress.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from page import require, table, write
from schedule_problems import PUBLISHED, problem, published

PUBLISHED_MARKER, DRAWN_MARKER, SPEED_MARKER = "published stages", "drawn stages", "speed of synthesis"
PICTURES_MARKER, SENDS_MARKER = "drawn schedules", "long sends"

MEMORIES: dict[str, float | None] = {"ample": None, "of 1F1B": 1.0, "half of 1F1B's": 0.5}
"""What each rank holds, as a part of what the first rank of 1F1B keeps."""

SIZES = ((4, 16), (8, 64), (16, 256))
"""Ranks and micro-batches, whose schedules' finding is timed."""

TOLERANCE = 1e-9


def percent(part: float) -> str:
    return f"{abs(round(100 * part, 1)) if abs(part) < 5e-4 else round(100 * part, 1)} %"


def spread(parts: Sequence[float]) -> str:
    """Mean, and the least and the largest."""
    least, most = (percent(part).removesuffix(" %") for part in (min(parts, default=0.0), max(parts, default=0.0)))
    return f"{percent(mean(parts))} ({least} to {most})" if parts else ""


def bubble(found: Any) -> float:
    """Part of the time between a rank's first and last action that it waits, of the rank where that time is longest: the bubble rate of
    arXiv 2401.10241, section 5.3."""
    timeline = found.timeline
    spans = [ends[-1] - starts[0] for starts, ends in zip(timeline.starts_s, timeline.ends_s, strict=True)]
    longest = max(range(len(spans)), key=spans.__getitem__)
    return 1 - timeline.busy_s[longest] / spans[longest]


def published_rows() -> Iterator[list[str]]:
    """The zero-bubble paper's models, in its two memories."""
    from ahp.schedule.synthesis.find import synthesize

    for name, row in PUBLISHED.items():
        for memory, theirs in ((1, row.zb_1p), (2, row.zb_2p)):
            found = synthesize(published(row, memory))
            gain = found.gain
            yield [
                f"{name}, {row.p} ranks, {row.m} micro-batches",
                f"{memory} x 1F1B's",
                percent(theirs),
                percent(bubble(found)),
                percent(found.gap),
                "" if gain is None else f"{percent(gain)} ({found.fixed.name})",
            ]


def drawn(
    kinds: Sequence[str],
    split: bool,
    memory: float | None,
    ratios: tuple[float, float],
    count: int,
    send: float = 0.02,
) -> Iterator[Any]:
    """What is found for stages drawn at random: 4, 8 or 16 ranks, one to eight micro-batches for each."""
    from ahp.schedule.synthesis.find import synthesize

    random = Random(f"{kinds}{split}{memory}{ratios}" if send == 0.02 else f"{kinds}{split}{memory}{ratios}{send}")
    for number in range(count):
        p = random.choice((4, 8, 16))
        m = p * random.choice((1, 2, 4, 8))
        kind, ratio = kinds[number % len(kinds)], random.uniform(*ratios)
        yield synthesize(problem(number, kind, p, m, ratio=ratio, memory=memory, split=split, send=send))


def drawn_rows(count: int) -> Iterator[list[str]]:
    """Each placement, backwards in two parts or whole, in three memories, with ranks that are alike or differ."""
    for told, ratios in (("alike", (1.0, 1.0)), ("1.5 to 3 times", (1.5, 3.0))):
        for kind in ("one", "looped", "v"):
            for split in (True, False):
                if kind == "v" and not split:
                    continue  # no pattern has it
                for memory, share in MEMORIES.items():
                    print(f"{told}, {kind}, {'split' if split else 'whole'}, {memory} ...", file=sys.stderr)
                    found = list(drawn((kind,), split, share, ratios, count))
                    yield [f"{told}, {NAMES[kind]}, {'in two parts' if split else 'whole'}", memory, *worth(found)]


def worth(found: Sequence[Any]) -> list[str]:
    """The gap to the bound, how often a pattern fits, what is gained against the best pattern, and what could be gained at most."""
    gains = [one.gain for one in found if one.gain is not None]
    most = [1 - one.bound.seconds / one.fixed.makespan_s for one in found if one.fixed is not None]
    return [spread([one.gap for one in found]), f"{len(gains)} of {len(found)}", spread(gains), spread(most)]


def sends_rows(count: int) -> Iterator[list[str]]:
    """The same where what is sent is on its way for a good part of a forward: devices far apart, or small micro-batches."""
    for send, words in ((0.5, "half a forward"), (1.0, "a forward")):
        for told, ratios in (("alike", (1.0, 1.0)), ("1.5 to 3 times", (1.5, 3.0))):
            for kind in ("one", "looped", "v"):
                for memory in ("ample", "of 1F1B"):
                    print(f"{told}, {kind}, sends of {words}, {memory} ...", file=sys.stderr)
                    found = list(drawn((kind,), True, MEMORIES[memory], ratios, count, send))
                    yield [f"{words}, {told}, {NAMES[kind]}", memory, *worth(found)]


NAMES = {"one": "one stage a rank", "looped": "two, looped", "v": "two, on a V"}


def beside_1f1b(count: int) -> list[list[str]]:
    """A V in half of the memory beside 1F1B with one stage per rank in all of it: the same work."""
    from ahp.schedule.synthesis.find import one_f_one_b_s, synthesize

    rows = []
    for told, ratios in (("alike", (1.0, 1.0)), ("1.5 to 3 times", (1.5, 3.0))):
        random, gains = Random(told), []
        for seed in range(count):
            p = random.choice((4, 8, 16))
            m, ratio = p * random.choice((2, 4, 8)), random.uniform(*ratios)
            half = synthesize(problem(seed, "v", p, m, ratio=ratio, memory=0.5))
            gains.append(1 - half.makespan_s / one_f_one_b_s(half.problem))
        slower = sum(gain < -TOLERANCE for gain in gains)
        rows.append([told, str(count), spread(gains), str(slower)])
    return rows


def pictures() -> list[dict[str, Any]]:
    """Timelines of four ranks and eight micro-batches, those of one dict to the same scale: every second rank slower by half, with sends of
    0.8 of a fast forward; and a head of 0.6 stages on the last, in all of 1F1B's memory and on a V in half of it."""
    from ahp.schedule.patterns import make
    from ahp.schedule.simulate import StageTimes, simulate
    from ahp.schedule.synthesis.find import synthesize
    from ahp.schedule.synthesis.problem import Problem

    far = [StageTimes(x, 2 * x, x, x, 0.8, 0.8) for x in (1.0, 1.5, 1.0, 1.5)]
    head = [StageTimes(x, 2 * x, x, x) for x in (1.0, 1.0, 1.0, 1.6)]
    halves = [StageTimes(x, 2 * x, x, x) for x in (*(0.5,) * 7, 1.1)]
    in_line = Problem(tuple(far), (0, 1, 2, 3), 8, (1.0,) * 4, memory_bytes=(5.0,) * 4)
    on_a_v = Problem(tuple(halves), (0, 1, 2, 3, 3, 2, 1, 0), 8, (0.5,) * 8, memory_bytes=(2.0,) * 4)
    patterns = {f"{name}, 4 micro-batches kept": make(name, 4, 1, 8) for name in ("1F1B", "InterleavedZeroBubble")}
    sends = {name: simulate(schedule, far) for name, schedule in patterns.items()}
    heads = {"1F1B, 4 micro-batches kept": simulate(make("1F1B", 4, 1, 8), head)}
    return [
        sends | {"found, 5 micro-batches kept": synthesize(in_line).timeline},
        heads | {"found on a V, 2 micro-batches kept": synthesize(on_a_v).timeline},
    ]


def drawn_text(pictures: list[dict[str, Any]]) -> str:
    """Each group as wide as the longest of it, with what each takes."""
    from ahp.schedule.drawing import drawing

    parts = []
    for timelines in pictures:
        whole_s = max(timeline.makespan_s for timeline in timelines.values())
        for name, timeline in timelines.items():
            parts.append("\n".join([f"{name}: {timeline.makespan_s:.1f} s", *drawing(timeline, 110, whole_s)]))
    return "```text\n" + "\n\n".join(parts) + "\n```"


def speed_rows(repeats: int, sizes: Sequence[tuple[int, int]]) -> Iterator[list[str]]:
    """How long it takes to find a schedule for so many ranks and micro-batches."""
    from ahp.schedule.synthesis.find import synthesize

    for p, m in sizes:
        for kind in ("one", "v"):
            for memory, share in MEMORIES.items():
                took = []
                for seed in range(repeats):
                    made = problem(seed, kind, p, m, ratio=2.0, memory=share)
                    start = time.process_time()
                    synthesize(made)
                    took.append(time.process_time() - start)
                yield [
                    f"{p} ranks, {m} micro-batches, {NAMES[kind]}",
                    memory,
                    f"{1e3 * median(took):.0f}",
                    f"{1e3 * max(took):.0f}",
                ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the tables between the page's markers")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--draw", action="store_true", help="only draw some schedules")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    args = parser.parse_args()
    if args.draw:
        print(drawn_text(pictures()))
        return
    markers = (PUBLISHED_MARKER, DRAWN_MARKER, SENDS_MARKER, SPEED_MARKER)
    if args.markdown:
        for marker in (PICTURES_MARKER, *markers):
            require(args.markdown, marker)
        write(args.markdown, PICTURES_MARKER, drawn_text(pictures()))
    count, repeats = (1, 1) if args.quick else (40, 5)
    sizes = SIZES[:1] if args.quick else SIZES
    rows = {
        PUBLISHED_MARKER: list(published_rows()),
        DRAWN_MARKER: list(drawn_rows(count)),
        "beside 1F1B": beside_1f1b(count),
        SENDS_MARKER: list(sends_rows(count)),
        SPEED_MARKER: list(speed_rows(repeats, sizes)),
    }
    if args.json:
        print(json.dumps(rows))
        return
    heads = {
        PUBLISHED_MARKER: [
            "stages",
            "memory",
            "bubble, the paper's",
            "bubble, found",
            "gap to the bound",
            "faster than the best pattern",
        ],
        DRAWN_MARKER: [
            "ranks, stages, backward",
            "memory",
            "gap to the bound",
            "a pattern fits",
            "faster than the best",
            "a schedule could be, at most",
        ],
        SPEED_MARKER: ["problem", "memory", "ms, median", "ms, most"],
    }
    heads[SENDS_MARKER] = ["sends of, ranks, stages", *heads[DRAWN_MARKER][1:]]
    texts = {marker: table(head, rows[marker]) for marker, head in heads.items()}
    texts[DRAWN_MARKER] += "\n\n" + table(
        ["ranks", "problems", "a V in half of 1F1B's memory, faster than 1F1B", "slower ones"], rows["beside 1F1B"]
    )
    for marker in markers:
        print(f"\n{texts[marker]}")
        if args.markdown:
            write(args.markdown, marker, texts[marker])


if __name__ == "__main__":
    main()
