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
    """Plans best first, with what the search can say about them."""

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

    @property
    def best(self) -> Plan:
        return self.plans[0]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)
