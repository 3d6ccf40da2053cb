"""All use of private PyTorch by launchers and by the code that finds and joins ranks. Imports no FSDP and no DTensor, which take a second that
launchers need not spend. Written for 2.11 to 2.15."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ahp.runtime.ranks.environment import run_of_changing_nodes


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """One mesh axis over several neighboring axes; ``_flatten`` has a public name only from 2.12 on."""
    return mesh[axes]._flatten(name)


def unflatten_axis(mesh: DeviceMesh, axis: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The mesh with several axes, slowest first, in place of one axis; the other axes keep their process groups."""
    assert mesh.mesh_dim_names is not None
    return mesh._unflatten(
        mesh.mesh_dim_names.index(axis), sizes, names
    )  # by index: 2.11 refuses the name of an axis that exists


def time_limit(device: torch.device, group: dist.ProcessGroup | None = None) -> timedelta:
    """How long a collective of the group, by default the whole job's, waits for the other ranks."""
    found = group or dist.group.WORLD
    assert found is not None
    return found._get_backend(device).options._timeout  # type: ignore[no-any-return]


def limit_time(group: dist.ProcessGroup | None, limit: timedelta) -> None:
    """Make collectives of the group end with an error after ``limit``. gloo's send and receive keep the limit that the group was made with."""
    distributed_c10d._set_pg_timeout(limit, group)


@contextmanager
def groups_wait(limit: timedelta) -> Iterator[None]:
    """Inside the block, new process groups that are given no limit get this one. A DeviceMesh has no other way to limit its groups."""
    own = distributed_c10d._get_default_timeout
    distributed_c10d._get_default_timeout = lambda backend: limit
    try:
        yield
    finally:
        distributed_c10d._get_default_timeout = own


def rendezvous_names() -> tuple[type, ...]:
    """The classes that the state of torch's dynamic rendezvous consists of."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    return dynamic_rendezvous._RendezvousState, dynamic_rendezvous._NodeDesc


def nodes_heard_of(rendezvous: Any) -> dict[Any, str] | None:
    """Nodes of torch's dynamic rendezvous in this round or waiting for the next, with addresses, as last read; None once the job is closed."""
    state = rendezvous._state_holder.state
    return None if state.closed else {node: node.addr for node in (*state.participants, *state.wait_list)}


def nodes_of_round(rendezvous: Any) -> dict[Any, tuple[int, str]]:
    """The nodes of the current round of torch's dynamic rendezvous, with their numbers and addresses, as last read."""
    return {node: (number, node.addr) for node, number in rendezvous._state_holder.state.participants.items()}


def nodes_there(rendezvous: Any) -> int:
    """Number of nodes of torch's dynamic rendezvous, as last read: in the round, about to join, and waiting for a place."""
    state = rendezvous._state_holder.state
    return len(state.participants) + len(state.wait_list) + len(state.redundancy_list)


def own_node(rendezvous: Any) -> Any:
    """This launcher's node, as torch's dynamic rendezvous names it."""
    return rendezvous._this_node


def stop_heartbeats(rendezvous: Any) -> None:
    """Stop the heartbeats of this launcher, without closing the job for the others as ``shutdown`` of torch's dynamic rendezvous does."""
    rendezvous._stop_heartbeats()


def launchers_store() -> tuple[dist.Store, int, int]:
    """The store that the launcher's variables name, this worker's number and the number of workers: what init_process_group would take.

    torchrun keeps one store for all attempts of its workers (torch 2.13), and what an ended attempt has left there is not for the next.
    If nodes come and go, launchers count attempts differently, and the run's id has the number of the round (``changing_nodes.py``).
    """
    from torch.distributed.rendezvous import rendezvous

    if (run := run_of_changing_nodes()) is not None:
        shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        return dist.PrefixStore(f"ahp/{run}", shared), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, worker, size = next(rendezvous("env://"))
    return (
        dist.PrefixStore(f"ahp/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{size}", store),
        worker,
        size,
    )


def bound_device() -> torch.device | None:
    """The GPU that the default process group was made for (``device_id`` of init_process_group), None if it was given none."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.bound_device_id


def default_store() -> dist.Store:
    """The key-value store that the default process group was made with."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def set_allocator(settings: str) -> None:
    """Apply settings in the form of the environment variable: torch reads that only once, and importing transformers is enough for it."""
    torch._C._accelerator_setAllocatorSettings(settings)
