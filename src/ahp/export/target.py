"""The input and the output of every target of ``ahp export``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ahp.config import Config, Run
from ahp.errors import BadInput, NotExpressible, bad_input
from ahp.plan import Plan

UNKNOWN = "GPUs"
"""Devices of a cluster that is known only where the job runs."""


@dataclass(frozen=True)
class Source:
    """A plan, or a config that is planned where it is started, with its file."""

    file: Path
    plan: Plan | None = None
    config: Config | None = None

    @property
    def run(self) -> Run:
        """The run keys; a plan has none, so ``ahp train`` takes the defaults, such as the run's folder."""
        return self.config.run if self.config is not None else Run()


@dataclass(frozen=True)
class Exported:
    """A file for another program."""

    text: str
    next: tuple[str, ...]
    """Commands that use it, with {file} for its path."""
    notices: tuple[str, ...] = ()
    """What the file lacks of the plan, and who must set it."""
    suffix: str | None = None
    """Suffix of the file, if it is not the target's."""


class Target(Protocol):
    """What ``ahp export NAME`` writes. ``options`` is a dataclass whose fields are the command's own options."""

    name: str
    what: str
    """A description in one line."""
    suffix: str
    """Suffix of the file, in place of the source's."""
    options: type[Any]

    def write(self, source: Source, options: Any) -> Exported:
        """The source in the target's form. Raises AhpError if the target cannot express it."""
        ...


@dataclass(frozen=True)
class Shape:
    """The nodes that a job asks its manager for."""

    least: int
    most: int
    workers: int
    """Workers per node."""
    gpus: int
    """GPUs per node; 0: its workers compute on cores."""
    device: str
    """The kind of device in words, for people."""

    @property
    def nodes(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}-{self.most}"


def shape_of(source: Source, nodes: str | None, workers: int | None, manager: str) -> Shape:
    """How many nodes of how many workers: from a plan, or from a config that describes its cluster; else from the options.

    ``manager``: the name of a config's ``cluster`` that is known only where the job runs.
    """
    least, most = _range(nodes)
    if source.plan is not None:
        return _of_plan(source.plan, source.file, nodes, workers)
    assert source.config is not None
    named = source.config.cluster
    if isinstance(named, str) and (named == "local" or named.partition("@")[0] == manager):
        if least is None or most is None or workers is None:
            missing = [name for name, value in (("--nodes", nodes), ("--workers-per-node", workers)) if value is None]
            raise BadInput(
                f"{' and '.join(missing)} missing: cluster = {named!r} is known only where the job runs; give how many nodes to ask for and "
                "the workers of each, one for each GPU, such as --nodes 2 --workers-per-node 8"
            )
        return Shape(least, most, workers, workers, UNKNOWN)
    _refuse_foreign_manager(named, manager)
    from ahp.cluster.model import Cluster

    found = _of_cluster(Cluster.resolve(named), None, "cluster")
    if workers is not None and workers != found.workers:
        raise bad_input("--workers-per-node", workers, "the config's cluster has other nodes", [found.workers])
    if most is not None and most > found.most:
        raise bad_input("--nodes", nodes, f"the config's cluster has {found.most}", [str(found.most)])
    return Shape(least or found.most, most or found.most, found.workers, found.gpus, found.device)


def _refuse_foreign_manager(named: Any, manager: str) -> None:
    word = named.partition("@")[0] if isinstance(named, str) else ""
    if word in ("slurm", "kubernetes") and word != manager:
        raise bad_input("cluster", named, "this target has nodes of another manager", [manager, "local"])


def _of_plan(plan: Plan, file: Path, nodes: str | None, workers: int | None) -> Shape:
    if plan.engine.name != "ahp":
        raise NotExpressible(
            f"engine.name = {plan.engine.name!r}: ahp train runs plans of the engine ahp; export its own configuration"
        )
    found = shape_of_plan(plan, file)
    for option, given, value in (("--nodes", nodes, str(found.most)), ("--workers-per-node", workers, found.workers)):
        if given is not None and str(given) != str(value):
            rule = f"{file} is a plan, which is run as it is ({plan.parallelism.short()}); plan again, or give a config.yaml"
            raise bad_input(option, given, rule, [value])
    return found


def shape_of_plan(plan: Plan, file: Path) -> Shape:
    """The nodes of a plan's cluster that its workers fill. Raises BadInput if the plan has no cluster, NotExpressible if nodes differ."""
    if plan.cluster is None:
        raise BadInput(
            f"{file}: the plan has no cluster, so the number of nodes is not known; write one with: ahp plan MODEL CLUSTER"
        )
    from ahp.cluster.model import Cluster

    return _of_cluster(Cluster.resolve(plan.cluster), plan.parallelism.world_size, str(file))


def generation_of(plan: Plan) -> str | None:
    """The generation of a plan's GPUs, as the forecast names it (kernels.yaml); None on cores, and for a plan without a cluster or of several."""
    from ahp.cluster.model import Cluster
    from ahp.forecast.efficiency import is_cpu
    from ahp.forecast.gpu import Gpu

    groups = () if plan.cluster is None else Cluster.resolve(plan.cluster).groups
    kinds = {None if is_cpu(group.device) else Gpu(group.device).generation for group in groups}
    return kinds.pop() if len(kinds) == 1 else None


def _of_cluster(cluster: Any, workers: int | None, where: str) -> Shape:
    """The nodes of a cluster that ``workers`` fill, one on each device; None = all devices."""
    if cluster.is_mixed:
        names = ", ".join(group.name for group in cluster.groups)
        raise NotExpressible(
            f"{where}: the cluster has groups of different nodes ({names}), and one job asks for nodes that are alike; plan for one group"
        )
    group = cluster.groups[0]
    on_cores = group.device.name.startswith("cpu")
    wanted = workers or cluster.num_devices
    here = min(group.devices_per_node, wanted)
    if wanted % here:
        raise NotExpressible(
            f"{where}: {wanted} workers do not fill nodes of {group.devices_per_node}; plan for a multiple of {here}"
        )
    nodes = wanted // here
    return Shape(nodes, nodes, here, 0 if on_cores else here, group.device.name)


def _range(nodes: str | None) -> tuple[int | None, int | None]:
    if nodes is None:
        return None, None
    least, colon, most = nodes.partition(":")
    if not (least.isdigit() and (most.isdigit() or not colon)) or not 1 <= int(least) <= int(most or least):
        raise bad_input("--nodes", nodes, "must be a number of nodes, or the least and the most", ["2", "2:4"])
    return int(least), int(most or least)
