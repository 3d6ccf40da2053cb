"""A layout with its forecast, as searches hand them on."""

from __future__ import annotations

from ahp.plan import Forecast, Parallelism

Pair = tuple[Parallelism, Forecast]
