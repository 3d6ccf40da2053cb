"""Workers of the pool do not find out again what their server has."""

from __future__ import annotations

from unittest import mock

import pytest

from ahp.graph.outline import _Record
from tests.runtime.models import JOB, MODELS
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
