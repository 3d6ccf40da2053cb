"""How many workers a machine carries, and that a probe of more is refused before anything is measured or started."""

from __future__ import annotations

from pathlib import Path

import pytest

from ahp.cluster import measure, sense
from ahp.cluster.most_workers import refuse_workers
from ahp.errors import BadInput


@pytest.mark.parametrize(
    ("free_gb", "count", "told"),
    [
        (64, 16, None),
        (64, 17, r"workers = 17: this machine carries at most 16 worker processes, 8 on each of its 2 physical cores \(valid: 1 to 16\)"),
        (64, 9999, "at most 16 worker processes"),
        (2.2, 4, None),
        (2.2, 5, r"at most 4 worker processes, 0\.5 GB for each of the 2\.2 GB that are free"),
        (0.1, 1, None),
    ],
)  # fmt: skip
def test_more_workers_than_the_machine_carries_are_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_gb: float, count: int, told: str | None
) -> None:
    """9,999 on two cores were: 340 processes and 14 GiB before somebody pulled the plug."""
    monkeypatch.setattr(sense, "physical_cores", lambda *_: 2)
    monkeypatch.setattr(sense, "memory_available_bytes", lambda *_: int(free_gb * 1e9))
    monkeypatch.setattr(measure.disk, "throughput", lambda folder, size: pytest.fail("measured before it was refused"))
    if told is None:
        refuse_workers(f"workers = {count}", count)
        return
    with pytest.raises(BadInput, match=told):
        refuse_workers(f"workers = {count}", count)
    monkeypatch.setattr(measure, "gpus", list)
    with pytest.raises(BadInput, match=told):
        measure.probe(workers=count, folder=tmp_path)
