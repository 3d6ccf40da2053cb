"""The ranks of a run: how they find each other, and the few words that they exchange beside tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from ahp.config import COLLECTIVE_TIMEOUT_S
from ahp.errors import AhpError, HardwareMismatch, bad_input
from ahp.plan import Plan
from ahp.runtime.compute.fp8 import refuse_without_fp8
from ahp.runtime.ranks.device_order import mesh_places
from ahp.runtime.torch_compat import default_store, launchers_store

Result = TypeVar("Result")
DeviceType = Literal["cpu", "cuda"]
BACKENDS: dict[DeviceType, str] = {"cpu": "gloo", "cuda": "nccl"}
MESH_ORDER = "ahp/mesh-order"
"""Prefix in the store of groups whose ranks are the places of a mesh."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def num_gpus() -> int:
    """GPUs of this node that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(num_local_workers: int) -> DeviceType:
    """The device of a run, decided here alone: GPUs when the machine has one for every worker, else the CPU."""
    return "cuda" if num_gpus() >= num_local_workers else "cpu"


def device_for(plan: Plan, num_local_workers: int) -> DeviceType:
    """The device that a plan was made for, of which this node has enough. Raises HardwareMismatch otherwise."""
    names = [group["device"]["name"] for group in (plan.cluster or {}).get("groups", [])]
    if names and all(name.startswith("cpu") for name in names):
        device: DeviceType = "cpu"
    else:
        device = choose_device(num_local_workers)
        if device == "cpu" and names:
            raise HardwareMismatch(
                f"the plan was made for {', '.join(names)} and needs {num_local_workers} of them on this node, which has "
                f"{num_gpus()} GPUs. On several nodes start ahp train with torchrun on each; for this node plan again: "
                "ahp plan MODEL local"
            )
    refuse_without_fp8(plan, device)
    return device


def is_joined() -> bool:
    """Whether torchrun, or what stands in for it, has started this process as one rank of many."""
    return all(name in os.environ for name in LAUNCHER_VARIABLES)


@dataclass(frozen=True)
class Ranks:
    """This rank among the others. Every method is called by all ranks alike."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Rank 0 writes the run's files."""
        return self.rank == 0

    def barrier(self) -> None:
        self.highest(0)

    def highest(self, *values: int) -> tuple[int, ...]:
        """The largest of each value over all ranks."""
        together = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        return tuple(together.tolist())

    def from_first(self, value: Any) -> Any:
        """What rank 0 passed in; the others' values are not looked at."""
        box = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def first_message(self, word: str | None) -> str | None:
        """What the first rank said that has something to say."""
        said: list[str | None] = [None] * self.size
        dist.all_gather_object(said, word)
        return next((found for found in said if found is not None), None)

    def decided_by_first(self, decide: Callable[[], Result]) -> Result:
        """Let rank 0 decide and every rank know it.

        When the leader's decision is an error, it raises that, and the others end with its exit code: the user is
        told once.
        """
        error: AhpError | None = None
        result: Any = None
        if self.is_first:
            try:
                result = decide()
            except AhpError as reason:
                error = reason
        result, exit_code = self.from_first((result, error.exit_code if error is not None else 0))
        if error is not None:
            raise error
        if exit_code:
            raise SystemExit(exit_code)
        return result


@contextmanager
def joined(device: DeviceType, plan: Plan | None = None) -> Iterator[Ranks]:
    """Join the other ranks for the length of the block, or use the group that is already there.

    The launcher's variables say who and where; ``cuda`` takes the GPU of ``LOCAL_RANK``. With a ``plan`` whose stages lie on
    the groups of a mixed cluster, ranks are the places of its mesh (``ahp.runtime.ranks.device_order``).

    When the block fails, ranks stay joined until their processes end: another may be in an exchange that does not end, and
    gloo waits for its own exchanges when a group is left.
    """
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if where.index >= torch.cuda.device_count():
            raise bad_input("LOCAL_RANK", where.index, f"this node has {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(where)
    places = mesh_places(plan) if plan is not None else None
    ours = not dist.is_initialized() or not (places is None or _is_in_mesh_order())
    if ours:
        _join(device, where, places)
    alone = dist.get_world_size() == 1
    well = False
    try:
        yield Ranks(rank=dist.get_rank(), size=dist.get_world_size(), device=where)
        well = True
    finally:
        if ours and (well or alone) and dist.is_initialized():  # not where a plan made the block inside join anew
            dist.destroy_process_group()


def _join(device: DeviceType, where: torch.device, places: list[int] | None) -> None:
    """Make the default group, with the places of a mesh as ranks where they are given."""
    limits: dict[str, Any] = {
        "timeout": timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        "device_id": where if device == "cuda" else None,
    }
    if places is None:
        dist.init_process_group(BACKENDS[device], **limits)
    else:
        if dist.is_initialized():  # in the launcher's order
            dist.destroy_process_group()
        store, worker = launchers_store()
        rank = places[worker]
        dist.init_process_group(
            BACKENDS[device], store=dist.PrefixStore(MESH_ORDER, store), rank=rank, world_size=len(places), **limits
        )
        default_store().set(f"{MESH_ORDER}/{rank}", "")
    if device == "cpu":  # A rank that left now would close what another one still connects to.
        dist.barrier()


def _is_in_mesh_order() -> bool:
    """Whether this rank has joined the present group with its place of a mesh."""
    return default_store().check([f"{MESH_ORDER}/{dist.get_rank()}"])
