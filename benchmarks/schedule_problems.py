"""Problems drawn at random: stages that differ, on ranks of any placement, in little or ample memory."""

from dataclasses import dataclass
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
    if streams:
        there = [0.0] * p
        for stage, rank in enumerate(stage_rank):
            there[rank] += random.uniform(0, 2)
            times[stage] = times[stage]._replace(
                gathered_s=there[rank], reduce_s=random.uniform(0, 3), reduce_slows=0.2
            )
    return Problem(
        tuple(times),
        stage_rank,
        m,
        tuple(kept),
        tuple(0.4 * k for k in kept),
        () if memory is None else (max(1.0, memory * p),) * p,
        split,
    )


@dataclass(frozen=True)
class Published:
    """Stages that somebody measured, in milliseconds, and the bubble rates that they published for their own schedules."""

    p: int
    m: int
    forward_ms: float
    input_gradient_ms: float
    weight_gradient_ms: float
    send_ms: float
    heads: int
    hidden: int
    zb_1p: float
    zb_2p: float


PUBLISHED = {
    "1.5 B": Published(8, 24, 18.522, 18.086, 9.337, 0.601, 24, 2304, 0.1585, 0.0433),
    "1.5 B, more": Published(8, 64, 18.546, 18.097, 9.321, 0.762, 24, 2304, 0.0674, 0.0026),
    "6.2 B": Published(8, 24, 29.718, 29.444, 19.927, 0.527, 32, 4096, 0.1323, 0.0029),
    "6.2 B, more": Published(8, 64, 29.935, 29.621, 19.388, 0.535, 32, 4096, 0.0554, 0.0010),
    "14.6 B": Published(16, 48, 11.347, 11.248, 8.132, 0.377, 40, 5120, 0.1397, 0.0066),
    "14.6 B, more": Published(16, 128, 11.325, 11.308, 8.109, 0.378, 40, 5120, 0.0576, 0.0028),
    "28.3 B": Published(32, 96, 10.419, 10.207, 7.715, 0.408, 48, 6144, 0.1421, 0.0038),
    "28.3 B, more": Published(32, 256, 10.402, 10.248, 7.698, 0.460, 48, 6144, 0.0594, 0.0018),
}
"""arXiv 2401.10241: times of Table 9, models of Table 3 (1,024 tokens), bubble rates of Table 5."""


def published(row: Published, memory: float) -> Problem:
    """One stage per rank, all alike; ``memory``: times that of 1F1B's first rank.

    A micro-batch keeps 34 + 5 a s / h bytes for each of its numbers until its input gradient, 32 until its weight gradient
    (Table 1 there).
    """
    seconds = [ms / 1e3 for ms in (row.forward_ms, row.input_gradient_ms, row.weight_gradient_ms, row.send_ms)]
    forward_s, input_s, weight_s, send_s = seconds
    times = StageTimes(forward_s, input_s + weight_s, input_s, weight_s, send_s, send_s)
    kept = 34 + 5 * row.heads * 1024 / row.hidden
    return Problem(
        (times,) * row.p,
        tuple(range(row.p)),
        row.m,
        (kept,) * row.p,
        (kept - 32,) * row.p,
        (memory * row.p * kept,) * row.p,
    )
