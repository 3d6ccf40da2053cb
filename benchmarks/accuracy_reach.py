"""What the forecast was asked to reach, what it reaches on the rows at hand, and why where it does not (accuracy_notes.yaml, ``reach``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import numpy as np
from accuracy_judge import Judged
from accuracy_tables import by_source, errors, regrets
from page import table


def section(judged: Sequence[Judged], unseen: Sequence[Judged], notes: Mapping[str, Any]) -> str:
    """A line for each thing that was asked for, and under the table what is known of those that are missed."""
    lines, missed = [], []
    for asked in notes["reach"]:
        own = [one for one in (unseen if asked.get("unseen") else [*judged, *unseen]) if _meant(one, asked)]
        value = FIGURES[asked["figure"]](own, notes) if own else None
        if value is None:
            continue
        reached = round(abs(value), 1) <= asked["at_most"]
        now = f"{value:{FORMS.get(asked['figure'], '.1f')}}"
        reach = str(asked["at_most"])
        lines.append([asked["what"], str(len(own)), asked["figure"], reach, now, "yes" if reached else "no"])
        if not reached:
            missed.append(f"- **{asked['what']}, {asked['figure']}.** {asked['why'].strip()}")
    head = ["asked for", "rows", "figure", "at most", "now", "reached"]
    return "\n\n".join([table(head, lines), "\n".join(missed)] if missed else [table(head, lines)])


FORMS = {"bias, each source one vote": "+.1f", "runs": ".0f"}


def _meant(one: Judged, asked: Mapping[str, Any]) -> bool:
    """Whether a row is of those that something was asked of: by source and id, device and precision."""
    device = one.run.arguments["cluster"]["device"]
    name = device["base"] if isinstance(device, Mapping) else device
    return (
        any(fnmatch(f"{one.run.source}/{one.run.id}", pattern) for pattern in asked["rows"])
        and any(fnmatch(name, pattern) for pattern in asked.get("devices", ["*"]))
        and one.run.arguments["job"]["precision"] in asked.get("precisions", [one.run.arguments["job"]["precision"]])
    )


def _mean(own: Sequence[Judged], _: Mapping[str, Any]) -> float | None:
    found = errors(own)
    return 100 * float(abs(found).mean()) if len(found) else None


def _memory(own: Sequence[Judged], _: Mapping[str, Any]) -> float | None:
    found = errors(own, "reserved_error")
    return 100 * float(abs(found).mean()) if len(found) else None


def _regret(own: Sequence[Judged], _: Mapping[str, Any]) -> float | None:
    found = regrets(own)
    return 100 * float(np.mean(found)) if found else None


def _by_vote(figure: Callable[[np.ndarray], float]) -> Callable[[Sequence[Judged], Mapping[str, Any]], float | None]:
    def voted(own: Sequence[Judged], notes: Mapping[str, Any]) -> float | None:
        groups = by_source([one for one in own if one.error is not None])
        found = [figure(errors(groups[name])) for name in groups if name not in notes["ranking_only"]]
        return 100 * float(np.mean(found)) if found else None

    return voted


FIGURES: Mapping[str, Callable[[Sequence[Judged], Mapping[str, Any]], float | None]] = {
    "mean error": _mean,
    "memory, mean error": _memory,
    "pick slower by": _regret,
    "mean error, each source one vote": _by_vote(lambda off: float(abs(off).mean())),
    "bias, each source one vote": _by_vote(lambda off: float(off.mean())),
    "runs": lambda own, _: float(sum(one.fit_mistaken for one in own)),
}
"""In percent, but for the runs of which the fit is mistaken; None where no row has what is asked."""
