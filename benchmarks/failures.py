"""Runs that are killed, stopped, cut off and damaged at random moments, and whether they go on by themselves on the same curve.

    python benchmarks/failures.py                                       100 failures, half an hour to an hour
    python benchmarks/failures.py --failures 10 --only worker launcher  some of the kinds
    python benchmarks/failures.py --short                               each kind once, runs beside each other: a minute or two
    python benchmarks/failures.py --markdown docs/reliability.md        also write the table into the page
    python benchmarks/failures.py --only SIGSTOP --again --markdown docs/reliability.md    some kinds, in a table of their own

A run trains a small model on two workers and is struck several times; then it is stopped, and every loss and gradient norm is compared with those of
a run of the same layout that nothing disturbed. At the end each trial is a line of ``--results``, where runs that have lines are not made again.
stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from failure_kinds import KINDS, Kind, cut_network, small_disk, start_on, why_not
from failure_run import (
    CLUSTER,
    ENDLESS,
    LAYOUTS,
    PATIENCE_S,
    TWO_HOSTS,
    Curve,
    DoesNotGoOn,
    Layout,
    Run,
    deviation,
    left_behind,
    reference_curve,
)
from failure_trials import Trial, append, read, tables
from machine import machine
from namespaces import HostSpec, hosts
from own_cache import own_cache
from page import require
from page import write as write_page

from ahp.cluster.model import Cluster

MARKER, AGAIN = "failures", "some failures again"
STOP = signal.SIGTERM, signal.SIGINT
TWO_CORES = {"nodes": 2, "devices_per_node": 1, "device": "cpu", "inter_node_gbps": 10}


@dataclass(frozen=True)
class Form:
    """How many failures, and of which runs."""

    failures: int = 100
    strikes: int = 5
    """Of one run, at most."""
    host_strikes: int = 5
    """Likewise of a run on two hosts."""
    away: tuple[int, int] = (6, 30)
    """Steps that a start makes before it is struck: past its first checkpoint."""
    layouts: tuple[Layout, ...] = LAYOUTS
    limit_s: float = 5.0
    """``run.collective_timeout_s``: for so long a rank may be waited for."""
    look_s: float = 0.02
    """Between two looks at a run that is waited for."""
    beside: int = 1
    """Runs at a time. Their seconds say nothing then."""


SHORT = Form(
    failures=len(KINDS), strikes=8, host_strikes=1, away=(6, 8), layouts=LAYOUTS[:1], limit_s=15.0, look_s=0.2, beside=4
)  # fmt: skip
"""On a busy machine a rank may be without a core for seconds. All kinds of one host strike one run: each run starts processes that only import."""


@dataclass
class Struck:
    """A run that was struck, to its end."""

    layout: Layout
    """That of the run which nothing disturbs."""
    trials: list[Trial]
    curve: Curve | None
    """None where it did not go on."""


def strike(run: Run, kind: Kind, draw: random.Random, trial: Trial, away: tuple[int, int]) -> None:
    """Let it happen, and wait until the run has made a step again. Raises DoesNotGoOn."""
    target = run.step() + draw.randint(*away)
    # A run whose only checkpoint is damaged is refused: it would begin again at step 0.
    fewest = 2 if kind.damages else 0
    run.until(lambda: run.step() >= target and len(run.checkpoint_steps()) >= fewest, f"step {target}")
    run.wait(draw.uniform(0.0, 0.1))  # into a step
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
        run.wait()
    trial.noticed_s = time.monotonic() - began_s
    while not _goes_on(run, begun):
        if kind.supervised and run.launches[-1].process.poll() is not None:
            run.start()
        if time.monotonic() - began_s > PATIENCE_S:
            raise DoesNotGoOn(f"no further step within {PATIENCE_S:g} s; {run.cause()}")
        if not kind.supervised and all(launch.process.poll() is not None for launch in run.launches):
            raise DoesNotGoOn(f"the run has ended; {run.cause()}")
        run.wait()
    trial.seconds = time.monotonic() - began_s
    first = run.starts()[begun].first_step
    trial.steps_lost, trial.past_checkpoint = max(0, made - first), max(0, max(kept, default=0) - first)
    trial.went_on = True


def _goes_on(run: Run, begun: int) -> bool:
    """Whether a start after so many has made a step."""
    starts = run.starts()
    return len(starts) > begun and run.step() > starts[-1].first_step and not starts[-1].ended


def struck_run(
    place: Path,
    form: Form,
    layout: Layout,
    kinds: Sequence[Kind],
    seeds: Sequence[int],
    number: int,
    text: Path,
    over: threading.Event,
) -> Struck:
    """A run that all of this happens to, until it is stopped."""
    others = None if form.beside > 1 else psutil.cpu_percent(1.0)
    trials = [
        Trial(seed, kind.name, layout.name, number, others_percent=others)
        for seed, kind in zip(seeds, kinds, strict=True)
    ]
    on_hosts, curve = any(kind.hosts for kind in kinds), None
    with ExitStack() as kept:
        disk = kept.enter_context(small_disk(place / f"disk-{number}")) if any(k.small_disk for k in kinds) else None
        made = kept.enter_context(hosts([HostSpec()] * 2)) if on_hosts else ()
        run = Run(
            place / f"run-{number}", layout, text, steps=ENDLESS, limit_s=form.limit_s, look_s=form.look_s, over=over, place=disk
        )  # fmt: skip
        run.hosts = made
        kept.callback(run.close)
        trial = trials[0]
        try:
            begin = _two_hosts if on_hosts else Run.start
            begin(run)
            for trial, kind in zip(trials, kinds, strict=True):
                strike(run, kind, random.Random(trial.seed), trial, form.away)
                say(f"  {trial.kind}: step after {trial.seconds:.1f} s, {trial.steps_lost} steps made again")
                if on_hosts and len(kinds) > 1:
                    # The network is away for longer than a collective may take.
                    _complete(run, away_s=3 * form.limit_s if kind.strike is cut_network else 0.0)
            run.stop()
            curve, left = run.curve(), tuple(left_behind(run))
            for trial in trials:
                trial.left = left
        except DoesNotGoOn as error:
            trial.went_on, trial.why = False, str(error)
            say(f"  {trial.kind}: {error}")
            trials = trials[: trials.index(trial) + 1]
    return Struck(form.layouts[0] if on_hosts else layout, trials, curve)


def compare(runs: Sequence[Struck], place: Path, form: Form, text: Path, over: threading.Event) -> None:
    """Each curve with that of a run of the same layout that nothing disturbs."""
    for layout in {run.layout.name: run.layout for run in runs if run.curve}.values():
        alike = [(run, run.curve) for run in runs if run.layout == layout and run.curve]
        longest = max(len(curve) for _, curve in alike)
        say(f"{longest} steps of {layout.name} that nothing disturbs")
        reference = reference_curve(
            place, layout, text, steps=longest, limit_s=form.limit_s, look_s=form.look_s, over=over
        )
        for run, curve in alike:
            for trial in run.trials:
                trial.deviation = deviation(curve, reference[: len(curve)])


def _two_hosts(run: Run) -> None:
    for host in run.hosts:
        start_on(run, host)
    run.until(lambda: bool(run.starts()) and run.starts()[-1].workers == 2 and run.step() > 0, "both hosts train")


def _complete(run: Run, away_s: float) -> None:
    """Both hosts are there again, after so long: the network is, and the command is started where it has ended."""
    run.wait(away_s)
    for host in run.hosts:
        host.set_link(up=True)

    def both() -> bool:
        for host in run.hosts:
            if not any(host.name in launch.command and launch.process.poll() is None for launch in run.launches):
                start_on(run, host)
        start = run.starts()[-1]
        return start.workers == 2 and run.step() > start.first_step

    run.until(both, "both hosts train again")


def campaign(form: Form, seed: int, kinds: Sequence[Kind]) -> Iterator[tuple[Layout, list[Kind], list[int]]]:
    """Runs with the kinds that strike them: all kinds in turns, all layouts in turns. Hosts first where runs go on beside each other."""
    draw = random.Random(seed)
    order: list[Kind] = []
    while len(order) < form.failures:
        order += draw.sample(kinds, len(kinds))
    order, number = order[: form.failures], 0
    for on_hosts in (True, False) if form.beside > 1 else (False, True):
        there = [kind for kind in order if kind.hosts is on_hosts]
        strikes = form.host_strikes if on_hosts else form.strikes
        while there:
            taken, there = there[:strikes], there[strikes:]
            first = form.layouts[0]
            layout = replace(TWO_HOSTS, model=first.model) if on_hosts else form.layouts[number % len(form.layouts)]
            yield layout, taken, [draw.randrange(2**32) for _ in taken]
            number += 1


@contextmanager
def ended_by_signals(over: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT end the block, and with it all runs: their threads take hosts, disks and processes down. They are to be waited for."""

    def stop(number: int, frame: object) -> None:
        for each in STOP:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in STOP:
        signal.signal(number, stop)
    try:
        yield
    finally:
        over.set()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="each kind once, with short runs beside each other")
    parser.add_argument("--failures", type=int, help="how many (default: 100)")
    parser.add_argument(
        "--limit-s", type=float, help="run.collective_timeout_s of the runs (default: 5, with --short 15)"
    )
    parser.add_argument(
        "--model", help="what the runs train, as in a config.yaml (default: models of each layout's own)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments (default: 0)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="kinds whose name has one of these words")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="a line for each trial; what is there is not tried again"
    )
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="also write the table between PAGE's markers")
    parser.add_argument("--again", action="store_true", help="there beside the table of all kinds, not in its place")
    arguments = parser.parse_args()
    marker = AGAIN if arguments.again else MARKER
    if arguments.markdown:
        require(arguments.markdown, marker)
    wanted = [kind for kind in KINDS if not arguments.only or any(word in kind.name for word in arguments.only)]
    if not wanted:
        parser.error(f"--only: the kinds are {'; '.join(kind.name for kind in KINDS)}")
    skipped = {kind.name: why for kind in wanted if (why := why_not(kind)) is not None}
    for name, why in skipped.items():
        say(f"{name}: not tried, {why}")
    kinds = [kind for kind in wanted if kind.name not in skipped]
    if not kinds:
        return 0
    given = {"failures": arguments.failures, "limit_s": arguments.limit_s}
    form = replace(SHORT if arguments.short else Form(), **{name: value for name, value in given.items() if value})
    if arguments.model:
        form = replace(form, layouts=tuple(replace(layout, model=arguments.model) for layout in form.layouts))
    trials = read(arguments.results)
    say(f"seed {arguments.seed}; collectives may take {form.limit_s:g} s")
    over = threading.Event()
    with (
        tempfile.TemporaryDirectory(prefix="ahp-failures-") as folder,
        ThreadPoolExecutor(form.beside) as threads,
        ended_by_signals(over),
    ):
        own_cache(Path(folder))
        Cluster.resolve(TWO_CORES).save(Path(folder) / CLUSTER)
        text = Path(folder) / "text.txt"
        text.write_text(
            "".join(Path(module).read_text() for module in (argparse.__file__, json.__file__, tempfile.__file__))
        )

        def one(planned: tuple[int, tuple[Layout, list[Kind], list[int]]]) -> Struck:
            number, (layout, struck, seeds) = planned
            say(f"run {number}: {layout.name}, {len(struck)} failures")
            return struck_run(Path(folder), form, layout, struck, seeds, number, text, over)

        there = {trial.run for trial in trials}
        planned = [run for run in enumerate(campaign(form, arguments.seed, kinds)) if run[0] not in there]
        found = list(threads.map(one, planned))
        compare(found, Path(folder), form, text, over)
    new = [trial for run in found for trial in run.trials]
    trials += new
    if arguments.results:
        append(arguments.results, new)
    text_ = f"{machine(2).words()}; seed {arguments.seed}.\n\n{tables(trials, skipped)}"
    print(text_)
    if arguments.markdown:
        write_page(arguments.markdown, marker, text_)
    return 0 if all(trial.went_on and not trial.past_checkpoint for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
