"""Runs that are killed, stopped, cut off and damaged at random moments, and whether they go on by themselves on the same curve.

    python benchmarks/failures.py                                       100 failures, half an hour to an hour
    python benchmarks/failures.py --failures 10 --only worker launcher  a short one
    python benchmarks/failures.py --markdown docs/reliability.md        also write the table into the page

A run trains a small model on two workers and is struck several times; at its end every loss and gradient norm is compared with those of a run of the
same layout that nothing disturbed. Each trial is a line of ``--results``, so a campaign that was stopped goes on. stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from failure_kinds import CUT_S, KINDS, Hosts, Kind, cut_network, small_disk, why_not
from failure_run import (
    LAYOUTS,
    LIMIT_S,
    PATIENCE_S,
    TWO_HOSTS,
    DoesNotGoOn,
    Layout,
    Run,
    deviation,
    left_behind,
    reference_curve,
)
from machine import machine
from page import require, table
from page import write as write_page

MARKER = "failures"
STRIKES = 5
"""Of one run, at most."""
STEPS, HOST_STEPS = 220, 2500
"""Of a run. The host that is left must not come to the end before the other one is back."""
AWAY = (6, 30)
"""Steps that a start makes before it is struck: past its first checkpoint."""


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


def strike(run: Run, kind: Kind, draw: random.Random, trial: Trial) -> None:
    """Let it happen, and wait until the run has made a step again. Raises DoesNotGoOn."""
    target = run.step() + draw.randint(*AWAY)
    # A run whose only checkpoint is damaged is refused: it would begin again at step 0.
    fewest = 2 if kind.damages else 0
    run.until(lambda: run.step() >= target and len(run.checkpoint_steps()) >= fewest, f"step {target}")
    time.sleep(draw.uniform(0.0, 0.1))  # into a step
    made, begun = run.step(), len(run.starts())
    kept = run.checkpoint_steps()
    began_s = time.monotonic()
    kind.strike(run, draw)
    if kind.small_disk:
        began_s = time.monotonic()
    if kind.damages:
        made, kept = run.step(), run.checkpoint_steps()[:-1]
    while not run.is_over(begun):
        if time.monotonic() - began_s > PATIENCE_S:
            raise DoesNotGoOn(f"nobody noticed within {PATIENCE_S:g} s")
        time.sleep(0.02)
    trial.noticed_s = time.monotonic() - began_s
    while not _goes_on(run, begun):
        if kind.supervised and run.launches[-1].process.poll() is not None:
            run.start()
        if time.monotonic() - began_s > PATIENCE_S:
            raise DoesNotGoOn(f"no further step within {PATIENCE_S:g} s; {run.cause()}")
        if not kind.supervised and all(launch.process.poll() is not None for launch in run.launches):
            raise DoesNotGoOn(f"the run has ended; {run.cause()}")
        time.sleep(0.02)
    trial.seconds = time.monotonic() - began_s
    first = run.starts()[begun].first_step
    trial.steps_lost, trial.past_checkpoint = max(0, made - first), max(0, max(kept, default=0) - first)
    trial.went_on = True


def _goes_on(run: Run, begun: int) -> bool:
    """Whether a start after so many has made a step."""
    starts = run.starts()
    return len(starts) > begun and run.step() > starts[-1].first_step and not starts[-1].ended


def struck_run(
    place: Path, layout: Layout, kinds: Sequence[Kind], seeds: Sequence[int], number: int, text: Path
) -> list[Trial]:
    """A run that all of this happens to, to its end."""
    trials = [Trial(seed, kind.name, layout.name, number) for seed, kind in zip(seeds, kinds, strict=True)]
    hosts = any(kind.hosts for kind in kinds)
    steps = HOST_STEPS if hosts else STEPS
    reference = reference_curve(place, layout, text, steps)
    with ExitStack() as kept:
        disk = kept.enter_context(small_disk(place / f"disk-{number}")) if any(k.small_disk for k in kinds) else None
        kept.enter_context(Hosts.made() if hosts else nullcontext())
        run = Run(place / f"run-{number}", layout, text, steps=steps, place=disk)
        kept.callback(run.close)
        begin = _two_hosts if hosts else Run.start
        begin(run)
        trial = trials[0]
        try:
            for trial, kind in zip(trials, kinds, strict=True):
                strike(run, kind, random.Random(trial.seed), trial)
                if hosts:
                    _complete(run, away_s=CUT_S if kind.strike is cut_network else 0.0)
                say(f"  {trial.kind}: step after {trial.seconds:.1f} s, {trial.steps_lost} steps made again")
            run.ends()
            found, left = deviation(run, reference), tuple(left_behind(run))
            for trial in trials:
                trial.deviation, trial.left = found, left
        except DoesNotGoOn as error:
            trial.went_on, trial.why = False, str(error)
            say(f"  {trial.kind}: {error}")
            trials = trials[: trials.index(trial) + 1]
    return trials


def _two_hosts(run: Run) -> None:
    for name in Hosts.NAMES:
        Hosts.start(run, name)
    run.until(lambda: bool(run.starts()) and run.starts()[-1].workers == 2 and run.step() > 0, "both hosts train")


def _complete(run: Run, away_s: float) -> None:
    """Both hosts are there again, after so long: the network is, and the command is started where it has ended."""
    time.sleep(away_s)
    for name in Hosts.NAMES:
        Hosts.set_link(name, up=True)

    def both() -> bool:
        for name in Hosts.NAMES:
            if not any(name in launch.command and launch.process.poll() is None for launch in run.launches):
                Hosts.start(run, name)
        start = run.starts()[-1]
        return start.workers == 2 and run.step() > start.first_step

    run.until(both, "both hosts train again")


def campaign(count: int, seed: int, kinds: Sequence[Kind]) -> Iterator[tuple[Layout, list[Kind], list[int]]]:
    """Runs with the kinds that strike them: all kinds in turns, all layouts in turns."""
    draw = random.Random(seed)
    order: list[Kind] = []
    while len(order) < count:
        order += draw.sample(kinds, len(kinds))
    order, number = order[:count], 0
    for hosts in (False, True):
        there = [kind for kind in order if kind.hosts is hosts]
        while there:
            taken, there = there[:STRIKES], there[STRIKES:]
            layout = TWO_HOSTS if hosts else LAYOUTS[number % len(LAYOUTS)]
            yield layout, taken, [draw.randrange(2**32) for _ in taken]
            number += 1


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
    noticed = [t.noticed_s for t in trials if t.noticed_s is not None]
    if noticed:
        noticed.sort()
        lines.append(
            f"Of the seconds, {noticed[len(noticed) // 2]:.1f} (median) and {noticed[-1]:.1f} (longest) pass until the failure is noticed and the workers "
            "are gone; the rest is the start: Python and torch's imports, joining, reading the checkpoint, and one step."
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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read(file: Path | None) -> list[Trial]:
    if file is None or not file.exists():
        return []
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [Trial(**{**one, "left": tuple(one["left"])}) for one in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments (default: 0)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="kinds whose name has one of these words")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="a line for each trial; what is there is not tried again"
    )
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="also write the table between PAGE's markers")
    arguments = parser.parse_args()
    if arguments.markdown:
        require(arguments.markdown, MARKER)
    wanted = [kind for kind in KINDS if not arguments.only or any(word in kind.name for word in arguments.only)]
    if not wanted:
        parser.error(f"--only: the kinds are {'; '.join(kind.name for kind in KINDS)}")
    skipped = {kind.name: why for kind in wanted if (why := why_not(kind)) is not None}
    for name, why in skipped.items():
        say(f"{name}: not tried, {why}")
    kinds = [kind for kind in wanted if kind.name not in skipped]
    trials = read(arguments.results)
    say(f"seed {arguments.seed}; collectives may take {LIMIT_S} s")
    with tempfile.TemporaryDirectory(prefix="ahp-failures-") as folder:
        text = Path(folder) / "text.txt"
        text.write_text(
            "".join(Path(module).read_text() for module in (argparse.__file__, json.__file__, tempfile.__file__))
        )
        for number, (layout, struck, seeds) in enumerate(campaign(arguments.failures, arguments.seed, kinds)):
            if any(trial.run == number for trial in trials):
                continue
            say(f"run {number}: {layout.name}, {len(struck)} failures; {len(trials)} of {arguments.failures} done")
            found = struck_run(Path(folder), layout, struck, seeds, number, text)
            trials += found
            if arguments.results:
                with arguments.results.open("a") as file:
                    file.writelines(json.dumps(asdict(trial)) + "\n" for trial in found)
    text_ = f"{machine(2).words()}; seed {arguments.seed}.\n\n{tables(trials, skipped)}"
    print(text_)
    if arguments.markdown:
        write_page(arguments.markdown, MARKER, text_)
    return 0 if all(trial.went_on and not trial.past_checkpoint for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
