"""One pool of workers and one reference run per model for the whole session; and the table of docs/runtime.md:

AHP_FAMILIES_PAGE=docs/runtime.md python -m pytest tests/runtime/test_families.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import table, write
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


COMPARED = pytest.StashKey[dict[tuple[str, str], str]]()
"""By family and technique: the largest relative difference that its test found, or what went wrong."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COMPARED] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report: pytest.TestReport = yield
    facts = dict(item.user_properties)
    if report.when == "call" and "family" in facts:
        worst = f"{facts['worst']:.0e}" if "worst" in facts else "does not run"
        item.config.stash[COMPARED][facts["family"], facts["technique"]] = worst if report.passed else f"**{worst}**"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    page, found = os.environ.get("AHP_FAMILIES_PAGE"), session.config.stash[COMPARED]
    if page and found:
        techniques = list(dict.fromkeys(technique for _, technique in found))
        rows = [
            [family, *(found.get((family, technique), "") for technique in techniques)]
            for family in sorted({family for family, _ in found})
        ]
        write(Path(page), "families", table(["family", *techniques], rows))
