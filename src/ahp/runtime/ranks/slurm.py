"""The place of this process among the tasks of one ``srun``, from Slurm's variables.

A single task on each node is that node's launcher (``changing_nodes.py``). Several tasks on a node are workers, one for each device; the
first keeps the store through which they find each other.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from ahp.cluster.environment import COMPUTE
from ahp.errors import BadInput, bad_input
from ahp.runtime.ranks.environment import gpu_variables, run_of_changing_nodes

FIRST_PORT, PORTS = 20_000, 10_000
"""Below Linux's ports for outgoing connections, which begin at 32768 (ip_local_port_range)."""
STEPS_APART = 8
"""Ports between two jobs, for steps that run at the same time."""
COMMAND_TIMEOUT_S = 30
TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
"""srun sets all of these for each task (srun's manual, "OUTPUT ENVIRONMENT VARIABLES"); a batch script itself lacks the last two."""


@dataclass(frozen=True)
class Task:
    """One task of an srun."""

    number: int
    tasks: int
    local: int
    """Its number among the tasks of its node."""
    tasks_here: int
    node: int
    nodes: int
    first_node: str
    """Slurm's name of the node that has task 0."""
    port: int

    @property
    def is_launcher(self) -> bool:
        """Whether the task is its node's launcher; otherwise it is one of several workers."""
        return self.tasks == self.nodes

    @property
    def endpoint(self) -> str:
        """HOST:PORT where all tasks meet."""
        return f"{address_of(self.first_node)}:{self.port}"


def task(given: Mapping[str, str] | None = None) -> Task | None:
    """This process as a task of its srun; None outside an srun, or if another launcher has started it.

    ``given`` stands in for ``os.environ``. Raises BadInput for variables that contradict each other.
    """
    env = os.environ if given is None else given
    if "RANK" in env or run_of_changing_nodes() is not None or not all(name in env for name in TASK):
        return None
    number, local, node, tasks, nodes = (_whole(env, name) for name in TASK)
    for name, value, most in (("SLURM_PROCID", number, tasks), ("SLURM_NODEID", node, nodes)):
        if value >= most:
            raise bad_input(name, value, f"the step has {most}, counted from 0; start through srun", range(most))
    here = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(here) != nodes or sum(here) != tasks or local >= here[node]:
        raise BadInput(
            f"SLURM_STEP_TASKS_PER_NODE = {env.get('SLURM_STEP_TASKS_PER_NODE')!r}: must tell the tasks of {nodes} nodes, {tasks} in all "
            f"(SLURM_LOCALID = {local} on node {node}); start through srun"
        )
    job, step = _whole(env, "SLURM_JOB_ID"), _whole(env, "SLURM_STEP_ID")
    port = FIRST_PORT + (job * STEPS_APART + step) % PORTS
    return Task(number, tasks, local, here[node], node, nodes, first_of(env.get("SLURM_STEP_NODELIST", "")), port)


def worker_variables(place: Task, given: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set for a worker in this place. Raises BadInput if it sees GPUs, but fewer than its node's tasks."""
    shown = [gpu for gpu in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if 0 < len(shown) < place.tasks_here:
        raise BadInput(
            f"CUDA_VISIBLE_DEVICES = {given['CUDA_VISIBLE_DEVICES']!r}: srun shows this task {len(shown)} of its node's GPUs, and "
            f"{place.tasks_here} tasks run there; give srun --gpus-per-node {place.tasks_here} --gpu-bind none, or one task for each node"
        )
    from ahp.cluster.sense import physical_cores

    host, _, port = place.endpoint.rpartition(":")
    cores = given.get("SLURM_CPUS_PER_TASK", "")
    threads = cores if cores.isdigit() else str(max(1, physical_cores() // place.tasks_here))
    ours = {"OMP_NUM_THREADS": threads, **COMPUTE, **gpu_variables(given)}
    return {name: value for name, value in ours.items() if name not in given} | {
        "RANK": str(place.number),
        "WORLD_SIZE": str(place.tasks),
        "LOCAL_RANK": str(place.local),
        "LOCAL_WORLD_SIZE": str(place.tasks_here),
        "GROUP_RANK": str(place.node),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        # The store is there when workers look for it; otherwise torch would open one on every address.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def become_worker(place: Task) -> object:
    """Take this place, in the variables that torch reads, for the life of the process. The first worker's result keeps the store alive."""
    os.environ.update(worker_variables(place, os.environ))
    if place.number > 0:
        return None
    from ahp.runtime.ranks.own_store import store_on

    return store_on(os.environ["MASTER_ADDR"], place.port, option="SLURM_STEP_NODELIST")


def address_of(node: str) -> str:
    """The node's name if that has an address, else the name by which Slurm reaches it (NodeAddr)."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        command = ["scontrol", "show", "node", node, "--oneliner"]
        try:
            shown = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return node
        found = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
        return found[1] if found else node
    return node


def first_of(nodes: str) -> str:
    """The first name of a list in Slurm's short form: rack1-node[07-09,12],login."""
    found = re.match(r"(?:[^,\[\]]|\[\w+[^\]]*\])+", nodes)
    if found is None:
        raise bad_input("SLURM_STEP_NODELIST", nodes, "must be a list of nodes; start through srun", ["node[1-2]"])
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0])


def _tasks_per_node(text: str) -> list[int]:
    """``2(x3),1`` means three nodes with two tasks each, then one with one."""
    found = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part) for part in text.split(",")]
    return [int(one[1]) for one in found if one is not None for _ in range(int(one[2] or 1))]


def _whole(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text):
        raise bad_input(name, text, "must be a whole number, as srun sets it")
    return int(text)
