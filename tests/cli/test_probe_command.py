"""``ahp probe``: its arguments, what it writes and prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from ahp.cli import probe as command
from ahp.cluster import measure
from ahp.cluster.model import Cluster, CollectiveSample, Host, MatmulSample, Measurements, MemorySample

MEASURED = Measurements(
    matmul=tuple(
        MatmulSample(m=10, n=10, k=10, dtype=d, workers=w, seconds=1e-6) for d in ("fp32", "bf16") for w in (1, 2)
    ),
    memory=(MemorySample(workers=1, bytes_per_s=2e10), MemorySample(workers=2, bytes_per_s=1e10)),
    collectives=tuple(CollectiveSample(kind="all_reduce", workers=2, bytes=b, seconds=1e-3) for b in (4096, 2**20)),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """probe that remembers what it was asked and answers at once."""
    seen: dict[str, Any] = {}

    def probe(**options: Any) -> Cluster:
        seen.update(options)
        options["progress"]("something", 0.5)
        cluster = Cluster.parse("2xA100-SXM-80GB")
        host = Host(cpu="some processor", cores=2, memory_bytes=2**34, storage_kind="ssd", storage_free_bytes=2**34)
        group = cluster.groups[0].model_copy(update={"measured": MEASURED, "host": host})
        return cluster.model_copy(update={"groups": (group,), "source": "probe on here"})

    monkeypatch.setattr(measure, "probe", probe)
    return seen


def test_writes_prints_and_names_the_next_command(asked: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "mine.yaml"
    assert command.run(["-o", str(path), "--quick", "--workers", "2"]) == 0
    assert (asked["quick"], asked["workers"], asked["folder"]) == (True, 2, tmp_path)
    assert Cluster.load(path).source == "probe on here"
    out = capsys.readouterr().out
    assert "some processor, 2 physical cores, 16.0 GiB" in out
    assert "2.0 GFLOP/s" in out
    assert "20.0 GB/s" in out
    assert "1 MiB" in out
    assert out.rstrip().splitlines()[-1] == f"Next: ahp plan tiny {path}"


def test_json_is_the_whole_output(
    asked: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.run(["--json"]) == 0
    assert (asked["quick"], asked["workers"]) == (False, None)
    printed = Cluster.from_dict(json.loads(capsys.readouterr().out))
    assert printed == Cluster.load("cluster.yaml")


def test_bad_arguments_end_with_usage(asked: dict[str, Any], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.run(["--worker", "two"])
    assert stopped.value.code == 2
    assert not asked
