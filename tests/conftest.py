"""How many processes run the tests, which process runs which test, and how long drawn examples may take."""

from __future__ import annotations

import gc
import os
import sys
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.workers import num_cores

MOST_PROCESSES = 4
"""[Empirical] Each may have eight workers of its own, of some 0.5 GB: on machines of many cores their memory is the limit.
Slow tests wait for processes that start, end or hang: on two cores three processes took 195 s for those of tests/runtime/ranks and
run and of sequence/test_context.py, where two took 229 s. What is not slow computes."""

# Tensors are small here and the tests share the cores: threads of one process that wait for each other only spin. [Empirical] Sixty steps
# of plain PyTorch on the small models took 1 s of processor time with one thread, on a busy machine 31 s with two, and 190 s to end.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; processes that tests start have it too

# As the Makefile has it: without bytecode this process would rewrite the assertions of every test anew, 5 s of processor time, and each
# process that a test starts would compile AHP again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No test is about how long an example takes: the machine may be busy. The rest is as hypothesis has it, here or in CI.
settings.register_profile("patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


NEW_OBJECTS = 50_000
"""After which Python looks for garbage, in place of 700. [Empirical] With what collection leaves frozen each search and each run counted
it, 0.04 s and more: 638 tests of search and commands took 104 s of processor time, and so take 84 s with the same peak memory."""


def pytest_configure(config: pytest.Config) -> None:
    """What is collected stays to the end: looking through it for garbage again and again takes a third of the collection."""
    gc.disable()
    if not hasattr(config, "workerinput"):  # this process starts those that run tests
        found = tempfile.TemporaryDirectory(prefix="ahp-tests-")
        os.environ["AHP_TESTS_FOUND"] = found.name  # what ranks of the pool find for each other (tests/runtime/warm.py)
        config.add_cleanup(found.cleanup)


def pytest_collection_finish() -> None:
    gc.set_threshold(NEW_OBJECTS)
    gc.enable()


def pytest_sessionfinish() -> None:
    """pytest looks for garbage twice more before it ends, which takes a second each time through all that is left here."""
    gc.freeze()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One for each core where all tests run, and one more where slow ones do; none beside this one where files or tests are named, which
    so start at once."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    waiting = "not slow" not in config.option.markexpr
    return 0 if named or num_cores() == 1 else min(num_cores() + waiting, MOST_PROCESSES)


LONGEST = (
    "test_failures.py", "test_probed_hosts.py", "test_probe_hosts.py", "test_benchmarks.py", "test_changing_nodes.py", "test_preparation.py",
    "test_nodes.py", "test_gone.py", "test_saving_first.py", "test_stopped.py",
)  # fmt: skip
"""They start many processes one after the other, and wait for most of their time, while the other processes of the tests compute.
[Empirical] On a busy machine tests/runtime/ranks/test_changing_nodes.py took 78 s, and 11 s of processor time."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is wide is slow too, so that ``-m "not slow"`` leaves it out, and what needs workers, but for the equality of some layouts.
    The longest come first: else one process of the tests would end with them while the others wait."""
    for item in items:
        needs_workers = "pool" in getattr(item, "fixturenames", ()) and item.path.name != "test_equality.py"
        if needs_workers or item.get_closest_marker("wide"):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name not in LONGEST)
