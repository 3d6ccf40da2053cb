"""One pool of workers and one reference run per model for the whole session; and the table of docs/runtime/models.md:

AHP_FAMILIES_PAGE=docs/runtime/models.md python -m pytest -m "" tests/runtime/test_families.py
"""

from __future__ import annotations

import gc
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


@pytest.fixture(scope="module", autouse=True)
def no_garbage_is_collected() -> Iterator[None]:
    """A collection goes through all that this process holds, a third of a second each time, and each run here makes one where the
    program has not turned the collector off."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def launched_on_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would start processes of its own runs on the pool. That the launcher starts them is shown elsewhere."""
    monkeypatch.setattr("ahp.runtime.ranks.launch.launch", pool.launch)


@pytest.fixture(scope="session")
def plain_run() -> Callable[..., dict[str, Any]]:
    """reference(model, steps), run once for each argument."""
    return cache(reference)


class Compared:
    """By family and technique: the largest relative difference that its test found, or what went wrong."""

    def __init__(self, page: Path) -> None:
        self.page = page
        self.found: dict[tuple[str, str], str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        facts = dict(report.user_properties)
        if report.when == "call" and "family" in facts:
            worst = f"{facts['worst']:.0e}" if "worst" in facts else "does not run"
            if report.passed and "refused" in facts:
                worst = "refused"
            key = str(facts["family"]), str(facts["technique"])
            self.found[key] = worst if report.passed else f"**{worst}**"

    def pytest_sessionfinish(self) -> None:
        if not self.found:
            return
        from tests.runtime.test_families import TECHNIQUES

        techniques = [name for name in TECHNIQUES if any(name == technique for _, technique in self.found)]
        rows = [
            [family, *(self.found.get((family, technique), "") for technique in techniques)]
            for family in sorted({family for family, _ in self.found})
        ]
        write(self.page, "families", table(["family", *techniques], rows))


def pytest_configure(config: pytest.Config) -> None:
    page = os.environ.get("AHP_FAMILIES_PAGE")
    if page and not hasattr(config, "workerinput"):  # a process that only runs tests reports to the one that writes
        config.pluginmanager.register(Compared(Path(page)))
