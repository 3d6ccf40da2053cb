"""The examples run as their first lines say; those that torchrun or a trainer would start, on workers that are there already."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.runtime.conftest import launched_on_pool as launched_on_pool  # a fixture, and the next one
from tests.runtime.conftest import pool as pool
from tests.runtime.workers import Pool, free_port, place

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(file for file in (ROOT / "examples").iterdir() if file.suffix in (".py", ".sh"))


def commands(name: str) -> list[str]:
    """Those of its head."""
    head = (ROOT / "examples" / name).read_text().split('"""')[1]
    return re.findall(rf"^ *((?:python|torchrun) .*?{re.escape(name)}(?: --[a-z]+)*)", head, flags=re.MULTILINE)


def said_by(name: str, *arguments: str) -> str:
    """What it prints, run in this process."""
    file, out = ROOT / "examples" / name, io.StringIO()
    with mock.patch.object(sys, "argv", [str(file), *arguments]), contextlib.redirect_stdout(out):
        runpy.run_path(str(file), run_name="__main__")
    return out.getvalue()


def as_rank(rank: int, world: int, folder: str, port: int, name: str, arguments: list[str]) -> str:
    """Runs in each worker, as torchrun would start it."""
    import torch.distributed as dist

    dist.destroy_process_group()
    with mock.patch.dict(os.environ, place(rank, world, port)), contextlib.chdir(folder):
        return said_by(name, *arguments)


def under_torchrun(pool: Pool, folder: Path, command: str) -> str:
    """What its first rank prints."""
    torchrun, option, ranks, name, *arguments = command.split()
    assert (torchrun, option) == ("torchrun", "--nproc-per-node")
    return pool.run(as_rank, int(ranks), str(folder), free_port(), name, arguments)[0]


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
    said = said_by("fine_tuning.py")
    assert "done after step 8" in said
    assert "parameters, adapters merged" in said


@pytest.mark.slow
def test_two_types_of_devices_are_faster_than_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands("mixed_cluster.py") == ["python mixed_cluster.py"]
    times = re.findall(r"(\w+) alone: .*, ([\d.]+) times as long", said_by("mixed_cluster.py"))
    assert [name for name, _ in times] == ["new", "old"]
    assert all(float(than) > 1.2 for _, than in times)


@pytest.mark.wide  # tests/runtime/run/test_nodes.py runs two nodes in every run
def test_two_nodes_find_each_other(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "PORT": str(free_port())}
    script = ROOT / "examples" / "several_nodes.sh"
    done = subprocess.run(["sh", script], cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Loss .* in 8 steps", done.stdout)


def test_every_example_is_listed_and_fits_on_a_screen_or_two() -> None:
    index = (ROOT / "examples" / "README.md").read_text()
    for file in EXAMPLES:
        assert f"({file.name})" in index
        assert len(file.read_text().splitlines()) <= 75
