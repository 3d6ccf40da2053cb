"""The engines by name."""

from __future__ import annotations

from ahp.engines.accelerate import AccelerateEngine
from ahp.engines.ahp import AhpEngine
from ahp.engines.deepspeed import DeepSpeedEngine
from ahp.engines.engine import Engine
from ahp.engines.megatron import MegatronEngine
from ahp.engines.torchtitan import TorchtitanEngine
from ahp.engines.traits import Traits
from ahp.errors import bad_input
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

ENGINES: tuple[Engine, ...] = (
    AhpEngine(),
    TorchtitanEngine(),
    MegatronEngine(),
    DeepSpeedEngine(),
    AccelerateEngine(),
)


def names() -> list[str]:
    """The names of all engines."""
    return [engine.name for engine in ENGINES]


def get(name: str) -> Engine:
    """The engine of that name. Raises BadInput for an unknown one."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise bad_input("engine.name", name, "no such engine", names())


def traits_of(job: Job, parallelism: Parallelism, choice: EngineChoice) -> Traits:
    """How the chosen engine behaves under a layout that it can run."""
    return get(choice.name).traits(job, parallelism, choice)
