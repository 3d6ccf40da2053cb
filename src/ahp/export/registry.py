"""The targets of ``ahp export``: a new one is a file with a ``Target``, and a line here."""

from __future__ import annotations

from ahp.errors import bad_input
from ahp.export.accelerate import Accelerate
from ahp.export.deepspeed import DeepSpeed
from ahp.export.kubernetes import Kubernetes
from ahp.export.megatron import Megatron
from ahp.export.slurm import Slurm
from ahp.export.target import Target
from ahp.export.torchtitan import Torchtitan

TARGETS: dict[str, Target] = {
    target.name: target for target in (Slurm(), Kubernetes(), Torchtitan(), Megatron(), DeepSpeed(), Accelerate())
}


def get(name: str) -> Target:
    """Raises BadInput for a name that is none."""
    if name not in TARGETS:
        raise bad_input("target", name, "there is no such target; ahp export --help lists them", TARGETS)
    return TARGETS[name]
