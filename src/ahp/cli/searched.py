"""What a search did, in three lines for people: what was searched, what was left out, what is proven."""

from __future__ import annotations

from ahp.search.certificate import SOLVERS, Certificate
from ahp.search.mixed.over_groups import MixedCertificate
from ahp.search.result import Ranking
from ahp.words import percent, seconds

SEARCHED, LEFT_OUT, PROVEN = "Searched", "Left out", "Proven"


def searched(ranking: Ranking) -> list[tuple[str, str]]:
    """Each line after what it is about. ``Ranking.proof`` has the same in one sentence."""
    certificate, own = ranking.certificate, ranking.own_order
    proven = _proven(certificate) + (own.words() if own is not None and own.leads else "")
    return [(SEARCHED, _searched(certificate)), (LEFT_OUT, _left_out(certificate)), (PROVEN, proven)]


def _searched(of: Certificate) -> str:
    if isinstance(of, MixedCertificate):
        alone = of.rows - of.shapes
        unlike = f", {of.unlike:,} of them with stages of unlike width" if of.unlike else ""
        return (
            f"{of.shapes:,} shapes over {of.num_groups} groups of devices and {alone:,} layouts of one group alone, in "
            f"{of.search_s:.1f} s; {of.forecasts + of.unlike:,} forecast in full{unlike}"
        )
    kernels = ", compiled and eager," if of.kernels else ""
    forecasts = of.forecasts + of.cuts + of.lightened
    by = "" if of.solver == "exact" else f" by {SOLVERS[of.solver]}"
    return f"{of.rows:,} layouts{kernels} in {of.search_s:.1f} s; {forecasts:,} forecast in full{by}"


def _left_out(of: Certificate) -> str:
    """The counts of the rows that were not ranked; those of several groups have placements too, and do not add up."""
    counts = [(of.broken, "not allowed"), (of.alike, "same as another"), (of.not_fit, "too large")]
    if not isinstance(of, MixedCertificate):
        counts.append((of.left, "cannot be faster" if of.proven else "not looked at"))
    return ", ".join(f"{number:,} {words}" for number, words in counts if number) or "none"


def _proven(of: Certificate) -> str:
    """By the forecast, of the layouts that fit; what is not proven is said too."""
    missed, bound_s = "nothing faster that fits was missed", of.lowest_bound_left_s
    if of.proven or (bound_s is None and of.solver == "exact"):
        rest = "" if bound_s is None else f": the rest takes at least {seconds(bound_s)}"
        return f"{missed}{rest}{_other_choices(of)}"
    if isinstance(of, MixedCertificate):
        return f"the best is within {percent(of.gap)} of the optimum: no layout takes under {seconds(bound_s or 0.0)}{_other_choices(of)}"
    may_be = "a faster layout" if bound_s is None else f"a layout of {seconds(bound_s)}"
    more = "" if of.solver == "exact" else "; --method exact proves its best"
    return f"nothing: {may_be} may be among those left out{more}"


def _other_choices(of: Certificate) -> str:
    """Of cuts into stages, layers to recompute and widths of stages that were not tried."""
    floors = ((of.any_cut_s, "uneven pipeline stages"), (of.any_part_s, "other layers recomputed"))
    settled = [others for floor_s, others in floors if floor_s is not None and floor_s >= of.found_s]
    left = [
        f"{others} (at least {seconds(floor_s)})"
        for floor_s, others in floors
        if floor_s is not None and floor_s < of.found_s
    ]
    if isinstance(of, MixedCertificate) and of.unlike:
        left.append("stages of unlike width (no bound)")
    words = f"; no faster with {' or '.join(settled)}" if settled else ""
    return f"{words}; not proven: {', '.join(left)}" if left else words
