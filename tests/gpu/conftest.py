"""What only a GPU can show: ``pytest -m gpu`` or ``make test-gpu``. Collected everywhere, skipped where there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
NO_GPU = "no GPU that torch can use on this machine"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # From one place, so that pytest reports all in one line; a mark it reports at each test's own.
    if HERE in item.path.parents and not torch.cuda.is_available():
        pytest.skip(NO_GPU)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def alone(device: torch.device) -> Iterator[torch.device]:
    """A process group of this process alone, under NCCL; yields its device, without what tests before left in reference cycles."""
    torch.cuda.set_device(device)
    gc.collect()
    torch.cuda.empty_cache()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield device
    finally:
        dist.destroy_process_group()
