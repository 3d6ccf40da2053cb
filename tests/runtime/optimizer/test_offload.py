"""AdamW's moments in host memory: the very same steps, a bucket on the device at a time, and checkpoints that any plan loads.

On a CPU host and device are one memory; the moments go the whole way all the same, as copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.errors import HardwareMismatch
from ahp.runtime.optimizer.offload import ALIGNED_BYTES, MOMENTS, NUM_SLOTS, HostMoments, refuse_without_host
from tests.runtime.models import BUILDERS, JOB, batch
from tests.runtime.test_equality import assert_same_curve, world_size
from tests.runtime.weights.test_checkpoint import PLANS
from tests.runtime.workers import Pool

STEPS = 4


SIZES, OTHERS = (700, 3, 0, 130), (65,)


def adamw(device: torch.device | str = "cpu") -> torch.optim.AdamW:
    torch.manual_seed(0)
    decayed, other = ([torch.nn.Parameter(torch.randn(n, 3).to(device)) for n in sizes] for sizes in (SIZES, OTHERS))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1, fused=True)


def set_gradients(optimizer: torch.optim.AdamW, number: int) -> None:
    """Of a step; one parameter has none in the second step."""
    torch.manual_seed(number)
    for group in optimizer.param_groups:
        for p in group["params"]:
            gradient = torch.randn(p.shape).to(p.device)
            p.grad = gradient if len(p) != 3 or number != 1 else None


def assert_same_to_the_last_bit(plain: torch.optim.AdamW, kept: torch.optim.AdamW) -> None:
    for one, other in zip(plain.param_groups, kept.param_groups, strict=True):
        for a, b in zip(one["params"], other["params"], strict=True):
            assert torch.equal(a, b)
            assert b.grad is None
            for key in (*MOMENTS, "step"):
                assert torch.equal(plain.state[a][key].cpu(), kept.state[b][key].cpu())


SLOT_BYTES = 2 * 4 * 256  # 256 elements with both moments: every weight but one in several buckets


def test_steps_are_those_of_adamw_to_the_last_bit() -> None:
    plain, kept = adamw(), adamw()
    host = HostMoments(kept, bucket_bytes=NUM_SLOTS * SLOT_BYTES)
    assert [[part.end - part.first for part in bucket.parts] for bucket in host.buckets] == [
        *[[256]] * 8, [52, 9, 128], [256], [6], [195],
    ]  # fmt: skip
    at_home = {shard: moments["exp_avg"].data_ptr() for shard, moments in kept.state.items()}
    for number in range(4):
        for optimizer in (plain, kept):
            set_gradients(optimizer, number)
        plain.step()
        host.step()
    assert_same_to_the_last_bit(plain, kept)
    assert at_home == {shard: moments["exp_avg"].data_ptr() for shard, moments in kept.state.items()}


def test_overflowed_gradients_leave_everything_as_it_was() -> None:
    """As torch.amp.GradScaler tells the fused kernels."""
    plain, kept = adamw(), adamw()
    host = HostMoments(kept, bucket_bytes=NUM_SLOTS * SLOT_BYTES)
    for number, overflowed in enumerate((0.0, 1.0, 0.0)):
        for optimizer in (plain, kept):
            set_gradients(optimizer, number)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(overflowed)  # type: ignore[attr-defined]
        plain.step()
        host.step()
    assert_same_to_the_last_bit(plain, kept)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.integers(NUM_SLOTS * 512, 100_000))
def test_the_device_never_has_more_than_the_slots(sizes: list[int], bucket_bytes: int) -> None:
    shards = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    host = HostMoments(torch.optim.AdamW(shards, fused=True), bucket_bytes=bucket_bytes)
    there = sum(slot.numel() * slot.element_size() for slot in host._slots())
    assert there <= bucket_bytes
    assert there <= sum(8 * size + 2 * ALIGNED_BYTES for size in sizes)
    for shard in shards:
        parts = [part for bucket in host.buckets for part in bucket.parts if part.shard is shard]
        assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
        assert parts[-1].end == shard.numel()


class Streams:
    """In the place of a device: what of the work in its streams is certain to be done before what."""

    class Stream:
        def __init__(self) -> None:
            self.before: frozenset[str] = frozenset()

        def wait_stream(self, other: Any) -> None:
            self.before |= other.before

        wait_event = wait_stream

    class Event:
        def __init__(self) -> None:
            self.before: frozenset[str] = frozenset()

        def record(self, stream: Any) -> None:
            self.before = stream.before

    def __init__(self) -> None:
        self.current = self.compute = self.Stream()
        self.before: dict[str, frozenset[str]] = {}

    def current_stream(self, device: torch.device) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.compute

    def run(self, work: str) -> None:
        self.before[work] = self.current.before
        self.current.before |= {work}


def test_a_bucket_comes_while_another_is_updated_and_a_third_goes_back() -> None:
    streams = Streams()
    with mock.patch.object(torch, "get_device_module", return_value=streams):
        host = HostMoments(adamw(), bucket_bytes=NUM_SLOTS * SLOT_BYTES)
        number = {id(part): i for i, bucket in enumerate(host.buckets) for part in bucket.parts}

        def copy(parts: list[Any], slot: torch.Tensor, *, to_host: bool) -> None:
            streams.run(f"{'out' if to_host else 'in'} {number[id(parts[0])]}")

        def update(group: Any, parts: list[Any], slot: torch.Tensor) -> None:
            streams.run(f"update {number[id(parts[0])]}")

        set_gradients(host.adamw, 0)
        streams.run("backward")
        with mock.patch.object(host, "_copy", copy), mock.patch.object(host, "_update", update):
            host.step()
        streams.run("forward")
    before, last = streams.before, len(host.buckets) - 1
    assert last > NUM_SLOTS
    for i in range(last + 1):
        assert {"backward", f"in {i}"} <= before[f"update {i}"]
        assert f"update {i}" in before[f"out {i}"]
        assert "backward" in before[f"in {i}"], "a slot may be memory that backward still reads"
        assert f"out {i}" in before["forward"], "a slot may be the memory that forward writes"
    for i in range(last):
        assert f"update {i}" not in before[f"in {i + 1}"]
        assert not {f"out {i}", f"in {i + 2}"} & before[f"update {i + 1}"]
    for i in range(last + 1 - NUM_SLOTS):
        assert f"out {i}" in before[f"in {i + NUM_SLOTS}"], "it has the same slot"


def train(
    rank: int,
    world: int,
    layout: dict[str, Any],
    first: int,
    last: int,
    load: str | None,
    save: str | None,
    offload: bool,
) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    with mock.patch("ahp.runtime.device_limits.refuse_without_host"):
        plan = {"job": JOB, "parallelism": layout, "engine": {"offload_optimizer": offload}}
        parallel = parallelize(BUILDERS["gpt2"](), plan)
    if load is not None:
        parallel.load(load)
    results = [parallel.step(parallel.shard(batch(step))) for step in range(first, last)]
    if save is not None:
        parallel.save(save)
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param("one", "tp", marks=pytest.mark.slow),
        pytest.param("zero3-x-tp", "zero1", marks=pytest.mark.slow),
        pytest.param("1f1b", "zero3", marks=pytest.mark.slow),
    ],
)
def test_a_run_equals_one_process_across_a_checkpoint(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], tmp_path: Path, saved: str, loaded: str
) -> None:
    """The moments go out of host memory under one plan and into it under another, which keeps them on the device before."""
    folder, middle = str(tmp_path / "checkpoint"), STEPS // 2
    before = pool.run(train, world_size(PLANS[saved]), PLANS[saved], 0, middle, None, folder, True)[0]
    after = pool.run(train, world_size(PLANS[loaded]), PLANS[loaded], middle, STEPS, folder, None, loaded != "zero1")[0]
    assert_same_curve({key: before[key] + after[key] for key in before}, plain_run("gpt2", STEPS))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(HardwareMismatch, match=r"engine.offload_optimizer = True: on a CPU.*valid: False"):
        refuse_without_host(torch.device("cpu"))
    refuse_without_host(torch.device("cuda"))
