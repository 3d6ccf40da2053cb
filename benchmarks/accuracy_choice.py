"""What the forecast would have chosen, held against the best layout that others found by trying.

Two questions. Where a source published only the best layout of each sweep: is it the one forecast fastest among all that
could have been swept, or how far from it? Where a source measured many layouts of one model: how much slower than
the best is the one forecast fastest, and the best of the five forecast fastest? accuracy_notes.yaml says which
sources are of the first kind, what their program could do, and why choices differ.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from accuracy_judge import Judged, Simulate, differing
from accuracy_rows import Run
from page import table

from ahp.errors import BadInput, NotExpressible
from ahp.plan import Parallelism

NEAR = 0.02
"""A layout forecast within this share of the first is as good as first."""

FEW = 5
"""Layouts that somebody would try if the forecast named them."""


@dataclass(frozen=True)
class Choice:
    """One sweep: the layout that was best when measured, among all that could have been swept."""

    run: Run
    best: Parallelism
    first: Parallelism
    rank: int
    """Of the measured best among the layouts that fit, 1 = forecast fastest."""
    candidates: int
    behind: float
    """Its forecast over that of the first, minus 1."""

    @property
    def same(self) -> bool:
        return _degrees(self.best) == _degrees(self.first)


def layouts(run: Run, can: Mapping[str, Any]) -> Iterator[Parallelism]:
    """Every layout of the run's devices and batch that its program could express: powers of two in all degrees."""
    cluster, job, given = (run.arguments[key] for key in ("cluster", "job", "parallelism"))
    world, batch = cluster["nodes"] * cluster["devices_per_node"], job["global_batch_size"]
    for tensor in _powers(min(can["tensor"], world)):
        for pipeline in _powers(world // tensor):
            data = world // tensor // pipeline
            for zero in can["zero_stages"] if data > 1 else (0,):
                for micro_batch in _powers(batch // data):
                    if batch // data // micro_batch < pipeline:
                        continue  # torch's 1F1B, and their own rule but for one micro-batch
                    yield Parallelism.model_validate({
                        **given,
                        "data_parallel_replicate_degree": data if zero == 0 else 1,
                        "data_parallel_shard_degree": data if zero else 1,
                        "zero_stage": zero,
                        "tensor_parallel_degree": tensor,
                        "enable_sequence_parallel": tensor > 1,
                        "pipeline_parallel_degree": pipeline,
                        "pipeline_parallel_schedule": "1F1B",
                        "micro_batch_size": micro_batch,
                    })  # fmt: skip


def _powers(most: int) -> list[int]:
    return [2**power for power in range(max(most, 0).bit_length())]


def choice(run: Run, can: Mapping[str, Any], simulate: Simulate) -> Choice | None:
    """Price all that could have been swept; None where the measured layout itself is refused."""
    best = Parallelism.model_validate(run.arguments["parallelism"])
    found: dict[Parallelism, float] = {}
    for layout in layouts(run, can):
        try:
            with differing(run.differs):
                forecast = simulate(**{**run.arguments, "parallelism": layout})
        except (BadInput, NotExpressible):
            continue
        if forecast.fits:
            found[layout] = forecast.step_time_s
    try:
        with differing(run.differs):
            own_s = simulate(**{**run.arguments, "parallelism": best}).step_time_s
    except (BadInput, NotExpressible):
        return None
    first = min(found, key=lambda layout: found[layout])
    rank = 1 + sum(seconds < own_s and _degrees(layout) != _degrees(best) for layout, seconds in found.items())
    return Choice(run, best, first, rank, len(found), own_s / found[first] - 1.0)


def _degrees(layout: Parallelism) -> tuple[int, ...]:
    """What tells layouts of such a sweep apart."""
    p = layout
    return p.tensor_parallel_degree, p.pipeline_parallel_degree, p.zero_stage, p.micro_batch_size


def choices(judged: Sequence[Judged], notes: Mapping[str, Any], simulate: Simulate) -> list[Choice]:
    """Every sweep of the sources named in the notes, with progress on stderr."""
    found = []
    for one in judged:
        can = notes["best_of_sweep"].get(one.run.source)
        if can is not None and one.run.measured_s and (made := choice(one.run, can, simulate)):
            found.append(made)
            print(f"choosing: {one.run.id}, {made.candidates} layouts", file=sys.stderr, flush=True)
    return found


def section(judged: Sequence[Judged], notes: Mapping[str, Any], simulate: Simulate) -> str:
    """Both tables with what follows from them."""
    parts = [_picks(judged)]
    made = choices(judged, notes, simulate)
    if made:
        first, near = sum(one.rank == 1 for one in made), sum(one.behind <= NEAR for one in made)
        parts.append(
            f"Of {len(made)} sweeps of which the best layout was published, that layout is forecast fastest in {first}, "
            f"and within {100 * NEAR:.0f} % of the fastest in {near}. *Behind*: its forecast over that of the first."
        )
        lines = [
            [f"`{one.run.id}`", _words(one.best), "the same" if one.same else _words(one.first), str(one.rank),
             str(one.candidates), f"{100 * one.behind:.1f}"]
            for one in made
        ]  # fmt: skip
        parts.append(table(["sweep", "best measured", "forecast fastest", "rank", "of", "behind, %"], lines))
        parts.append(_misses(made, notes))
    return "\n\n".join(filter(None, parts))


def _words(layout: Parallelism) -> str:
    tensor, pipeline, zero, micro_batch = _degrees(layout)
    return f"tp{tensor} pp{pipeline} zero{zero} mb{micro_batch}"


def _misses(made: Sequence[Choice], notes: Mapping[str, Any]) -> str:
    lines = []
    for note in notes["choices"]:
        own = [c.run.id for c in made if c.behind > NEAR and any(fnmatch(c.run.id, p) for p in note["rows"])]
        if own:
            lines.append(f"- **{note['why'].strip()}** ({len(own)}): {', '.join(f'`{name}`' for name in own)}")
    return "\n".join(lines)


def _picks(judged: Sequence[Judged]) -> str:
    """Regret of the first choice and of the best of a few, where a source measured so many layouts of a model."""
    groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for one in judged:
        if one.error is not None:
            groups[one.run.source, one.run.group].append(one)
    regrets: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for (source, _), group in groups.items():
        if len(group) > 2 * FEW:
            ordered = sorted(group, key=lambda one: one.predicted_s or 0.0)
            times = [one.run.measured_s or 0.0 for one in ordered]
            regrets[source].append((len(group), times[0] / min(times) - 1.0, min(times[:FEW]) / min(times) - 1.0))
    lines = [
        [source, str(len(own)), str(sum(n for n, _, _ in own)), *(f"{100 * sum(r[i] for r in own) / len(own):.1f}" for i in (1, 2))]
        for source, own in sorted(regrets.items())
    ]  # fmt: skip
    head = ["source", "models", "layouts", "first choice slower by, %", f"best of the first {FEW} slower by, %"]
    return table(head, lines) if lines else ""
