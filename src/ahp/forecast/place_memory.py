"""Memory that every rank of a layout needs, by place of the pipeline: ranks at one place on one kind of device need the same."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.forecast.memory import RankMemory


@dataclass(frozen=True)
class PlaceMemory:
    """Ranks that need the same memory, and the device of each rank."""

    ranks: tuple[int, ...]
    device: str
    capacity_bytes: int
    memory: RankMemory
