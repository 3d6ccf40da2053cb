"""What an engine is: it can run a plan, or says why it cannot."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ahp.engines.traits import Traits
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism


class Engine(ABC):
    """One stack that runs plans. Final classes implement every method; none overrides another's."""

    name: str

    @abstractmethod
    def refuses(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """The reason why this engine cannot express the layout (key, value, rule), or None."""

    @abstractmethod
    def traits(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> Traits:
        """Its behaviour for the forecast."""
