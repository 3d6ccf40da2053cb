"""Workers of the pool do not find out again what their server has."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ahp.graph.capture import Capture
from ahp.graph.outline import Outline, _Record
from ahp.job import Job
from tests.runtime.models import JOB, MODELS, SEQUENCE
from tests.runtime.workers import Pool


def set_up(rank: int, world: int, name: str) -> bool:
    """Runs in each worker; an outline that is found there fails."""
    from ahp.runtime.parallel import parallelize

    layout = {"context_parallel_degree": 2, "micro_batch_size": 4}
    with mock.patch.object(_Record, "__init__", side_effect=AssertionError("traced again")):
        return bool(parallelize(MODELS[name](), {"job": JOB, "parallelism": layout}).stages)


@pytest.mark.parametrize("name", MODELS)
def test_what_the_server_has_traced_no_worker_traces(pool: Pool, name: str) -> None:
    assert pool.run(set_up, 2, name) == [True, True]


def parts(rank: int, world: int, name: str) -> bytes:
    """Runs in each worker, which finds them itself: ``kept_parts`` has the ranks take what one of them found."""
    from tests.runtime import warm

    module = MODELS[name]()
    found = warm.outline(module, batch_size=1, sequence_length=SEQUENCE, dtype=torch.float32)
    return pickle.dumps(warm._parts_of_kinds(module, found, Job(sequence_length=SEQUENCE), None))


@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_find_the_same_parts(pool: Pool, name: str) -> None:
    one, other = pool.run(parts, 2, name)
    assert one == other


def handed_over(rank: int, world: int, name: str) -> tuple[int, bool]:
    """Runs in each worker: how often it traced a model that no other test asks for, and whether what it has is what it would find itself."""
    from tests.runtime import warm

    module, tokens = MODELS[name](), SEQUENCE - 1
    with mock.patch.object(warm, "outline", wraps=warm.outline) as traces:
        found = warm.kept_outline(module, batch_size=3, sequence_length=tokens)
    return traces.call_count, words(found) == words(warm.outline(module, batch_size=3, sequence_length=tokens))


def words(found: Outline) -> tuple[Any, ...]:
    """All that an outline says, with its graphs as code and with what they know of their tensors."""
    graphs = [
        (one.names, one.output_spec, one.trainable, one.places, one.graph.code, [str(node.meta) for node in one.nodes])
        for one in found.captures
        if isinstance(one, Capture)  # else it says why there is none
    ]
    return replace(found, captures=()), graphs


@pytest.mark.parametrize("name", MODELS)
def test_what_one_rank_has_traced_the_others_read(pool: Pool, name: str) -> None:
    traces, alike = zip(*pool.run(handed_over, 4, name), strict=True)
    assert sum(traces) == 1
    assert all(alike)
