"""The main job: analyze the model, probe the machine, search, print the ranked plans, train, write text.

Without an argument a small LLaMA learns the Python standard library's own source files. CONFIG is a config.yaml, or
a plan.yaml of ahp plan that is run as it is. The same command again continues the run; with other degrees or
another number of workers too. SIGINT, SIGTERM and SIGUSR1 end it with a checkpoint.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
import yaml

from ahp.about import __version__
from ahp.cli import nodes
from ahp.cli.following import next_words
from ahp.cli.json_alone import print_alone
from ahp.cli.options import options_of
from ahp.cli.overrides import CONFIG_ROOTS, split_overrides
from ahp.cli.plan_job import with_job
from ahp.config import Config, Run, config_help, load_config, read_yaml, set_dotted
from ahp.errors import AhpError, BadInput, OtherJob, bad_input
from ahp.graph.catalogue import CATALOGUE
from ahp.job import Job
from ahp.optional import Flag, OptionalNumber, OptionalText
from ahp.plan import Forecast, Plan, validated
from ahp.report.tables import console
from ahp.run_files import Status, read_metrics
from ahp.runtime.ranks import slurm
from ahp.runtime.run.same_model import LIBRARIES
from ahp.runtime.run.stop_signal import Stopped
from ahp.whole_files import write_aside
from ahp.words import number_of, seconds, times

if TYPE_CHECKING:
    from ahp.runtime.run.folder import RunFolder
    from ahp.runtime.run.texts import Texts
    from ahp.runtime.run.trainer import Outcome

SAMPLE_TOKENS = 160
PROMPTS = {"python-stdlib": "def "}
"""How the sample at the end begins, keyed by job.data; with other text it begins a new document."""


DEMO: dict[str, Any] = {
    "job.global_batch_size": 8,
    "job.steps": 600,
    "job.optimizer.learning_rate": 3.0e-3,
    "job.optimizer.warmup_steps": 30,
}
"""Values that replace the defaults in a run without CONFIG: many small steps, with which a model of four million parameters
learns most in a few minutes on two cores (docs/decisions/the-demonstration.md). Values on the command line win."""


@dataclass(frozen=True)
class Arguments:
    config: Annotated[tyro.conf.Positional[OptionalText], tyro.conf.arg(metavar="[CONFIG|PLAN]")] = None
    """config.yaml or plan.yaml; without it the demo: every key has its default except job.steps 600, job.global_batch_size 8,
    job.optimizer.learning_rate 0.003 and job.optimizer.warmup_steps 30."""
    top: int = 5
    """Plans that are shown."""
    json: Flag = False
    """Print the result as one JSON object; nothing else goes to stdout."""
    nodes: Annotated[OptionalText, tyro.conf.arg(metavar="N|MIN:MAX")] = None
    """Nodes that run this command together, such as 2, or 2:4 if some may be lost and come back; under srun the nodes of the step."""
    rendezvous: Annotated[OptionalText, tyro.conf.arg(metavar="HOST[:PORT],...")] = None
    """An address of one of the nodes, the same on all, or addresses of several: the second one takes over if the first is lost. The port is 29500
    if none is given."""
    workers_per_node: OptionalNumber = None
    """Workers of this node, with --nodes; by default one for each GPU, else for each core."""


@dataclass(frozen=True)
class Request:
    """What to train: a plan as it is, or a config that is still to be planned."""

    run: Run
    plan: Plan | None = None
    config: Config | None = None

    @property
    def job(self) -> Job:
        source = self.plan or self.config
        assert source is not None
        return source.job

    def alike(self) -> dict[str, Any]:
        """What every node of a run must be asked for alike, as plain data: all but its own path to the folder, how often its launcher starts
        workers again, and what the first worker does at the end."""
        source = self.plan or self.config
        assert source is not None
        # Without what follows a "+": builds of one version of torch for several CUDA releases can train together.
        versions = {name: version(name).partition("+")[0] for name in LIBRARIES}
        keys = {"model", "init_from", "job", "parallelism", "engine", *(() if self.config is None else ("cluster",))}
        return {
            **source.model_dump(mode="json", include=keys),
            "run": self.run.model_dump(mode="json", exclude={"folder", "elastic", "sample"}),
            "versions": {"ahp": __version__, **versions},
        }


def run(argv: list[str]) -> int:
    """``ahp train``. Returns the exit code; raises AhpError."""
    given, rest = split_overrides(argv)
    arguments = options_of(Arguments, rest, "ahp train", f"{__doc__}\n{config_help()}", CONFIG_ROOTS)
    if arguments.top < 1:
        raise bad_input("--top", arguments.top, "must be 1 or more")
    overrides = given if arguments.config is not None else DEMO | given
    place = slurm.task()
    several = nodes.asked(arguments.nodes, arguments.rendezvous, arguments.workers_per_node, place)
    if several is not None:
        request = read_request(arguments.config, overrides)
        return nodes.launch(several, argv, request.run, request.job, request.alike())
    store = slurm.become_worker(place) if place is not None and not place.is_launcher else None
    with _refusal_in_status(lambda: _folder(arguments.config, overrides)):
        request = read_request(arguments.config, overrides)
        code = train(request, arguments, command=shlex.join(["ahp", "train", *argv]))
    del store  # kept until here for the other workers
    return code


def read_request(path: str | None, overrides: dict[str, Any]) -> Request:
    """The config or the plan in a file. With a plan only ``--run.KEY`` can be given, and keys of the job that do not change the plan."""
    if path in CATALOGUE and not os.path.exists(path):
        raise bad_input("config", path, "this is a model, not a file", [f"--model {path}"])
    if path is not None and (plan := Path(path, "plan.yaml")).is_file():
        as_it_is = f"{shlex.quote(str(plan))} --run.folder {shlex.quote(path)}"
        raise bad_input(
            "config",
            path,
            "a run's folder; start the same command again, or its plan as it is",
            [f"ahp train {as_it_is}"],
        )
    data = read_yaml(path) if path is not None else {}
    if "schema_version" not in data:
        config = load_config(path, overrides)
        return Request(run=config.run, config=config)
    changes: dict[str, Any] = {}
    of_run = {key: value for key, value in overrides.items() if key.split(".")[0] == "run"}
    for key, value in of_run.items():
        set_dotted(changes, key, value)
    assert path is not None
    others = {key: value for key, value in overrides.items() if key not in of_run}
    run = validated(Run, changes.get("run", {}), "run")
    return Request(run=run, plan=with_job(Plan.load(path), path, others))


def train(request: Request, arguments: Arguments, command: str) -> int:
    """Plan, run, and report; under torchrun the first rank plans for all."""
    from ahp.cli import train_plan
    from ahp.runtime.ranks.preparation import Preparation
    from ahp.runtime.ranks.ranks import is_joined
    from ahp.runtime.run import evaluation
    from ahp.runtime.run import trackers as track
    from ahp.runtime.run.folder import RunFolder
    from ahp.runtime.run.nodes_alike import refuse_other_folders, refuse_other_settings
    from ahp.runtime.run.texts import Texts
    from ahp.runtime.run.trainer import Trainer

    track.check(request.run.track)
    if request.run.evaluation is not None:
        evaluation.find(request.run.evaluation)
    folder = RunFolder(request.run.folder)

    def start(prepared: Prepared) -> Outcome:
        given = {key: value for key, value in request.run if key not in ("sample", "folder")}
        return Trainer(prepared.plan, folder=folder, **given, texts=prepared.texts, replan=replan).run()

    def replan(workers: int) -> Plan:
        return train_plan.for_other_workers(request.config, folder, workers, top=arguments.top, quiet=arguments.json)

    with ExitStack() as kept:

        def hold() -> None:
            folder.create()
            kept.enter_context(folder.held())

        if not is_joined():
            with leaving_stopped(folder):
                hold()
                ready = make_plan(request, arguments, folder, None)
            outcome = start(ready)
            return report(outcome, arguments, command, sample=request.run.sample)
        with nodes.ending_for_all():
            workers = Preparation()
            alike = request.alike()
            refuse_other_settings(workers, alike)

            workers.decided_by_first(hold)
            refuse_other_folders(workers, folder)  # before anything that takes long

            def decide() -> tuple[Plan, Texts | None]:
                with leaving_stopped(folder):
                    found = make_plan(request, arguments, folder, workers.size)
                    write_aside(folder.asked_file, json.dumps(alike))
                return found.plan, found.texts

            outcome = start(Prepared(*workers.decided_by_first(decide, tuple[Plan, Texts | None])))
        if not workers.is_first:
            return outcome.exit_code
        with nodes.reporting(is_done=outcome.status.state == "done"):
            return report(outcome, arguments, command, sample=request.run.sample)


@contextmanager
def leaving_stopped(folder: RunFolder) -> Iterator[None]:
    """Record in status.json that a signal ended this start inside the block, before it trained; a finished run keeps its own status."""
    try:
        yield
    except Stopped as stop:
        status = folder.status()
        if folder.is_held and (status is None or status.state != "done"):
            saved = folder.checkpoints()
            step = saved[-1].step if saved else 0
            folder.write_status(Status("interrupted", step, f"stopped by {stop} before training began", stop.exit_code))
        raise


@dataclass(frozen=True)
class Prepared:
    """What to run, and on which text."""

    plan: Plan
    texts: Texts | None
    """None for a run that is done: its text may be gone."""


def make_plan(request: Request, arguments: Arguments, folder: RunFolder, workers: int | None) -> Prepared:
    """The plan that was given, the one that this folder was started with, or the best that a search finds now.

    Whatever can be refused without a layout is refused before the machine is measured and layouts are searched.

    Args:
        request: what the user asked for.
        arguments: decide how the ranking is shown.
        folder: the folder of the run, which this process holds.
        workers: ranks that a launcher has started already; None = as many as the plan wants.
    """
    from ahp.cli import train_plan
    from ahp.runtime.run.given import with_kept_model
    from ahp.runtime.run.same_job import check_same_job

    if request.run.checkpoint_store is not None and not folder.checkpoints():  # before lost checkpoints are refused
        from ahp.runtime.run.checkpoint_store import CheckpointStore
        from ahp.runtime.run.stored_checkpoints import StoredCheckpoints

        StoredCheckpoints(CheckpointStore.open(request.run.checkpoint_store), folder, request.run.keep).fetch()
    config = None if request.config is None else train_plan.with_precision(request.config, folder)
    wanted = request.plan or train_plan.without_layout(config or Config())
    request.run.check(wanted.job)
    # Before the model is built from that folder: else the error would name the key model, which nobody gave.
    is_gone = wanted.init_from is not None and not Path(wanted.init_from).expanduser().is_dir()
    if is_gone and not folder.checkpoints():
        raise bad_input("init_from", wanted.init_from, "no such folder; give a folder as save_pretrained writes it")
    begins_with = wanted.init_from if wanted.model == wanted.init_from and not folder.checkpoints() else None
    if begins_with is not None and not (Path(begins_with).expanduser() / "config.json").is_file():
        raise bad_input("init_from", begins_with, "it holds no config.json; give a folder as save_pretrained writes it")
    wanted = with_kept_model(wanted, folder)
    check_same_job(folder, wanted, extend=request.run.extend)
    found = train_plan.earlier(config, folder, workers) if config is not None else None
    if folder.finished(wanted.job) is not None:
        return Prepared(request.plan or found or Plan.load(folder.plan_file), None)
    texts = train_plan.prepare(wanted, config, folder, workers)
    if request.plan is not None:
        return Prepared(train_plan.check(wanted, folder), texts)
    if found is not None:
        print(f"using the plan in {folder.plan_file}: {found.parallelism.short()}", file=sys.stderr)
        return Prepared(found, texts)
    assert config is not None
    plan = train_plan.search(config, folder, workers, top=arguments.top, quiet=arguments.json)
    return Prepared(plan, texts)


def report(outcome: Outcome, arguments: Arguments, command: str, *, sample: bool = True) -> int:
    """Report the outcome: text and page for a finished run, how to go on for a stopped one."""
    from ahp.runtime.run.folder import RunFolder

    folder = RunFolder(outcome.folder)
    plan = Plan.load(folder.plan_file)
    result: dict[str, Any] = {"folder": str(folder.path), **asdict(outcome.status)}
    result["plan"] = json.loads(plan.model_dump_json(exclude={"cluster"}))
    metrics = read_metrics(folder.metrics_file, ["step_time_s", "tokens_per_s"])
    if metrics:
        result["speed"] = _speed(metrics, plan.forecast)
    if losses := [
        record["loss"] for record in metrics if record.get("loss") is not None
    ]:  # a step that was left out has no loss
        result |= {"first_loss": losses[0], "last_loss": losses[-1]}
    held_out = [record["validation_loss"] for record in metrics if "validation_loss" in record]
    if held_out:
        result["validation_loss"] = held_out[-1]
    if outcome.status.state == "done":
        result |= _sample(folder.path, kept=outcome.already_done) if sample else {}
        here = shlex.quote(str(folder.path))
        text = [f"ahp generate {here}"] if "sample" in result else []
        off = result.get("speed", {}).get("in_band") is False
        calibrate = [f"ahp calibrate {here}"] if off and _has_steps_to_calibrate(folder) else []
        result["next"] = [*text, f"ahp report {here}", f"ahp explain {shlex.quote(str(folder.plan_file))}", *calibrate]
    else:
        result["next"] = [command]
    result["report"] = _write_page(folder.path)
    if arguments.json:
        print_alone(json.dumps(result))
    else:
        print("\n".join(words(result, already_done=outcome.already_done)))
    return outcome.exit_code


def _has_steps_to_calibrate(folder: RunFolder) -> bool:
    from ahp.runtime.check.calibrate import measured

    try:
        measured(folder)
    except BadInput:
        return False
    return True


def words(result: dict[str, Any], *, already_done: bool) -> list[str]:
    """The result for people."""
    steps = result["plan"]["job"]["steps"]
    lines = [""]
    if already_done:
        lines.append(f"{result['folder']} is finished. Give more --job.steps, or another --run.folder.")
    elif result["state"] != "done":
        lines.append(f"Interrupted ({result['cause']}) after step {result['step']} of {steps}; everything is saved.")
    if "last_loss" in result:
        speed = result["speed"]
        predicted = f", predicted {seconds(speed['predicted_s'])}" if speed["predicted_s"] is not None else ""
        lines.append(
            f"Loss     {result['first_loss']:.3f} -> {result['last_loss']:.3f} in {number_of(result['step'], 'step')}"
        )
        lines.append(f"Speed    {seconds(speed['median_s'])} a step{predicted}; {speed['tokens_per_s']:,.0f} tokens/s")
        if speed["in_band"] is False:
            ratio = speed["median_s"] / speed["predicted_s"]
            lines.append(f"         {times(ratio)} the prediction, outside its 90 % band")
        if "validation_loss" in result:
            held_out = result["validation_loss"]
            figure = "no number" if held_out is None else f"{held_out:.3f}"
            lines.append(f"Held out {figure}, the loss on text that it was not trained on")
    if "sample" in result:
        lines += ["Sample", *(f"  | {line}" for line in result["sample"].splitlines())]
    lines.append(f"Files    {result['folder']}/: checkpoints, metrics.jsonl, plan.yaml, status.json, log")
    if result["report"]:
        lines.append(f"Report   {result['report']}")
    return [*lines, next_words(result["next"], console().width)]


def _speed(metrics: list[dict[str, Any]], forecast: Forecast | None) -> dict[str, Any]:
    """Median step time under the last plan, without the run's first step, which waits for allocations; and whether it lies in the forecast's
    band, None without a forecast."""
    predicted_s = metrics[-1].get("predicted_step_time_s")
    same = [record for record in metrics[1:] or metrics if record.get("predicted_step_time_s") == predicted_s]
    times = sorted(record["step_time_s"] for record in same)
    median = times[len(times) // 2]
    tokens = metrics[-1]["tokens_per_s"] * metrics[-1]["step_time_s"]
    return {
        "median_s": median,
        "predicted_s": predicted_s,
        "in_band": None
        if forecast is None or predicted_s is None
        else forecast.step_time_low_s <= median <= forecast.step_time_high_s,
        "tokens_per_s": tokens / median,
    }


def _sample(folder: Path, *, kept: bool) -> dict[str, str]:
    """Text from the trained model, that of an earlier start if ``kept``; nothing, with the reason on stderr, if there is none. The run succeeds
    either way."""
    from ahp.runtime.run.generate import Sampling, generate

    file = folder / "sample.txt"
    if kept and file.is_file():
        return {"sample": file.read_text(encoding="utf-8").removesuffix("\n")}
    try:
        data = Plan.load(folder / "plan.yaml").job.data
        text = generate(
            folder, PROMPTS.get(data, "") if isinstance(data, str) else "", Sampling(max_new_tokens=SAMPLE_TOKENS)
        )
        file.write_text(text + "\n", encoding="utf-8")
    except Exception as error:
        print(f"no sample: {_reason(error)}", file=sys.stderr)
        return {}
    return {"sample": text}


def _write_page(folder: Path) -> str | None:
    """The page's path; None, with the reason on stderr, if it cannot be drawn. The run succeeds either way."""
    from ahp.report import page

    try:
        return str(page.write(folder))
    except Exception as error:
        print(f"no report.html: {_reason(error)}", file=sys.stderr)
        return None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, AhpError) else f"{type(error).__name__}: {error}"


@contextmanager
def _refusal_in_status(folder: Any) -> Iterator[None]:
    """Record the cause of a refusal in status.json, which launchers do not hide. A finished run, one that trains, and one of another job keep
    their own status."""
    try:
        yield
    except AhpError as error:
        from ahp.runtime.run import failure
        from ahp.runtime.run.cannot_write import CannotWrite
        from ahp.runtime.run.folder import RunFolder

        # What training raises is in the status already; if the folder is gone, it must not be made again, e.g. on the disk below.
        is_told = isinstance(error, failure.TrainingFailed | CannotWrite)
        place = None if is_told else folder()
        if place is not None and os.environ.get("RANK", "0") == "0":
            run = RunFolder(place)
            with suppress(BadInput):  # another run holds the folder, or it cannot be written
                run.create()
                with run.held(wait_s=0.0):
                    status = run.status()
                    if status is None or not (status.state == "done" or isinstance(error, OtherJob)):
                        failure.report(run, str(error), error.exit_code)
        raise


def _folder(path: str | None, overrides: dict[str, Any]) -> str | None:
    """The run's folder, as far as a config that may be wrong gives it."""
    try:
        data = read_yaml(path) if path is not None else {}
        for key, value in overrides.items():
            if key.startswith("run."):
                set_dotted(data, key, value)
        return validated(Run, data.get("run", {}), "run").folder
    except (BadInput, yaml.YAMLError):
        return None
