"""Measures how long plans take on this machine: each runs a few steps on random tokens."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ahp.errors import AhpError, bad_input
from ahp.plan import Plan
from ahp.runtime.check import rehearsal
from ahp.runtime.ranks.device import device_for
from ahp.runtime.run.worker import end_process
from ahp.words import seconds, slower

WARMUP = 2
"""Steps before the clock counts: allocators, kernel compilers and the backend's connections start in them."""


@dataclass(frozen=True)
class Measured:
    """One plan and its step times, or why it could not run."""

    plan: Plan
    step_times_s: tuple[float, ...] = ()
    failure: str | None = None

    @property
    def step_time_s(self) -> float:
        """Median; infinite for a plan that failed."""
        return statistics.median(self.step_times_s) if self.step_times_s else float("inf")

    def words(self, *, against: Measured | None = None) -> str:
        """``measured here: 201 ms a step (199 ms .. 207 ms), forecast 155 ms``; ``against``: adds how much slower this plan is."""
        if self.failure is not None:
            return f"could not be measured: {self.failure}"
        low, high = seconds(min(self.step_times_s)), seconds(max(self.step_times_s))
        found = f"measured here: {seconds(self.step_time_s)} a step ({low} .. {high})"
        if against is not None:
            found += f", {slower(self.step_time_s / against.step_time_s)}"
        forecast = self.plan.forecast
        return found if forecast is None else f"{found}, forecast {seconds(forecast.step_time_s)}"


def measure(plans: Sequence[Plan], *, steps: int = 5, say: Callable[[str], None] = lambda text: None) -> list[Measured]:
    """Run each plan for ``steps`` steps after two warm-up steps, on workers of this machine. Returns the fastest first.

    A plan that fails, for lack of memory for instance, comes last with the reason. Raises HardwareMismatch if the plans
    are for other hardware, AhpError if none of them runs.
    """
    if steps < 1:
        raise bad_input("steps", steps, "must be at least 1")
    found = []
    for number, plan in enumerate(plans, start=1):
        device = device_for(plan, plan.parallelism.world_size)
        say(f"measuring {number} of {len(plans)}: {plan.parallelism.short()}")
        try:
            times_s = json.loads(rehearsal.on_workers("ahp.runtime.check.measure", plan, device, str(steps)))
        except AhpError as error:
            found.append(Measured(plan, failure=str(error)))
        else:
            found.append(Measured(plan, tuple(times_s)))
    if all(one.failure for one in found):
        raise AhpError(f"no plan could be measured; the first: {found[0].failure}")
    return sorted(found, key=lambda one: one.step_time_s)


def main(argv: list[str]) -> int:
    """One rank: ``python -m ahp.runtime.check.measure FOLDER DEVICE STEPS`` under the launcher's variables."""
    with rehearsal.as_rank(argv) as (plan, ranks, answer):
        parallel, tokens = rehearsal.parallel_model(plan, ranks.device)
        times_s = []
        for step in range(WARMUP + int(argv[2])):
            data = rehearsal.batch(plan, step, tokens)
            dist.barrier()
            start = time.perf_counter()
            parallel.step(parallel.shard(data))
            ranks.barrier()  # waits for the device too: a GPU's step is over when its queue is empty
            times_s.append(time.perf_counter() - start)
        answer(json.dumps(times_s[WARMUP:]))
    return 0


if __name__ == "__main__":
    end_process(lambda: main(sys.argv[1:]))
