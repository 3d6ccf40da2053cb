"""What workers on processor cores inherit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ahp.cluster.environment import COMPUTE, with_ours

STEPS = """
import resource
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    kept = [bytearray(40 << 20) for _ in range(4)]
    del kept
step()
before = faults()
for _ in range(3):
    step()
print(faults() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's variables")
def test_what_a_step_frees_stays_with_the_process() -> None:
    """Else the kernel hands it out anew in each step, page by page."""

    def faults(environment: dict[str, str]) -> int:
        own = {key: value for key, value in os.environ.items() if key not in COMPUTE}
        ended = subprocess.run(
            [sys.executable, "-c", STEPS], env={**own, **environment}, capture_output=True, text=True, check=True
        )
        return int(ended.stdout)

    assert faults(with_ours({})) < 1000 < faults({})


def test_what_the_user_has_set_for_the_workers_stays() -> None:
    assert with_ours({}) == COMPUTE
    for name in COMPUTE:
        assert with_ours({name: "7", "other": "1"}) == {**COMPUTE, name: "7", "other": "1"}
