"""The tables of docs/accuracy.md from judged runs; all figures in %, errors are forecast / measured - 1."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

import numpy as np
from accuracy_judge import Judged
from numpy.typing import NDArray
from page import table
from scipy.stats import spearmanr

from ahp.engines import steps
from ahp.forecast.assembly import band_s

FAR_OFF = 0.30
"""Rows further off than this are listed one by one."""

RANKED_FROM, CORRELATED_FROM = 3, 5
"""Layouts of one model that were measured: from here on the pick is judged, and the order."""

MOST_WORDS = 110
"""Characters of a reason in a table, whose rows have 200 at most."""

COVERAGE = (0.85, 0.90, 0.97)
SIGMAS = np.arange(0.01, 1.0, 0.001)

Groups = Mapping[str, Sequence[Judged]]

DEVICES = (1, 8, 64, 256)
"""The most devices of each row of the table by devices."""
FEW, MANY = 8, 64
"""Devices of small and of large runs."""


def by_source(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        groups[one.run.source].append(one)
    return dict(sorted(groups.items()))


def voting(groups: Groups, notes: Mapping[str, Any]) -> list[str]:
    """Sources of dense models that count for the means: not those kept for ranking, nor mixtures of experts."""
    return [name for name in groups if name not in notes["ranking_only"] and not name.endswith("(experts)")]


def errors(judged: Sequence[Judged], what: str = "error") -> np.ndarray:
    return np.array([value for one in judged if (value := getattr(one, what)) is not None])


def percent(value: float | None, form: str = ".1f") -> str:
    return "" if value is None or np.isnan(value) else f"{100 * value:{form}}"


def _figures(judged: Sequence[Judged]) -> list[float]:
    """Mean, median, 90th percentile, worst, bias and share inside the band."""
    off = errors(judged)
    if not len(off):
        return [np.nan] * 6
    size, inside = abs(off), errors(judged, "inside")
    return [size.mean(), np.median(size), np.quantile(size, 0.9), off[size.argmax()], off.mean(), inside.mean()]


def _line(name: str, judged: Sequence[Judged], figures: Sequence[float], left_out: float) -> list[str]:
    mean, median, p90, worst, bias, inside = figures
    failed = sum(one.failure is not None for one in judged)
    return [
        name, str(len(judged)), str(failed), percent(mean), percent(median), percent(p90), percent(worst, "+.0f"),
        percent(bias, "+.1f"), percent(inside, ".0f"), percent(left_out),
    ]  # fmt: skip


def sources(judged: Sequence[Judged], left_out: Sequence[Judged], notes: Mapping[str, Any]) -> str:
    """Per source: errors of the step time as shipped, and the mean with constants fitted without the source."""
    groups, apart = by_source(judged), by_source(left_out)
    lines, figures, left = [], {}, {}
    for name, own in groups.items():
        figures[name] = _figures(own)
        without = errors(apart.get(name, []))
        left[name] = float(abs(without).mean()) if len(without) else np.nan
        marks = " (ranking only)" if name in notes["ranking_only"] else ""
        lines.append(_line(name + marks, own, figures[name], left[name]))
    votes = [name for name in voting(groups, notes) if not np.isnan(figures[name][0])]
    if votes:
        means = np.array([figures[name] for name in votes]).mean(axis=0)
        means[3] = max((figures[name][3] for name in votes), key=abs)
        everyone = [one for name in votes for one in groups[name]]
        lines.append(_line("**each source one vote**", everyone, means, float(np.mean([left[n] for n in votes]))))
        all_left = errors([one for name in votes for one in apart.get(name, [])])
        mean_left = float(abs(all_left).mean()) if len(all_left) else np.nan
        lines.append(_line("**each row one vote**", everyone, _figures(everyone), mean_left))
    head = ["source", "rows", "not priced", "mean", "median", "9 of 10 below", "worst", "bias", "in band", "left out"]
    return table(head, lines)


def unseen(judged: Sequence[Judged], notes: Mapping[str, Any]) -> str:
    """Per source of rows that nothing was derived from: errors of the step time and of memory (reserved, or the
    whole device's where that was read), and rows far off."""
    lines, means = [], []
    for name, own in by_source(judged).items():
        figures, reserved = _figures(own), errors(own, "reserved_error")
        means.append(figures)
        off = [percent(abs(reserved).mean()), percent(reserved.mean(), "+.1f")] if len(reserved) else ["", ""]
        lines.append(_line(name, own, figures, np.nan)[:-1] + off)
    votes = np.array([figures for figures in means if not np.isnan(figures[0])])
    if len(votes):
        mean = votes.mean(axis=0)
        mean[3] = max(votes[:, 3], key=abs)
        lines.append([*_line("**each source one vote**", judged, mean, np.nan)[:-1], "", ""])
    head = ["source", "rows", "not priced", "mean", "median", "9 of 10 below", "worst", "bias", "in band"]
    parts = [table([*head, "memory: mean", "bias"], lines), far_off(judged, {"far_off": notes["unseen"]})]
    return "\n\n".join(parts)


def by_devices(judged: Sequence[Judged]) -> str:
    """The bias by the number of devices, each source with one vote; and what sources with runs on few and on many say alone."""
    lines = []
    for fewest, most in pairwise((0, *DEVICES, math.inf)):
        groups = by_source([one for one in judged if fewest < one.run.devices <= most])
        means = [off.mean() for own in groups.values() if len(off := errors(own))]
        spread = np.std(means, ddof=1) / len(means) ** 0.5 if len(means) > 1 else None
        numbers = f"over {fewest}" if most == math.inf else f"{fewest + 1} to {most}" if most > 1 else "1"
        bias = np.mean(means) if means else None
        lines.append([numbers, str(len(means)), percent(bias, "+.1f"), percent(spread)])
    apart = []
    for own in by_source(judged).values():
        few = errors([one for one in own if one.run.devices <= FEW])
        many = errors([one for one in own if one.run.devices >= MANY])
        if len(few) and len(many):
            apart.append(many.mean() - few.mean())
    more = f": by {percent(float(np.mean(apart)), '+.1f')} points in the mean" if apart else ""
    words = f"In {len(apart)} sources with runs on up to {FEW} and on {MANY} or more devices, the larger runs are forecast slower{more}."
    return "\n\n".join([table(["devices", "sources", "bias, %", "standard error"], lines), words])


def memory(judged: Sequence[Judged]) -> str:
    """Per source with measured bytes: errors of allocated and reserved, and mistaken promises of the fit."""
    lines = []
    for name, own in by_source(judged).items():
        cells = [name]
        for what in ("allocated_error", "reserved_error"):
            off = errors(own, what)
            if len(off):
                worst = off[abs(off).argmax()]
                cells += [str(len(off)), percent(abs(off).mean()), percent(off.mean(), "+.1f"), percent(worst, "+.0f")]
            else:
                cells += ["0", "", "", ""]
        told = [one for one in own if one.fit_probability is not None]
        ran = [one for one in told if one.run.ran]
        cells += [f"{sum(o.fit_mistaken for o in ran)} of {len(ran)}"]
        cells += [f"{sum(o.fit_mistaken for o in told if not o.run.ran)} of {len(told) - len(ran)}"]
        lines.append(cells)
    head = ["source", "allocated: rows", "mean", "bias", "worst", "reserved: rows", "mean", "bias", "worst"]
    return table([*head, "ran, but excluded", "ran out, but promised"], lines)


def _layouts(judged: Sequence[Judged]) -> list[list[Judged]]:
    """The priced rows of each model on the same devices with the same batch."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.error is not None:
            groups[one.run.group].append(one)
    return list(groups.values())


def regrets(judged: Sequence[Judged]) -> list[float]:
    """Of each model with enough layouts, how much slower the one that is forecast fastest was than the best."""
    found = []
    for group in _layouts(judged):
        measured = [one.run.measured_s for one in group]
        if len(group) >= RANKED_FROM:
            found.append(measured[int(np.argmin([one.predicted_s for one in group]))] / min(measured) - 1.0)
    return found


def ranking(judged: Sequence[Judged]) -> str:
    """Per source: what picking by forecast costs where several layouts of one model were measured; time of a call."""
    lines = []
    for name, own in by_source(judged).items():
        regret, order = regrets(own), []
        for group in _layouts(own):
            if len(group) >= CORRELATED_FROM:
                order.append(spearmanr([o.predicted_s for o in group], [o.run.measured_s for o in group]).statistic)
        calls = errors(own, "seconds")
        lines.append([
            name, str(len(regret)), percent(np.mean(regret) if regret else None), percent(max(regret, default=None)),
            f"{np.mean(order):.2f}" if order else "", f"{1e3 * np.median(calls):.0f}" if len(calls) else "",
        ])  # fmt: skip
    head = ["source", "models with several layouts", "pick slower by, mean", "worst", "rank correlation", "ms a call"]
    return table(head, lines)


def _covered(own: Sequence[Judged], sigma: float) -> float:
    low, high = band_s(1.0, sigma)
    return float(((low <= _slower(own)) & (_slower(own) <= high)).mean())


def _slower(own: Sequence[Judged]) -> NDArray[np.float64]:
    """Measured over forecast."""
    return 1.0 / (1.0 + errors(own))


def _tails(groups: Sequence[Sequence[Judged]]) -> str:
    """The 5th and the 95th percentile of ln(measured / forecast), every group one vote."""
    logs = np.concatenate([np.log(_slower(own)) for own in groups])
    votes = np.concatenate([np.full(len(own), 1.0 / (len(own) * len(groups))) for own in groups])
    order = np.argsort(logs)
    low, high = (logs[order][np.searchsorted(np.cumsum(votes[order]), share)] for share in (0.05, 0.95))
    return f"{low:+.2f} and {high:+.2f}"


def _reaching(coverage: Callable[[float], float], share: float) -> float:
    """The least standard error whose 90 % band holds that share."""
    return next((float(sigma) for sigma in SIGMAS if coverage(float(sigma)) >= share), float("nan"))


def bands(judged: Sequence[Judged], left_out: Sequence[Judged], notes: Mapping[str, Any]) -> str:
    """The standard error that would make the band hold 85, 90 and 97 %, by source and over them."""
    lines = [_band(name, [own]) for name, own in _timed(judged, notes).items()]
    spans, tails = [], []
    for found, words in ((judged, ""), (left_out, ", left out")):
        groups = list(_timed(found, notes).values())
        if not groups:
            continue
        rows = [one for own in groups for one in own]
        tails.append(f"{_tails(groups)}{words}")
        for view, own in ((f"each source one vote{words}", groups), (f"each row one vote{words}", [rows])):
            lines.append(_band(f"**{view}**", own))
            spans.append(f"{view}, {lines[-1][2]} to {lines[-1][4]} %")
    head = ["source", "in band now", *(f"sigma for {percent(share, '.0f')}" for share in COVERAGE)]
    low, high = percent(COVERAGE[0], ".0f"), percent(COVERAGE[-1], ".0f")
    return (
        f"{table(head, lines)}\n\nThe band holds {low} to {high} % with a sigma of: {'; '.join(spans)}. "
        f"The 5th and the 95th percentile of ln(measured / forecast), each source one vote: {'; '.join(tails)}."
    )


def _timed(judged: Sequence[Judged], notes: Mapping[str, Any]) -> dict[str, list[Judged]]:
    """The sources that vote, of rows with an error."""
    groups = by_source([one for one in judged if one.error is not None])
    return {name: groups[name] for name in voting(groups, notes)}


def _band(name: str, groups: Sequence[Sequence[Judged]]) -> list[str]:
    """One line: every group one vote."""
    held = np.mean([errors(own, "inside").mean() for own in groups])
    sigmas = (
        _reaching(lambda sigma: float(np.mean([_covered(own, sigma) for own in groups])), share) for share in COVERAGE
    )
    return [name, percent(held, ".0f"), *(percent(sigma, ".0f") for sigma in sigmas)]


def constants(fitted: Mapping[str, float], without: Mapping[str, Mapping[str, float]]) -> str:
    """The step constants: what ships, fitted again, and fitted without each of their sources."""
    lines = []
    for name, constant in steps.constants().items():
        apart = [f"{source}: {values[name]:g}" for source, values in without.items() if source in constant.derived_from]
        engines, sources_ = ", ".join(constant.engines) or "all", ", ".join(constant.derived_from)
        lines.append([
            f"`{name}`", _short(constant.unit), engines, sources_, f"{constant.value:g}", f"{fitted[name]:g}",
            "; ".join(apart) or "no rows",
        ])  # fmt: skip
    return table(["constant", "unit", "engines", "derived from", "ships", "fitted again", "without"], lines)


def far_off(judged: Sequence[Judged], notes: Mapping[str, Any]) -> str:
    """Every row off by more than ``FAR_OFF``, under the first of the notes whose pattern its id matches."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.error is not None and abs(one.error) > FAR_OFF:
            why = next((n["why"] for n in notes["far_off"] if any(fnmatch(one.run.id, p) for p in n["rows"])), "")
            groups[why].append(one)
    total = sum(map(len, groups.values()))
    if not total:
        return f"No row is off by more than {percent(FAR_OFF, '.0f')} %."
    parts = [f"{total} of {len(errors(judged))} rows are off by more than {percent(FAR_OFF, '.0f')} %."]
    for why, own in sorted(groups.items(), key=lambda pair: (not pair[0], -len(pair[1]))):
        rows = ", ".join(f"`{one.run.id}` {percent(one.error, '+.0f')}" for one in own)
        parts.append(f"- **{why.strip() or 'Not explained yet.'}** ({len(own)}): {rows}")
    return "\n".join([parts[0], "", *parts[1:]])


def not_priced(judged: Sequence[Judged], left_out: Mapping[str, str]) -> str:
    """Runs that the forecast refused, in its own words, and rows of the files that are no runs, with the reasons."""
    refused: dict[str, list[str]] = defaultdict(list)
    for one in judged:
        if one.failure:
            refused[one.failure].append(one.run.id)
    lines = [[_short(reason.replace("|", "/")), str(len(ids)), _some(ids)] for reason, ids in refused.items()]
    parts = [table(["refused, counted as not priced", "rows", "which"], lines) if lines else "Every run was priced."]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in left_out.items():
        reasons[reason].append(name)
    if reasons:
        lines = [[reason, str(len(ids)), _some(ids)] for reason, ids in reasons.items()]
        parts.append(table(["in the files, but not judged", "rows", "which"], lines))
    return "\n\n".join(parts)


def _short(words: str) -> str:
    """As much as a table's row has room for."""
    return words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS].rsplit(' ', 1)[0]} ..."


def _some(ids: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in ids[:3]) + (", ..." if len(ids) > 3 else "")


def published(notes: Mapping[str, Any]) -> str:
    """The accuracy that other tools report."""
    lines = [[n["tool"], n["error"], n["graded_by"], n["source"]] for n in notes["published"]]
    words = [f"- {n['tool']} ({n['source']}): {n['runs']}" for n in notes["published"]]
    head = ["tool", "error of the step time, if nothing else is said", "who graded", "where"]
    return "\n".join([table(head, lines), "", "On which runs:", "", *words])
