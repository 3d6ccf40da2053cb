"""What an engine is: a stack that runs a plan, or says why it cannot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from ahp.engines.traits import Traits
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism


class Engine(ABC):
    """One stack that runs plans. Final classes implement every method; none overrides another's."""

    name: str
    own_attention: ClassVar[bool] = False
    """Whether attention is a kernel of its own, which knows sliding windows and sinks (``ahp.graph.engine_attention``), and not what transformers
    has for the model."""

    @abstractmethod
    def refuses(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """The reason why this engine cannot express the layout (key, value, rule), or None."""

    @abstractmethod
    def no_key_for(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """Why no file of the program can express a layout that its code would run (key, value, rule), or None.

        Such a layout is priced, searched if the user fixes that key, and refused by ``ahp export``; a search that leaves the
        key open does not offer it. The caller has checked ``refuses`` first.
        """

    @abstractmethod
    def traits(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> Traits:
        """Its behavior for the forecast."""
