"""The short form of benchmarks/failures.py: ten failures, after each of which a run goes on by itself, on the same curve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "failures.py"


@pytest.mark.wide
def test_a_run_goes_on_after_each_of_ten_failures(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    kinds = ["-9 of one worker", "-9 of all workers", "truncated"]
    words = [sys.executable, str(BENCHMARK), "--failures", "10", "--only", *kinds, "--results", str(results)]
    done = subprocess.run(words, cwd=BENCHMARK.parent, capture_output=True, text=True)
    trials = [json.loads(line) for line in results.read_text().splitlines()]
    assert done.returncode == 0, done.stderr
    assert [trial["went_on"] for trial in trials] == [True] * 10
    assert {trial["deviation"] for trial in trials} == {0.0}, "the same digits"
    assert {trial["past_checkpoint"] for trial in trials} == {0}
    assert [trial["left"] for trial in trials] == [[]] * 10
