"""What a host and its device cannot do, whatever the model and the layout. It imports no more of torch than the launcher of a run needs."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch

from ahp.errors import HardwareMismatch, bad_input
from ahp.plan import EngineChoice
from ahp.runtime.optimizer.offload import refuse_without_host

CPU_COMPILERS = ("g++", "clang++")
"""Compilers that torch looks for if the variable CXX names none (torch/_inductor/config.py, cpp.cxx)."""

GPU_COMPILERS = ("gcc", "clang")
"""Compilers that Triton builds its launchers with if CC names none (triton/runtime/build.py)."""


def refuse_kernels(engine: EngineChoice, device: torch.device) -> None:
    """Raises HardwareMismatch for a choice that no plan can have on this device."""
    if engine.compile:
        refuse_without_compiler(device)
    if engine.offload_optimizer:
        refuse_without_host(device)


def refuse_without_compiler(device: torch.device) -> None:
    """Raises HardwareMismatch if nothing can compile kernels for the device."""
    if (reason := why_not_compiled(device)) is not None:
        raise HardwareMismatch(f"engine.compile = True: {reason} (valid: False)")


def why_not_compiled(device: torch.device) -> str | None:
    """What this host lacks to compile kernels with torch.compile; None if nothing."""
    on_cpu = device.type == "cpu"
    variable, known = ("CXX", CPU_COMPILERS) if on_cpu else ("CC", GPU_COMPILERS)
    wanted = (os.environ[variable],) if variable in os.environ else known
    if not any(map(shutil.which, wanted)):
        needs = "a C++ compiler on a CPU" if on_cpu else "a C compiler, which Triton calls"
        return f"needs {needs}, and there is no {' or '.join(wanted)}"
    if not on_cpu and find_spec("triton") is None:
        return "needs the package triton on a GPU, which is not installed"
    return None


def compiles_sliced_blocks() -> bool:
    """Whether this torch sums gradients of compiled blocks over tensor-parallel ranks. [Empirical] torch 2.11 silently leaves sums out (a small
    LLaMA on two ranks: a norm of 0.95 instead of 1.39, on Python 3.13); 2.13, 2.14 and 2.15 do not; 2.12 was not tried."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def refuse_default_device(device: torch.device) -> None:
    """Raises BadInput within ``torch.device("meta")`` and the like, which every tensor made here would land on."""
    default = torch.get_default_device()
    if default.type not in ("cpu", device.type):
        rule = f"ahp.parallelize makes tensors, and was called under this default (torch.set_default_device, or with torch.device), to compute on {device.type}"
        raise bad_input("torch.get_default_device()", str(default), rule, ["cpu", "only the model built under it"])
