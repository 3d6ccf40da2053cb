"""``ahp models`` and ``ahp devices`` list what ``ahp plan`` knows, without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ahp.cli.main import main
from ahp.cluster.catalogue import CPU, names
from ahp.cluster.model import Cluster
from ahp.graph.catalogue import CATALOGUE


def listed(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.split()[0] for line in lines[1 : lines.index("")]]


def test_models_are_those_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed("models", capsys) == list(CATALOGUE)
    assert main(["models", "--json"]) == 0
    data = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert data["qwen3-30b-a3b"]["config"] == CATALOGUE["qwen3-30b-a3b"].config
    assert all(row["source"] for row in data.values())


def test_devices_are_those_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*listed("devices", capsys), CPU] == names()
    assert main(["devices", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        assert Cluster.parse(row["device"]["name"]).num_devices == 1
        assert row["device"]["source"]


@pytest.mark.parametrize("command", ["models", "devices"])
def test_a_catalogue_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert not any(line.endswith(" ") for line in out.splitlines())
    assert "\nNext: ahp plan " in out


@pytest.mark.parametrize("command", ["models", "devices"])
def test_a_catalogue_needs_no_torch(command: str) -> None:
    code = f"import sys; from ahp.cli.main import main; main([{command!r}, '--json']); print([m for m in ('torch', 'transformers', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
