"""One worker of probe: ``python -m ahp.cluster.worker RANK SETTINGS``. Started by measure.py, not by people.

Every worker goes through the same list of tasks, with a broadcast before each, so that workers that take part start together
and the others sleep. Rank 0 prints one JSON object per line: first facts about itself, then one result per task and round.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ahp.cluster.model import ProductPhase
from ahp.cluster.operands import Operands
from ahp.cluster.small import NUM_OPERATORS, ROWS, WIDTH, SmallStep
from ahp.cluster.tasks import COLLECTIVES, Task

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

PRODUCTS: dict[ProductPhase, Callable[[Tensor, Tensor], Tensor]] = {
    "forward": functional.linear,
    "input_gradient": torch.mm,
    "weight_gradient": lambda gradient, x: gradient.t().mm(x),
}
"""The product of each phase, as autograd computes it."""

BATCH_S = 2.0e-3
"""Short calls are timed in batches of about this length, far above the clock's resolution."""
MIN_BATCHES, MAX_BATCHES, MAX_CALLS = 3, 30, 2000
MIN_TASK_S, MAX_TASK_S = 0.01, 0.3
"""Bounds of the total time of the batches of one task."""
WORK_S = 2.0e-3
"""Seconds that a rank computes before each collective on CPU cores, about as long as a small layer. [Empirical] 2 cores of an
AMD EPYC: gathers of 0.4 MB take 0.4 ms one after another, 1.7 ms after 1 ms of products and 2.0 after 4 or 18."""
FEWEST, MOST, OUTSIDE = 15, 100, 0.1
"""Limits of the number of calls of such a collective, and the share of calls dropped at either end, when the machine did something else."""
JOIN_TIMEOUT_S = 120


class Worker:
    """A rank of the probe's process group, with the device it measures."""

    def __init__(self, rank: int, settings: dict[str, Any]) -> None:
        self.rank = rank
        self.world: int = settings["workers"]
        self.cores: int = settings["cores"]
        self.processors: float = settings["processors"]
        self.rounds: int = settings["rounds"]
        self.deadline: float = settings["deadline"]
        self.stream_bytes: int = settings["stream_bytes"]
        self.slowest_s: float = settings["slowest_s"]
        self.on_cuda: bool = settings["device"] == "cuda"
        self.device = torch.device("cuda", rank) if self.on_cuda else torch.device("cpu")
        self.tasks = [Task(**task) for task in settings["tasks"]]
        self.operands = Operands(settings["cold_bytes"], self.device)
        self.too_slow: set[tuple[ProductPhase, str, int]] = set()
        """(phase, dtype, workers) for which a product took too long in this round; the larger ones are left out."""
        self.work = torch.ones(128, 128, device=self.device)
        """Operand of the products before a collective."""
        self.clock = time.perf_counter
        self.turns = 1.0
        """Workers that take turns on a core, if the clock counts only a worker's own turns; else 1."""
        if self.on_cuda:
            torch.cuda.set_device(self.device)
        store = dist.FileStore(settings["store"], self.world)
        # The control group is gloo on every device: a rank that waits in it sleeps, and so does not disturb those that measure.
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=self.world, timeout=timedelta(seconds=JOIN_TIMEOUT_S)
        )
        backend = "nccl" if self.on_cuda else "gloo"
        sizes = sorted({task.workers for task in self.tasks if task.kind in COLLECTIVES})
        self.groups: dict[int, Any] = {n: dist.new_group(list(range(n)), backend=backend) for n in sizes}

    def run(self) -> None:
        """Go through all tasks; rank 0 prints the results."""
        self._print({"rss_bytes": psutil.Process().memory_info().rss, "torch": str(torch.__version__)})
        for turn in range(self.rounds):
            self.too_slow.clear()
            for index, task in enumerate(self.tasks):
                budget_s = self._budget_s(turn, index)
                if budget_s is None:
                    break
                self._print({"task": index, "value": self._together(task, budget_s)})
        dist.barrier()
        dist.destroy_process_group()

    def _budget_s(self, turn: int, index: int) -> float | None:
        """Seconds for the next task, computed by rank 0 from the time left; None when time is up. The first round is
        always completed, with little time for each task when the machine is busy."""
        left_s = self.deadline - time.time()
        over = left_s <= 0 and turn > 0
        of_this_round_s = max(0.0, left_s) / (self.rounds - turn)
        # Half of a task's share is for warming up, making tensors and waiting for each other.
        budget_s = min(MAX_TASK_S, max(MIN_TASK_S, 0.5 * of_this_round_s / (len(self.tasks) - index)))
        said = torch.tensor([-1.0 if over else budget_s], dtype=torch.float64)
        dist.broadcast(said, 0)
        return None if said.item() < 0 else said.item()

    def _together(self, task: Task, budget_s: float) -> float | None:
        """Measure with all workers that take part; rank 0 gets the team's value. The others wait for the next task."""
        if not self.on_cuda:
            threads = max(1, self.cores // task.workers)
            torch.set_num_threads(threads)
            self.clock, self.turns = timing(task, threads, self.processors)
        result = self.measure(task, budget_s) if self.rank < task.workers else None
        results: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(result, results)
        taken = [r for r in results or [] if r is not None]
        if not taken:
            return None
        # A collective by itself ends with its last worker; for products, streams and what a collective adds the average worker counts.
        alone = task.kind in COLLECTIVES and (self.on_cuda or task.kind == "send_recv")
        return max(taken) if alone else statistics.fmean(taken)

    def measure(self, task: Task, budget_s: float) -> float | None:
        """Seconds of one call (bytes per second for memory); None when it would take too long."""
        if task.kind == "matmul":
            return self._matmul(task, budget_s)
        if task.kind == "memory":
            elements = self.stream_bytes // 4
            source = torch.ones(elements, device=self.device)
            target = torch.empty_like(source)
            # Element-wise work is what is bound by memory in training: read once, write once.
            return 2 * 4 * elements / self._timed(lambda: torch.mul(source, 1.5, out=target), budget_s)
        if task.kind == "launch":
            return self._launch(budget_s)
        if task.heads:
            return self._attention(task, budget_s)
        if task.elements:
            return self._element_wise(task, budget_s)
        return self._collective(task, budget_s)

    def _matmul(self, task: Task, budget_s: float) -> float | None:
        key = (task.phase, task.dtype, task.workers)
        if key in self.too_slow:
            return None
        first = (task.k, task.m) if task.phase == "weight_gradient" else (task.m, task.k)
        second = (task.n, task.k) if task.phase == "forward" else (task.k, task.n)
        operands, product = self.operands.of(DTYPES[task.dtype], first, second), PRODUCTS[task.phase]
        if (MIN_BATCHES + 1) * self._batch(lambda: product(*next(operands)), 1) > self.slowest_s:
            self.too_slow.add(key)
            return None
        return self._timed(self.operands.kept(lambda: product(*next(operands))), budget_s)

    def _launch(self, budget_s: float) -> float:
        """Seconds of the smallest kernel on a GPU; on a CPU, of an operator of a training step with next to no work."""
        if self.on_cuda:
            tiny = torch.ones(16, device=self.device)
            return self._timed(lambda: tiny.add_(1.0), budget_s)
        step, x = SmallStep(), torch.randn(ROWS, WIDTH, requires_grad=True)
        return self._timed(lambda: step.run(x), budget_s) / NUM_OPERATORS

    def _attention(self, task: Task, budget_s: float) -> float:
        """Forward as training runs it, saving for backward; or backward alone."""
        shape = (1, task.heads, task.m, task.k)
        q, k, v, gradient = (torch.randn(shape, device=self.device).to(DTYPES[task.dtype]) for _ in range(4))
        for tensor in (q, k, v):
            tensor.requires_grad_()
        if task.kind == "attention_forward":
            forward = self.operands.kept(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
            return self._timed(forward, budget_s)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        backward = self.operands.kept(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
        return self._timed(backward, budget_s)

    def _element_wise(self, task: Task, budget_s: float) -> float:
        dtype = DTYPES[task.dtype]
        if task.kind == "silu":
            inputs = self.operands.of(dtype, (task.elements,))
            return self._timed(self.operands.kept(lambda: functional.silu(next(inputs)[0])), budget_s)
        pairs = self.operands.of(dtype, (task.elements,), (task.elements,))
        return self._timed(self.operands.kept(lambda: torch.add(*next(pairs))), budget_s)

    def _collective(self, task: Task, budget_s: float) -> float:
        group, workers = self.groups[task.workers], task.workers
        # Zeros: a sum that is made again and again would overflow from anything else.
        whole = torch.zeros(task.bytes // 4, device=self.device)
        part = torch.zeros(task.bytes // 4 // workers, device=self.device)
        if task.kind == "send_recv":
            return self._timed(lambda: self._ping_pong(whole, group), budget_s, group) / 2
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: _all_gather(whole, part, group),
            "reduce_scatter": lambda: _reduce_scatter(part, whole, group),
            "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        }
        if self.on_cuda:
            return self._timed(calls[task.kind], budget_s, group)
        return self._added(calls[task.kind], budget_s, group)

    def _added(self, call: Callable[[], Any], budget_s: float, group: dist.ProcessGroup) -> float:
        """Seconds that a collective of CPU workers adds to the computation before it.

        By itself, its ranks sleep in it, and the sending threads have the cores to themselves. In a step the ranks come from
        computing, one a little later than the other, and a sending thread must first get a core, at times after another's turn.
        """
        product_s, first = self._agreed(self._wall_s(self._product), group), self._agreed(self._wall_s(call), group)
        products = max(1, round(WORK_S / product_s))
        count = min(MOST, max(FEWEST, int(budget_s / (WORK_S + first))))
        added = sorted(self._behind_work(call, products) for _ in range(count))
        left_out = int(OUTSIDE * count)
        return max(statistics.fmean(added[left_out : count - left_out]), 1.0e-6)

    def _wall_s(self, call: Callable[[], Any]) -> float:
        """Seconds of the second of two calls."""
        call()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def _behind_work(self, call: Callable[[], Any], products: int) -> float:
        """Seconds from the start of the computation to the end of the collective, minus the products' own time by the clock."""
        start, own = time.perf_counter(), self.clock()
        for _ in range(products):
            self._product()
        own = (self.clock() - own) * self.turns
        call()
        return time.perf_counter() - start - own

    def _product(self) -> None:
        functional.linear(self.work, self.work)

    def _agreed(self, seconds: float, group: dist.ProcessGroup) -> float:
        """The longest that any rank of the group took."""
        slowest = torch.tensor([seconds], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        return slowest.item()

    def _ping_pong(self, message: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Neighbours send a message there and back, all pairs at once."""
        partner = self.rank ^ 1
        if self.rank < partner:
            dist.send(message, partner, group=group)
            dist.recv(message, partner, group=group)
        else:
            dist.recv(message, partner, group=group)
            dist.send(message, partner, group=group)

    def _timed(self, call: Callable[[], Any], budget_s: float, group: dist.ProcessGroup | None = None) -> float:
        """Median seconds of one call over batches, after two calls to warm up. With a group all its ranks make the same number."""
        call()
        first = self._batch(call, 1)
        if group is not None:
            first = self._agreed(first, group)
        calls = min(MAX_CALLS, max(1, int(BATCH_S / first)))
        batches = min(MAX_BATCHES, max(MIN_BATCHES, int(budget_s / (calls * first))))
        return statistics.median(self._batch(call, calls) for _ in range(batches))

    def _batch(self, call: Callable[[], Any], calls: int) -> float:
        self._synchronize()
        start = self.clock()
        for _ in range(calls):
            call()
        self._synchronize()
        # Above 0 whatever the clock's resolution.
        return max(self.clock() - start, 1.0e-9) * self.turns / calls

    def _synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def _print(self, line: dict[str, Any]) -> None:
        if self.rank == 0:
            print(json.dumps(line), flush=True)


def timing(task: Task, threads: int, processors: float) -> tuple[Callable[[], float], float]:
    """The clock for a task of CPU workers, and the factor for its seconds.

    A single thread that only computes is timed by its own processor time, which other programs do not lengthen as they do wall
    time. If workers share a core, each waits during the turns of the others, and if a control group grants less than a processor
    to each, it is held back for the rest of the time: the factor adds this. ``processors`` is what all workers get together. Wall
    time does not show it, because most batches are shorter than a turn and so not interrupted. Several threads wait for each
    other, and messages for the other side: these are timed by wall time.
    """
    if threads > 1 or task.kind == "send_recv":
        return time.perf_counter, 1.0
    return time.thread_time, max(1.0, task.workers / processors)


def _all_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    # torch 2.13 calls these all_gather_single and reduce_scatter_single, and warns at the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def _reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, whole, group=group)


def main(arguments: list[str]) -> None:
    """Measure as rank ``arguments[0]`` by the settings in the JSON file ``arguments[1]``."""
    rank, settings = int(arguments[0]), json.loads(Path(arguments[1]).read_text())
    Worker(rank, settings).run()


if __name__ == "__main__":
    main(sys.argv[1:])
