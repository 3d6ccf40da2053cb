"""AdamW's moments in pinned host memory: the same bits as on the device, in bounded memory. ``-s`` shows how long it takes."""

from __future__ import annotations

import pytest
import torch

from ahp.engines.ahp import OFFLOAD_BUCKET_BYTES
from ahp.runtime.optimizer.offload import MOMENTS, HostMoments

MIB = 2**20
SIZES = (50_000_003, 4096, 12_000_001, 1, 0, 30_000_000, 8_000_000)
"""Elements of weights: of 50 million the moments are 381 MiB, more than all slots together."""


def adamw(device: torch.device) -> torch.optim.AdamW:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size, device=device)) for size in SIZES]
    groups = [{"params": weights[:3], "weight_decay": 0.1}, {"params": weights[3:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def set_gradients(optimizer: torch.optim.AdamW, step: int) -> None:
    torch.manual_seed(1 + step)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.randn_like(weight)


def test_steps_are_those_of_adamw_on_the_device_to_the_last_bit(device: torch.device) -> None:
    plain, kept = adamw(device), adamw(device)
    host = HostMoments(kept)
    for step in range(6):
        set_gradients(plain, step)
        plain.step()
        set_gradients(kept, step)
        host.step()
        # Memory that the slots had is taken and written at once, as a forward pass would.
        torch.full((OFFLOAD_BUCKET_BYTES // 4,), float("nan"), device=device)
    host.wait()
    for one, other in zip(plain.param_groups, kept.param_groups, strict=True):
        for a, b in zip(one["params"], other["params"], strict=True):
            assert torch.equal(a, b)
            assert plain.state[a]["step"].item() == kept.state[b]["step"].item()
            for key in MOMENTS:
                moments = kept.state[b][key]
                assert moments.device.type == "cpu"
                assert moments.is_pinned() or not moments.numel()  # torch calls no empty tensor pinned
                assert torch.equal(plain.state[a][key].cpu(), moments)


def test_the_device_has_no_more_than_the_slots(device: torch.device) -> None:
    optimizer = adamw(device)
    host = HostMoments(optimizer)
    set_gradients(optimizer, 0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    host.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated(device) - before <= OFFLOAD_BUCKET_BYTES + MIB


@pytest.mark.parametrize("steps", [5])
def test_how_long_a_step_takes(device: torch.device, steps: int) -> None:
    """Beside the copies alone, one way after the other and both at the same time. Printed, not judged."""
    optimizer = adamw(device)
    host = HostMoments(optimizer)
    num_bytes = 4 * sum(SIZES) * len(MOMENTS)
    there = torch.empty(num_bytes // 4, device=device)
    pinned = [torch.empty(num_bytes // 4, pin_memory=True) for _ in range(2)]
    other = torch.empty_like(there)
    ways = torch.cuda.Stream(), torch.cuda.Stream()

    def timed_s(work: object) -> float:
        assert callable(work)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def both_ways() -> None:
        for stream, (target, source) in zip(ways, ((there, pinned[0]), (pinned[1], other)), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in ways:
            torch.cuda.current_stream().wait_stream(stream)

    def one_step() -> None:
        host.step()

    def stepped_s(number: int) -> float:
        set_gradients(optimizer, number)
        return timed_s(one_step)

    found = [stepped_s(number) for number in range(steps)]
    in_s, out_s, both_s = (
        min(timed_s(work) for _ in range(3))
        for work in (
            lambda: there.copy_(pinned[0], non_blocking=True),
            lambda: pinned[1].copy_(other, non_blocking=True),
            both_ways,
        )
    )
    gb = num_bytes / 1e9
    print(
        f"\n{gb:.2f} GB of moments: step {1e3 * min(found):.1f} ms; to the device {gb / in_s:.1f} GB/s, to the host {gb / out_s:.1f} GB/s, "
        f"one after the other {1e3 * (in_s + out_s):.1f} ms, both at the same time {1e3 * both_s:.1f} ms"
    )
