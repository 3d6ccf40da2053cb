"""A layout with its forecast, as searches pass it on."""

from __future__ import annotations

from ahp.plan import Forecast, Parallelism

Pair = tuple[Parallelism, Forecast]
