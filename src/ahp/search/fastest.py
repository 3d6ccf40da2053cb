"""The fastest layout of a problem without the ranking and its reasons, for callers that need it again and again."""

from __future__ import annotations

from ahp.errors import BadInput, NotExpressible
from ahp.plan import Parallelism
from ahp.search.compiled import compiling
from ahp.search.one_group import Fastest, fastest_on_one_group
from ahp.search.problem import Problem


def fastest(
    asked: Problem, ceiling_s: float = float("inf"), like: Parallelism | None = None, slack: float = 0.0
) -> Fastest | None:
    """The layout with the shortest step; None if no layout is legal on all of the problem's devices.

    ``ceiling_s``: layouts that take as long are not wanted; the search is short if none is faster. ``like``: the best layout of a nearly equal
    problem; on mixed clusters, where searches are long, it makes the search brief. ``slack``: share of the time by which another may be faster;
    only on clusters of one group.
    """
    used = compiling(asked)[0]
    return (
        _over_groups(used, ceiling_s, like) if asked.cluster.is_mixed else fastest_on_one_group(used, ceiling_s, slack)
    )


def _over_groups(asked: Problem, ceiling_s: float, like: Parallelism | None) -> Fastest | None:
    """``fastest`` on a mixed cluster, which has a search of its own; eager blocks are tried if nothing fits with compiled ones."""
    from ahp.search.mixed.over_groups import fastest_of_groups  # here, as most searches do not need it

    first: Fastest | None = None
    for used in (asked.compiled, asked.eager) if asked.either_blocks else (asked,):
        try:
            found = fastest_of_groups(used, ceiling_s, like)
        except (BadInput, NotExpressible):
            continue
        if found is not None and (found.best is not None or found.at_least_s < float("inf")):
            return found
        first = first or found
    return first
