"""Hosts in network namespaces, made by the benchmarks' own module; the tests are skipped in one line where this system does not let them be made."""

from __future__ import annotations

import pytest

from benchmarks.namespaces import HostSpec, why_not

SPECS = [HostSpec(cores=(0,), processors=0.4, gbps=0.5), HostSpec(processors=0.8, gbps=0.5)]


@pytest.fixture(scope="session")
def two_to_one() -> list[HostSpec]:
    """Two hosts, the first half as fast, 500 Mb/s each."""
    if (reason := why_not(SPECS)) is not None:
        pytest.skip(reason)
    return SPECS
