"""The ranks of a run: how they find each other, and the few values that they exchange besides tensors."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ahp.config import COLLECTIVE_TIMEOUT_S
from ahp.errors import BadInput, HardwareMismatch, bad_input
from ahp.plan import Plan
from ahp.runtime.host_copy import HostCopy
from ahp.runtime.ranks.dead_peer import give_up_after
from ahp.runtime.ranks.device import (
    BACKENDS,
    DeviceType,
    choose_device,
    device_of_group,
    idle_gpus,
    local_world_size,
    num_gpus,
    own_gpu,
)
from ahp.runtime.ranks.device_order import agreed_numbers, mesh_places
from ahp.runtime.ranks.environment import ALLOCATOR, gpu_variables
from ahp.runtime.ranks.meeting import MEET_S, meet
from ahp.runtime.ranks.torch_compat import default_store, launchers_store, limit_time, set_allocator

MESH_ORDER = "ahp/mesh-order"
"""Prefix in the store for groups whose ranks are the places of a mesh."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_joined() -> bool:
    """Whether torchrun, or another launcher like it, has started this process as one of many ranks."""
    return all(name in os.environ for name in LAUNCHER_VARIABLES)


@dataclass(frozen=True)
class Ranks:
    """This rank among the others. All ranks call every method."""

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
        return tuple(self.highest_later(*values).read().tolist())

    def highest_later(self, *values: int) -> HostCopy:
        """``highest``, to be read later: on a GPU the exchange is queued after the work that is already queued, and the host does not wait."""
        given = torch.tensor(values, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        together = given.to(self.device, non_blocking=True)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        return HostCopy(together)

    def from_first(self, value: Any) -> Any:
        """The value that rank 0 passed in; the other ranks' values are ignored."""
        box = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def together(self, mine: dict[str, int]) -> dict[str, int]:
        """The entries of all ranks."""
        found: list[dict[str, int]] = [{}] * self.size
        dist.all_gather_object(found, mine)
        return {name: value for one in found for name, value in one.items()}

    def first_message(self, word: str | None) -> str | None:
        """The message of the first rank that has one; None if no rank has."""
        said: list[str | None] = [None] * self.size
        dist.all_gather_object(said, word)
        return next((found for found in said if found is not None), None)


@contextmanager
def joined(
    device: DeviceType, plan: Plan | None = None, *, collective_timeout_s: float = COLLECTIVE_TIMEOUT_S
) -> Iterator[Ranks]:
    """Join the other ranks for the length of the block, or use the group that is already there; collectives get this limit.

    The launcher's variables give rank and address; ``cuda`` takes this rank's GPU (``own_gpu``). With a ``plan`` whose stages
    lie on the groups of a mixed cluster, ranks are the places of its mesh (``ahp.runtime.ranks.device_order``).

    If the block fails, ranks stay joined until their processes end: another rank may be in an exchange that does not end,
    and gloo waits for its own exchanges when it leaves a group.
    """
    where = own_gpu() if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    places = mesh_places(plan) if plan is not None else None
    limit = timedelta(seconds=collective_timeout_s)
    ours = not dist.is_initialized() or not (places is None or _is_in_mesh_order())
    if ours:
        _join(where, plan, limit, meet_s=MEET_S)
    else:
        limit_time(dist.group.WORLD, limit)
    alone = dist.get_world_size() == 1
    well = False
    try:
        yield Ranks(rank=dist.get_rank(), size=dist.get_world_size(), device=where)
        well = True
    finally:
        if ours and (well or alone) and dist.is_initialized():  # not if an inner block joined again for its plan
            dist.destroy_process_group()


def _device_named(wanted: torch.device | str | None) -> torch.device | None:
    """The device that a user has named. Raises BadInput for what is no device."""
    if wanted is None or isinstance(wanted, torch.device):
        return wanted
    try:
        return torch.device(str(wanted))
    except RuntimeError:
        raise bad_input("device", wanted, "is no device of torch", [None, *BACKENDS]) from None


def rank_device(plan: Plan, wanted: torch.device | str | None = None) -> torch.device:
    """The device of this rank; a GPU becomes the current device. Joins the other ranks if the program has not.

    ``wanted``: the user's own choice. Collective. Warns on stderr, once per node, if the CPU computes while GPUs are idle.
    """
    given = _device_named(wanted)
    if dist.is_initialized():
        device, why = device_of_group(given)
    else:
        if given is not None and given.type not in BACKENDS:
            raise bad_input("device", str(wanted), "AHP computes on none such", valid=BACKENDS)
        _refuse_to_start(plan)
        set_gpu_variables()
        kind = given.type if given is not None else choose_device(local_world_size())
        device = own_gpu(given) if kind == "cuda" else torch.device("cpu")
        why = idle_gpus(local_world_size()) if given is None and kind == "cpu" else None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # On some ranks the program may have other work before this.
        limit_s = COLLECTIVE_TIMEOUT_S
        _join(device, plan, timedelta(seconds=limit_s), meet_s=limit_s)
    if why and os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(
            f"ahp.parallelize: device None becomes the CPU beside idle GPUs: {why}. Start one worker for each GPU and leave "
            "init_process_group to ahp.parallelize, or give device='cuda'; device='cpu' if it is meant",
            RuntimeWarning,
            stacklevel=3,
        )
    return device


def set_gpu_variables(log_folder: Path | None = None) -> None:
    """Set ``gpu_variables`` in this process, and in torch's allocator, which may already have read the environment."""
    os.environ.update(ours := gpu_variables(os.environ, log_folder))
    if ALLOCATOR[0] in ours:
        set_allocator(ours[ALLOCATOR[0]])


def _refuse_to_start(plan: Plan) -> None:
    """Raise if a launcher has set only some of the variables that ranks find each other by, or if the plan needs more ranks and none is set."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    size = plan.parallelism.world_size
    if missing and ("RANK" in os.environ or "WORLD_SIZE" in os.environ):
        raise BadInput(
            f"ahp.parallelize: torch.distributed is not initialised, and {', '.join(missing)} is not in the environment; start "
            "with torchrun, or call init_process_group first"
        )
    if missing and size > 1:
        raise HardwareMismatch(
            f"parallelism: its degrees multiply to {size} ranks, but this process was started alone ({plan.parallelism.short()}); "
            f"start it with torchrun --nproc-per-node {size}, or plan again for 1"
        )


def _join(where: torch.device, plan: Plan | None, limit: timedelta, *, meet_s: float) -> None:
    """Make the default group, with the places of the plan's mesh as ranks. It gets the limit of collectives at once, because gloo's send and
    receive keep the limit that a group was made with; so all ranks are waited for before.

    Raises NoAnswer with the ranks that do not come within ``meet_s``, HardwareMismatch if their devices are not the plan's.
    """
    device: DeviceType = "cuda" if where.type == "cuda" else "cpu"
    limits: dict[str, Any] = {"timeout": limit, "device_id": where if device == "cuda" else None}
    if not is_joined():
        dist.init_process_group(BACKENDS[device], store=dist.HashStore(), rank=0, world_size=1, **limits)
        return
    if dist.is_initialized():  # in the launcher's order
        left = default_store()  # kept: this process may serve the store, and others may still read from it
        # A rank that left now would close a connection that another rank is still making.
        meet(left, dist.get_rank(), dist.get_world_size(), at="change of the ranks' order", within_s=meet_s)
        dist.destroy_process_group()
    store, worker, size = launchers_store()
    give_up_after(int(os.environ["MASTER_PORT"]), limit.total_seconds())
    in_launchers_order = True
    meet(store, worker, size, at="start of the job", within_s=meet_s)
    _compare_devices(store, worker, device)
    rank = worker
    for order in _orders(store, worker, size, plan, where):
        rank = order[rank]
        in_launchers_order = False
    named = dist.PrefixStore("ahp/ranks" if in_launchers_order else MESH_ORDER, store)
    dist.init_process_group(BACKENDS[device], store=named, rank=rank, world_size=size, **limits)
    if not in_launchers_order:
        default_store().set(f"{MESH_ORDER}/{rank}", "")
    if device == "cpu":  # A rank that left now would close a connection that another rank is still making.
        dist.barrier()


def _orders(store: dist.Store, worker: int, size: int, plan: Plan | None, where: torch.device) -> list[list[int]]:
    """Renumberings: from the launcher's numbers to the plan's, then to the places of its mesh; those that change nothing are left out. Collective."""
    if plan is None:
        return []
    return [
        order for order in (agreed_numbers(store, worker, size, plan, where), mesh_places(plan)) if order is not None
    ]


def _compare_devices(store: dist.Store, worker: int, device: DeviceType) -> None:
    """Raise HardwareMismatch on a rank whose kind of device is not the first rank's: their backends would wait for each other."""
    if worker == 0:
        store.set("ahp/device", device)
        return
    store.wait(["ahp/device"], timedelta(seconds=MEET_S))
    first = store.get("ahp/device").decode()
    if first != device:
        raise HardwareMismatch(
            f"worker {worker} on {socket.gethostname()} computes on {device}, worker 0 on {first}: this one sees {num_gpus()} GPUs "
            f"for the {local_world_size()} workers of its node"
        )


def _is_in_mesh_order() -> bool:
    """Whether this rank has joined the current group with its place in a mesh."""
    return default_store().check([f"{MESH_ORDER}/{dist.get_rank()}"])
