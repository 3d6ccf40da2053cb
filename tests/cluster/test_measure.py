"""probe: the list of tasks, how samples become a cluster, failing workers; the real thing in a slow test."""

import json
import time
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch

from ahp.cluster import measure, team
from ahp.cluster.gpus import Gpu
from ahp.cluster.model import Cluster, CollectiveSample, Host, MatmulSample, Measurements, MemorySample, ProductPhase
from ahp.cluster.tasks import COLLECTIVES, Task, tasks, worker_counts
from ahp.errors import AhpError, BadInput
from tests.cluster.small_probe import small_probe


@pytest.fixture(autouse=True)
def _outside_of_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "PET_NNODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("workers", "quick", "counts"),
    [(1, True, [1]), (2, True, [1, 2]), (6, False, [1, 2, 4, 6]), (8, False, [1, 2, 4, 8]), (8, True, [1, 2, 8])],
)
def test_worker_counts(workers: int, quick: bool, counts: list[int]) -> None:
    assert worker_counts(workers, quick=quick) == counts


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("on_cuda", [True, False])
def test_tasks(workers: int, quick: bool, on_cuda: bool) -> None:
    found = tasks(workers=workers, on_cuda=on_cuda, quick=quick)
    assert len(set(found)) == len(found)
    assert all(1 <= task.workers <= workers for task in found)
    kinds = {task.kind for task in found}
    assert {"launch", "memory", "matmul", "attention_forward", "attention_backward", "add", "silu"} <= kinds
    assert (set(COLLECTIVES) <= kinds) == (workers > 1)
    for task in found:
        if task.kind in COLLECTIVES:
            assert task.workers > 1
            assert task.bytes % (4 * task.workers) == 0
            assert task.kind != "send_recv" or task.workers % 2 == 0
    for dtype in ("fp32", "bf16"):
        products = [t for t in found if t.kind == "matmul" and t.dtype == dtype and t.workers == workers]
        forward, *gradients = ([t for t in products if t.phase == phase] for phase in get_args(ProductPhase))
        for of_phase in (forward, *gradients):
            work = [t.m * t.n * t.k for t in of_phase]
            assert work == sorted(work)
        shapes = {tuple(sorted((t.m, t.n, t.k))) for t in forward}
        of_x, of_w = ({tuple(sorted((t.m, t.n, t.k))) for t in of_phase} for of_phase in gradients)
        assert of_x == of_w
        assert of_x <= shapes
        assert bool(of_x) != on_cuda
    assert (any(t.dtype == "fp16" for t in found)) == on_cuda


def samples(workers: int) -> Measurements:
    return Measurements(
        matmul=tuple(
            MatmulSample(m=64, n=64, k=64 * size, dtype=dtype, workers=w, seconds=1e-6 * size * w)
            for size in (1, 2)
            for dtype in ("fp32", "bf16")
            for w in {1, workers}
        ),
        memory=(MemorySample(workers=1, bytes_per_s=2e10), MemorySample(workers=workers, bytes_per_s=1e10)),
        collectives=tuple(
            CollectiveSample(kind="send_recv", workers=2, bytes=b, seconds=5e-5 + b / 4e9) for b in (4096, 2**20, 2**24)
        ),
    )


def test_link_is_the_best_rate_and_the_time_beside_it() -> None:
    link = measure.measured_link(samples(2), "here")
    assert link is not None
    assert link.bandwidth_bytes_per_s == pytest.approx(4e9, rel=0.02)
    assert link.latency_s == pytest.approx(5e-5, rel=0.01)
    assert measure.measured_link(Measurements(), "here") is None


def test_one_disturbed_message_does_not_spoil_the_link() -> None:
    clean = samples(2)
    disturbed = CollectiveSample(kind="send_recv", workers=2, bytes=2**26, seconds=9.0)
    late = CollectiveSample(kind="send_recv", workers=2, bytes=1024, seconds=0.01)
    noisy = clean.model_copy(update={"collectives": (late, *clean.collectives, disturbed)})
    assert measure.measured_link(noisy, "here") == measure.measured_link(clean, "here")


def run_with(monkeypatch: pytest.MonkeyPatch, found: list[Gpu], **options: Any) -> tuple[Cluster, dict[str, Any]]:
    """probe with made-up workers that answer each task with its own size."""
    seen: dict[str, Any] = {}

    def results(settings: dict[str, Any]) -> Any:
        seen.update(settings)
        json.dumps(settings)
        yield {"rss_bytes": 3 * 10**8, "torch": "9.9"}
        for turn in (3.0, 0.5, 1.0)[: settings["rounds"]]:
            for index, plain in enumerate(settings["tasks"]):
                task = Task(**plain)
                slow = task.kind == "matmul" and task.m == 4096 and task.dtype == "bf16"
                work = 2.0 * task.m * task.n * task.k / 1e11 + task.bytes / 1e9 + 1e-6
                value = 1e10 / turn if task.kind == "memory" else work * turn
                yield {"task": index, "value": None if slow else value}

    monkeypatch.setattr(team, "results", results)
    monkeypatch.setattr(measure, "gpus", lambda: found)
    monkeypatch.setattr(measure.psutil, "cpu_percent", lambda interval: 50.0)
    monkeypatch.setattr(measure.disk, "throughput", lambda folder, size: (1e9, None))
    said: list[float] = []
    cluster = measure.probe(progress=lambda what, share: said.append(share), **options)
    assert all(0 <= share <= 1 for share in said)
    assert all(later >= earlier for earlier, later in pairwise(said))
    return cluster, seen


def test_probe_of_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    cluster, settings = run_with(monkeypatch, [], quick=True, workers=2, folder=tmp_path)
    (group,) = cluster.groups
    assert settings["device"] == "cpu"
    assert (group.devices_per_node, group.device.name, group.host.storage_write_bytes_per_s) == (2, "cpu", 1e9)
    assert group.device.reserved_memory_bytes == 3 * 10**8
    # The median of the rounds counts: the last, in which everything takes 1 time the work.
    assert group.device.memory_bandwidth_bytes_per_s == pytest.approx(1e10)
    assert group.device.peak_flops_per_s["fp32"] == pytest.approx(1e11, rel=0.01)
    assert group.device.kernel_launch_s == pytest.approx(1e-6)
    assert group.measured is not None
    assert not any(s.m == 4096 for s in group.measured.matmul if s.dtype == "bf16")
    assert any(s.m == 4096 for s in group.measured.matmul if s.dtype == "fp32")
    assert "torch 9.9" in cluster.source
    assert "other programs used 50%" in cluster.source
    assert Cluster.from_dict(cluster.plain()) == cluster


def test_probe_of_known_and_unknown_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * 2**20, 132, 650.0, 450e9)
    cluster, settings = run_with(monkeypatch, [known] * 2, quick=True)
    device = cluster.groups[0].device
    assert settings["device"] == "cuda"
    assert (device.name, device.power_limit_w, device.peak_flops_per_s["bf16"]) == ("H100-SXM-80GB", 650, 989.4e12)
    assert device.kernel_launch_s == pytest.approx(1e-6)
    unknown = Gpu(0, "NVIDIA A10", 23028 * 2**20, 72)
    cluster, _ = run_with(monkeypatch, [unknown], quick=True)
    group = cluster.groups[0]
    assert group.device.name == "NVIDIA A10"
    assert group.device.peak_flops_per_s["fp16"] == pytest.approx(1e11, rel=0.01)
    assert "nothing to connect" in group.intra_node.source


def test_probe_inside_a_job_of_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    h100, a10 = Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * 2**20), Gpu(0, "NVIDIA A10", 23028 * 2**20)
    (group,) = run_with(monkeypatch, [h100] * 8, quick=True)[0].groups
    assert (group.nodes, group.devices_per_node) == (4, 8)
    assert group.inter_node is not None
    assert group.inter_node.bandwidth_bytes_per_s == 8 * 400e9 / 8
    assert group.inter_node.latency_s == pytest.approx(4e-6)
    monkeypatch.setattr(measure.sense, "network_kind", lambda: "efa")
    (group,) = run_with(monkeypatch, [h100] * 8, quick=True)[0].groups
    assert group.inter_node is not None
    assert group.inter_node.latency_s == pytest.approx(24.7e-6)
    (group,) = run_with(monkeypatch, [a10], quick=True, inter_node_gbps=100.0)[0].groups
    assert group.inter_node is not None
    assert group.inter_node.latency_s == pytest.approx(24.7e-6)
    assert group.inter_node.bandwidth_bytes_per_s == 100e9 / 8
    monkeypatch.setattr(measure.sense, "network_gbps", lambda root: None)
    with pytest.raises(BadInput, match="inter_node_gbps is missing"):
        run_with(monkeypatch, [a10], quick=True)
    with pytest.raises(BadInput, match="inter_node_gbps = nan"):
        run_with(monkeypatch, [h100], quick=True, inter_node_gbps=float("nan"))


@pytest.mark.parametrize(("found", "workers"), [([], 0), ([], -2), ([Gpu(0, "Tesla T4", 2**34)], 2)])
def test_impossible_workers(monkeypatch: pytest.MonkeyPatch, found: list[Gpu], workers: int) -> None:
    with pytest.raises(BadInput, match=f"workers = {workers}"):
        run_with(monkeypatch, found, workers=workers)


@pytest.mark.parametrize(
    ("kind", "workers", "threads", "cores", "own_time", "turns"),
    [
        ("matmul", 2, 1, 2, True, 1.0),
        ("matmul", 1, 2, 2, False, 1.0),
        ("memory", 4, 1, 2, True, 2.0),
        ("launch", 3, 1, 2, True, 1.5),
        ("all_reduce", 4, 1, 2, True, 2.0),
        ("send_recv", 4, 1, 2, False, 1.0),
        ("matmul", 1, 1, 0.4, True, 2.5),  # a control group grants less than a processor
    ],
)
def test_workers_that_share_a_core_wait_for_their_turns(
    kind: str, workers: int, threads: int, cores: float, own_time: bool, turns: float
) -> None:
    from ahp.cluster.worker import Worker, timing

    clock, times = timing(Task(kind=kind, workers=workers), threads, cores)
    assert clock is (time.thread_time if own_time else time.perf_counter)
    assert times == turns
    ticks = iter([1.0, 1.5])
    worker = Worker.__new__(Worker)
    worker.clock, worker.turns, worker.on_cuda = lambda: next(ticks), times, False
    assert worker._batch(lambda: None, calls=2) == 0.25 * turns  # pyright: ignore[reportPrivateUsage]


def test_a_collective_is_timed_behind_computation_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers on a core: products that take 2 s of a worker's own time are known to take 4, what is left of 10 s is the collective's."""
    from ahp.cluster import worker

    wall, own, order = iter([100.0, 110.0]), iter([0.5, 2.5]), list[str]()
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(wall))
    one = worker.Worker.__new__(worker.Worker)
    one.clock, one.turns, one.work = lambda: next(own), 2.0, torch.ones(2, 2)
    monkeypatch.setattr(one, "_product", lambda: order.append("product"))
    assert one._behind_work(lambda: order.append("collective"), 2) == 6.0  # pyright: ignore[reportPrivateUsage]
    assert order == ["product", "product", "collective"]


@pytest.mark.slow  # a worker imports torch before it can fail
def test_a_worker_that_fails_is_quoted() -> None:
    with pytest.raises(AhpError, match=r"(?s)worker 0 ended with code 1.*KeyError: 'cores'"):
        list(team.results({"workers": 1}))


@pytest.mark.slow
def test_real_quick_probe_of_two_workers(tmp_path: Any) -> None:
    with small_probe():
        cluster = measure.probe(quick=True, workers=2, folder=tmp_path)
    (group,) = cluster.groups
    measured = group.measured
    assert measured is not None
    assert group.devices_per_node == 2
    assert {s.dtype for s in measured.matmul} == {"fp32", "bf16"}
    assert {s.workers for s in measured.matmul} == {1, 2}
    assert {(s.phase, s.dtype) for s in measured.matmul} >= {(phase, "fp32") for phase in get_args(ProductPhase)}
    assert [s.workers for s in measured.memory] == [1, 2]
    assert {(s.phase, s.dtype, s.workers) for s in measured.attention} == {
        (phase, dtype, w) for phase in ("forward", "backward") for dtype in ("fp32", "bf16") for w in (1, 2)
    }
    assert {(s.kind, s.dtype, s.workers) for s in measured.element_wise} == {
        (kind, dtype, w) for kind in ("add", "silu") for dtype in ("fp32", "bf16") for w in (1, 2)
    }
    assert all(1e8 < s.bytes_per_s < 1e13 for s in measured.memory)
    assert all(1e8 < peak < 1e15 for peak in group.device.peak_flops_per_s.values())
    # Far apart in size, so that the order holds on a busy machine too.
    for kind in COLLECTIVES:
        by_size = sorted((s.bytes, s.seconds) for s in measured.collectives if s.kind == kind)
        assert len(by_size) == 4
        assert by_size[-1][1] > by_size[0][1]
    assert 1e7 < group.intra_node.bandwidth_bytes_per_s < 1e12
    assert 0 < group.device.kernel_launch_s < 1e-3
    assert group.device.memory_bytes > group.device.reserved_memory_bytes > 10**7
    assert isinstance(group.host, Host)
    path = tmp_path / "cluster.yaml"
    cluster.save(path)
    assert Cluster.load(path) == cluster
