"""The targets of ``ahp export``: a new one is a file with a ``Target``, and a line here."""

from __future__ import annotations

from ahp.errors import bad_input
from ahp.export import accelerate, deepspeed, megatron, torchtitan
from ahp.export.kubernetes import Kubernetes
from ahp.export.slurm import Slurm
from ahp.export.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (Slurm(), Kubernetes(), torchtitan.TARGET, megatron.TARGET, deepspeed.TARGET, accelerate.TARGET)
}


def get(name: str) -> Target:
    """The target with this name. Raises BadInput if there is none."""
    if name not in TARGETS:
        raise bad_input("target", name, "there is no such target; ahp export --help lists them", TARGETS)
    return TARGETS[name]
