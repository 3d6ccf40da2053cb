"""Peak memory of this rank, step by step."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch

RESET_PEAK = "5"
"""Writing this to /proc/PID/clear_refs resets the peak resident memory to what is resident now (man 5 proc_pid_clear_refs)."""


class Peak(NamedTuple):
    """Peak memory in bytes. On a CPU both are resident memory."""

    allocated_bytes: int
    reserved_bytes: int
    """Including what torch's allocator keeps for later, which the device cannot give to others."""


def take_peak(device: torch.device) -> Peak:
    """The peak since the last call in this process, or since the process began. The host does not wait for the device."""
    if device.type != "cuda":
        resident = _resident_peak_bytes()
        return Peak(resident, resident)
    known = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return Peak(known["allocated_bytes.all.peak"], known["reserved_bytes.all.peak"])


def most_bytes(device: torch.device) -> int:
    """The peak since ``take_peak`` was last called, or since the process began: allocated on a GPU, resident on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident_bytes()


def _resident_peak_bytes(process: Path = Path("/proc/self")) -> int:
    """Also resets the peak. If the system cannot reset it, this is the peak since the process began."""
    try:
        lines = (process / "status").read_text().splitlines()
        (process / "clear_refs").write_text(RESET_PEAK)
    except OSError:
        return _resident_bytes()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0) or _resident_bytes()


def _resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
