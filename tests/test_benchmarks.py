"""The benchmarks run from end to end on their smallest task; no figure of theirs decides anything here."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ahp.cluster.model import Cluster
from ahp.engines import registry
from ahp.plan import Plan, validated

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts' own folder, where Python puts it when a script is started."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name, module in list(sys.modules.items()):
        if str(FOLDER) in str(getattr(module, "__file__", None)) and not name.startswith("benchmarks"):
            del sys.modules[name]


def run(script: str, *arguments: str) -> dict:
    command = [sys.executable, str(FOLDER / script), "--quick", "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.wide
def test_side_by_side_compares_like_with_like() -> None:
    names = ["zero3-bf16", "pp-zbv", "ep"]
    found = run("side_by_side.py", "--only", *names)
    assert found["failed"] == []
    assert [row["layout"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["ratio"] == pytest.approx(row["plain_s"] / row["ahp_s"])


@pytest.mark.wide
def test_first_answers_import_torch_where_a_model_is_new_and_nowhere_else() -> None:
    found = {row["command"]: row for row in run("first_answer.py")["rows"]}
    assert set(found["plan MODEL CLUSTER"]["first_heavy"]) >= {"torch", "transformers"}
    for row in found.values():
        assert row["heavy"] == []
        assert row["named_s"] > 0
    assert {command for command, row in found.items() if "again_s" in row} >= {
        "explain plan.yaml",
        "simulate plan.yaml",
    }


@pytest.mark.wide
def test_hosts_that_differ_are_probed_planned_for_and_measured() -> None:
    from benchmarks.namespaces import HostSpec, why_not

    if (reason := why_not([HostSpec(processors=0.5, gbps=1.0)])) is not None:
        pytest.skip(reason)
    [found] = run("hosts.py")["clusters"]
    assert found["summary"]["plan"] in {row["words"] for row in found["rows"]}
    assert {"plan", "even", "ddp"} <= {role for row in found["rows"] for role in row["roles"]}
    assert all(len(row["rounds_s"]) == 2 for row in found["rows"])


@pytest.mark.usefixtures("on_path")
def test_the_words_of_every_layout_are_a_plan() -> None:
    import layouts
    from task import Task

    found = [*layouts.layouts(), *layouts.engine_layouts()]
    assert len({layout.name for layout in found}) == len(found)
    for layout in found:
        plan = validated(Plan, layouts.plan(layout, layout.of(Task()), 1), "plan")
        assert plan.parallelism.world_size == layouts.NUM_WORKERS
        assert plan.parallelism.num_micro_batches(plan.job) == layout.micro_batches
        assert registry.get("ahp").refuses(plan.job, plan.parallelism, plan.engine) is None


@pytest.mark.slow
@pytest.mark.usefixtures("on_path")
def test_every_layout_has_a_rival_that_takes_it() -> None:
    import layouts
    from task import Task

    for layout in layouts.layouts():
        module, name, keywords = layouts.RIVALS[layout.rival]
        taken = inspect.signature(getattr(importlib.import_module(module), name))
        taken.bind(layout.of(Task()), layout.micro_batches, **keywords)


@pytest.mark.slow
def test_schedules_are_held_against_patterns_and_bounds() -> None:
    rows = run("schedules.py")
    assert {name: len(found) for name, found in rows.items()} == {
        "published stages": 16, "drawn stages": 30, "beside 1F1B": 2, "long sends": 24, "speed of synthesis": 6
    }  # fmt: skip
    for row in rows["published stages"]:  # a pattern fits in all rows, and is never faster
        gap, gain = (float(cell.split(" %")[0]) for cell in row[-2:])
        assert 0.0 <= gap < 10.0
        assert gain >= 0.0


@pytest.mark.usefixtures("on_path")
def test_some_schedules_are_drawn() -> None:
    import schedules

    text = schedules.drawn_text(schedules.pictures())
    pictures = text.removeprefix("```text\n").removesuffix("\n```").split("\n\n")
    assert len(pictures) == 5
    for picture in pictures:
        _, *lines = picture.splitlines()
        assert len(lines) == 4
        assert all(len(line) == 110 and set(line) <= set("FBIWfbiw.") for line in lines)


@pytest.mark.wide
def test_checkpoints_are_measured_whole() -> None:
    (row,) = run("checkpoints.py", "--only", "zero3")["rows"]
    assert row["bytes"] > 12 * 2_000_000, "weights and two moments in fp32"
    assert 0 < row["blocked_s"] <= row["worst_blocked_s"] < row["whole_s"]


@pytest.mark.usefixtures("on_path")
def test_the_first_checkpoint_is_judged_by_the_same_limit() -> None:
    import checkpoints

    def row(step_s: float, *blocked_s: float) -> dict:
        saves = [
            {
                "alone_s": [step_s] * 3,
                "blocked_s": s,
                "blocked_cpu_s": s,
                "beside_s": [2 * step_s, step_s],
                "whole_s": 1.0,
            }
            for s in blocked_s
        ]
        return checkpoints.row(checkpoints.CASES[0], "small", {"saves": saves, "bytes": 1})

    assert row(0.1, 0.04, 0.05, 0.03)["limit_s"] == 0.05
    assert row(0.1, 0.04, 0.05, 0.03)["held"]
    assert not row(0.1, 0.06, 0.01)["held"]
    assert row(2.0, 0.19, 0.2)["held"]
    assert not row(2.0, 0.1, 0.21)["held"]
    assert row(2.0, 0.1)["slowed_s"] == 2.0


@pytest.mark.wide
def test_start_up_is_that_of_the_same_first_step() -> None:
    (row,) = run("startup.py", "--only", "ddp")["rows"]
    for side in ("plain", "ahp"):
        assert 0 < row[f"{side}_imported_s"] < row[f"{side}_ready_s"] < row[f"{side}_stepped_s"]
    assert row["ratio"] == pytest.approx(row["plain_stepped_s"] / row["ahp_stepped_s"])


@pytest.mark.usefixtures("on_path")
def test_starts_of_unlike_steps_are_refused() -> None:
    import side_by_side
    import startup

    layout = side_by_side.layouts()[0]
    one = startup.Start(imported_s=1.0, ready_s=2.0, stepped_s=3.0, used_s=1.5, loss=8.3, grad_norm=1.0)
    slower = startup.Start(imported_s=1.0, ready_s=2.0, stepped_s=6.0, used_s=1.5, loss=8.3, grad_norm=1.0)
    other = startup.Start(imported_s=1.0, ready_s=2.0, stepped_s=3.0, used_s=1.5, loss=8.3, grad_norm=2.0)
    assert startup.row(layout, {"plain": [slower, slower], "ahp": [one, one]})["ratio"] == 2.0
    assert startup.row(layout, {"plain": [slower, slower], "ahp": [one, one]})["cpu_ratio"] == 1.0
    with pytest.raises(side_by_side.UnlikeThings, match="grad_norm of the first step"):
        startup.row(layout, {"plain": [one], "ahp": [other]})


@pytest.mark.wide
def test_predicted_measures_every_layout_and_the_pick(tmp_path: Path) -> None:
    Cluster.parse("1x2xcpu").save(tmp_path / "cluster.yaml")  # measuring the machine is a test of its own
    found = run("predicted.py", "--cluster", str(tmp_path / "cluster.yaml"))["models"][0]
    assert sum(row["picked"] for row in found["rows"]) == 1
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in found["rows"])
    assert found["summary"]["regret"] >= 0


@pytest.mark.usefixtures("on_path")
def test_unlike_things_are_refused() -> None:
    import side_by_side

    layout = side_by_side.layouts()[0]
    times = {"plain": [0.2, 0.2], "ahp": [0.1, 0.1]}
    same = {"step_s": times, "cpu_s": times, "given": {"plain": [(8.3, 1.0)], "ahp": [(8.3, 1.0)]}}
    assert side_by_side.row(layout, same, warmup=1).ratio == pytest.approx(2.0)
    for loss, norm in ((8.31, 1.0), (8.3, 1.01), (float("nan"), 1.0)):
        other = {**same, "given": {"plain": [(8.3, 1.0)], "ahp": [(loss, norm)]}}
        with pytest.raises(side_by_side.UnlikeThings, match="ddp: loss differs"):
            side_by_side.row(layout, other, warmup=1)


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("name", ["deepspeed_shm_comm", "fused_adam"])
def test_a_lock_that_a_build_left_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import rivals

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / name).mkdir()
    rivals.refuse_stale_locks()
    lock = tmp_path / name / "lock"
    lock.touch()
    with pytest.raises(SystemExit, match=f"{lock}: a build that was ended left this lock"):
        rivals.refuse_stale_locks()


@pytest.mark.usefixtures("on_path")
def test_layouts_of_other_engines_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import side_by_side

    for words in (["--only", "ddp", "torchtitan-tp"], ["--engines", "--only", "torchtitan-tp", "ddp"]):
        monkeypatch.setattr(sys, "argv", ["side_by_side.py", *words])
        with pytest.raises(SystemExit):
            side_by_side.parse()
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", "--engines", "--only", "torchtitan-tp", "deepspeed-zero1"])
    assert side_by_side.parse().only == ["torchtitan-tp", "deepspeed-zero1"]


@pytest.mark.usefixtures("on_path")
def test_regret_is_against_the_best_measured() -> None:
    import predicted

    rows = [
        predicted.Row("m", 2, "a", predicted_s=1.1, low_s=0.9, high_s=1.3, measured_s=1.0, picked=False),
        predicted.Row("m", 2, "b", predicted_s=0.9, low_s=0.8, high_s=1.0, measured_s=1.2, picked=True),
    ]
    about = predicted.summary(rows)
    assert about["picked"] == "b"
    assert about["best"] == "a"
    assert about["regret"] == pytest.approx(0.2)
    assert about["mean_error"] == pytest.approx((0.1 - 0.25) / 2)
    assert about["inside_band"] == 0.5


@pytest.mark.usefixtures("on_path")
def test_figures_go_between_the_markers(tmp_path: Path) -> None:
    import page

    path = tmp_path / "page.md"
    path.write_text("before\n<!-- x -->\nold\n<!-- end of x -->\nafter\n")
    page.write(path, "x", page.table(["a", "b"], [["1", "2"]]))
    assert path.read_text() == "before\n<!-- x -->\n| a | b |\n|---|---:|\n| 1 | 2 |\n<!-- end of x -->\nafter\n"
    with pytest.raises(SystemExit, match="needs the lines"):
        page.write(path, "y", "text")


@pytest.mark.wide
def test_the_sides_of_a_gpu_row_compute_the_same() -> None:
    rows = {row["side"]: row for row in run("gpu.py", "--only", "chunked-loss")["rows"]}
    assert {"ahp", "plain"} <= set(rows)  # rows whose losses differ are left out
    for side, row in rows.items():
        assert row["step_s"] > 0
        assert 0 < row["mfu"] < 1
        assert (row["predicted_s"] is not None) == (side == "ahp")
