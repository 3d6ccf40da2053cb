"""The page: whole, in one file, without the network, with what the run left and nothing that it did not."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ahp.cli.report import run as report
from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.forecast.step import price, pricer
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import Forecast, Parallelism, Plan, Rejected
from ahp.report import page, plan_sections, run_sections
from ahp.report.schedules import compared_with_pattern
from ahp.run_files import judge_status
from ahp.schedule.orders import order_text
from ahp.schedule.patterns import make
from tests.search.small import cpu_workers

FORECAST = Forecast(
    step_time_s=0.5, step_time_low_s=0.4, step_time_high_s=0.6, tokens_per_s_per_device=100.0, mfu=0.31,
    mfu_peak="bf16 dense", memory_allocated_bytes=2 << 30, memory_reserved_bytes=3 << 30, fit_probability=0.99,
    fits=True, step={"forward": 0.1, "backward": 0.3, "bubble": 0.0}, memory={"parameters": 1 << 30},
    fullest_rank=1,
)  # fmt: skip
PLAN = Plan(
    cluster={"groups": [{"nodes": 2, "devices_per_node": 4, "device": {"name": "H100", "memory_bytes": 80 << 30}}]},
    forecast=FORECAST,
    why=("nothing else <is> as fast",),
    rejected=(
        Rejected(parallelism=Parallelism(tensor_parallel_degree=8), reason="all-reduce exposed", step_time_s=0.7),
    ),
)


def event(name: str, rank: int, start_us: float, length_us: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 0, "tid": rank, "ts": start_us, "dur": length_us}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    PLAN.save(run / "plan.yaml")
    lines = [
        {"step": step, "loss": 9.0 - step, "step_time_s": 0.55, "tokens_per_s": 7.0, "memory_bytes": 1 << 30}
        for step in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    (run / "status.json").write_text(json.dumps({"state": "failed", "step": 2, "cause": "disk <full>", "exit_code": 1}))
    (run / "sample.txt").write_text("def a():\n    return '<script>'\n")
    (run / "trace.json").write_text(json.dumps({"traceEvents": [event("0F0", 0, 0, 50)]}))
    return run


def test_run_page_has_every_part(run: Path) -> None:
    assert page.write(run) == run / "report.html"
    text = (run / "report.html").read_text()
    for words in (
        "failed, step 3 of 200", "disk &lt;full&gt;", "6.000", "from 8.000", "550 ms", "10 % slower than predicted 500 ms",
        "nothing else &lt;is&gt; as fast", "all-reduce exposed", "&lt;script&gt;", "8 x H100", "ln(2048)", "0F0: 50.0 us",
    ):  # fmt: skip
        assert words in text, words
    assert list(run.glob("*.tmp")) == []


MARK = "<img src=x onerror=alert(1)></script><script>alert(1)</script>"
LINE = {"step": 4, "loss": 5.0, "step_time_s": 0.5, "tokens_per_s": 7.0, "memory_bytes": 1 << 30}
STATUS = {"state": "failed", "step": 2, "cause": None, "exit_code": 1}
EVENT = event("0F0", 0, 0, 50)
NAMED = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": MARK}}
BAD_STATUS: list[Any] = [*({**STATUS, key: MARK} for key in STATUS), {**STATUS, "step": None}, {}, [], 3]
BAD_LINES: list[Any] = [
    *({**LINE, key: value} for key in LINE for value in (MARK, None, [1], {"a": 1}, -1)),
    *({key: value for key, value in LINE.items() if key != left_out} for left_out in LINE),
    {**LINE, "step_time_s": 0}, {**LINE, "step_time_s": float("inf")}, {**LINE, "loss": float("nan")}, 3, MARK, {**LINE, "validation_loss": MARK},
    {**LINE, "memory_reserved_bytes": None, "mfu": None, "data_wait_s": None}, {**LINE, "memory_bytes": 10**400},
]  # fmt: skip
BAD_EVENTS: list[Any] = [
    *({**EVENT, key: value} for key in EVENT for value in (MARK, None, [1], {"a": 1})),
    *({key: value for key, value in EVENT.items() if key != left_out} for left_out in EVENT),
    NAMED, {**NAMED, "args": []}, {**NAMED, "tid": None}, 3,
]  # fmt: skip
"""What a disk, a person or a foreign run may have left in a folder."""


def test_a_page_that_cannot_be_written_is_one_sentence(run: Path) -> None:
    (run / "file").write_text("")
    with pytest.raises(BadInput, match=r"page.html.: cannot be written \(a part of its path is a file\); give another"):
        page.write(run, out=run / "file" / "page.html")


def test_damaged_files_neither_end_the_page_nor_write_into_it(run: Path) -> None:
    lines = [json.dumps(line).encode() for line in BAD_LINES]
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines, b"\xff\xfe", b"[" * 9999, b""]))
    (run / "trace.json").write_text(json.dumps([*BAD_EVENTS, EVENT]))
    (run / "sample.txt").write_bytes(MARK.encode() + b"\xff")
    begun = {"began": "2026-01-01T00:00:00+00:00", "plan": MARK, "workers": 2, "first_step": 0}
    ends = [
        {"ended": ended, "why": MARK, "last_step": 3, "saved_step": 2}
        for ended in (begun["began"], MARK, 3, None, "2025-01-01")
    ]
    starts = [json.dumps(line) for end in ends for line in ({**begun, "workers": MARK}, begun, end, 3, {MARK: MARK})]
    (run / "starts.jsonl").write_text("\n".join(["{", *starts]))
    text = page.write(run).read_text(encoding="utf-8")
    assert "<img" not in text
    assert "</script><script>alert" not in text
    for words in ("The layout", "Loss", "rank by rank", "&lt;img src=x"):
        assert words in text, words


def test_a_start_that_nobody_wrote_the_end_of_is_shown_as_ended_where_the_run_is(run: Path) -> None:
    begun = {"began": "2026-01-01T00:00:00+00:00", "plan": "dp2", "workers": 2, "first_step": 0}
    (run / "starts.jsonl").write_text(f"{json.dumps(begun)}\n" * 2)
    last = run_sections.RunFiles.read(run).starts[-1]
    assert (last.why, last.last_step, last.ended) == ("disk <full>", 2, None)
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 2, "cause": None, "exit_code": None}))
    last = run_sections.RunFiles.read(run).starts[-1]
    assert (last.why, last.last_step) == (None, None)


@pytest.mark.parametrize("content", [*map(json.dumps, BAD_STATUS), "{", "[" * 9999, b"\xff"])
def test_a_damaged_status_is_none_or_text(run: Path, content: str | bytes) -> None:
    (run / "status.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    text = page.header("Run", PLAN, judge_status(run / "status.json"), 0)
    assert "<img" not in text
    assert text.startswith("<header><h1>Run ")


def test_slow_ranks_and_spikes_are_shown_as_text(run: Path) -> None:
    slow = {"rank": 3, "host": MARK, "ratio": 1.52, "reason": "processor", "why": "computes long", "since_step": 21}
    spike = {"step": 57, "of": "grad_norm", "value": 9.512345678, "median": 3.25}
    noticed = {
        "slow_ranks": [{**slow, "plan": {"words": "12 % more tokens/s"}}, {**slow, "plan": 3}, {}, 3],
        "loss_spikes": [spike],
    }
    status = {"state": "running", "step": 60, "cause": None, "exit_code": None, **noticed}
    (run / "status.json").write_text(json.dumps(status))
    text = "".join(run_sections.noticed(run / "status.json"))
    assert "<img" not in text
    for words in (
        "Slow ranks",
        "1.52",
        "computes long",
        "12\N{NO-BREAK SPACE}% more tokens/s",
        "Spikes",
        "57",
        "gradient norm",
        ">9.512<",
        "3.25",
    ):
        assert words in text, words
    (run / "status.json").write_text(json.dumps({**status, "slow_ranks": 3, "loss_spikes": []}))
    assert run_sections.noticed(run / "status.json") == []


@pytest.mark.parametrize("trace", [{"traceEvents": 3}, {"traceEvents": [3]}, 3, "ab", [], {}, None])
def test_a_trace_of_another_form_is_left_out(trace: Any) -> None:
    assert plan_sections.timeline(trace) == []


@pytest.mark.parametrize("text", ["{", "[" * 9999, b"\xff"])
def test_a_trace_that_is_no_json_is_left_out(run: Path, text: str | bytes) -> None:
    (run / "trace.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert page._json(run / "trace.json") is None


def test_a_run_whose_process_has_gone_is_shown_as_dead(run: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    who = {"pid": gone.pid, "host": socket.gethostname(), "heartbeat": datetime.now(UTC).isoformat()}
    (run / "status.json").write_text(json.dumps({**STATUS, **who, "state": "running"}))
    text = page.header("Run", PLAN, judge_status(run / "status.json"), 4)
    assert "<span class='state dead'>dead, step 4 of 200</span>" in text
    assert f"process {gone.pid} on" in text


@pytest.mark.parametrize(
    "groups",
    [
        [{}],
        [3],
        3,
        "ab",
        [{"nodes": 1}],
        [{"nodes": "x", "devices_per_node": 10**9, "device": {"name": "a", "memory_bytes": 1}}],
    ],
)
def test_a_cluster_of_another_form_is_refused(groups: Any) -> None:
    with pytest.raises(BadInput, match=r"cluster\.groups = "):
        plan_sections.devices(PLAN.model_copy(update={"cluster": {"groups": groups}}))


@pytest.mark.parametrize("model", [{"model_type": MARK}, {"model_type": 3}, MARK])
def test_a_model_of_another_form_is_text_on_the_page(model: Any) -> None:
    plan = PLAN.model_copy(update={"model": model, "why": (MARK,), "versions": {MARK: MARK}})
    for text in (
        page.header("Run", plan, None, 0),
        plan_sections.layout(plan),
        plan_sections.job(plan),
        *plan_sections.lost(plan),
    ):
        assert "<img" not in text


def test_page_asks_the_network_for_nothing_and_is_small(run: Path) -> None:
    text = page.write(run).read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(|fetch\(|XMLHttpRequest""", text)
    assert len(text) < 60_000


def test_run_that_has_not_made_a_step_gets_a_page(tmp_path: Path) -> None:
    Plan().save(tmp_path / "plan.yaml")
    text = page.write(tmp_path).read_text()
    assert "<h2>Loss" not in text
    assert "Memory (forecast)" not in text
    assert "The layout" in text
    assert "what binds are not shown: the plan names no cluster" in text


def test_a_model_that_is_code_is_not_run_for_a_page(tmp_path: Path) -> None:
    cluster = Cluster.parse("1x4xH100-SXM-80GB").plain()
    PLAN.model_copy(update={"model": "no_such_module:make", "cluster": cluster}).save(tmp_path / "plan.yaml")
    text = page.write(tmp_path / "plan.yaml").read_text()
    assert "its model is code (no_such_module:make), which a page does not run" in text
    assert "1.0 of 79.6 GiB" in text


def test_plan_page_lies_beside_the_plan(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "my-plan.yaml")
    assert page.write(tmp_path / "my-plan.yaml") == tmp_path / "my-plan.html"
    out = tmp_path / "new" / "page.html"
    assert report(["-o", str(out), str(tmp_path / "my-plan.yaml")]) == 0
    assert out.read_text() == (tmp_path / "my-plan.html").read_text()
    text = (tmp_path / "my-plan.html").read_text()
    assert "400 ms to 600 ms" in text
    assert "1.0 of 80.0 GiB" in text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="neither a run's folder nor a plan"):
        page.write(tmp_path / "no")
    with pytest.raises(BadInput, match="no such file"):
        page.write(tmp_path)


def test_steps_that_were_left_out_and_what_was_waited_for_are_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    PLAN.save(run / "plan.yaml")
    lines = [
        {
            "step": step, "loss": None if step == 2 else 9.0 - step, "step_time_s": 0.5, "memory_bytes": 1 << 30,
            "memory_reserved_bytes": 3 << 30, "mfu": 0.25, "data_wait_s": 0.05, "checkpoint_wait_s": 0.0,
        }
        for step in range(1, 5)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page.write(run).read_text()
    for words in ("from 8.000, 1 step left out", "25 %", "3.0 GiB", "data 200 ms, checkpoints 0 s"):
        assert words in text, words


def test_a_schedule_of_its_own_is_drawn_beside_the_best_fixed_pattern(tmp_path: Path) -> None:
    order = order_text(make("GPipe", 4, 1, 8))
    layout = Parallelism(
        pipeline_parallel_degree=4, pipeline_parallel_schedule="Synthesized", pipeline_parallel_order=order
    )
    keys = {
        "model": "tiny",
        "job": Job(sequence_length=64, global_batch_size=8),
        "cluster": Cluster.parse("1x4xH100-SXM-80GB").plain(),
        "parallelism": layout,
    }
    Plan(**{**PLAN.model_dump(exclude={"rejected"}), **keys}).save(tmp_path / "plan.yaml")
    text = page.write(tmp_path / "plan.yaml").read_text()
    assert "Its schedule beside a fixed pattern" in text
    assert "made for these stages" in text
    assert order[0] not in text
    for words in (
        "Memory of every rank",
        "<div class='named'>rank 3</div>",
        "What binds",
        "rank by rank",
        "rank 3, bubble",
    ):
        assert words in text, words
    keys["model"] = "a model that is not here"
    Plan(**{**PLAN.model_dump(exclude={"rejected"}), **keys}).save(tmp_path / "plan.yaml")
    assert "Its schedule beside" not in page.write(tmp_path / "plan.yaml").read_text()


def test_an_order_that_is_a_patterns_own_is_as_fast() -> None:
    """It was ``0.0 % of a step more than InterleavedZeroBubble``."""
    order = order_text(make("InterleavedZeroBubble", 4, 1, 8))
    layout = Parallelism(
        pipeline_parallel_degree=4, pipeline_parallel_schedule="Synthesized", pipeline_parallel_order=order
    )
    job = Job(sequence_length=64, global_batch_size=8)
    found = compared_with_pattern(pricer(analyze("tiny", job), Cluster.parse("1x4xH100-SXM-80GB"), job), layout)
    assert found is not None
    assert found.words == "made for these stages: as fast as InterleavedZeroBubble, the best fixed pattern that fits"


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "on_cores"), [("2xH100-SXM-80GB", False), (cpu_workers(2, 2).plain(), True)])
def test_what_is_predicted_of_the_peak_is_what_is_measured_there(cluster: Any, on_cores: bool) -> None:
    plan = Plan(cluster=Cluster.resolve(cluster).plain(), parallelism=Parallelism(data_parallel_replicate_degree=2))
    graph = analyze("gpt2", plan.job)
    priced = price(graph, Cluster.resolve(cluster), plan.job, plan.parallelism).forecast
    found = run_sections.predicted_peak_bytes(plan.model_copy(update={"forecast": priced}))
    assert found == (sum(priced.memory.values()) if on_cores else priced.memory_reserved_bytes)


def test_the_cluster_of_a_plan_may_be_written_by_hand(tmp_path: Path) -> None:
    by_hand = PLAN.model_copy(update={"cluster": {"nodes": 2, "devices_per_node": 4, "device": "H100"}})
    by_hand.save(tmp_path / "plan.yaml")
    assert "8 x H100-SXM-80GB" in page.write(tmp_path / "plan.yaml").read_text()
