"""A checkpoint on a GPU: its copies lie in page-locked memory, and the host does not wait for the copies. ``-s`` shows how long they take."""

from __future__ import annotations

from pathlib import Path

import torch

from ahp.runtime.parallel import Parallel, parallelize
from ahp.runtime.torch_compat import local_tensor
from ahp.runtime.weights.checkpoint import tensors_of
from tests.gpu.test_loop import no_waiting
from tests.gpu.test_predicted import JOB, MODEL, rows


def made(device: torch.device) -> Parallel:
    """After a step, so that the optimizer has states."""
    from ahp.graph.models import build_model

    parallel = parallelize(build_model(MODEL, device="meta"), {"job": JOB, "parallelism": {}}, device=device)
    parallel.step(parallel.shard(rows(0)))
    return parallel


def copied(parallel: Parallel) -> tuple[dict[str, torch.Tensor], int]:
    """The copies of a rank's part, as the saver makes them, and their bytes."""
    found = parallel.saver.copies.of(tensors_of(parallel.state))
    return found, sum(local_tensor(tensor).nbytes for tensor in found.values())


def test_copies_are_page_locked_and_the_host_waits_for_none(alone: torch.device) -> None:
    parallel = made(alone)
    copied(parallel)  # makes the memory
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the device's clock, before the copies in its queue
    with no_waiting():
        found, _ = copied(parallel)
        over = torch.cuda.Event()
        over.record()
    assert not over.query(), "the copies were over before what is queued before them"
    on_device = {name: local_tensor(t) for name, t in tensors_of(parallel.state).items() if local_tensor(t).is_cuda}
    assert on_device
    torch.cuda.synchronize()
    for name, tensor in on_device.items():
        copy = local_tensor(found[name])
        assert copy.is_pinned(), name
        assert torch.equal(copy, tensor.cpu()), name


def test_a_checkpoint_is_what_was_there_when_it_was_asked_for(alone: torch.device, tmp_path: Path) -> None:
    parallel = made(alone)
    before = {name: local_tensor(p.detach()).clone() for name, p in parallel.parameters.items()}
    done = parallel.saver.start(tmp_path, lambda checksums: None)
    for step in (1, 2):  # queued behind the copies
        parallel.step(parallel.shard(rows(step)))
    done.result()
    again = made(alone)
    again.load(tmp_path)
    assert again.num_steps_done == 1
    assert all(torch.equal(local_tensor(p.detach()), before[name]) for name, p in again.parameters.items())


def test_how_long_the_copies_take(alone: torch.device) -> None:
    """Printed, not judged."""
    parallel, took_ms, num_bytes = made(alone), [], 0
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        _, num_bytes = copied(parallel)
        end.record()
        torch.cuda.synchronize()
        took_ms.append(start.elapsed_time(end))
    print(f"\n{num_bytes / 1e9:.2f} GB: {took_ms[0]:.1f} ms where memory is made, then {min(took_ms[1:]):.1f} ms, "
          f"{num_bytes / min(took_ms[1:]) / 1e6:.1f} GB/s")  # fmt: skip
