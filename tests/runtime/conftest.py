"""One pool of workers and one reference run per model for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.runtime.models import reference
from tests.runtime.workers import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def plain_run() -> Callable[..., dict[str, Any]]:
    """reference(model, steps), run once for each argument."""
    return cache(reference)
