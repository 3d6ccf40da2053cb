"""How ``ahp train`` finds its plan: cluster, graph, search; kept in the run's folder for the next start."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from ahp.cli.planning_job import precision_for
from ahp.cluster import catalogue
from ahp.cluster.model import Cluster
from ahp.cluster.most_workers import refuse_workers
from ahp.config import Config, Constraints
from ahp.errors import AhpError, BadInput, HardwareMismatch, NotExpressible
from ahp.forecast.rules import precision
from ahp.plan import EngineChoice, Parallelism, Plan
from ahp.runtime.run.progress import say
from ahp.whole_files import write_aside
from ahp.words import number_of

if TYPE_CHECKING:
    from ahp.runtime.run.folder import RunFolder
    from ahp.runtime.run.texts import Texts

DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
)
"""If all are given, these and the context-parallel degree (1 if not given) multiply to the number of workers."""


def earlier(config: Config, folder: RunFolder, workers: int | None) -> Plan | None:
    """The plan of the last start, if it was made for this very config and for as many workers as there are now."""
    try:
        # Read as a config, a file of an earlier version has defaults for the keys that were added since.
        same = _plain(Config.model_validate_json(folder.config_file.read_text())) == _plain(config)
        plan = Plan.load(folder.plan_file)
    except (OSError, ValueError, AhpError):
        return None
    most = config.run.elastic.max_workers
    there = workers in (None, plan.parallelism.world_size) and plan.parallelism.world_size <= (most or math.inf)
    return plan if same and there else None


def with_precision(config: Config, folder: RunFolder) -> Config:
    """The config with a precision where the user gives none: that of the run in the folder, else the fastest that trains well here."""
    if "precision" in config.job.model_fields_set:
        return config
    if saved := folder.checkpoints():
        chosen, reason = saved[-1].meta()["job"]["precision"], ""
    elif config.job.dtype == "bf16":
        return config  # such weights compute in no other type
    else:
        try:
            chosen, reason = precision_for(Cluster.resolve(config.cluster), config.engine)
        except BadInput:  # the cluster is refused later, or GPUs are not in the catalogue until they are measured
            return config
    if reason:
        say(f"job.precision {chosen}, as none is given: {reason}")
    return config.model_copy(update={"job": config.job.model_copy(update={"precision": chosen})})


def without_layout(config: Config) -> Plan:
    """The plan of a config without its layout, which is still to be searched."""
    return Plan(model=config.model, init_from=config.init_from, job=config.job)


def prepare(plan: Plan, config: Config | None, folder: RunFolder, workers: int | None) -> Texts:
    """Refuse what can be refused without a forecast, and prepare the text: else errors would come only after the machine is measured and
    layouts are searched.

    Args:
        plan: what is to be run; without a layout yet if it is that of a ``config``.
        config: None if the user gave a plan.
        folder: where it is to be run.
        workers: ranks that are already started, None if this process will start them.
    """
    from ahp.runtime.run.same_job import check_same_text
    from ahp.runtime.run.texts import prepare_texts

    if config is not None:
        _engine(config)
    if workers is None:
        _refuse_here(plan, config)
    elif config is not None:
        config.run.elastic.refuse(workers, "the launcher's processes")
    texts = prepare_texts(plan, folder)
    check_same_text(folder, plan, texts.fingerprint, texts.validation_fingerprint)
    return texts


def _refuse_here(plan: Plan, config: Config | None) -> None:
    """Raises HardwareMismatch if this machine lacks the devices of the plan or of the config's cluster, BadInput if it has fewer or more workers
    than it can carry or than the user allows, or cores that do not compute in the job's precision."""
    from ahp.cli.machine import num_devices
    from ahp.runtime.ranks.device import device_for

    named: Cluster | None = None
    if config is None:
        what, count = "the plan's degrees", plan.parallelism.world_size
    else:
        what, count = "parallelism: its degrees", num_workers(config.parallelism)
        if config.cluster != "local":
            named = Cluster.resolve(config.cluster)
            plan = plan.model_copy(update={"cluster": named.plain()})
            if count is None:
                what, count = "cluster: its devices", named.num_devices
        if count is None:
            config.run.elastic.refuse(_most_here(config) or num_devices(), "this machine's devices")
        else:
            config.run.elastic.refuse(count, what)
    if device_for(plan, count or 1) == "cpu":
        if config is not None:
            core = named.groups[0].device if named is not None else catalogue.find(catalogue.CPU).device
            if (reason := precision(config.job, core)) is not None:
                raise BadInput(reason)
        if count is not None:
            refuse_workers(f"{what} make {number_of(count, 'worker')}", count)


def search(config: Config, folder: RunFolder, workers: int | None, *, top: int, quiet: bool) -> Plan:
    """Probe or read the cluster, analyze, search, show the ranking on stdout unless ``quiet``, keep the best plan."""
    from ahp.cli import plan as planning
    from ahp.cli.searched import searched
    from ahp.forecast import timeline
    from ahp.forecast.step import price
    from ahp.graph.kept import analyze
    from ahp.report import tables
    from ahp.runtime.run.given import with_kept_model

    asked, config = config, with_kept_model(config, folder)
    engine, note = _engine(config)
    say(f"analyzing {config.model if isinstance(config.model, str) else config.model.get('model_type', 'the model')}")
    graph = analyze(config.model, config.job, attention=engine.attention)
    wanted = workers or num_workers(config.parallelism) or _most_here(config)
    cluster = _local(folder, wanted) if config.cluster == "local" else _those_there(config.cluster, workers)
    say(f"searching layouts, world size {cluster.num_devices}")
    ranking = searched(
        config.model, graph, cluster, config.job, constraints=config.parallelism, engine=engine, keep=top
    )
    if not quiet:
        console = tables.console()
        found = planning.Found(graph, cluster, config.job, (), ranking)
        console.print(planning.table(found))
        planning.explain_first(console, ranking)
        console.print()
    best = ranking.best.model_copy(update={"init_from": config.init_from, "why": (*ranking.best.why, *note)})
    timeline.write(price(graph, cluster, config.job, best.parallelism, best.engine), folder.trace_file)
    best.save(folder.plan_file)
    write_aside(folder.config_file, json.dumps(_plain(asked), indent=1) + "\n")
    return best


def for_other_workers(config: Config | None, folder: RunFolder, workers: int, *, top: int, quiet: bool) -> Plan:
    """The best plan of the same job for the workers that are left, or that are back. Raises AhpError if there is none."""
    if config is None:
        raise HardwareMismatch(
            f"a plan is run as it is, and {number_of(workers, 'worker')} {'is' if workers == 1 else 'are'} left; give a config.yaml to plan again"
        )
    if config.cluster != "local":
        raise HardwareMismatch(
            f"cluster names its devices, and {number_of(workers, 'worker')} {'is' if workers == 1 else 'are'} left; with cluster: local it is planned again"
        )
    plan = search(with_precision(config, folder), folder, workers, top=top, quiet=quiet)
    # The next start by hand counts the devices again, and must not reuse a plan for those that were left.
    folder.config_file.unlink(missing_ok=True)
    return plan


def _engine(config: Config) -> tuple[EngineChoice, tuple[str, ...]]:
    """The engine as asked; without compiled blocks, and with the reason, if compilation is left open and this host cannot compile.

    Raises NotExpressible or HardwareMismatch for what no layout can have here.
    """
    import torch

    from ahp.engines.registry import get
    from ahp.runtime.device_limits import refuse_kernels, why_not_compiled
    from ahp.runtime.ranks.device import choose_device

    engine = config.engine
    if reason := get(engine.name).refuses(config.job, Parallelism(), engine):
        raise NotExpressible(reason)
    device = torch.device(choose_device(1))
    if config.cluster == "local":
        refuse_kernels(engine, device)
    if engine.compile is None and device.type != "cpu" and (missing := why_not_compiled(device)) is not None:
        return engine.model_copy(update={"compile": False}), (f"eager blocks: torch.compile {missing}",)
    return engine, ()


def check(plan: Plan, folder: RunFolder) -> Plan:
    """Price again a plan that the user gave, which refuses what cannot run, and leave its timeline in the folder."""
    from ahp.cli.simulate import price
    from ahp.forecast import timeline

    if plan.cluster is not None:
        timeline.write(price(plan), folder.trace_file)
    return plan


def num_workers(constraints: Constraints) -> int | None:
    """How many workers a layout needs if all its degrees are given, else None."""
    degrees = [constraints.given.get(key) for key in DEGREES]
    context = constraints.given.get("context_parallel_degree") or 1
    return math.prod([context, *(d for d in degrees if d is not None)]) if None not in degrees else None


def _most_here(config: Config) -> int | None:
    """``run.elastic.max_workers`` if this machine has more devices, else None."""
    from ahp.cli.machine import num_devices

    most = config.run.elastic.max_workers
    return most if config.cluster == "local" and most is not None and most < num_devices() else None


def _local(folder: RunFolder, workers: int | None) -> Cluster:
    """This machine, measured; the folder gets a copy, so that it records what its plan was made from."""
    from ahp.cache import cache_folder
    from ahp.cli import machine

    cluster = machine.measured(workers, folder.path, cache_folder())
    cluster.save(folder.cluster_file)
    return cluster


def _those_there(named: str | dict[str, Any], workers: int | None) -> Cluster:
    """The cluster as it is named, or the part of it for the workers that were started. Raises HardwareMismatch if it has no such part."""
    from ahp.search.problem import with_devices

    cluster = Cluster.resolve(named)
    if workers is None or workers == cluster.num_devices:
        return cluster
    if cluster.is_mixed or (found := with_devices(cluster, workers)) is None:
        raise HardwareMismatch(
            f"{number_of(workers, 'worker')} started, and the cluster has {number_of(cluster.num_devices, 'device')}; start as many, or as "
            "many as some of its nodes have where they are all alike"
        )
    return found


def _plain(config: Config) -> dict[str, object]:
    """The keys that decide the plan, as read back from JSON: all except the run's own."""
    return json.loads(config.model_dump_json(exclude={"run"}))
