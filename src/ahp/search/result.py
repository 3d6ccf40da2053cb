"""What a search returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ahp.plan import Plan, Rejected
from ahp.search.certificate import Certificate
from ahp.search.choice import Choice
from ahp.search.current import Current
from ahp.search.objective import Objective, Worth
from ahp.words import WORTH_TELLING, percent, seconds

SPEED = Objective()


@dataclass(frozen=True)
class OwnOrder:
    """What is known about schedules that were made for the best layouts' own stages."""

    gain: float
    """Share of the step that the best such order saves against every layout under a fixed pattern; 0 if it is no faster."""
    gap: float
    """The most by which another order of the same stages could be faster, as a share of its time."""
    bound: str
    """The reason for ``gap``."""
    leads: bool = False
    """Whether the first plan has this schedule."""

    def words(self) -> str:
        """What is proven about the first plan's order, to follow what is proven about fixed patterns."""
        faster = f"more than {percent(self.gap)} faster" if self.gap >= WORTH_TELLING else "faster"
        return f"; all this is about torch's fixed patterns; no other order of the first plan's stages is {faster}"


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
    """Every layout that was priced and is not in ``plans``, each with one reason; those that are too large first."""
    notes: tuple[str, ...] = ()
    """What else the user should know, such as devices that are left over."""
    current: Current | None = None
    """What the user runs today, if it was given."""
    objective: Objective = SPEED
    worth: tuple[Worth, ...] = ()
    """The worth of each plan by the objective."""
    choice: Choice | None = None
    """The choice of the number of devices, if the objective leaves it open; the plans are then the best of each number."""

    faster: Plan | None = None
    """The fastest plan by the forecast, if the first plan is tied with it and simpler."""
    families: tuple[Plan, ...] = ()
    """The best plan of each family (``search/families.py``) besides the first plan's, in the order of ``plans``; some may be slower
    than all of ``plans``. The fastest and today's layout are among them."""
    own_order: OwnOrder | None = None
    """Set if a schedule made for a layout's own stages was searched for."""
    more: tuple[Plan, ...] = ()
    """On a mixed cluster, the plans beyond ``plans``: a schedule for its own stages may make one of these plans the fastest."""
    twins: int = 0
    """Layouts that were priced, fit, and are neither the first plan nor one of ``families``."""

    @property
    def fastest(self) -> Plan:
        """The plan with the shortest step by the forecast. The certificate is about this plan or, if it has a schedule of its own
        (``own_order``), about the fastest under a fixed pattern."""
        return self.faster or self.best

    @property
    def proof(self) -> tuple[str, ...]:
        """``searched: ...``, ``left out: ...`` and ``proven: ...`` of the first plan."""
        own, lines = self.own_order, self.certificate.lines()
        return (*lines[:-1], lines[-1] + own.words()) if own is not None and own.leads else lines

    @property
    def best(self) -> Plan:
        return self.plans[0]

    def __str__(self) -> str:
        """The plans as a table, and what is proven about the first."""
        rows = [("#", "layout", "step", "tokens/s/device", "GiB", "why not #1")]
        for number, plan in enumerate(self.plans, 1):
            forecast = plan.priced
            used, speed = f"{forecast.needed_bytes / 2**30:.1f}", f"{forecast.tokens_per_s_per_device:,.0f}"
            reason = "chosen" if number == 1 else plan.why[0]
            rows.append((str(number), plan.parallelism.short(), seconds(forecast.step_time_s), speed, used, reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = (
            f"{number:>{widths[0]}}  {layout:<{widths[1]}}  {step:>{widths[2]}}  {speed:>{widths[3]}}  {used:>{widths[4]}}  {reason}"
            for number, layout, step, speed, used, reason in rows
        )
        return "\n".join([*aligned, *self.proof])

    def with_reasons(self, *lines: str, last: bool = False) -> Ranking:
        """The ranking with more reasons for its first plan, after the line on its time or, if ``last``, at the end; empty ones are left out."""
        why = self.best.why
        at = len(why) if last else 1
        best = self.best.model_copy(update={"why": (*why[:at], *filter(None, lines), *why[at:])})
        return replace(self, plans=(best, *self.plans[1:]))

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)
