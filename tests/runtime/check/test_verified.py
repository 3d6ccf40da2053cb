"""``ahp verify`` of a real plan, on workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ahp.cli import verify as command
from tests.cli.test_verify_command import plan


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
def test_a_plan_is_equal_to_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(tensor_parallel_degree=2).save(tmp_path / "plan.yaml")
    assert command.run([str(tmp_path), "--steps", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert [row["step"] for row in found["steps"]] == [1, 2, 3]
    assert all(0 <= row["difference"] <= row["tolerance"] for row in found["steps"])
