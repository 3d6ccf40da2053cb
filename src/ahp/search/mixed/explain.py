"""Which group of devices got what, and why, in words with numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ahp.cluster.cells import link_between, place
from ahp.cluster.model import Cluster
from ahp.plan import Forecast, Parallelism
from ahp.schedule.orders import ranks_of_stages
from ahp.schedule.stages import layers_of_stages
from ahp.search import reasons
from ahp.search.fewest import with_all
from ahp.search.pairs import Pair
from ahp.search.problem import Problem
from ahp.search.result import Ranking
from ahp.search.ties import TIED
from ahp.words import gib, number_of, percent, seconds


def on_fullest(asked: Problem, pair: Pair) -> Problem:
    """The problem on the group of the fullest rank, with whose memory the forecast is compared."""
    if not asked.cluster.is_mixed:
        return asked
    name = place(asked.cluster, pair[0]).group_of(pair[1].fullest_rank)
    group = next(group for group in asked.cluster.groups if group.name == name)
    return asked.on(asked.cluster.with_groups([group]))


def idle(asked: Problem, layout: Parallelism, used: Cluster) -> Iterator[str]:
    """The devices that a layout does not use."""
    taken = place(used, layout).used if used.is_mixed else {used.groups[0].name: layout.world_size}
    for group in asked.cluster.groups:
        count = taken.get(group.name, 0)
        if count < group.num_devices:
            left, whole = group.num_devices - count, number_of(group.num_devices, "device")
            yield f"{group.name}: {left} of {whole} {'is' if left == 1 else 'are'} left over"


def width(pair: Pair, ranked: list[Pair]) -> Iterator[str]:
    """How much faster stages of different width are."""
    alike = next((other for other in ranked if not other[0].has_unlike_widths), None)
    if pair[0].has_unlike_widths and alike is not None:
        gain = alike[1].step_time_s / pair[1].step_time_s - 1
        yield f"stages of unlike width: {percent(gain)} faster than the best with stages alike, {alike[0].short()}"


def groups(asked: Problem, pair: Pair) -> Iterator[str]:
    """What each group computes, and how long a layer takes there for one micro-batch."""
    layout, found = pair[0], asked.mixed_pricer
    rows, shared = place(asked.cluster, layout).cells, layout.micro_batches(asked.job)
    layers = layers_of_stages(layout, asked.graph.num_layers, ends=asked.stage_ends)  # today's may have no ``stages``
    ranks = ranks_of_stages(layout)
    for group in asked.cluster.groups:
        cells = [(r, rank) for r, row in enumerate(rows) for rank, cell in enumerate(row) if cell.group == group.name]
        if not cells:
            yield f"{group.name}: not used; no layout that was priced with it is more than {100 * TIED:.0f} % faster"
            continue
        held_by = [(r, s) for r, own in cells for s, rank in enumerate(ranks) if rank == own]
        stages, replicas = sorted({s for _, s in held_by}), sorted({r for r, _ in held_by})
        held = sum(layers[s] for s in stages)
        units = found.groups[group.name].units(layout.of_rank(cells[0][1]))
        one = units.blocks[units.layers[0]].times
        each_s = one.forward_s + one.backward_s
        work = sum(shared[r] * layers[s] for r, s in held_by) / (sum(shared) * sum(layers))
        where = "all stages" if len(stages) == len(layers) else _runs("stage", stages)
        yield (
            f"{group.name}: {where} ({held} of {sum(layers)} layers{_recomputed(layout, held_by)}){_share(replicas, shared)}: "
            f"{percent(work)} of the work on "
            f"{percent(sum(rows[r][rank].width for r, rank in cells) / layout.world_size)} of the devices; "
            f"a layer takes {seconds(each_s)} a micro-batch there"
        )


def _share(replicas: list[int], shared: Sequence[int]) -> str:
    """The part of the batch that passes the ``replicas`` which a group takes part in, in words; empty where there is only one replica."""
    if len(shared) == 1:
        return ""
    counts = " or ".join(map(str, sorted({shared[r] for r in replicas})))
    each = " each" if len(replicas) > 1 else ""
    return f" of {len(replicas)} of {len(shared)} replicas, {counts} of {sum(shared)} micro-batches{each}"


def _recomputed(layout: Parallelism, held_by: list[tuple[int, int]]) -> str:
    """How many layers of a replica's stages on a group are recomputed, where not all are; ``held_by``: (replica, stage)."""
    counts: dict[int, int] = {}
    for replica, stage in held_by:
        if (some := layout.recomputed_layers(replica)) is None:
            return ""
        counts[replica] = counts.get(replica, 0) + some[stage]
    return f", {' or '.join(map(str, sorted(set(counts.values()))))} recomputed"


def recompute(asked: Problem, pair: Pair) -> Iterator[str]:
    """How much faster it is that each stage recomputes as few layers as fit."""
    layout = pair[0]
    if layout.stages is None or layout.recomputed_layers() is None:
        return
    if (forecast := asked.price_or_none(with_all(layout))) is None:
        return
    gain = forecast.step_time_s / pair[1].step_time_s - 1
    yield f"each stage recomputes as few layers as fit: {percent(gain)} faster than with all layers recomputed"


def _runs(what: str, numbers: list[int]) -> str:
    """``stages 1-3``, counted from 1."""
    if len(numbers) == 1:
        return f"{what} {numbers[0] + 1}"
    whole = len(numbers) == numbers[-1] - numbers[0] + 1
    words = f"{numbers[0] + 1}-{numbers[-1] + 1}" if whole else ", ".join(str(n + 1) for n in numbers)
    return f"{what}s {words}"


def links(asked: Problem, pair: Pair) -> Iterator[str]:
    """What crosses from one group to another in a step."""
    layout, found = pair[0], asked.mixed_pricer
    rows, shared = place(asked.cluster, layout).cells, layout.micro_batches(asked.job)
    names = list(dict.fromkeys(cell.group for row in rows for cell in row))
    if len(names) < 2:
        return
    sent: dict[tuple[str, str], int] = {}
    for row, m in zip(rows, shared, strict=True):
        for one, other in pairwise(row[rank].group for rank in ranks_of_stages(layout)):
            if one != other:
                key = (one, other) if one < other else (other, one)
                sent[key] = sent.get(key, 0) + m
    sums = any(len({row[s].group for row in rows}) > 1 for s in range(len(rows[0])))
    message = found.groups[names[0]].units(layout.of_rank(0)).hidden_bytes
    for (one, other), count in sent.items():
        link = link_between(asked.cluster, one, other)
        speed = f" ({link.bandwidth_bytes_per_s * 8e-9:.0f} Gb/s a node)" if link is not None else ""
        yield (
            f"between {one} and {other}{speed} go {count} micro-batches of {gib(message)} a rank, forward and back"
            + ("" if sums else "; gradients are summed within each group")
        )
    if sums:
        beside = "" if sent else ", no pipeline crosses from one to another"
        yield f"gradients are summed over {', '.join(names)} once a step{beside}"


def of_alone(name: str, ranking: Ranking | None, refusal: str, best: Forecast) -> str:
    """The best layout of one group alone, compared with the best of all."""
    if ranking is None:
        return f"{name} alone: {refusal.splitlines()[0]}"
    plan = ranking.best
    lost = reasons.slower_because(plan.priced, best)
    return f"{name} alone: {seconds(plan.priced.step_time_s)} a step, {lost} ({plan.parallelism.short()})"


def against_spread(used: Problem, ranked: list[Pair], best: Forecast) -> Iterator[str]:
    """How much slower the best layout over several groups is."""
    if not ranked:
        yield f"{used.cluster.groups[0].name} alone: no layout over several groups was found that fits and could be as fast"
        return
    # The fastest of all may have all its stages on one group.
    if (spread := next((pair for pair in ranked if _is_spread(pair[0])), None)) is not None:
        lost = reasons.is_slower_because(spread[1], best)
        yield f"{used.cluster.groups[0].name} alone: the best over several groups, {spread[0].short()}, {lost}"


def _is_spread(layout: Parallelism) -> bool:
    replicas = layout.data_parallel_replicate_degree
    return layout.stages is None or len({name for stage in layout.stages for name in stage.groups(replicas)}) > 1
