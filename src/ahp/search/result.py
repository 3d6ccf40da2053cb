"""What a search gives back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ahp.plan import Plan, Rejected
from ahp.search.certificate import Certificate
from ahp.search.choice import Choice
from ahp.search.current import Current
from ahp.search.objective import Objective, Worth

SPEED = Objective()


@dataclass(frozen=True)
class Ranking:
    """Plans best first, with what the search can say about them.

    The first is the simplest of those that the forecast cannot tell from the fastest (``search/ties.py``); the others follow by
    their time.
    """

    plans: tuple[Plan, ...]
    certificate: Certificate
    too_large: tuple[Rejected, ...]
    """Layouts that would be faster but do not fit."""
    losers: tuple[Rejected, ...]
    """Every layout that was priced and is not in ``plans``, each with its one reason; those too large first."""
    notes: tuple[str, ...] = ()
    """What the user should know beside: devices that are left over."""
    current: Current | None = None
    """What the user runs today, where it was given."""
    objective: Objective = SPEED
    worth: tuple[Worth, ...] = ()
    """Of each plan, by the objective."""
    choice: Choice | None = None
    """Of the number of devices, where the objective leaves it open; the plans are then the best of each number."""

    faster: Plan | None = None
    """The fastest by the forecast, where the first plan is tied with it and simpler."""
    families: tuple[Plan, ...] = ()
    """Beside the first plan the best of each other family (``search/families.py``), in the order of ``plans``; some may be slower
    than all of these. The fastest and today's layout are among them."""
    twins: int = 0
    """Layouts that were priced, fit, and are neither the first plan nor one of ``families``."""

    @property
    def fastest(self) -> Plan:
        """The plan with the shortest step by the forecast; the certificate is about it."""
        return self.faster or self.best

    @property
    def best(self) -> Plan:
        return self.plans[0]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)
