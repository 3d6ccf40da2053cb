"""benchmarks/accuracy.py on a few made-up rows: what it shows, what it writes, what it leaves out. Pricing is stubbed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ahp.engines import steps
from ahp.errors import BadInput

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
CONSTANT = "host_launches"
SCRIPTS = (
    "accuracy",
    "accuracy_choice",
    "accuracy_judge",
    "accuracy_pairs",
    "accuracy_reach",
    "accuracy_rows",
    "accuracy_tables",
    "page",
)


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script, from its own folder as python starts it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import accuracy

    yield accuracy
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def row(number: int, seconds: float | None, **changes: Any) -> dict[str, Any]:
    model = {"name": "m", "layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 64}
    return {
        "id": f"run-{number}", "source": "here", "verified": True, "gpu": "A100-SXM-80GB", "gpus": 2, "gpus_per_node": 2,
        "model": model, "precision": "fp16", "tp": 1, "pp": 1, "micro_batch": number, "global_batch": 24,
        "measured": {"step_time_s": seconds}, **changes,
    }  # fmt: skip


def fake_simulate(**arguments: Any) -> Any:
    """A step as long as the host takes, a tenth of a second for each launch; micro-batches of 13 are refused."""
    micro_batch = arguments["parallelism"]["micro_batch_size"]
    if micro_batch == 13:
        raise ValueError("micro_batch_size = 13: does not divide 24")
    step_s = 0.1 * steps.value(CONSTANT) * micro_batch
    return SimpleNamespace(
        step_time_s=step_s, step_time_low_s=step_s / 1.5, step_time_high_s=1.5 * step_s,
        memory_allocated_bytes=10 * 2**30, memory_reserved_bytes=11 * 2**30, memory={"parameters": 11 * 2**30}, fit_probability=0.99,
    )  # fmt: skip


def files(folder: Path, **sources: list[dict[str, Any]]) -> list[str]:
    for name, rows in sources.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return [str(folder / f"{name}.json") for name in sources]


def line(text: str, start: str) -> list[str]:
    """The cells of the first table row that starts so."""
    found = next(one for one in text.splitlines() if one.startswith(f"| {start}"))
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.mark.slow
def test_tables_count_what_could_not_be_priced(accuracy: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    launch_s = 0.1 * steps.constants()[CONSTANT].value
    rows = [
        row(1, launch_s / 1.1), row(2, 2 * launch_s / 0.8), row(4, 4 * launch_s / 2.0), row(13, 1.0),
        row(8, None, measured={"memory_gib": 8.0, "memory_reserved_gib": 10.0, "oom": True}), row(3, 1.0, verified=False),
    ]  # fmt: skip
    assert accuracy.main(files(tmp_path, mine=rows), fake_simulate) == 0
    printed = capsys.readouterr().out
    source, count, failed, mean, median, _, worst, bias, inside, left_out = line(printed, "mine |")
    assert (source, count, failed) == ("mine", "5", "1")
    assert [float(mean), float(median), float(worst), float(bias)] == pytest.approx([130 / 3, 20, 100, 30], abs=0.1)
    assert float(inside) == 67
    assert left_out == ""
    assert line(printed, "ValueError: micro_batch_size = 13")[1:] == ["1", "`run-13`"]
    assert line(printed, "not verified")[1:] == ["1", "`run-3`"]
    assert "1 of 3 rows are off by more than 30 %" in printed
    assert "**Not explained yet.** (1): `run-4` +100" in printed
    memory = line(printed.split("## Memory")[1], "mine |")
    assert memory == ["mine", "1", "25.0", "+25.0", "+25", "1", "10.0", "+10.0", "+10", "0 of 3", "1 of 1"]
    assert line(printed.split("## Ranking")[1], "mine |")[1] == "1"


def test_leaving_a_source_out_fits_without_it(accuracy: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    constant = steps.constants()[CONSTANT]
    named = constant.derived_from[0]
    truth = 2.0
    rows = [row(number, 0.1 * truth * number) for number in (1, 2, 4)]
    paths = files(tmp_path, **{named: rows, "other": [row(1, 0.1 * constant.value)]})
    assert accuracy.main([*paths, "--derive"], fake_simulate) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)[CONSTANT] == {"ships": constant.value, "derived": truth, "from": [named]}

    assert accuracy.main([*paths, "--leave-one-out"], fake_simulate) == 0
    printed = capsys.readouterr().out
    own, left_out = (float(line(printed, f"{named} |")[i]) for i in (3, 9))
    assert own == pytest.approx(100 * (constant.value / truth - 1), abs=0.1)
    # Without its rows nothing says how long a launch takes: the value where nothing is known.
    assert left_out == pytest.approx(100 * abs(constant.unknown / truth - 1), abs=0.1)
    assert float(line(printed, "other |")[9]) == 0.0
    assert line(printed.split("## Constants")[1], f"`{CONSTANT}`")[-2:] == [
        f"{truth:g}",
        f"{named}: {constant.unknown:g}",
    ]
    assert steps.value(CONSTANT) == constant.value


def test_every_section_of_the_page_is_written(accuracy: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\nstale {name}\n<!-- end of {name} -->\n" for name in accuracy.TITLES))
    paths = files(tmp_path, mine=[row(1, 0.5), row(13, 1.0)])
    assert accuracy.main([*paths, "--markdown", str(page)], fake_simulate) == 0
    text = page.read_text()
    assert "stale " not in text
    assert line(text, "mine |")[:3] == ["mine", "2", "1"]
    with pytest.raises(SystemExit, match="needs the lines"):
        accuracy.main([*paths, "--markdown", str(tmp_path / "mine.json")], fake_simulate)


def test_a_pattern_explains_rows_and_the_rest_stay_open(accuracy: Any) -> None:
    import accuracy_judge
    import accuracy_rows
    import accuracy_tables

    def far(name: str) -> Any:
        run = accuracy_rows.Run(name, "s", "g", {}, 1.0, None, None, None, True)
        return accuracy_judge.Judged(run, error=-0.5, inside=False, predicted_s=0.5)

    notes = {"far_off": [{"rows": ["a-*"], "why": "slow network"}]}
    told = accuracy_tables.far_off([far("a-1"), far("b-1"), far("a-2")], notes)
    assert "**slow network** (2): `a-1` -50, `a-2` -50" in told
    assert "**Not explained yet.** (1): `b-1` -50" in told


def test_the_bias_of_each_source_counts_once_by_devices(accuracy: Any) -> None:
    import accuracy_judge
    import accuracy_rows
    import accuracy_tables

    def off(source: str, nodes: int, error: float) -> Any:
        cluster = {"cluster": {"nodes": nodes, "devices_per_node": 8}}
        run = accuracy_rows.Run("r", source, "g", cluster, 1.0, None, None, None, True)
        return accuracy_judge.Judged(run, error=error, inside=True, predicted_s=1 + error)

    rows = [off("a", 1, -0.1), off("a", 1, -0.2), off("b", 1, 0.05), off("a", 8, 0.05), off("b", 9, 0.1)]
    text = accuracy_tables.by_devices(rows)
    assert line(text, "2 to 8 |") == ["2 to 8", "2", "-5.0", "10.0"]
    assert line(text, "9 to 64 |") == ["9 to 64", "1", "+5.0", ""]
    assert line(text, "over 256 |")[:2] == ["over 256", "0"]
    assert text.endswith(
        "In 2 sources with runs on up to 8 and on 64 or more devices, the larger runs are forecast slower: by +12.5 points in the mean."
    )


def test_rows_that_nothing_was_derived_from_are_apart(
    accuracy: Any, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unseen").mkdir()
    launch_s = 0.1 * steps.constants()[CONSTANT].value
    files(tmp_path / "unseen", theirs=[row(1, launch_s / 1.2), row(2, 2 * launch_s / 0.6), row(13, 1.0)])
    monkeypatch.setattr(accuracy, "UNSEEN", tmp_path / "unseen")
    assert accuracy.main(files(tmp_path, mine=[row(1, launch_s)]), fake_simulate) == 0
    apart, rest = capsys.readouterr().out.split("## Ranking")
    seen, unseen = apart.split("## Runs that nothing was derived from")
    assert "theirs" not in seen + rest
    assert line(unseen, "theirs |")[:7] == ["theirs", "3", "1", "30.0", "30.0", "38.0", "-40"]
    assert "1 of 2 rows are off by more than 30 %" in unseen


def test_every_shipped_row_is_a_run_with_a_source(accuracy: Any) -> None:
    runs, left_out = sys.modules["accuracy_rows"].read(sorted(accuracy.UNSEEN.glob("*.json")))
    assert {reason for reason in left_out.values() if "routing by force" not in reason} == set()
    assert len({run.id for run in runs}) == len(runs) > 100
    assert len({run.source for run in runs}) == 30  # mixtures of a source count by themselves
    assert all(run.measured_s for run in runs if run.ran)


def test_a_row_of_adapters_is_priced_by_the_engine_that_has_them(accuracy: Any) -> None:
    arguments = sys.modules["accuracy_rows"].arguments
    lora, model = {"r": 16, "lora_alpha": 32}, row(1, 1.0)["model"] | {"hf": {"model_type": "qwen2"}}
    given = row(
        1, 1.0, framework="NeMo AutoModel (FSDP2)", lora=lora, loss_chunk_tokens=64, document_mask=True, model=model
    )
    found = arguments(given)
    assert (found["engine"]["name"], found["engine"]["loss_chunk_tokens"]) == ("ahp", 64)
    assert (found["job"]["lora"], found["job"]["document_mask"]) == (lora, True)
    assert found["model"]["model_type"] == "qwen2"
    given.pop("lora")
    assert arguments(given)["engine"]["name"] == "torchtitan"


def test_a_program_is_priced_by_what_it_has_itself(accuracy: Any, tmp_path: Path) -> None:
    from ahp.engines import releases

    def has(**arguments: Any) -> Any:
        keys = ("complex_positions", "repeated_keys")
        seen.append(tuple(releases.has("torchtitan", key, arguments["engine"].get("version")) for key in keys))
        return fake_simulate(**arguments)

    seen: list[tuple[bool, ...]] = []
    programs = ("torchtitan", "nanotron v0.5", "KempnerForge")
    rows = [row(at, 1.0, framework=name) for at, name in enumerate(programs, start=1)]
    rows.append(row(4, 1.0, framework="torchtitan", differs={"repeated_keys": True}))
    runs, _ = sys.modules["accuracy_rows"].read(map(Path, files(tmp_path, one=rows)))
    sys.modules["accuracy_judge"].judge_all(runs, has)
    assert seen == [(True, False), (False, False), (False, True), (True, True)]


def test_rows_that_differ_in_what_their_program_has_alone_are_priced_apart(accuracy: Any, tmp_path: Path) -> None:
    """Pricers are kept by what a user says, which these rows have in common."""
    from accuracy_judge import judge_all
    from accuracy_rows import read

    from ahp import simulate

    model = {"name": "m", "layers": 8, "hidden": 2048, "heads": 16, "vocab": 1024, "seq": 1024}
    alike = row(1, 1.0, model=model, zero_stage=1, release="2025-06", interconnect="10 Gb/s", gpus_per_node=1)
    rows = [alike | {"precision": "bf16", "differs": {"overlapped_gradients": on}} for on in (False, True)]
    rows.append(alike | {"precision": "bf16"})
    (tmp_path / "source.json").write_text(json.dumps([one | {"id": str(at)} for at, one in enumerate(rows)]))
    off, on, shipped = (one.predicted_s for one in judge_all(read([tmp_path / "source.json"])[0], simulate))
    assert off > on == shipped


@pytest.mark.slow
@pytest.mark.parametrize("name", list(steps.constants()))
def test_a_constant_of_whole_steps_moves_a_real_forecast(accuracy: Any, name: str) -> None:
    import ahp

    judge = sys.modules["accuracy_judge"]
    arguments = sys.modules["accuracy_rows"].arguments(row(1, 1.0))
    constant = steps.constants()[name]
    taken = []
    for value in (constant.low, constant.high):
        with judge.using({name: value}):
            taken.append(ahp.simulate(**arguments).step_time_s)
    assert taken[1] > 1.02 * taken[0]
    assert taken[0] <= ahp.simulate(**arguments).step_time_s <= taken[1]


def test_pairs_say_from_where_on_the_order_means_something(accuracy: Any) -> None:
    import accuracy_pairs

    judge, rows = sys.modules["accuracy_judge"], sys.modules["accuracy_rows"]

    def run(group: str, predicted_s: float, measured_s: float) -> Any:
        return judge.Judged(
            rows.Run("r", "s", group, {}, measured_s, None, None, None, True), error=0.0, predicted_s=predicted_s
        )

    # Apart by 0.5 % and wrong; by 50 and 51 %, right; another group is compared with nobody; equal forecasts are half right.
    judged = [run("a", 1.0, 2.0), run("a", 1.005, 1.9), run("a", 1.51, 3.0), run("b", 1.0, 9.0)]
    found = list(accuracy_pairs.pairs(judged))
    assert sorted(pair.right for pair in found) == [0.0, 1.0, 1.0]
    assert [pair.right for pair in accuracy_pairs.pairs([run("a", 1.0, 2.0), run("a", 1.0, 3.0)])] == [0.5]
    printed = accuracy_pairs.section(judged)
    assert line(printed, "0 to 1 %") == ["0 to 1 %", "1", "1", "0 %"]
    assert line(printed, "20 % or more") == ["20 % or more", "2", "1", "100 %"]
    assert "is off by 5 %" in printed  # 0.7, 5.0 and 5.6 %


def test_choosing_holds_the_first_of_the_forecast_against_the_best_of_a_sweep(accuracy: Any, tmp_path: Path) -> None:
    import accuracy_choice

    paths = files(tmp_path, swept=[row(2, 0.7, gpus=4, gpus_per_node=4, tp=2, zero_stage=0)])
    runs, _ = sys.modules["accuracy_rows"].read([Path(paths[0])])

    def simulate(**arguments: Any) -> Any:
        layout = arguments["parallelism"]
        if not isinstance(layout, dict):
            layout = layout.model_dump()
        if layout["pipeline_parallel_degree"] == 4:
            raise BadInput("pipeline_parallel_degree = 4: there are 2 layers")
        slower = 3.0 - 1.0 * (layout["tensor_parallel_degree"] == 2) - 0.1 * (layout["micro_batch_size"] == 4)
        return SimpleNamespace(step_time_s=slower, fits=layout["zero_stage"] == 0 or layout["micro_batch_size"] > 1)

    made = accuracy_choice.choice(runs[0], {"tensor": 4, "zero_stages": [0, 1]}, simulate)
    assert made.best.tensor_parallel_degree == made.first.tensor_parallel_degree == 2
    assert (made.best.micro_batch_size, made.first.micro_batch_size) == (2, 4)
    assert made.behind == pytest.approx(2.0 / 1.9 - 1)
    # As fast or faster with other degrees: micro-batch 4 with ZeRO 0 and 1, without a pipeline and with one.
    assert made.rank == 1 + sum(
        layout.tensor_parallel_degree == 2 and layout.micro_batch_size == 4
        for layout in accuracy_choice.layouts(runs[0], {"tensor": 4, "zero_stages": [0, 1]})
        if layout.pipeline_parallel_degree < 4
    )
    assert not made.same
    judged = sys.modules["accuracy_judge"].judge_all(runs, fake_simulate)
    notes = {
        "best_of_sweep": {"swept": {"tensor": 4, "zero_stages": [0]}},
        "choices": [{"rows": ["run-*"], "why": "odd"}],
    }
    told = accuracy_choice.section(judged, notes, simulate)
    assert "is forecast fastest in 0, and within 2 % of the fastest in 0" in told
    assert "**odd** (1): `run-2`" in told


def test_what_was_asked_for_is_held_against_its_rows_and_a_miss_says_why(accuracy: Any) -> None:
    import accuracy_reach

    judge, rows = sys.modules["accuracy_judge"], sys.modules["accuracy_rows"]

    def judged(name: str, error: float, device: Any = "A100-SXM-80GB") -> Any:
        arguments = {"cluster": {"device": device}, "job": {"precision": "bf16"}}
        run = rows.Run(name, "mine", "g", arguments, 1.0, None, None, None, True)
        return judge.Judged(run, error=error, inside=True, predicted_s=1.0 + error)

    asked = {"what": "near", "rows": ["mine/a-*"], "figure": "mean error", "at_most": 5, "why": "never told"}
    far = asked | {"what": "far", "rows": ["mine/*"], "devices": ["B200*"], "why": "its power"}
    nobody = asked | {"what": "nobody", "precisions": ["fp8"]}
    own = [judged("a-1", 0.04), judged("a-2", -0.06), judged("b-1", 0.2, {"base": "B200-SXM"})]
    text = accuracy_reach.section(own, [], {"reach": [asked, far, nobody], "ranking_only": {}})
    assert line(text, "near |") == ["near", "2", "mean error", "5", "5.0", "yes"]
    assert line(text, "far |") == ["far", "1", "mean error", "5", "20.0", "no"]
    assert "its power" in text
    assert "never told" not in text
    assert "nobody" not in text
