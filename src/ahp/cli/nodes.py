"""``ahp train --nodes 2:4 --rendezvous HOST:PORT``: the same command on each node runs one job."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ahp.config import Elastic, Run
from ahp.errors import BadInput, bad_input
from ahp.runtime.ranks.environment import run_of_changing_nodes
from ahp.words import number_of

if TYPE_CHECKING:
    from ahp.job import Job
    from ahp.runtime.ranks.changing_nodes import JobEnded, Node
    from ahp.runtime.ranks.slurm import Task
    from ahp.runtime.run.folder import RunFolder

NOT_AGAIN = "not started again"
OPTIONS = ("--nodes", "--rendezvous", "--workers-per-node")
QUIET_STORE = "TORCH_CPP_LOG_LEVEL", "ERROR"
"""A launcher's and its workers' stderr is the user's: torch's store would print C++ frames there for each node that leaves. We report the cause."""
Asked = tuple[int, int, str, int | None]
"""The least and the most nodes, where they meet, and this node's workers if they are given."""


def asked(nodes: str | None, rendezvous: str | None, workers: int | None, slurm: Task | None = None) -> Asked | None:
    """Parse the options. Returns None if none is given, and in a worker that such a launcher has started. Raises BadInput.

    ``slurm``: this process among the tasks of an srun, which decides what the options leave open.
    """
    if run_of_changing_nodes() is not None:
        return None
    if slurm is not None and slurm.tasks == 1 and (workers is None or nodes or rendezvous):
        slurm = None  # a process of its own
    if slurm is not None:
        _refuse_against(slurm, nodes, rendezvous, workers)
        if slurm.is_launcher:
            nodes, rendezvous = nodes or str(slurm.nodes), rendezvous or slurm.endpoint
    given = dict(zip(OPTIONS, (nodes, rendezvous, workers), strict=True))
    if all(value is None for value in given.values()):
        return None
    if nodes is None or rendezvous is None:
        missing = [name for name in OPTIONS[:2] if given[name] is None]
        raise BadInput(
            f"{' and '.join(missing)} missing: several nodes need --nodes N or MIN:MAX and --rendezvous HOST:PORT, an address of one "
            "node, the same on all nodes"
        )
    if "RANK" in os.environ:
        raise bad_input(
            "--nodes", nodes, "a launcher (torchrun) has started this process as one of its workers; leave it out"
        )
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", nodes)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise bad_input("--nodes", nodes, "must be a number of nodes, or the least and the most", ["2", "2:4"])
    address = r"([^\s:,]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?"
    if not re.fullmatch(f"{address}(,{address})*", rendezvous):
        rule = "must be an address of one of the nodes, or of several with commas between"
        raise bad_input("--rendezvous", rendezvous, rule, ["10.0.0.1:29500", "10.0.0.1,10.0.0.2"])
    if workers is not None and workers < 1:
        raise bad_input("--workers-per-node", workers, "must be at least 1")
    return least, most, rendezvous, workers


def _refuse_against(slurm: Task, nodes: str | None, rendezvous: str | None, workers: int | None) -> None:
    """Raises BadInput for options that contradict srun."""
    given = {"--nodes": nodes, "--rendezvous": rendezvous, "--workers-per-node": workers}
    if not slurm.is_launcher:
        for name, value in given.items():
            if value is not None:
                rule = f"srun has started {slurm.tasks} tasks on {slurm.nodes} node{'s' * (slurm.nodes > 1)}, each of which is a worker"
                raise bad_input(name, value, f"{rule}; leave it out, or give srun --ntasks-per-node 1")
    counts = re.findall(r"\d+", nodes or "")
    if counts and not int(counts[0]) <= slurm.nodes <= int(counts[-1]):
        raise bad_input("--nodes", nodes, "srun has started tasks on another number of nodes", [slurm.nodes])


def launch(several: Asked, words: Sequence[str], run: Run, job: Job, alike: dict[str, Any]) -> int:
    """Start this node's workers, which run the same command. Returns the exit code. Raises BadInput if it would join a run that other nodes
    were asked for otherwise; ``alike``: what all must be asked for."""
    os.environ.setdefault(*QUIET_STORE)
    from ahp.runtime.ranks import changing_nodes
    from ahp.runtime.ranks.watch import OWN_CAUSE_S, Watch
    from ahp.runtime.run.folder import RunFolder

    folder = RunFolder(run.folder)
    folder.create()
    refuse_to_join(folder, alike)
    least, most, endpoint, given = several
    workers = given or _workers_here()
    least, most = bounded(least, most, workers, run.elastic)
    if folder.finished(job) is not None:
        least = 1  # its workers only say so; nobody else may come
    limit_s = run.collective_timeout_s
    watch = Watch(folder.metrics_file, limit_s + OWN_CAUSE_S, limit_s, begins=folder.joined_file)
    node: Node = changing_nodes.Node(
        least, most, endpoint, workers, run.elastic.max_restarts, folder.log_folder, watch, partial(say_why, folder)
    )
    try:
        return changing_nodes.launch(["train", *words], node)
    except changing_nodes.JobEnded as ended:
        status = folder.status()
        if status is None or status.state != "done":
            if not ended.elsewhere:
                record_end(folder, ended, behind=run.elastic.max_restarts > 0)
            raise
        print(f"the run in {folder.path} is done; nothing is left to do on this node", file=sys.stderr)
        return 0


def refuse_to_join(folder: RunFolder, alike: dict[str, Any]) -> None:
    """Raises BadInput if the run that goes on in the folder was asked for otherwise: its workers would find out only after they had stopped for
    this node, and all nodes would end."""
    from ahp.runtime.run.nodes_alike import differences

    try:
        first = json.loads(folder.asked_file.read_bytes())
    except (OSError, ValueError):
        return
    if (found := differences(first, alike)) and folder.is_in_use():
        raise BadInput(
            f"run.folder = {str(folder.path)!r}: the run that goes on there is another one: {found}. Start this node as the others were started, "
            "or give another --run.folder"
        )


def say_why(folder: RunFolder, why: str) -> None:
    """Print and record why this node's workers were ended, which they cannot report themselves."""
    from ahp.runtime.ranks.hangs import RankMissing
    from ahp.runtime.run import failure

    cause = failure.of_hang(folder, why)
    print(
        f"{cause}; the workers of this node are ended, and start again if run.elastic.max_restarts allows",
        file=sys.stderr,
        flush=True,
    )
    failure.record(folder, None, RankMissing(cause))


def record_end(folder: RunFolder, ended: JobEnded, *, behind: bool) -> None:
    """Record in status.json why launchers start no workers again; ``behind``: also if the cause of the last failure is there, behind that.

    The first worker, which may be another node's, holds the folder until it has written that cause. A folder that others hold for longer is
    left alone: they have gone on without this node.
    """
    from ahp.runtime.run import failure
    from ahp.runtime.run.folder import LET_GO_S

    with suppress(BadInput), folder.held(wait_s=LET_GO_S):
        status = folder.status()
        if status is not None and status.state == "done":
            return
        failed = status is not None and status.state == "failed" and status.cause
        if not failed or (behind and NOT_AGAIN not in failed):  # one launcher's words are enough
            why = f"on {socket.gethostname()}: {ended}"
            text = f"{failed}\n{NOT_AGAIN}: {why}" if failed else why
            failure.report(folder, text, ended.exit_code)


def bounded(least: int, most: int, workers: int, elastic: Elastic) -> tuple[int, int]:
    """The least and the most nodes of ``workers`` workers each, within ``run.elastic``'s min_workers and max_workers. Raises BadInput if none are."""
    elastic.refuse_more(least * workers, _nodes_of(least, workers))
    if elastic.max_workers is not None:
        most = min(most, elastic.max_workers // workers)
    elastic.refuse_fewer(most * workers, _nodes_of(most, workers))
    return max(least, -(-elastic.min_workers // workers)), most


def _nodes_of(nodes: int, workers: int) -> str:
    return f"{number_of(nodes, 'node')} of {number_of(workers, 'worker')}"


@contextmanager
def ending_for_all() -> Iterator[None]:
    """Inside the block, in a worker of a job on several nodes, an error that a new start would meet again ends the job on all nodes."""
    try:
        yield
    except Exception as error:
        from ahp.runtime.run.failure import may_pass

        if not may_pass(error):
            _end_for_all(getattr(error, "exit_code", 1))
        raise


@contextmanager
def reporting(*, is_done: bool) -> Iterator[None]:
    """Inside the block, in the first worker of a job on several nodes, launchers start nothing again if the run is done, whether nodes are lost
    or come. An error of the report then ends the job with its exit code."""
    if not is_done:
        yield
        return
    _end_for_all(0)
    try:
        yield
    except Exception as error:
        _end_for_all(getattr(error, "exit_code", 1))
        raise


def _end_for_all(exit_code: int) -> None:
    if run_of_changing_nodes() is not None:
        from ahp.runtime.ranks.changing_nodes import end_for_all

        end_for_all(exit_code)


def _workers_here() -> int:
    """The number of this node's GPUs, else of its cores, as ``cluster: local`` counts them; under Slurm only the cores given to the job."""
    from ahp.cluster.local import local_cluster
    from ahp.cluster.managers import cores_given

    here = local_cluster()
    is_cpu = here.groups[0].device.name.startswith("cpu")
    return min(here.num_devices, cores_given()) if is_cpu else here.num_devices
