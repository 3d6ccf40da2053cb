"""The short form of benchmarks/failures.py: kinds of failures, after each of which a run goes on by itself, on the same curve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.namespaces import HostSpec, why_not
from tests.marks import cases

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "failures.py"


EVERY_KIND = ("",)
NO_OTHER = ("kill -9 of one", "launcher", "full disk", "network")
"""By words of their names, kinds that no quicker test has. A killed worker brings the others down, as if all were killed
(tests/runtime/ranks/test_launch.py), and a stopped one is killed at its limit (there, and in test_stopped.py); each run here ends by SIGTERM,
and a run goes on from there in tests/runtime/run/test_loop.py, which also passes over a truncated checkpoint as over a flipped bit, several
ranks in test_trainer.py; the processes of a lost host fall silent as those behind a cut network do (tests/runtime/ranks/test_changing_nodes.py)."""


@pytest.mark.parametrize(
    ("words", "failures"),
    cases([(NO_OTHER, 4), (EVERY_KIND, 10)], wide=[(EVERY_KIND, 10)]),
    ids=["four kinds", "all kinds"],
)
def test_a_run_goes_on_after_each_failure(tmp_path: Path, words: tuple[str, ...], failures: int) -> None:
    """Kinds that this system does not let be tried (no root, no network namespaces) are named and left out."""
    results = tmp_path / "results.jsonl"
    asked = ["--short", "--only", *words, "--failures", str(failures), "--results", str(results)]
    asked += ["--model", "tests.runtime.models:OfTexts"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *asked], cwd=BENCHMARK.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    trials = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(trials) == failures
    assert all(trial["went_on"] for trial in trials)
    assert {trial["past_checkpoint"] for trial in trials} == {0}
    assert all(trial["left"] == [] for trial in trials)
    hosts = [trial["deviation"] for trial in trials if trial["layout"] == "two hosts"]
    others = [trial["deviation"] for trial in trials if trial["layout"] != "two hosts"]
    assert set(others) == {0.0}, "the same digits"
    # One worker rounds otherwise than two: docs/reliability.md has how far that takes two runs apart.
    assert all(found < 1e-5 for found in hosts)
    missing = failures - len({trial["kind"] for trial in trials})
    assert done.stderr.count(": not tried, ") == missing


@pytest.mark.wide  # about the benchmark, which somebody starts by hand
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_where_the_benchmark_itself_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    """Two runs beside each other: one on two hosts, one on a disk of its own."""
    if (reason := why_not([HostSpec()] * 2)) is not None:
        pytest.skip(reason)
    words = [sys.executable, str(BENCHMARK), "--short", "--only", "is lost", "full disk", "--failures", "2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, cwd=BENCHMARK.parent, env=environment, stderr=subprocess.PIPE, text=True) as ours:

        def there() -> list[bool]:
            hosts = any(Path("/run/netns").glob(f"ahp-{ours.pid}-*"))
            return [hosts, str(tmp_path) in Path("/proc/mounts").read_text(), len(commands_below(tmp_path)) >= 3]

        began_s = time.monotonic()
        while not all(there()):
            assert ours.poll() is None
            assert time.monotonic() - began_s < 500
            time.sleep(0.1)
        ours.send_signal(number)
        _, error = ours.communicate(timeout=500)
    assert ours.returncode == 128 + number, error
    assert not any(there())
    assert commands_below(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def commands_below(folder: Path) -> list[str]:
    """What runs with its files below a folder: as launchers, so their workers are known."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            variables = process.environ()
            if variables.get("TMPDIR", "").startswith(f"{folder}/"):
                found.append(" ".join(process.cmdline()))
    return found
