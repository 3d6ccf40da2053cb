"""The examples run as their first lines say; those that torchrun or a trainer would start, on workers that are there already."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.conftest import launched_on_pool as launched_on_pool  # a fixture, and the next one
from tests.runtime.conftest import pool as pool
from tests.runtime.workers import Pool, free_port, said_by, script_as_rank

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
EXAMPLES = sorted(file for file in FOLDER.iterdir() if file.suffix in (".py", ".sh"))


def commands(name: str) -> list[str]:
    """Those of its head."""
    head = (FOLDER / name).read_text().split('"""')[1]
    return re.findall(rf"^ *((?:python|torchrun) .*?{re.escape(name)}(?: --[a-z]+)*)", head, flags=re.MULTILINE)


def under_torchrun(pool: Pool, folder: Path, command: str) -> str:
    """What its first rank prints."""
    torchrun, option, ranks, name, *arguments = command.split()
    assert (torchrun, option) == ("torchrun", "--nproc-per-node")
    return pool.run(script_as_rank, int(ranks), folder, free_port(), FOLDER / name, arguments)[0]


def test_a_loop_goes_on_under_another_layout(pool: Pool, tmp_path: Path) -> None:
    first, second = (under_torchrun(pool, tmp_path, command) for command in commands("own_loop.py"))
    assert re.findall(r"step (\d+): loss", first + second) == [str(step) for step in range(20)]
    assert "loss of unseen text" in second


def test_a_module_of_ones_own_computes_the_same_on_one_process_and_on_two(pool: Pool, tmp_path: Path) -> None:
    alone, on_two = commands("custom_module.py")
    assert alone == "python custom_module.py"
    table, *losses = re.split(r"step \d+: loss ", under_torchrun(pool, tmp_path, on_two))
    assert "chosen" in table
    assert losses == re.split(r"step \d+: loss ", under_torchrun(pool, tmp_path, on_two.replace("2", "1")))[1:]


@pytest.mark.usefixtures("launched_on_pool")
def test_adapters_are_trained_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands("fine_tuning.py") == ["python fine_tuning.py"]
    said = said_by(FOLDER / "fine_tuning.py")
    assert "done after step 8" in said
    assert "parameters, adapters merged" in said


@pytest.mark.slow
def test_two_types_of_devices_are_faster_than_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands("mixed_cluster.py") == ["python mixed_cluster.py"]
    times = re.findall(r"(\w+) alone: .*, ([\d.]+) times as long", said_by(FOLDER / "mixed_cluster.py"))
    assert [name for name, _ in times] == ["new", "old"]
    assert all(float(than) > 1.2 for _, than in times)


@pytest.mark.wide  # tests/runtime/run/test_nodes.py runs two nodes in every run
def test_two_nodes_find_each_other(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "PORT": str(free_port())}
    script = FOLDER / "several_nodes.sh"
    done = subprocess.run(["sh", script], cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Loss .* in 8 steps", done.stdout)


def test_every_example_is_listed_and_fits_on_a_screen_or_two() -> None:
    index = (FOLDER / "README.md").read_text()
    for file in EXAMPLES:
        assert f"({file.name})" in index
        assert len(file.read_text().splitlines()) <= 75
