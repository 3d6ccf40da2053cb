"""The number of devices that an objective chose, and what is known about the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ahp.search.objective import Scale, Worth
from ahp.search.one_group import Fastest
from ahp.words import number_of


@dataclass(frozen=True)
class Settled:
    """What is known about one number of devices."""

    found: Fastest
    worth: Worth | None
    """Worth of its best plan; None if none fits, misses the target, or has a lower bound so high that it is not worth a forecast."""
    lowest_score: float
    """No plan on these devices scores less; infinite if none fits."""

    @property
    def devices(self) -> int:
        return self.found.problem.cluster.num_devices

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        best = self.found.best
        fits = self.found.at_least_s < float("inf")
        return {
            "devices": self.devices,
            "parallelism": None if best is None else best[0].model_dump(mode="json"),
            "step_time_s": None if best is None else best[1].step_time_s,
            "step_time_at_least_s": self.found.at_least_s if fits else None,
            "worth": None if self.worth is None else dict(self.worth.figures),
        }


@dataclass(frozen=True)
class Choice:
    """The number of devices that was chosen, and what is known about the others."""

    scale: Scale
    first: Settled
    others: tuple[Settled, ...]
    """Numbers of devices with a plan, the best first."""
    without: tuple[Settled, ...]
    """Numbers of devices without a plan worth showing, and why that is known."""
    search_s: float

    @property
    def proven(self) -> bool:
        """Whether no other number of devices can be better, by this forecast."""
        return all(self._behind(one) for one in (*self.others, *self.without))

    def _behind(self, one: Settled) -> bool:
        assert self.first.worth is not None, "the first has a plan"
        if self.scale.objective.name != "fewest-devices":
            return one.lowest_score >= self.first.worth.score
        if one.devices == self.first.devices and one.lowest_score >= self.first.worth.score:
            return True
        return one.devices > self.first.devices or one.found.at_least_s > self.scale.target_s

    def words(self) -> str:
        """One line for people: which numbers of devices were tried, and what is known about those that lost."""
        settled = sorted(one.devices for one in (self.first, *self.others, *self.without))
        too_small = sum(one.found.at_least_s == float("inf") for one in self.without)
        bounded = len(self.without) - too_small
        others = len(self.others)
        parts = [
            f"nothing fits on {too_small}" * (too_small > 0),
            f"the best plan{'s' * (others > 1)} of {others} {'are' if others > 1 else 'is'} worse" * (others > 0),
            f"a lower bound excludes {bounded}" * (bounded > 0),
        ]
        figures = ", ".join(filter(None, parts))
        where = "the only number that was compared"
        if len(settled) > 1:
            what = "parts of the cluster" if self.scale.asked.cluster.is_mixed else "numbers"
            least = f"{settled[0]} to " * (settled[0] < settled[-1])
            where = f"the best of {len(settled)} {what} ({least}{number_of(settled[-1], 'device')})"
        end = "proven" if self.proven else "not proven: a better plan may be among those that were not priced"
        chosen = number_of(self.first.devices, "device")
        return f"{chosen}, {where}, found in {self.search_s:.1f} s{': ' if figures else ''}{figures} ({end})"

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        rest = sorted((*self.others, *self.without), key=lambda one: one.devices)
        return {
            "proven": self.proven,
            "search_s": self.search_s,
            "chosen": self.first.plain(),
            "others": [one.plain() for one in rest],
        }
