"""``ahp calibrate``: runs beside their forecasts, and the cluster that forecasts what they took."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ahp
from ahp.cli.calibrate import run
from ahp.cli.main import main
from ahp.cli.plan import confidence
from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.forecast import timeline
from ahp.forecast.step import price
from ahp.plan import Plan

JOB = {"sequence_length": 64, "global_batch_size": 8}
NODE = {"nodes": 1, "devices_per_node": 4, "device": "B200-SXM"}


def plan_of(parallelism: dict[str, Any], cluster: Any = NODE) -> Plan:
    return Plan.model_validate({"model": "tiny", "job": JOB, "cluster": cluster, "parallelism": parallelism})


def forecast(plan: Plan) -> ahp.Forecast:
    return ahp.simulate(model=plan.model, cluster=plan.cluster, job=plan.job, parallelism=plan.parallelism)


def run_folder(folder: Path, plan: Plan, times: float, steps: int = 12, earlier: int = 0) -> str:
    """A run whose steps took so many times the forecast; before that ``earlier`` steps under another plan."""
    folder.mkdir()
    plan.save(folder / "plan.yaml")
    told_s = forecast(plan).step_time_s
    records = [{"step": i, "step_time_s": 99.0, "predicted_step_time_s": 7.0} for i in range(earlier)]
    for i in range(steps):
        slow = 50.0 if i < 3 else 1.0 + (i % 3 - 1) / 100  # the first steps allocate
        records.append({"step": earlier + i, "step_time_s": slow * times * told_s, "predicted_step_time_s": told_s})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(folder)


@pytest.mark.slow
def test_the_next_forecast_is_what_the_run_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = plan_of({"data_parallel_shard_degree": 4}), tmp_path / "c.yaml"
    assert run([run_folder(tmp_path / "run", plan, 1.3, earlier=4), "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "9 steps" in shown
    assert "measured is 1.3 times as long" in shown
    assert shown.splitlines()[-1] == f"Next: ahp plan tiny {out}"
    assert "; steps are forecast to take 1.3 times what its figures say, as measured in 9 steps" in confidence(
        Cluster.load(out)
    )
    other = plan_of({"tensor_parallel_degree": 4})
    for layout in (plan, other):
        before, after = forecast(layout), forecast(layout.model_copy(update={"cluster": Cluster.load(out).plain()}))
        assert after.step_time_s == pytest.approx(1.3 * before.step_time_s)
        assert sum(after.step.values()) == pytest.approx(after.step_time_s)
        assert after.tokens_per_s_per_device == pytest.approx(before.tokens_per_s_per_device / 1.3)
        assert after.step_time_high_s / after.step_time_low_s < before.step_time_high_s / before.step_time_low_s
        assert after.step_time_low_s * after.step_time_high_s == pytest.approx(after.step_time_s**2)
        assert after.memory == before.memory


def test_several_runs_have_one_ratio_and_a_second_time_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = plan_of({"data_parallel_shard_degree": 4}), plan_of({"tensor_parallel_degree": 4})
    folders = [run_folder(tmp_path / "a", first, 1.6), run_folder(tmp_path / "b", second, 0.9)]
    out = tmp_path / "c.yaml"
    assert run([*folders, "-o", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["calibration"]["step_ratio"] == pytest.approx(1.2)
    assert (told["calibration"]["runs"], [one["ratio"] for one in told["runs"]]) == (2, pytest.approx([1.6, 0.9]))
    for one, plan in zip(told["runs"], (first, second), strict=True):
        before = forecast(plan)
        after = forecast(plan.model_copy(update={"cluster": Cluster.load(out).plain()}))
        assert one["band_s"] == [before.step_time_low_s, before.step_time_high_s]
        assert one["calibrated_s"] == after.step_time_s
        assert one["calibrated_band_s"] == [after.step_time_low_s, after.step_time_high_s]
        assert one["parallelism"] == plan.parallelism.model_dump(mode="json")
    assert told["next"] == [f"ahp plan tiny {out}"]
    again = plan_of({"tensor_parallel_degree": 4}, Cluster.load(out).plain())
    assert run([run_folder(tmp_path / "c", again, 1.0), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["step_ratio"] == pytest.approx(1.2)


@pytest.mark.slow
def test_a_forecast_says_that_runs_corrected_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = tmp_path / "c.yaml", tmp_path / "plan.yaml"
    plan = plan_of({"data_parallel_shard_degree": 4})
    assert run([run_folder(tmp_path / "run", plan, 1.3), "-o", str(out)]) == 0
    for cluster, told in (
        (plan.cluster, "datasheet figures"),
        (Cluster.load(out).plain(), "datasheet figures; steps are forecast to take 1.3 times what its figures say, as"),
    ):
        plan_of({"data_parallel_shard_degree": 4}, cluster).save(file)
        capsys.readouterr()
        for command in ("simulate", "explain"):
            assert main([command, str(file)]) == 0
            assert told in " ".join(capsys.readouterr().out.split())
            assert main([command, str(file), "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["stands_on"].startswith(told)
    assert main(["plan", "tiny", str(out), "-o", str(file), "--json"]) == 0
    capsys.readouterr()
    assert main(["report", str(file)]) == 0
    assert told in file.with_suffix(".html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_the_search_finds_the_same_plan_and_its_floor_is_below_it(ratio: float) -> None:
    cluster = Cluster.parse("1x4xA100-SXM-80GB")
    [group] = cluster.groups
    known = {"step_ratio": ratio, "runs": 1, "source": "a test"}
    ran = Cluster.model_validate(
        {**cluster.plain(), "groups": [{**group.model_dump(mode="json"), "calibration": known}]}
    )
    job = ahp.Job.model_validate(JOB)
    graph = ahp.analyze("tiny", job)
    plain, found = ahp.search(graph, cluster, job), ahp.search(graph, ran, job)
    assert plain.best is not None
    assert found.best is not None
    assert found.best.parallelism == plain.best.parallelism
    assert found.best.forecast is not None
    assert plain.best.forecast is not None
    assert found.best.forecast.step_time_s == pytest.approx(ratio * plain.best.forecast.step_time_s)
    assert plain.certificate.proven
    assert found.certificate.proven
    assert found.certificate.best_s == pytest.approx(ratio * plain.certificate.best_s)


def test_the_timeline_ends_with_the_step() -> None:
    cluster = Cluster.parse("1x4xA100-SXM-80GB")
    [group] = cluster.groups
    known = {"step_ratio": 0.5, "runs": 1, "source": "a test"}
    ran = Cluster.model_validate(
        {**cluster.plain(), "groups": [{**group.model_dump(mode="json"), "calibration": known}]}
    )
    job = ahp.Job.model_validate(JOB)
    layout = plan_of({"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2}).parallelism
    priced = price(ahp.analyze("tiny", job), ran, job, layout)
    events = timeline.chrome_trace(priced)["traceEvents"]
    end_us = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert end_us == pytest.approx(1e6 * priced.forecast.step_time_s, rel=1e-4)


def test_what_says_nothing_is_refused(tmp_path: Path) -> None:
    plan = plan_of({"data_parallel_shard_degree": 4})
    short = run_folder(tmp_path / "short", plan, 1.0, steps=7)
    with pytest.raises(BadInput, match=r"7 steps were measured under its plan \(valid: 8 or more"):
        run([short, "-o", str(tmp_path / "c.yaml")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no step was measured there"):
        run([str(tmp_path / "empty"), "-o", str(tmp_path / "c.yaml")])
    with pytest.raises(BadInput, match=r"RUN = '.*none': no such folder \(valid: "):
        run([str(tmp_path / "none"), "-o", str(tmp_path / "c.yaml")])
    long = run_folder(tmp_path / "long", plan, 1.0)
    for times, told in ((150.0, "150"), (0.0, "0"), (0.001, "0.001")):
        other = run_folder(tmp_path / f"times-{told}", plan, times)
        with pytest.raises(
            BadInput, match=rf"RUN = '.*': its steps took {told} times their forecast, so .*0.01 to 100"
        ):
            run([other, "-o", str(tmp_path / "c.yaml")])
    with pytest.raises(BadInput, match=r"RUN = '.*/long/': given a second time, so that it would count twice"):
        run([long, f"{long}/", "-o", str(tmp_path / "c.yaml")])
    elsewhere = run_folder(
        tmp_path / "elsewhere", plan_of({"tensor_parallel_degree": 4}, {**NODE, "device": "L4-24GB"}), 1.0
    )
    with pytest.raises(BadInput, match="it ran on another cluster than"):
        run([long, elsewhere, "-o", str(tmp_path / "c.yaml")])
    groups = [{"name": name, **NODE} for name in ("a", "b")]
    mixed = {"groups": groups, "links": [{"between": ["a", "b"], "gbps": 400, "latency_us": 5}]}
    both = run_folder(
        tmp_path / "both", plan_of({"data_parallel_shard_degree": 4, "pipeline_parallel_degree": 2}, mixed), 1.0
    )
    with pytest.raises(BadInput, match=r"cluster.groups = \['a', 'b'\]: .* which of its groups took longer"):
        run([both, "-o", str(tmp_path / "c.yaml")])
    assert not (tmp_path / "c.yaml").exists()


def test_a_calibrated_group_of_a_mixed_cluster_is_refused() -> None:
    calibration = {"step_ratio": 1.1, "runs": 1, "source": "a test"}
    data = Cluster.model_validate(Cluster.parse("1x4xA100-SXM-80GB")).plain()
    [group] = data["groups"]
    data["groups"] = [{**group, "name": "a", "calibration": calibration}, {**group, "name": "b"}]
    data["links"] = [{"between": ["a", "b"], "link": {"bandwidth_bytes_per_s": 5e10, "latency_s": 5e-6}}]
    with pytest.raises(BadInput, match=r"cluster.groups.calibration = 1.1: .*leave it out of 'a' \(valid: null\)"):
        ahp.simulate(
            model="tiny", cluster=data, job=JOB,
            parallelism={"data_parallel_shard_degree": 4, "pipeline_parallel_degree": 2},
        )  # fmt: skip


MIXED = {
    "groups": [
        {"name": "new", "nodes": 1, "devices_per_node": 2, "device": "H100-SXM-80GB"},
        {"name": "old", "nodes": 1, "devices_per_node": 2, "device": "A100-SXM-80GB"},
    ],
    "links": [{"between": ["new", "old"], "gbps": 100}],
}


def cut(new: int) -> dict[str, Any]:
    """A pipeline with so many of the model's four blocks on the new devices."""
    stages = [{"group": "new", "layers": new}, {"group": "old", "layers": 4 - new}]
    return {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "stages": stages, "micro_batch_size": 1}


@pytest.mark.slow
def test_runs_on_a_mixed_cluster_say_together_what_each_group_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ahp.cluster.scaled import scaled

    cluster = Cluster.from_dict(MIXED)
    new, old = cluster.groups
    truth = cluster.model_copy(update={"groups": (scaled(new, 1.2, ""), scaled(old, 1.9, ""))})
    folders = []
    for layers in (1, 2, 3):
        plan = plan_of(cut(layers), cluster.plain())
        real_s = forecast(plan.model_copy(update={"cluster": truth.plain()})).step_time_s
        folders.append(run_folder(tmp_path / f"cut-{layers}", plan, real_s / forecast(plan).step_time_s))
    out = tmp_path / "c.yaml"
    assert run([*folders, "-o", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["calibration"]
    assert told == {"new": pytest.approx(1.2, rel=0.06), "old": pytest.approx(1.9, rel=0.06)}
    other = plan_of({**cut(2), "micro_batch_size": 2}, Cluster.load(out).plain())
    real = forecast(other.model_copy(update={"cluster": truth.plain()}))
    assert forecast(other).step_time_s == pytest.approx(real.step_time_s, rel=0.05)
    assert re.fullmatch(
        r"Confidence: datasheet figures, groups corrected by 27 steps of 3 runs, [-\d]+", confidence(Cluster.load(out))
    )
    assert re.search(r"; times 1\.\d+ by 27 steps of 3 runs", Cluster.load(out).groups[1].device.source)
    assert run([*folders, "-o", str(out)]) == 0
    assert "From here on each group counts as slower by a factor: new 1." in capsys.readouterr().out
