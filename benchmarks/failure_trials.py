"""The result of each failure, kept as lines of JSON, and the page's table of the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from failure_kinds import KINDS
from page import table


@dataclass
class Trial:
    """One failure and what came of it."""

    seed: int
    kind: str
    layout: str
    run: int
    went_on: bool = False
    seconds: float | None = None
    """From the failure to the end of the next step; of a full disk from when there is room again."""
    noticed_s: float | None = None
    """Of these, until the start that failed was over."""
    steps_lost: int | None = None
    past_checkpoint: int | None = None
    """Steps lost beyond the newest complete checkpoint."""
    deviation: float | None = None
    """Of the whole run's curve."""
    left: tuple[str, ...] = ()
    why: str = ""
    others_percent: float | None = None
    """Of the machine's processor time, in the second before its run: what other programs took."""


def read(file: Path | None) -> list[Trial]:
    if file is None or not file.exists():
        return []
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [Trial(**{**one, "left": tuple(one["left"])}) for one in found]


def append(file: Path, trials: Sequence[Trial]) -> None:
    with file.open("a") as lines:
        lines.writelines(json.dumps(asdict(trial)) + "\n" for trial in trials)


def tables(trials: Sequence[Trial], skipped: dict[str, str]) -> str:
    """The page's table, and what failed."""
    rows = []
    for kind in KINDS:
        ours = [trial for trial in trials if trial.kind == kind.name]
        if kind.name in skipped:
            rows.append([kind.name, f"not tried: {skipped[kind.name]}", *[""] * 7])
        elif ours:
            rows.append([kind.name, *_row(ours)])
    rows.append(["**all**", *_row(trials)])
    head = [
        "failure", "tried", "went on", "same digits", "largest deviation", "steps made again, most", "past a checkpoint",
        "seconds to the next step, median", "longest",
    ]  # fmt: skip
    lines = [table(head, rows), ""]
    lines += [f"- {t.kind}, {t.layout}, seed {t.seed}: {t.why}" for t in trials if not t.went_on]
    left = sorted({f"{t.layout}, run {t.run}: {', '.join(t.left)}" for t in trials if t.left})
    lines.append(f"Left behind, processes and files: {'; '.join(left) or 'none'}.")
    noticed = sorted(t.noticed_s for t in trials if t.noticed_s is not None)
    if noticed:
        lines.append(
            f"Of the seconds, {noticed[len(noticed) // 2]:.1f} (median) and {noticed[-1]:.1f} (longest) pass until the failure is noticed and the workers "
            "are gone; the rest is the start: Python and torch's imports, joining, reading the checkpoint, and one step."
        )
    others = sorted({t.run: t.others_percent for t in trials if t.others_percent is not None}.values())
    if others:
        lines.append(
            f"Other programs took {others[len(others) // 2]:.0f} % (median) and {others[-1]:.0f} % (most) of the processor time in the second before a run, and may have "
            "taken more within it: a start then takes longer."
        )
    return "\n".join(lines)


def _row(trials: Sequence[Trial]) -> list[str]:
    times = sorted(trial.seconds for trial in trials if trial.seconds is not None)
    compared = [trial.deviation for trial in trials if trial.deviation is not None]
    return [
        str(len(trials)),
        str(sum(trial.went_on for trial in trials)),
        f"{sum(d == 0.0 for d in compared)} of {len(compared)}",
        f"{max(compared):.1e}" if compared else "",
        str(max((t.steps_lost or 0 for t in trials), default=0)),
        str(sum(t.past_checkpoint or 0 for t in trials)),
        f"{times[len(times) // 2]:.1f}" if times else "",
        f"{times[-1]:.1f}" if times else "",
    ]
