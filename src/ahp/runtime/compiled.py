"""Blocks as compiled kernels: element-wise chains in one piece, under ``engine.compile``."""

from __future__ import annotations

import os
import shutil

import torch
from torch import nn

from ahp.errors import HardwareMismatch
from ahp.runtime.slice import SlicedForward
from ahp.runtime.telling import Noting

CPU_COMPILERS = ("g++", "clang++")
"""What torch's compiler looks for beside the variable CXX (torch/_inductor/config.py, cpp.cxx)."""


def refuse_without_compiler(device: torch.device) -> None:
    """On a CPU torch writes C++; raises HardwareMismatch where nothing can compile that."""
    wanted = (os.environ["CXX"],) if "CXX" in os.environ else CPU_COMPILERS
    if device.type == "cpu" and not any(map(shutil.which, wanted)):
        raise HardwareMismatch(
            f"engine.compile = True: needs a C++ compiler on a CPU, and there is no {' or '.join(wanted)} (valid: False)"
        )


def compile_block(block: nn.Module) -> None:
    """Compile a block's forward, in place, when it is first run. Hooks on the block (FSDP2's) stay outside."""
    forward = block.forward
    if isinstance(forward, SlicedForward):  # its graph is known already, collectives and all
        forward.compiled = True
    elif isinstance(forward, Noting):  # what it keeps for later stays outside too
        forward.telling = torch.compile(forward.telling, dynamic=False)
    else:
        block.forward = torch.compile(forward, dynamic=False)  # type: ignore[method-assign]
