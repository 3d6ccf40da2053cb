"""plan.yaml: read from its file or a run's folder, and refused in words when it is something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ahp.errors import BadInput
from ahp.plan import Parallelism, Plan, validated

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
        (b"7", "a mapping of keys was expected, not a single value"),
        (b"", "a mapping of keys was expected, and the file is empty"),
        (
            b"groups: [{device: H100}]\nschema_version: 1\n",
            "this is a cluster; write a plan with: ahp plan MODEL CLUSTER",
        ),
        (b"schema_version: 9\n", "^/.*: schema_version = 9: AHP reads 1; plan again"),
        (b"a: b\nc", "not YAML: it ends too early: could not find expected ':'"),
        (b"versions: {ahp: 0.0.9}\ntp: 2\n", r" \(made by ahp '0.0.9', and this is .*\): tp: unknown key"),
        (b"model: tiny\nmodel: llama3-8b\n", "the key 'model' is given twice"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "plan.yaml").write_bytes(content)
    with pytest.raises(BadInput, match=told):
        Plan.load(tmp_path)


def test_a_plan_that_was_cut_off_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.yaml")
    lines = (tmp_path / "plan.yaml").read_text().splitlines(keepends=True)
    for end in range(lines.index("init_from: null\n") + 1, lines.index("versions: {}\n")):
        (tmp_path / "plan.yaml").write_text("".join(lines[:end]))
        with pytest.raises(BadInput, match="the file is cut off; copy it again"):
            Plan.load(tmp_path)


DEGREES = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}


def test_a_config_in_the_place_of_a_plan_is_told(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("job: {steps: 5}\nrun: {folder: runs/x}\n")
    with pytest.raises(BadInput, match="this is a config, not a plan"):
        Plan.load(file)
    file.write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(BadInput, match="this is a model; write a plan with: ahp plan MODEL CLUSTER"):
        Plan.load(file)


def test_the_usual_order_of_axes_is_null() -> None:
    assert Parallelism(**DEGREES, mesh_order=("pp", "dp_shard", "tp")) == Parallelism(**DEGREES)
    assert Parallelism(mesh_order=()).mesh_order is None
    assert Parallelism(**DEGREES).axes == ("pp", "dp_shard", "tp")
    turned = Parallelism(**DEGREES, mesh_order=("tp", "dp_shard", "pp"))
    assert Parallelism(**turned.model_dump(mode="json")) == turned
    assert turned.short().endswith("order(tp>dp_shard>pp)")


@pytest.mark.parametrize(
    ("order", "valid"),
    [
        (("pp", "tp"), "['pp', 'dp_shard', 'tp']"),
        (("tp", "pp"), "['dp_shard', 'tp', 'pp']"),
        (("tp", "cp", "dp_shard", "pp"), "['tp', 'dp_shard', 'pp']"),
        (("tp", "tp", "dp_shard"), "['pp', 'tp', 'dp_shard']"),
    ],
)
def test_an_order_names_every_axis_once(order: tuple[str, ...], valid: str) -> None:
    with pytest.raises(BadInput, match=r"mesh_order = .* must name each axis with a degree above 1 once") as refused:
        validated(Parallelism, {**DEGREES, "mesh_order": order}, "plan.yaml")
    assert f"(valid: {valid})" in str(refused.value)
