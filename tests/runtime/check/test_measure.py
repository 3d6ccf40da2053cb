"""Plans timed on workers of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ahp.cli import plan as plan_command
from ahp.cli.plan_measured import by_measurement
from ahp.cluster.model import Cluster
from ahp.errors import AhpError, BadInput, HardwareMismatch
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import Parallelism, Plan
from ahp.runtime.check.measure import Measured, measure
from ahp.search.problem import problem
from ahp.search.ranking import search

SMALL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
JOB = Job(sequence_length=16, global_batch_size=4, steps=2, precision="fp32")


def of(**degrees: Any) -> Plan:
    return Plan(model=SMALL, job=JOB, parallelism=Parallelism(**degrees))


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
def test_every_plan_is_timed_and_one_that_fails_comes_last() -> None:
    said: list[str] = []
    bad = of(pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B", micro_batch_size=2)
    found = measure([bad, of(data_parallel_replicate_degree=2, micro_batch_size=2), of()], steps=3, say=said.append)
    assert [len(one.step_times_s) for one in found] == [3, 3, 0]
    assert found[0].step_time_s <= found[1].step_time_s
    assert said[1].startswith("measuring 2 of 3: dp2x1")
    assert found[2].plan == bad
    assert found[2].words().startswith("could not be measured: virtual_stages_per_rank = 1: Interleaved1F1B needs")


def test_when_no_plan_runs_the_first_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise AhpError("out of memory")

    monkeypatch.setattr("ahp.runtime.check.rehearsal.on_workers", fails)
    with pytest.raises(AhpError, match="no plan could be measured; the first: out of memory"):
        measure([of(), of()])


def test_what_cannot_be_measured_here_is_refused_before_a_worker_starts() -> None:
    elsewhere = of(data_parallel_replicate_degree=64).model_copy(
        update={"cluster": Cluster.parse("8x8xH100-SXM-80GB").plain()}
    )
    with pytest.raises(HardwareMismatch, match=r"H100.*plan again: ahp plan MODEL local"):
        measure([elsewhere])
    with pytest.raises(HardwareMismatch, match=r"job\.precision = 'fp8': processor cores have no products in 8 bits"):
        measure([of().model_copy(update={"job": JOB.model_copy(update={"precision": "fp8"})})])
    with pytest.raises(BadInput, match="steps = 0"):
        measure([of()], steps=0)
    with pytest.raises(BadInput, match="--measure = -1"):
        plan_command.run(["tiny", "local", "--measure", "-1"])


def test_the_order_is_that_of_medians() -> None:
    odd, steady = Measured(of(), (1.0, 1.0, 9.0)), Measured(of(), (2.0, 2.0, 2.0))
    assert odd.step_time_s < steady.step_time_s < Measured(of(), failure="no room").step_time_s
    assert steady.words(against=odd) == "measured here: 2.00 s a step (2.00 s .. 2.00 s), 100 % slower"


@pytest.mark.slow
def test_the_command_writes_the_plan_that_was_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def backwards(plans: tuple[Plan, ...], **_: object) -> list[Measured]:
        return [Measured(plan, (1.0 + number,)) for number, plan in enumerate(reversed(plans))]

    monkeypatch.setattr("ahp.runtime.check.measure.measure", backwards)
    model, out, cluster = tmp_path / "config.json", tmp_path / "plan.yaml", tmp_path / "cluster.yaml"
    model.write_text(json.dumps(SMALL))
    Cluster.parse("1x2xcpu").save(cluster)  # whose copies are timed when it is described: once, for both plans
    keys = ["--job.sequence-length", "16", "--job.global-batch-size", "4", "--job.precision", "fp32"]
    assert plan_command.run([str(model), str(cluster), "-o", str(out), *keys]) == 0
    forecast_first = Plan.load(out).parallelism
    today = ["--current", "dp_replicate=2"]
    assert plan_command.run([str(model), str(cluster), "--measure", "3", *today, "-o", str(out), *keys]) == 0
    best = Plan.load(out)
    assert best.current is not None, "the forecast's first plan has it, and another one was faster"
    assert best.current.parallelism.data_parallel_replicate_degree == 2
    assert best.parallelism != forecast_first
    assert best.why[0].startswith("measured here: 1.00 s a step")
    assert best.why[1].startswith(
        f"the forecast had {forecast_first.short()} first; compared with that plan this one is "
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "measured here: 3.00 s a step" in shown
    assert best.current.reason.startswith("not measured; ")
    assert f"Today {best.current.parallelism.short()}" in shown
    assert {loser.parallelism for loser in best.rejected if loser.reason.startswith("measured here")} >= {
        forecast_first
    }
    assert all(loser.reason.startswith(("measured here", "not measured; ", "does not fit")) for loser in best.rejected)


def test_a_budget_without_a_solver_is_refused() -> None:
    for option in (["--budget", "7"], ["--seed", "3"]):
        with pytest.raises(BadInput, match="the exact search has none"):
            plan_command.run(["tiny", "local", *option])


@pytest.mark.slow
def test_today_is_compared_with_the_plan_that_was_fastest() -> None:
    job = Job(sequence_length=64, global_batch_size=8, precision="bf16")
    graph = analyze(SMALL, job)
    today = search(graph, "2xH100-SXM-80GB", job).plans[2].parallelism
    ranking = search(graph, "2xH100-SXM-80GB", job, current=today)
    asked = problem(graph, "2xH100-SXM-80GB", job, None, ranking.best.engine)

    def told(*order: int) -> str:
        """``order``: of the first plans, the fastest first."""
        results = [Measured(ranking.plans[number], (1.0 + at,)) for at, number in enumerate(order)]
        found = by_measurement(ranking, results, asked)
        assert found.current is not None
        assert found.best.current == found.current.lost()
        assert found.best.parallelism == ranking.plans[order[0]].parallelism
        assert [plan.parallelism for plan in found][len(order) :] == [plan.parallelism for plan in ranking][
            len(order) :
        ]
        return found.current.against_best

    assert told(2, 0, 1) == "it is the best"
    assert told(1, 2, 0).startswith("measured here: 2.00 s a step (2.00 s .. 2.00 s), 100 % slower")
    assert told(1, 0).startswith("not measured; ")
