"""The frame of the command line: dispatch, messages, exit codes."""

from __future__ import annotations

import ast
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from ahp.cli import main as frame
from ahp.cli.main import COMMANDS, main
from ahp.errors import BadInput, HardwareMismatch, NotExpressible, NothingFits


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Put a function in the place of ``ahp plan``."""

    def install(run) -> None:
        module = ModuleType("ahp.cli.plan")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ahp.cli.plan", module)

    return install


def raising(error: BaseException):
    def run(argv: list[str]) -> int:
        raise error

    return run


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help"]])
def test_help_lists_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)
    first = out.split("start here:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split("  ")[1] for line in first] == list(frame.FIRST)
    assert out.index("start here:") < out.index("commands:")
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_of_a_commands_help_begins_with_an_option(name: str) -> None:
    """tyro joins the lines of a paragraph but for those: a sentence would be broken there."""
    text = ast.get_docstring(ast.parse(Path(frame.__file__).with_name(f"{name}.py").read_text())) or ""
    assert not [line for line in text.splitlines() if line.startswith(("-", "+"))]


def test_what_is_named_first_is_a_command() -> None:
    named = [command for line in frame.FIRST for command in line.split(", ")]
    assert {command.split()[1] for command in named} <= set(COMMANDS)
    assert all(command.startswith("ahp ") for command in named)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ahp 0.")


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "command = 'trian'" in captured.err
    assert "nearest: train" in captured.err
    assert main(["--versoin"]) == 2
    assert (
        "command = '--versoin': no such command; ahp --help lists them (valid: --help, --version"
        in capsys.readouterr().err
    )
    assert main(["export", "plan.yaml", "slurm"]) == 2
    assert "the target comes first: ahp export TARGET PLAN (valid: slurm)" in capsys.readouterr().err


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of the user's own, in which the console script is started: that one adds no folder to the path."""
    (tmp_path / "my_own_model.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Embedding(37, 8), nn.Linear(8, 37))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "my_own_model", raising=False)
    return tmp_path


def test_a_factory_is_found_in_the_folder_that_the_command_starts_in(
    users_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", "my_own_model:make", "--sequence-length", "16"]) == 0
    assert "Next: ahp plan my_own_model:make" in capsys.readouterr().out
    assert sys.path[-1] == str(users_folder), "last, so that no library is hidden by a file of the user's"


def test_a_factory_that_is_nowhere_is_told_with_the_places(
    users_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", "no_such_module:make"]) == 2
    assert "No module named 'no_such_module'; it must lie in the folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_warning_of_ours_is_one_line_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    words = ["analyze", str(tmp_path), "--sequence-length", "128"]
    with pytest.warns(UserWarning, match="the model takes 64 positions"):
        assert main(words) == 0  # here torch is there: the command finds the graph
    ended = subprocess.run([sys.executable, "-m", "ahp", *words], capture_output=True, text=True, check=True)
    told = [line for line in ended.stderr.splitlines() if "max_position_embeddings" in line]
    rule = "the model takes 64 positions, by max_position_embeddings of its config"
    assert told == [f"warning: job.sequence_length = 128: {rule}; it is forecast anyway, but training refuses it"]
    assert "graph = " not in ended.stderr


def test_arguments_and_code_pass_through(command) -> None:
    seen = []

    def run(argv: list[str]) -> int:
        seen.append(argv)
        return 3

    command(run)
    assert main(["plan", "a", "--b", "1"]) == 3
    assert seen == [["a", "--b", "1"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [(BadInput("x"), 2), (NothingFits("x"), 3), (HardwareMismatch("x"), 4), (NotExpressible("x"), 5)],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_exit_code(command, capsys: pytest.CaptureFixture[str], error: Exception, code: int) -> None:
    command(raising(error))
    assert main(["plan"]) == code
    captured = capsys.readouterr()
    assert captured.err == "error: x\n"
    assert captured.out == ""
    assert main(["plan", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told == {"error": {"kind": type(error).__name__, "message": "x", "exit_code": code}}


def test_internal_error_has_a_place_and_a_way_to_the_trace(command, capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(ZeroDivisionError("division by zero")))
    assert main(["plan", "m"]) == 1
    err = capsys.readouterr().err
    assert "internal error, main.py:" in err
    assert "ZeroDivisionError: division by zero" in err
    assert "ahp --traceback plan m" in err
    assert "Traceback" not in err
    assert main(["--traceback", "plan", "m"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["plan", "x" * 300, "8xH100"], ["simulate", "x" * 300], ["train", "x" * 300], ["report", "x" * 300]],
)
def test_a_path_that_is_too_long_is_bad_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: path = 'xxx")
    assert told.endswith("': file name too long\n")


def test_a_file_that_the_user_may_not_read_is_bad_input(command, capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(PermissionError(errno.EACCES, os.strerror(errno.EACCES), "plan.yaml")))
    assert main(["plan"]) == 2
    assert capsys.readouterr().err == "error: path = 'plan.yaml': permission denied\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EFBIG])
def test_a_disk_that_takes_nothing_is_told_in_one_line(
    command, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    command(raising(OSError(number, os.strerror(number), "runs/demo/report.html.tmp")))
    assert main(["plan"]) == 1
    assert capsys.readouterr().err == f"error: runs/demo/report.html.tmp: {os.strerror(number)}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that takes nothing")
def test_a_stdout_that_takes_nothing_is_told_in_one_line_beside_json_too() -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "ahp", "models", "--json"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, f"error: a file: {os.strerror(errno.ENOSPC)}\n")


def test_interrupt(command) -> None:
    command(raising(KeyboardInterrupt()))
    assert main(["plan"]) == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_lets_a_command_clean_up(command, number: signal.Signals) -> None:
    cleaned = []

    def run(words: list[str]) -> int:
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            cleaned.append(number)
        return 0

    before = signal.getsignal(number)
    command(run)
    assert main(["plan"]) == 128 + number
    assert cleaned == [number]
    assert signal.getsignal(number) == before


@pytest.mark.slow
def test_names_are_told_on_a_stdout_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "plan-é.yaml").write_text("schema_version: 1\ncluster: {device: H100}\n")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}

    def told(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "ahp", "export", "slurm", "plan-é.yaml", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert told()[:2] == (0, "Wrote plan-\\xe9.sbatch\nNext: sbatch 'plan-\\xe9.sbatch'\n")
    assert (tmp_path / "plan-é.sbatch").is_file()
    code, out, error = told("-o", "-")
    assert (code, out) == (2, "")
    assert "stdout is ascii, and the text has '\\xe9'; give a file" in error


def test_a_folder_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["models"]) == 2
    assert "the folder in which the command was started is gone" in capsys.readouterr().err


def test_what_a_users_module_prints_is_not_on_stdout_beside_the_data(
    users_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = "import torch\nprint('imported')\ndef make():\n    print('made')\n    return torch.nn.Linear(2, 2)\n"
    (users_folder / "noisy_model.py").write_text(noisy)
    assert main(["analyze", "noisy_model:make", "--json"]) == 2  # no language model
    told = capsys.readouterr()
    assert json.loads(told.out)["error"]["exit_code"] == 2
    assert told.err.startswith("imported\nmade\n")


def test_what_others_print_beside_json_goes_to_stderr() -> None:
    """Also what a process prints that is started there, such as a worker of ahp train."""
    work = "print('first'); os.system('echo second'); print_alone('[1]'); print('third'); sys.stdout.flush()"
    code = "import os, sys\nfrom ahp.cli.json_alone import json_alone, print_alone\n"
    code += f"with json_alone():\n    {work}\nprint('last')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[1]\nlast\n"
    assert sorted(ended.stderr.split()) == ["first", "second", "third"]


def test_wrong_options_are_data_too_where_data_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "8xH100", "--objective", "nonsense", "--json"]) == 2
    told = capsys.readouterr()
    rule = "there is no such value (valid: speed, cost, tokens-per-day, fewest-devices)"
    message = f"--objective = 'nonsense': {rule}"
    assert json.loads(told.out)["error"] == {"kind": "BadInput", "message": message, "exit_code": 2}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan"], "MODEL and CLUSTER missing; the form is: ahp plan MODEL CLUSTER; ahp plan --help"),
        (["plan", "tiny"], "CLUSTER missing; the form is: ahp plan MODEL CLUSTER; ahp plan --help"),
        (["plan", "tiny", "8xH100", "--top", "1e3"], "--top = '1e3': must be a whole number"),
        (["generate", "runs/demo", "--temperature", "hot"], "--temperature = 'hot': must be a number"),
        (["plan", "tiny", "8xH100", "--top"], "Missing value for argument '--top'. Expected 1 values; ahp plan --help"),
        (["plan", "tiny", ""], "cluster = ''"),
    ],
)
@pytest.mark.parametrize("columns", ["40", "120"])
def test_wrong_words_are_one_sentence(
    words: list[str], told: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {told}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_output_is_no_fault(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, closed, None)
    assert main(["--version"]) == 0
    assert main(["trian"]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["devices", "--nonsense"], "--nonsense: no option of ahp devices; ahp devices --help lists them"),
        (["models", "qwen"], "'qwen': ahp models takes no such word"),
        (
            ["explain", "plan.yaml", "--why-not", "tp4", "pp2"],
            "'pp2': ahp explain takes no such word; ahp explain --help",
        ),
        (["report", "runs/demo", "--ou", "page.html"], "--ou: no option of ahp report (did you mean: --out?)"),
        (["simulate", "plan.yaml", "--zzzz", "4x8xH100"], "--zzzz: no option of ahp simulate; ahp simulate --help"),
        (["plan", "--config", "config.yaml"], "--config: no option of ahp plan"),
        (
            ["plan", "8xH100", "llama3-8b"],
            "cluster = 'llama3-8b': this is a model; the order is: ahp plan MODEL CLUSTER",
        ),
        (["generate", __file__], "no run's folder: it is a file"),
        (["train", "--top", "0"], "--top = 0: must be 1 or more"),
        (["train", "llama3-8b"], "config = 'llama3-8b': this is a model, not a file (valid: --model llama3-8b)"),
    ],
    ids=lambda one: " ".join(one[:2]) if isinstance(one, list) else "",
)
def test_a_word_that_a_command_does_not_take_is_named(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "code",
    [
        "from ahp.cli import main as frame; frame._help = lambda: 'line\\n' * 100_000; sys.exit(frame.main([]))",
        "from ahp.cli import main as frame, models; from ahp.report.tables import console; models.run = lambda words: [console().print('line') for _ in range(100_000)] and 0; sys.exit(frame.main(['models']))",
        "from ahp.cli import json_alone, main as frame, models; models.run = lambda words: json_alone.print_alone('line\\n' * 100_000); sys.exit(frame.main(['models', '--json']))",
    ],
    ids=["print", "rich", "json"],
)
def test_a_reader_that_leaves_is_no_error(code: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; {code}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=500) == frame.BROKEN_PIPE


def test_a_worker_that_failed_does_not_wait_for_its_threads() -> None:
    """As where a checkpoint's collective waits for a host that is gone."""
    script = (
        "import time; from concurrent.futures import ThreadPoolExecutor; from ahp.cli import main\n"
        "ThreadPoolExecutor(1).submit(time.sleep, 600); main.main = lambda: 3; main.program()"
    )
    ended = subprocess.run([sys.executable, "-c", script], env={**os.environ, "RANK": "0"}, timeout=500)
    assert ended.returncode == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "tiny", "8xH100", "--precision", "fp16"], "keys are given whole (did you mean: --job.precision?)"),
        (
            ["plan", "tiny", "8xH100", "--precison=fp16"],
            "--precison: no option of ahp plan (did you mean: --job.precision?)",
        ),
        (["plan", "tiny", "8xH100", "--job.loss-chunk-tokens", "8"], "(did you mean: engine.loss_chunk_tokens?)"),
        (["plan", "tiny", "8xH100", "--tp", "4"], "(did you mean: --parallelism.tensor_parallel_degree?)"),
        (["plan", "tiny", "8xH100", "--seq-len", "4"], "(did you mean: --job.sequence_length?)"),
        (["plan", "tiny", "8xH100", "--objectiv", "cost"], "(did you mean: --objective?)"),
        (["plan", "tiny", "8xH100", "--target-tokens-per-s", "5"], "(did you mean: --objective.target-tokens-per-s?)"),
        (
            ["plan", "tiny", "8xH100", "--optimizer.name", "muon"],
            "(did you mean: --job.optimizer.name, --engine.name?)",
        ),
        (["simulate", "plan.yaml", "--steps", "4"], "no option of ahp simulate; keys are given whole"),
        (["check", "ds.json", "--clustr", "8xH100"], "(did you mean: --cluster?)"),
        (["plan", "tiny", "8xH100", "--no-wide"], "--no-wide: no option of ahp plan (did you mean: --wide?)"),
        (["plan", "tiny", "8xH100", "--", "--precision"], "--precision: no option of ahp plan; ahp plan --help lists"),
        (["plan", "tiny", "8xH100", "-x"], "-x: no option of ahp plan; ahp plan --help lists"),
    ],
)
def test_an_option_that_is_none_is_told_with_those_near_it(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err
