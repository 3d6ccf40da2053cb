"""``ahp probe``: its arguments, what it writes and prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from ahp.cli import probe as command
from ahp.cli.main import main
from ahp.cluster import measure
from ahp.cluster.model import Cluster, CollectiveSample, Host, MatmulSample, Measurements, MemorySample
from ahp.errors import BadInput

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


def test_bad_arguments_end_before_anything_is_measured(asked: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="--workers = 'two': must be a whole number"):
        command.run(["--workers", "two"])
    with pytest.raises(BadInput, match=r"--worker: no option of ahp probe \(did you mean: --workers\?\)"):
        command.run(["--worker", "two"])
    assert not asked


def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    asked: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "a_file"
    file.write_text("")
    for path, why in (
        (file / "c.yaml", "Not a directory"),
        (tmp_path, "is a folder"),
        (Path("/proc/c.yaml"), "/proc: "),
    ):
        assert main(["probe", "-o", str(path)]) == 2
        told = capsys.readouterr().err
        assert f"-o = '{path}': " in told
        assert why in told
    assert not asked


def test_folder_of_the_output_is_made(asked: dict[str, Any], tmp_path: Path) -> None:
    assert main(["probe", "-o", str(tmp_path / "new" / "c.yaml")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_launch_is_told_as_what_it_is_on_each_device() -> None:
    gpu = Cluster.parse("2xA100-SXM-80GB")
    cpu = gpu.groups[0].model_copy(update={"device": gpu.groups[0].device.model_copy(update={"name": "cpu"})})
    assert any("us, the smallest kernel" in line for line in command.lines(gpu))
    told = command.lines(gpu.model_copy(update={"groups": (cpu,)}))
    assert any("an operator of a training step with next to no work" in line for line in told)
