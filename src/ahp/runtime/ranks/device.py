"""Chooses the device that a rank computes on, and explains why it is not a GPU that is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from ahp.cluster.plain_groups import plain_groups
from ahp.errors import HardwareMismatch, bad_input
from ahp.plan import Plan
from ahp.runtime.compute.fp8 import refuse_without_fp8
from ahp.runtime.ranks.torch_compat import bound_device
from ahp.words import number_of

DeviceType = Literal["cpu", "cuda"]
BACKENDS: dict[DeviceType, str] = {"cpu": "gloo", "cuda": "nccl"}
DRIVERS = ("nvidiactl", "kfd")
"""Files that NVIDIA's and AMD's drivers put into /dev."""


def num_gpus() -> int:
    """Number of GPUs of this node that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(num_local_workers: int) -> DeviceType:
    """The device of a run, decided only here: GPUs if the machine has one for every worker, else the CPU."""
    return "cuda" if num_gpus() >= num_local_workers else "cpu"


def idle_gpus(num_local_workers: int) -> str | None:
    """Why this node's workers compute on the CPU although it has GPUs; None if it has none, or the user hides them."""
    if found := num_gpus():
        return f"this process sees {number_of(found, 'GPU')}, and {num_local_workers} workers run on this node"
    hidden = any(name in os.environ for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))  # the user's own wish
    driver = next((name for name in DRIVERS if Path("/dev", name).exists()), None)
    if driver is None or hidden:
        return None
    return f"this node has a GPU driver (/dev/{driver}), but torch {torch.__version__} finds no GPU"


def device_for(plan: Plan, num_local_workers: int) -> DeviceType:
    """The device type that a plan was made for. Raises HardwareMismatch if this node has too few such devices."""
    names = [group["device"]["name"] for group in plain_groups(plan.cluster)]
    if names and all(name.startswith("cpu") for name in names):
        device: DeviceType = "cpu"
    else:
        device = choose_device(num_local_workers)
        if device == "cpu" and names:
            raise HardwareMismatch(
                f"the plan was made for {', '.join(names)} and needs {num_local_workers} of them on this node, which has "
                f"{number_of(num_gpus(), 'GPU')}. With several nodes run the same command on each, with --nodes; for this machine plan again: "
                "ahp plan MODEL local"
            )
    refuse_without_fp8(plan, device)
    return device


def device_of_group(wanted: torch.device | None) -> tuple[torch.device, str | None]:
    """The device of this rank in the default process group, whatever its backends: a GPU if there is one and the group's backend for
    GPUs is not gloo, else the CPU. Also returns why it is the CPU, if there are GPUs.

    ``wanted``: the user's own choice. Raises BadInput if the group does not carry it, HardwareMismatch if there is no such GPU.
    """
    carried = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    if wanted is not None:
        if wanted.type not in carried:
            rule = f"the process group ({dist.get_backend_config()}) does not carry it"
            raise bad_input("device", str(wanted), rule, valid=carried)
        return (own_gpu(wanted) if wanted.type == "cuda" else wanted), None
    if carried.get("cuda", "gloo") != "gloo" and num_gpus():
        return own_gpu(), None
    if "cpu" not in carried:
        raise HardwareMismatch(
            f"the process group ({dist.get_backend_config()}) needs a GPU on each rank, and torch {torch.__version__} finds none here"
        )
    why = idle_gpus(local_world_size())
    return torch.device("cpu"), why and f"{why}; the process group is {dist.get_backend_config()}"


def own_gpu(wanted: torch.device | None = None) -> torch.device:
    """This rank's GPU: the GPU that was asked for, else the one that the process group or the program has chosen, else that of LOCAL_RANK.

    Raises HardwareMismatch if there is no such GPU.
    """
    bound = bound_device() if dist.is_initialized() else None
    if wanted is not None and wanted.index is not None:
        index = wanted.index
    elif bound is not None:
        index = bound.index
    elif num_gpus() == 1:  # also if the launcher shows each worker only its own
        index = 0
    else:
        index = torch.cuda.current_device() if num_gpus() else 0
        index = index or int(os.environ.get("LOCAL_RANK", 0))
    if index >= num_gpus():
        raise HardwareMismatch(f"device cuda:{index}: this process sees {number_of(num_gpus(), 'GPU')}")
    return torch.device("cuda", index)


def local_world_size() -> int:
    """Number of workers on this node, from the launcher's variables; all workers if it sets none."""
    everyone = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    return int(os.environ.get("LOCAL_WORLD_SIZE", everyone))
