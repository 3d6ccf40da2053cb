"""What ahp train knows of this machine: measured once for all runs on it, and again when it is another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ahp.cli import machine
from ahp.cli.machine import measured
from ahp.cluster.gpus import Gpu
from ahp.cluster.measure import DISTURBED
from ahp.cluster.model import Cluster

QUIET, BUSY = 0.0, 0.5


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of workers that were measured; nothing really is. Each measurement is another one, beside what the machine does then."""
    done: list[int] = []

    def probe(*, workers: int, **_: Any) -> Cluster:
        done.append(workers)
        cluster = Cluster.parse(f"{workers}xA100-SXM-80GB")
        beside = f"; {DISTURBED} 50% of the processor" if machine.busy_share() == BUSY else ""
        return cluster.model_copy(update={"source": f"probe number {len(done)}{beside}"})

    monkeypatch.setattr(machine, "probe", probe)
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setattr(machine, "busy_share", lambda: QUIET)
    monkeypatch.setattr(machine.sense, "physical_cores", lambda: 2)
    return done


def test_another_folder_takes_the_same_measurement(
    probes: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ahp calibrate of two runs said that they ran on other clusters, because each had measured this one anew."""
    first = measured(None, tmp_path / "a", tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "machines").iterdir()
    assert f"kept for every run on this machine: {file}" in capsys.readouterr().err
    assert measured(2, tmp_path / "b", tmp_path / "cache") == first
    assert f"probe number 1; delete {file} to measure it again" in capsys.readouterr().err
    assert probes == [2]
    assert measured(4, tmp_path / "b", tmp_path / "cache") != first
    file.unlink()
    assert measured(2, tmp_path / "b", tmp_path / "cache") != first
    assert probes == [2, 4, 2]


def test_a_flipped_bit_is_measured_again(probes: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(None, tmp_path, tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "machines").iterdir()
    content = file.read_bytes()
    for place in (0, 30, len(content) // 2, len(content) - 2):
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        measured(None, tmp_path, tmp_path / "cache")
        assert f"{file} has changed since it was written" in capsys.readouterr().err
    measured(None, tmp_path, tmp_path / "cache")
    assert probes == [2] * 5


CHANGES: dict[str, tuple[str, Callable[..., Any]]] = {
    "processor": ("ahp.cluster.sense.cpu_name", lambda: "another"),
    "memory": ("ahp.cluster.sense.memory_limit_bytes", lambda: 2**40),
    "torch": ("ahp.cli.machine.version", lambda name: "9.9"),
    "gpus": ("ahp.cli.machine.gpus", lambda: [Gpu(0, "Tesla T4", 2**34)] * 2),
    "nodes": ("ahp.cluster.managers.num_nodes", lambda: 4),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_machine_is_measured(
    probes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    measured(2, tmp_path, tmp_path / "cache")
    monkeypatch.setattr(*CHANGES[change])
    measured(2, tmp_path, tmp_path / "cache")
    assert len(probes) == 2


def test_what_was_measured_beside_other_programs_is_measured_again_without_them(
    probes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(share: float) -> int:
        monkeypatch.setattr(machine, "busy_share", lambda: share)
        measured(2, tmp_path, tmp_path / "cache")
        return len(probes)

    assert [again(BUSY), again(BUSY), again(QUIET), again(QUIET), again(BUSY)] == [1, 1, 2, 2, 2]


def test_a_damaged_file_and_a_cache_that_cannot_be_written_cost_a_measurement_alone(
    probes: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(2, tmp_path, tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "machines").iterdir()
    file.write_text("groups: [")
    measured(2, tmp_path, tmp_path / "cache")
    assert "the machine is measured again" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    measured(2, tmp_path, tmp_path / "file")
    assert "the measurement is not kept for other runs" in capsys.readouterr().err
    assert len(probes) == 3
