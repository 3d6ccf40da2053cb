"""Problems drawn at random: stages that differ, on ranks of any placement, in little or ample memory."""

from random import Random

from ahp.schedule.simulate import StageTimes
from ahp.schedule.synthesis.problem import Problem

PLACEMENTS = ("one", "looped", "v", "any")


def placed(kind: str, p: int, random: Random | None = None) -> tuple[int, ...]:
    """One stage per rank, two in a loop or on a V, or from one to three anywhere."""
    if kind == "one":
        return tuple(range(p))
    if kind == "looped":
        return tuple(range(p)) * 2
    if kind == "v":
        return (*range(p), *range(p - 1, -1, -1))
    assert random is not None
    stages = [*range(p), *(random.randrange(p) for _ in range(random.randint(0, 2 * p)))]
    random.shuffle(stages)
    return tuple(stages)


def problem(
    seed: int,
    kind: str,
    p: int,
    m: int,
    *,
    ratio: float = 1.0,
    memory: float | None = None,
    split: bool = True,
    extra: float = 0.0,
    streams: bool = False,
    send: float = 0.02,
) -> Problem:
    """Ranks whose seconds differ by up to ``ratio``; a micro-batch of all of a rank's stages keeps 1 byte.

    ``memory``: bytes of each rank, as a part of p; ``extra``: part by which a backward in two is longer than a whole one;
    ``streams``: weights are gathered and gradients reduced beside the computation.
    """
    random = Random(seed)
    stage_rank = placed(kind, p, random)
    slowness = [random.uniform(1.0, ratio) for _ in range(p)]
    times, kept = [], []
    for rank in stage_rank:
        share = 1.0 / stage_rank.count(rank)
        forward_s = slowness[rank] * share * random.uniform(0.95, 1.05)
        times.append(StageTimes(forward_s, 2 * forward_s, forward_s * (1 + extra), forward_s * (1 + extra), send, send))
        kept.append(share)
    return Problem(
        tuple(times),
        stage_rank,
        m,
        tuple(kept),
        tuple(0.4 * k for k in kept),
        () if memory is None else (max(1.0, memory * p),) * p,
        split,
        tuple(random.uniform(0, 2) for _ in kept) if streams else (),
        tuple(random.uniform(0, 3) for _ in kept) if streams else (),
    )
