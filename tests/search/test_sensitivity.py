"""Better hardware: every figure and every measured table belongs to one piece of it, and the plan stays a candidate."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest

from ahp.cluster.better import MORE, better_clusters
from ahp.cluster.model import (
    AttentionSample,
    Cluster,
    CollectiveSample,
    ElementWiseSample,
    MatmulSample,
    Measurements,
    MemorySample,
)
from ahp.config import Constraints
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism, Plan
from ahp.search.by_speed import ranking_by_speed
from ahp.search.method import Method
from ahp.search.problem import problem
from ahp.search.sensitivity import Move, sensitivity
from ahp.search.ties import TIED
from tests.search.small import small

ATTENTION = AttentionSample(heads=4, sequence=64, head_dim=32, dtype="fp32", workers=1, phase="forward", seconds=8e-5)
MEASURED = Measurements(
    matmul=(MatmulSample(m=8, n=8, k=8, dtype="fp32", workers=1, seconds=1e-5),),
    memory=(MemorySample(workers=1, bytes_per_s=1e9),),
    attention=(ATTENTION, ATTENTION.model_copy(update={"phase": "backward"})),
    element_wise=tuple(
        ElementWiseSample(kind=kind, elements=64, dtype="fp32", workers=1, seconds=1e-5)  # type: ignore[arg-type]
        for kind in ("add", "silu")
    ),
    collectives=(CollectiveSample(kind="all_reduce", workers=2, bytes=64, seconds=1e-5),),
)


def pieces(cluster: Cluster) -> dict[str, Cluster]:
    return {words.removeprefix("10 % more "): better for words, better in better_clusters(cluster)}


def test_every_measured_table_belongs_to_one_piece_of_hardware() -> None:
    group = Cluster.parse("2xA100-SXM-80GB").groups[0].model_copy(update={"measured": MEASURED})
    changed: dict[str, set[str]] = {}
    for words, better in pieces(Cluster(groups=(group,))).items():
        faster = better.groups[0].measured
        assert faster is not None
        for table in Measurements.model_fields:
            for old, new in zip(getattr(MEASURED, table), getattr(faster, table), strict=True):
                if new == old:
                    continue
                speed = new.bytes_per_s / old.bytes_per_s if table == "memory" else old.seconds / new.seconds
                assert speed == pytest.approx(MORE)
                changed.setdefault(words, set()).add(getattr(old, "kind", table))
    assert changed == {
        "FLOPS": {"matmul", "attention", "silu"},
        "memory bandwidth": {"memory", "add"},
        "network within nodes": {"all_reduce"},
    }


def test_one_figure_of_the_cluster_changes_at_a_time() -> None:
    cluster = Cluster.parse("2x4xA100-SXM-80GB")
    (group,) = cluster.groups
    assert group.inter_node is not None

    def figures(of: Cluster) -> dict[str, float]:
        one = of.groups[0]
        assert one.inter_node is not None
        return {
            "FLOPS": one.device.peak_flops_per_s["bf16"],
            "memory": one.device.memory_bytes,
            "memory bandwidth": one.device.memory_bandwidth_bytes_per_s,
            "network within nodes": one.intra_node.bandwidth_bytes_per_s,
            "network between nodes": one.inter_node.bandwidth_bytes_per_s,
        }

    found = pieces(cluster)
    assert set(found) == set(figures(cluster))
    for words, better in found.items():
        ratios = {key: value / figures(cluster)[key] for key, value in figures(better).items()}
        assert ratios == pytest.approx({key: MORE if key == words else 1.0 for key in ratios})


@pytest.mark.parametrize(
    ("text", "missing"),
    [("H100-SXM-80GB", {"network within nodes", "network between nodes"}), ("4xH100-SXM-80GB", {"network between nodes"}),
     ("4x1xH100-SXM-80GB", {"network within nodes"})],
)  # fmt: skip
def test_what_a_cluster_has_not_got_cannot_be_better(text: str, missing: set[str]) -> None:
    everything = set(pieces(Cluster.parse("2x4xH100-SXM-80GB")))
    assert set(pieces(Cluster.parse(text))) == everything - missing


def test_the_best_there_is_searched_and_told() -> None:
    asked = small(cluster="2xH100-SXM-80GB", constraints={"micro_batch_size": 1})
    slow = Parallelism(tensor_parallel_degree=2, micro_batch_size=1, activation_checkpoint="full")
    moves = sensitivity(asked, slow)
    assert [move.step_time_s for move in moves] == sorted(move.step_time_s for move in moves)
    # Something else is faster than this layout even today.
    assert all(not move.stays and move.gain > 0 for move in moves)
    best = moves[0].layout
    stays = sensitivity(asked, best)
    assert all(move.stays for move in stays if move.gain < 0.005)
    said = {move.words().split(": ")[1] for move in stays if move.stays and move.gain < 0.0005}
    assert said == {"changes nothing"}


def test_a_gain_below_a_tie_is_said_where_the_layout_stays() -> None:
    move = Move("10 % more network", Parallelism(), step_time_s=0.997, gain=0.003, stays=True)
    assert move.words() == "10 % more network: 997 ms a step, 0.3 % less; the layout stays"
    assert dataclasses.replace(move, gain=0.0004).words() == "10 % more network: changes nothing"


def test_more_memory_lets_fewer_layers_be_recomputed() -> None:
    given = {"data_parallel_shard_degree": 8, "zero_stage": 2, "micro_batch_size": 1}
    job = Job(sequence_length=8192, global_batch_size=512, precision="bf16")
    cluster = Cluster.parse("8xH100-SXM-80GB")
    asked = problem(
        analyze("llama3-8b", job), cluster, job, Constraints.model_validate(given), EngineChoice(compile=True)
    )

    def best(on: Cluster) -> Plan:
        return ranking_by_speed(asked.on(on), 1, None, Method(), TIED, remedies=False).best

    today, there = best(cluster), best(pieces(cluster)["memory"])
    (more,) = (move for move in sensitivity(asked, today.parallelism) if move.change == "10 % more memory")
    some = more.layout.recomputed_layers_per_stage
    assert some is not None
    assert some < (today.parallelism.recomputed_layers_per_stage or ())
    assert (more.layout, more.step_time_s) == (there.parallelism, there.priced.step_time_s)


def test_every_search_is_told_while_it_goes_on() -> None:
    asked, told = small(cluster="2xH100-SXM-80GB", constraints={"micro_batch_size": 1}), list[str]()

    def during(what: str) -> nullcontext[None]:
        told.append(what)
        return nullcontext()

    moves = sensitivity(asked, Parallelism(tensor_parallel_degree=2, micro_batch_size=1), during)
    assert set(told) == {f"searching with {move.change}" for move in moves}
