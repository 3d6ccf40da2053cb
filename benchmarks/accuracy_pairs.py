"""How far two forecasts must lie apart before their order means something: pairs of measured layouts of one model.

What a forecast gets wrong for all layouts of a model on a cluster (an older kernel, a crowded network) cancels between
two such layouts, so that their ratio is better known than either time. Pairs are those of one source with the same model,
devices, batch and precision; runs of unseen/ among them, for order is fitted to nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from accuracy_judge import Judged
from page import table

EDGES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, math.inf)
"""By how much the slower of a pair is forecast to be slower: the rows of the table."""


@dataclass(frozen=True)
class Pair:
    """Two layouts of one model that somebody measured; ratios are of the one that is forecast slower to the other."""

    source: str
    forecast: float
    measured: float

    @property
    def right(self) -> float:
        """1 where the one forecast slower was slower, 0 where it was faster, half where forecast or measurement is the same."""
        return 0.5 if 1.0 in (self.forecast, self.measured) else float(self.measured > 1.0)

    @property
    def error(self) -> float:
        """Log of the forecast ratio over the measured one."""
        return math.log(self.forecast / self.measured)


def pairs(judged: Sequence[Judged]) -> Iterator[Pair]:
    """Every two runs of one source that differ in their layout alone."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for one in judged:
        if one.error is not None and one.predicted_s and one.run.measured_s:
            groups[one.run.source, one.run.group].append((one.predicted_s, one.run.measured_s))
    for (source, _), group in groups.items():
        for one, other in combinations(group, 2):
            slow, fast = max(one, other), min(one, other)
            yield Pair(source, slow[0] / fast[0], slow[1] / fast[1])


def section(judged: Sequence[Judged]) -> str:
    """By the forecast distance: how often the order was right; then what error two layouts of a model have."""
    found = list(pairs(judged))
    lines = []
    for low, high in pairwise(EDGES):
        own = [pair for pair in found if low <= pair.forecast - 1.0 < high]
        if own:
            upto = f"{100 * low:.0f} to {100 * high:.0f} %" if math.isfinite(high) else f"{100 * low:.0f} % or more"
            right, sources = np.mean([pair.right for pair in own]), len({pair.source for pair in own})
            lines.append([upto, str(len(own)), str(sources), f"{100 * right:.0f} %"])
    if not lines:
        return ""
    errors = [float(np.median([abs(p.error) for p in found if p.source == name])) for name in {p.source for p in found}]
    return (
        table(["forecasts apart by", "pairs", "sources", "in the right order"], lines)
        + f"\n\nThe ratio of two forecasts of a model is off by {100 * float(np.median(errors)):.0f} %: the median of each "
        f"source's median, {len(errors)} sources."
    )
