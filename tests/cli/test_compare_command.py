"""``ahp compare``: which of two is faster, what makes the difference, in which settings they differ."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ahp.cli.compare import _tokens, _word, run
from ahp.cli.explain import run as explain
from ahp.cli.main import main
from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.forecast.step import price
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import Parallelism, Plan
from ahp.search.ties import TIED

JOB = {"sequence_length": 1024, "global_batch_size": 64}
SHARDED = {"data_parallel_shard_degree": 8, "zero_stage": 3, "micro_batch_size": 4}
SPLIT = {"tensor_parallel_degree": 4, "data_parallel_shard_degree": 2, "zero_stage": 1, "micro_batch_size": 4}


FOUR = {"nodes": 1, "devices_per_node": 4, "device": "A100-SXM-80GB"}


def write(path: Path, layout: dict[str, Any], **more: Any) -> str:
    cluster = {"nodes": 1, "devices_per_node": 8, "device": "A100-SXM-80GB"}
    plan = {"model": "gpt2", "job": JOB, "cluster": cluster, "parallelism": layout, **more}
    Plan.model_validate(plan).save(path)
    return str(path)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    return [write(tmp_path / "a.yaml", SHARDED), write(tmp_path / "b.yaml", SPLIT)]


def step_s(layout: dict[str, Any]) -> float:
    job = Job.model_validate(JOB)
    cluster = Cluster.parse("8xA100-SXM-80GB")
    return price(analyze("gpt2", job), cluster, job, Parallelism(**layout)).forecast.step_time_s


def compared(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_difference_is_that_of_the_forecasts_part_by_part(
    two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(two, capsys)
    sharded, split = step_s(SHARDED), step_s(SPLIT)
    assert found["a"]["forecast"]["step_time_s"] == sharded
    assert found["b"]["forecast"]["step_time_s"] == split
    assert sum(found["difference"]["step"].values()) == pytest.approx(split - sharded)
    sizes = [abs(more) for more in found["difference"]["step"].values()]
    assert sizes == sorted(sizes, reverse=True)
    assert found["settings"]["tensor parallel degree"] == [1, 4]
    assert "global batch size" not in found["settings"]
    assert not {"devices", "nodes", "links"} & set(found["settings"])
    slower = "A" if sharded > split else "B"
    assert max(sharded, split) > 2 * min(sharded, split)
    assert found["verdict"][0].startswith(f"{slower} takes ")
    assert "times as long: " in found["verdict"][0]


def test_people_read_tables_with_both(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(two) == 0
    out = capsys.readouterr().out
    for words in (
        "Where the time goes",
        "Where the memory of the fullest rank goes",
        "What differs",
        "zero stage",
        "B - A",
    ):
        assert words in out
    assert out.rstrip().endswith(f"ahp explain {two[0]}    ahp explain {two[1]}")
    assert not any(line.endswith(" ") for line in out.splitlines())


@pytest.mark.slow
def test_no_explanation_ends_a_line_with_a_space(
    two: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for plan in two:
        assert explain([plan]) == 0
        lines = capsys.readouterr().out.partition("Next: ")[0].splitlines()
        assert max(map(len, lines)) <= 80
        assert not any(line.endswith(" ") for line in lines)


def test_a_layout_in_words_is_for_the_first_ones_job(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = "tp=4 dp_shard=2 zero=1 mb=4"
    by_words, by_file = compared([two[0], words], capsys), compared(two, capsys)
    assert by_words["b"]["forecast"] == by_file["b"]["forecast"]
    assert by_words["next"] == [f"ahp explain {two[0]} --why-not '{words}'"]


def test_one_word_as_tables_print_it_is_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "a.yaml", {"data_parallel_shard_degree": 4, "zero_stage": 3}, cluster=FOUR)
    by_word, by_key = (compared([one, words], capsys)["b"] for words in ("tp4", "tp=4"))
    assert by_word["forecast"] == by_key["forecast"]
    assert by_word["capacity_bytes"] == 80 * 2**30


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("device", "memory_bytes"), 90_000_000_000, {"device memory bytes": [85_899_345_920, 90_000_000_000]}),
        (("device", "power_limit_w"), 300.0, {"device power limit w": [400.0, 300.0]}),
        (("device", "peak_flops_per_s", "bf16"), 3e14, {"device peak flops per s bf16": [3.12e14, 3e14]}),
        (("calibration",), {"step_ratio": 1.5, "runs": 1, "source": "a run"}, {"calibration step ratio": [None, 1.5]}),
        (("measured",), {"memory": [{"workers": 1, "bytes_per_s": 1e12}]}, {"measured cluster": [False, True]}),
    ],
)
def test_figures_of_the_cluster_that_differ_are_told(
    path: tuple[str, ...], value: Any, told: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such plans have other forecasts, and were said to differ in nothing."""
    one, other = (Cluster.parse("8xA100-SXM-80GB").plain() for _ in range(2))
    *above, last = path
    changed = other["groups"][0]
    for key in above:
        changed = changed[key]
    changed[last] = value
    words = [write(tmp_path / name, SHARDED, cluster=cluster) for name, cluster in (("a.yaml", one), ("b.yaml", other))]
    assert compared(words, capsys)["settings"] == told


def test_two_measurements_are_no_one_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clusters = [Cluster.parse("8xA100-SXM-80GB").plain() for _ in range(2)]
    for rate, cluster in zip((1e12, 2e12), clusters, strict=True):
        cluster["groups"][0]["measured"] = {"memory": [{"workers": 1, "bytes_per_s": rate}]}
    words = [write(tmp_path / f"{at}.yaml", SHARDED, cluster=cluster) for at, cluster in enumerate(clusters)]
    assert compared(words, capsys)["settings"] == {"measured cluster": ["measurement 1", "measurement 2"]}


def test_a_plan_beside_itself_is_tied_and_differs_in_nothing(
    two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared([two[0], two[0]], capsys)
    assert found["verdict"] == [f"The forecast cannot tell them apart (less than {100 * TIED:.0f} %)."]
    assert found["settings"] == {}
    assert set(found["difference"]["step"].values()) == {0.0}
    assert found["next"] == [f"ahp explain {two[0]}"]
    assert run([two[0], two[0]]) == 0
    assert "nothing: model, cluster, job, layout and engine are the same" in capsys.readouterr().out


def test_of_tied_ones_the_simpler_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ways to number the same ranks of one node."""
    plain = write(tmp_path / "a.yaml", SPLIT)
    ordered = write(tmp_path / "b.yaml", {**SPLIT, "mesh_order": ["tp", "dp_shard"]})
    found = compared([plain, ordered], capsys)
    assert found["verdict"] == [
        f"The forecast cannot tell them apart (less than {100 * TIED:.0f} %); A is the simpler layout."
    ]


def test_other_batches_and_devices_are_compared_by_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    four = {"nodes": 1, "devices_per_node": 4, "device": "A100-SXM-80GB"}
    small = write(tmp_path / "a.yaml", {**SHARDED, "data_parallel_shard_degree": 4}, cluster=four)
    large = write(tmp_path / "b.yaml", SHARDED, job={**JOB, "global_batch_size": 128})
    found = compared([small, large], capsys)
    tokens = [one["forecast"]["tokens_per_s_per_device"] for one in (found["a"], found["b"])]
    assert "tokens per second; their steps do not have the same number of tokens." in found["verdict"][0]
    assert found["verdict"][1].startswith("B has 8 devices, A 4: each of B's trains ")
    assert found["settings"]["devices"] == ["4 x A100-SXM-80GB", "8 x A100-SXM-80GB"]
    assert ("more" if tokens[1] > tokens[0] else "fewer") in found["verdict"][1]


def test_a_layout_in_words_may_be_longer_than_the_name_of_a_file(
    two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(two[0])
    words = " ".join(f"{key}={value}" for key, value in plan.parallelism if value is not None)
    assert len(words) > 255
    told = compared([two[0], words], capsys)
    assert told["b"]["parallelism"] == told["a"]["parallelism"]


def test_next_to_nothing_is_no_hundred_percent_fewer() -> None:
    assert _tokens(0.002) == "0.002 times as many tokens"
    assert _tokens(0.01) == "99 % fewer tokens"
    assert _tokens(0.006) == "99 % fewer tokens"


def test_many_times_as_much_is_said_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"nodes": 1, "devices_per_node": 1, "device": "A100-SXM-80GB"}
    small = write(tmp_path / "a.yaml", {}, cluster=one, job={**JOB, "global_batch_size": 8})
    large = write(tmp_path / "b.yaml", SHARDED)
    told = compared([small, large], capsys)["verdict"]
    assert re.fullmatch(r"B trains \d\d times as many tokens per second; their steps .*", told[0])
    told = compared([large, small], capsys)["verdict"]
    assert re.fullmatch(r"B trains 9\d % fewer tokens per second; their steps .*", told[0])
    assert told[1].startswith("B has 1 device, A 8: each of B's trains ")


def test_stages_on_groups_are_said_as_a_user_writes_them() -> None:
    layout = Parallelism.model_validate(
        {"stages": [{"group": ["a", "b"], "layers": 8}], "data_parallel_replicate_degree": 2}
    )
    assert _word(layout.model_dump(mode="json")["stages"]) == "{group: a b, layers: 8}"


def test_what_does_not_fit_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = {**JOB, "global_batch_size": 1024}
    fits = write(tmp_path / "a.yaml", SHARDED, job=large)
    heavy = write(tmp_path / "b.yaml", {**SHARDED, "micro_batch_size": 128}, job=large)
    found = compared([fits, heavy], capsys)
    assert found["verdict"][0].startswith("B does not fit: ")


def test_runs_stand_beside_their_forecasts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, layout, took_s in (("one", SHARDED, 0.5), ("two", SPLIT, 0.25)):
        folder = tmp_path / name
        folder.mkdir()
        write(folder / "plan.yaml", layout)
        steps = ({"step": step, "loss": 5.0 - step, "step_time_s": took_s, "memory_bytes": 2**30} for step in (1, 2, 3))
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    folders = [str(tmp_path / name) for name in ("one", "two")]
    found = compared(folders, capsys)
    assert found["a"]["measured"]["step_time_s"] == 0.5
    assert found["verdict"][-1] == "Measured, B takes 50 % less time for each token than A."
    assert found["next"] == [f"ahp report {' '.join(folders)}"]
    itself = compared([folders[0], folders[0]], capsys)
    assert itself["verdict"][-1] == "Measured, B takes as long for each token as A."
    assert run(folders) == 0
    assert "Measured against the forecast" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ("nowhere", r"B = 'nowhere': neither a plan, nor a run's folder, nor a layout in words"),
        ("nowhere.yaml", r"plan = 'nowhere.yaml': "),
        ("", r"plan = '': must be a plan.yaml, or a run's folder"),
        ("tp=three", r"tensor_parallel_degree"),
        ("tp=5", r"tp=5: parallelism: its degrees multiply to 5"),
    ],
)
def test_what_is_neither_is_refused(two: list[str], second: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        run([two[0], second])


def test_the_second_is_refused_before_the_first_is_forecast(two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(plan: Plan) -> Plan:
        raise AssertionError("forecast before B was read")

    monkeypatch.setattr("ahp.cli.compare.price", never)
    with pytest.raises(BadInput, match="B = 'nowhere'"):
        run([two[0], "nowhere"])


def test_the_first_must_be_a_plan_or_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "tp=2", "tp=4"]) == 2
    assert "plan = 'tp=2'" in capsys.readouterr().err


@pytest.mark.slow
def test_known_models_are_compared_without_torch(two: list[str]) -> None:
    code = f"import sys; from ahp.cli.main import main; main(['compare', *{two!r}]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
