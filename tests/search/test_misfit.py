"""What would make it fit where nothing does: more devices in the node, shorter sequences, both."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from ahp.cluster.model import Cluster
from ahp.errors import NothingFits
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.search import misfit
from ahp.search.mixed import misfit as mixed_misfit
from ahp.search.problem import Problem, problem

from .small import cpu_workers, small

JOB = Job(sequence_length=1024, global_batch_size=8)
ONE = Cluster.parse("1xRTX-4090")


def asked(model: str, cluster: Cluster = ONE, job: Job = JOB) -> Problem:
    return problem(analyze(model, job), cluster, job)


def told(of: Problem) -> list[str]:
    error = misfit.nothing_fits(of)
    assert isinstance(error, NothingFits)
    return [line.strip() for line in str(error).splitlines()[1:]]


@pytest.mark.slow
def test_more_devices_go_into_a_node_that_has_room() -> None:
    """A card that usually has no network: more nodes of it are no answer, more cards are."""
    [line] = told(asked("llama3.2-3b"))
    assert line.startswith("would fit: 4 devices instead of 1 (dp1x")
    assert not list(misfit.more_devices(asked("tiny", Cluster.parse("8xRTX-4090"))))
    assert not list(misfit.more_devices(asked("tiny", Cluster.parse("2x1xH100-SXM-80GB"))))


@pytest.mark.slow
def test_settings_of_the_engine_that_take_less_memory_are_tried() -> None:
    """Before more devices, which an engineer would ask for last."""
    job, model, both = JOB.model_copy(update={"sequence_length": 4096}), "llama2-7b", Cluster.parse("4xRTX-4090")
    found = dict(misfit.lighter(asked(model, both, job)))
    chunks, moments = "engine.loss_chunk_tokens 2048", "engine.offload_optimizer true"
    assert list(found) == [chunks, moments, f"{chunks} and {moments}"]
    assert [misfit._fits(changed) is not None for changed in found.values()] == [False, True, True]
    assert found[moments].engine.offload_optimizer
    assert found[chunks].engine.loss_chunk_tokens == misfit.CHUNK_TOKENS
    assert list(dict(misfit.lighter(asked(model, both)))) == [moments]  # of 1,024 tokens a chunk is all
    assert not list(misfit.lighter(problem(analyze(model, job), both, job, None, "torchtitan")))
    assert not list(misfit.lighter(asked("tiny", cpu_workers(1, 1))))


def test_workers_on_a_processor_are_given_no_company() -> None:
    assert not list(misfit.more_devices(asked("tiny", cpu_workers(1, 1))))


@pytest.mark.slow
def test_devices_and_sequences_together_where_neither_is_enough() -> None:
    lines = told(asked("llama3-8b", job=JOB.model_copy(update={"sequence_length": 16384})))
    assert len(lines) == 1
    assert lines[0].startswith(
        "would fit: 8 devices instead of 1 and job.sequence_length 8192 instead of 16384 (dp1x2 "
    )


@pytest.mark.slow
def test_where_the_shortest_sequence_does_not_fit_no_other_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    real = misfit._with_sequence

    def seen(used: Problem, length: int) -> Problem:
        lengths.append(length)
        return real(used, length)

    monkeypatch.setattr(misfit, "_with_sequence", seen)
    [line] = told(asked("llama3-70b"))
    assert set(lengths) == {128}
    assert line.endswith("8 devices instead of 1; job.sequence_length 128 instead of 1024")


@pytest.mark.slow
def test_nobody_is_warned_of_lengths_that_he_did_not_ask_for() -> None:
    config = {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": 4, "max_position_embeddings": 128}  # fmt: skip
    with pytest.warns(UserWarning, match="the model takes 128 positions"):
        of = problem(analyze(config, JOB), ONE, JOB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        words, _ = next(misfit.shorter(of, lambda _: True))
    assert words == "job.sequence_length 512 instead of 1024"


@pytest.mark.parametrize(
    ("length", "expected"),
    [(100, []), (128, []), (200, [128]), pytest.param(1000, [512, 256, 128], marks=pytest.mark.slow)],
)
def test_powers_of_two_down_to_the_shortest(length: int, expected: list[int]) -> None:
    def fits(_: Any) -> bool:
        return True

    of = asked("tiny", job=JOB.model_copy(update={"sequence_length": length}))
    assert [other.job.sequence_length for _, other in misfit.shorter(of, fits)] == expected


@pytest.mark.slow
def test_one_that_fits_is_found_where_the_nearest_fits() -> None:
    fits = []
    for megabytes in (50, 300, 1200, 1210, 1300, 1500, 2000):
        used = small("experts", "4xA100-SXM-40GB", batch=8, memory_bytes=megabytes * 10**6)
        nearest, fitting = misfit.nearest(used), misfit.nearest(used, fitting=True)
        assert nearest is not None
        assert (fitting is not None) == nearest[1].fits
        assert fitting is None or fitting[1].fits
        fits.append(nearest[1].fits)
    assert fits == sorted(fits)
    assert set(fits) == {False, True}


def test_more_nodes_of_a_mixed_cluster_are_tried_where_the_most_of_them_help() -> None:
    groups = [{"name": name, "nodes": 2, "devices_per_node": 4, "device": "A100-SXM-40GB"} for name in "abc"]
    del groups[2]["nodes"]  # one node, which nothing joins with others
    links = [{"between": [*pair], "gbps": 100} for pair in ("ab", "ac", "bc")]
    of = small(cluster=Cluster.from_dict({"groups": groups, "links": links}))
    looked = []

    def fits(changed: Problem) -> str | None:
        a, b, _ = (group.nodes for group in changed.cluster.groups)
        looked.append((a, b))
        return "a alone" if a >= 8 else None

    assert [words for words, _ in mixed_misfit._more_nodes(of, fits)] == [
        "8 nodes in a instead of 2",
        "32 nodes in b instead of 2",
    ]
    assert looked == [(32, 2), (8, 2), (4, 2), (2, 32)]
