"""plan.yaml: read from its file or a run's folder, and refused in words when it is something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ahp.errors import BadInput
from ahp.plan import Parallelism, Plan

PLAN = Plan(model="tiny", parallelism=Parallelism(tensor_parallel_degree=2), why=("groß genug",))


def test_a_plan_is_read_from_its_file_or_its_folder(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == Plan.load(tmp_path) == PLAN


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "a folder without a plan.yaml"),
        (b"a: [1\n", "not YAML"),
        (b"\x89PNG\xff", "not YAML"),
        (b"7", "not a plan"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "plan.yaml").write_bytes(content)
    with pytest.raises(BadInput, match=told):
        Plan.load(tmp_path)
