"""Several runs on one page, a page that follows a run, and both in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ahp.cli import report as command
from ahp.cli.main import main
from ahp.cluster.model import Cluster
from ahp.job import Job
from ahp.plan import Plan
from ahp.report.differences import differences

from .test_page import PLAN

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def left_by_a_run(folder: Path, steps: int, state: str = "done") -> Path:
    folder.mkdir()
    PLAN.model_copy(update={"job": Job(steps=steps)}).save(folder / "plan.yaml")
    lines = [
        {"step": step, "loss": 9.0 - 0.1 * step, "grad_norm": 1.0, "step_time_s": 0.5, "tokens_per_s": 7.0}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    alive = {"pid": 1, "host": "elsewhere", "heartbeat": datetime.now(UTC).isoformat()}
    status = {"state": state, "step": steps, "cause": None, "exit_code": None}
    (folder / "status.json").write_text(json.dumps({**status, **alive}))
    return folder


def test_several_runs_lie_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = left_by_a_run(tmp_path / "one", 20), left_by_a_run(tmp_path / "other", 30)
    page = tmp_path / "both.html"
    assert main(["report", str(one), str(other), "--out", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"wrote": str(page), "next": [f"ahp report {one}"]}
    text = page.read_text()
    assert "one beside other" in text
    assert all(words in text for words in (">one<", ">other<", "20", "30", "What differs"))


def test_a_switch_that_neither_plan_says_is_no_difference() -> None:
    """Plans of earlier versions do not have the key."""
    earlier = PLAN.model_copy(
        update={
            "cluster": {"groups": [{"nodes": 1, "devices_per_node": 4, "device": {"name": "d", "memory_bytes": 1}}]}
        }
    )
    assert earlier.cluster is not None
    groups = earlier.cluster["groups"]
    now, known = (
        earlier.model_copy(update={"cluster": {"groups": [{**groups[0], "nvlink_switch": said}]}})
        for said in (None, False)
    )
    assert differences([earlier, now]) == []
    assert differences([earlier, known]) == [("nvlink switch", ("not said", "false"))]


def test_keys_of_models_by_mapping_are_told() -> None:
    small = {"model_type": "gpt2", "n_embd": 64, "n_head": 4}
    plans = [PLAN.model_copy(update={"model": {**small, "n_layer": layers}}) for layers in (2, 3)]
    assert differences(plans) == [("model n layer", (2, 3))]


def test_the_link_between_groups_is_told() -> None:
    groups = [{"name": name, "nodes": 1, "devices_per_node": 4, "device": "A100-SXM-80GB"} for name in ("new", "old")]
    by_hand = [{"groups": groups, "links": [{"between": ["new", "old"], "gbps": gbps}]} for gbps in (400, 100)]
    for clusters in (by_hand, [Cluster.resolve(cluster).plain() for cluster in by_hand]):
        (row,) = differences([PLAN.model_copy(update={"cluster": cluster}) for cluster in clusters])
        assert row[0] == "link of new and old"
        assert row[1][0] != row[1][1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plan.yaml", "run"), "a plan has no curves"),
        (("run", "run", "--follow"), "only one run can be followed"),
        (("plan.yaml", "--follow"), "a plan does not change"),
        (("run", "nowhere"), "neither a run's folder nor a plan"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    left_by_a_run(tmp_path / "run", 3)
    Plan().save(tmp_path / "plan.yaml")
    assert main(["report", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_page_follows_a_run_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, pages = left_by_a_run(tmp_path / "run", 3, "running"), []

    def goes_on(seconds: float) -> None:
        pages.append((folder / "report.html").read_text())
        if len(pages) == 2:
            status = json.loads((folder / "status.json").read_text())
            (folder / "status.json").write_text(json.dumps({**status, "state": "done"}))

    monkeypatch.setattr(command.time, "sleep", goes_on)
    assert main(["report", str(folder), "--follow"]) == 0
    assert len(pages) == 2
    assert all(f'data-every="{command.FOLLOW_S}"' in page for page in pages)
    assert 'data-every="0"' in (folder / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_finds_nothing_to_complain_of(tmp_path: Path) -> None:
    one, other = left_by_a_run(tmp_path / "one", 20), left_by_a_run(tmp_path / "other", 30)
    assert main(["plan", "tiny", "8xH100", "-o", str(tmp_path / "plan.yaml")]) == 0
    for words in ([one], [one, other, "--out", tmp_path / "both.html"], [tmp_path / "plan.yaml"]):
        assert main(["report", *map(str, words)]) == 0
    for page in (one / "report.html", tmp_path / "both.html", tmp_path / "plan.html"):
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=3000",
            "--enable-logging=stderr",
        ]
        command_line = [str(BROWSER), *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
        done = subprocess.run(command_line, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0
        assert "</section></main>" in done.stdout
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
