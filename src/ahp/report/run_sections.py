"""What a run's page shows besides its curves: figures that stand out, starts after failures, slow ranks, spikes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high
from typing import Any

from ahp.cluster.catalogue import CPU
from ahp.cluster.plain_groups import plain_groups
from ahp.plan import Plan
from ahp.report.curves import Measured
from ahp.report.html_parts import note, section, table
from ahp.run_files import Status, judge_status, read_metrics, read_noticed
from ahp.run_history import Start, effect, starts
from ahp.words import gib, number_of, percent, seconds, times

DRAWN = ("step_time_s", "memory_bytes")
"""Numbers that a line of metrics.jsonl must have to be drawn."""


@dataclass(frozen=True)
class RunFiles:
    """A run's folder as far as it can be read."""

    folder: Path
    plan: Plan
    metrics: Sequence[dict[str, Any]]
    status: Status | None
    starts: Sequence[Start]

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read a run's folder. Raises BadInput if it has no plan."""
        plan = Plan.load(folder / "plan.yaml")
        found = read_metrics(folder / "metrics.jsonl", DRAWN)
        metrics = [record for record in found if "loss" in record and record["step_time_s"] > 0]
        status = judge_status(folder / "status.json")
        return cls(folder, plan, metrics, status, _ended(starts(folder / "starts.jsonl"), status))

    def measured(self, name: str, vocabulary: int | None = None) -> Measured:
        """The run's steps, for the curves."""
        again = tuple(
            (start.first_step, _restarted(before, start))
            for before, start in zip(self.starts, self.starts[1:], strict=False)
        )
        return Measured(name, self.metrics, self.plan.forecast, self.plan.job.tokens_per_step, again, vocabulary)

    @property
    def steps_done(self) -> int:
        """Steps done so far: the heartbeat can be ten seconds behind the metrics."""
        return max([self.status.step if self.status else 0, *(m["step"] for m in self.metrics[-1:])])

    @property
    def median_s(self) -> float | None:
        """Median step time, without the first step of the run, which waits for allocations."""
        times_s = [m["step_time_s"] for m in self.metrics[1:] or self.metrics]
        return median_high(times_s) if times_s else None

    @property
    def mfu(self) -> float | None:
        """Median MFU that was reached; for older runs, whose steps do not have it, from the forecast's FLOPs."""
        reached = [m["mfu"] for m in self.metrics if m.get("mfu") is not None]
        if not reached and self.plan.forecast is not None and self.median_s:
            return self.plan.forecast.mfu * self.plan.forecast.step_time_s / self.median_s
        return median_high(reached) if reached else None

    @property
    def peak_bytes(self) -> int | None:
        """Most that a rank's allocator held."""
        return max((m.get("memory_reserved_bytes") or m["memory_bytes"] for m in self.metrics), default=None)

    @property
    def losses(self) -> list[float]:
        """Losses of the steps that were not left out."""
        return [m["loss"] for m in self.metrics if m["loss"] is not None]


def _ended(found: Sequence[Start], status: Status | None) -> Sequence[Start]:
    """The starts, with the reason why the last one ended if the run was killed before it could write it."""
    if not found or found[-1].ended is not None or status is None or status.state == "running":
        return found
    return [*found[:-1], replace(found[-1], last_step=status.step, why=status.cause or status.state)]


def _restarted(before: Start, start: Start) -> str:
    why = before.why or "an unknown reason"
    return (
        f"started again after step {start.first_step}, on {number_of(start.workers, 'worker')} as {start.plan}: {why}"
    )


def predicted_peak_bytes(plan: Plan) -> int:
    """Forecast of the peak that a run measures: what the allocator holds; for workers on cores, whose whole process is measured, all that
    they take."""
    assert plan.cluster is not None, "a plan with a forecast has one"
    on_cores = all(group["device"]["name"].lower().startswith(CPU) for group in plain_groups(plan.cluster))
    return plan.priced.needed_bytes if on_cores else plan.priced.memory_reserved_bytes


def figures(run: RunFiles) -> list[tuple[str, str, str]]:
    """(name, value, note) of what a run reached, compared with the forecast."""
    plan, forecast, step_s = run.plan, run.plan.forecast, run.median_s
    if step_s is None:
        return []
    cards = []
    if run.losses:
        left_out = len(run.metrics) - len(run.losses)
        more = f", {number_of(left_out, 'step')} left out" if left_out else ""
        cards.append(("loss", f"{run.losses[-1]:.3f}", f"from {run.losses[0]:.3f}{more}"))
    cards.append(("step time", seconds(step_s), against(step_s, plan) if forecast else "median"))
    cards.append(("tokens per second", f"{plan.job.tokens_per_step / step_s:,.0f}", "all devices together"))
    if run.mfu is not None:
        predicted = f"predicted {percent(forecast.mfu)}" if forecast else "median"
        cards.append(("MFU", percent(run.mfu), predicted))
    if run.peak_bytes is not None:
        expected = f"predicted {gib(predicted_peak_bytes(plan))}" if forecast else "fullest rank"
        cards.append(("peak memory", gib(run.peak_bytes), expected))
    if any("data_wait_s" in m for m in run.metrics):
        waits_s = [sum(m.get(key) or 0.0 for m in run.metrics) for key in ("data_wait_s", "checkpoint_wait_s")]
        share = percent(sum(waits_s) / sum(m["step_time_s"] for m in run.metrics))
        cards.append(("waiting", share, f"data {seconds(waits_s[0])}, checkpoints {seconds(waits_s[1])}"))
    return cards


def against(step_s: float, plan: Plan) -> str:
    """A measured step against the forecast: ``12 % slower than predicted 500 ms``."""
    forecast = plan.forecast
    if forecast is None:
        return ""
    ratio = step_s / forecast.step_time_s
    if ratio >= 2:
        return f"{times(ratio)} the predicted {seconds(forecast.step_time_s)}"
    words = "slower than" if ratio >= 1 else "faster than"
    return f"{percent(abs(ratio - 1))} {words} predicted {seconds(forecast.step_time_s)}"


def history(found: Sequence[Start]) -> list[str]:
    """Every start of the workers, if there was more than one: its plan, how far it came, what was lost, why it ended."""
    if len(found) < 2:
        return []
    rows = (
        (
            start.began.replace("T", " ").partition("+")[0],
            start.plan,
            start.workers,
            f"{start.first_step} to {'?' if start.last_step is None else start.last_step}",
            "?" if start.steps_lost is None else start.steps_lost,
            "?" if start.seconds is None else seconds(start.seconds),
            "?" if start.seconds_lost is None else seconds(start.seconds_lost),
            start.why or "",
        )
        for start in found
    )
    head = ("began", "layout", "workers", "steps", "steps lost", "took", "of it lost", "ended because")
    reached = effect(found)
    words = ""
    if reached is not None:
        words = note(
            f"{percent(reached.share)} of that time went into steps that count: {reached.tokens_per_day:,.0f} tokens a day, "
            f"{reached.tokens_per_day_without_failures:,.0f} if nothing had failed."
        )
    return [section("Starts of the workers", table(head, rows), words)]


def noticed(status_file: Path) -> list[str]:
    """Slow ranks and spikes of the loss, if there are any."""
    found = read_noticed(status_file)
    parts = []
    if slow := found.get("slow_ranks"):
        keys = "rank", "host", "ratio", "reason", "why", "since_step"
        rows = [(*_row(one, keys), _planned(one)) for one in slow]
        parts.append(section("Slow ranks", table((*keys[:-1], "since step", "what another plan would gain"), rows)))
    if spikes := found.get("loss_spikes"):
        keys = "step", "of", "value", "median"
        words = [{**one, "of": "gradient norm" if one.get("of") == "grad_norm" else one.get("of")} for one in spikes]
        parts.append(section("Spikes", table((*keys[:-1], "median before"), [_row(one, keys) for one in words])))
    return parts


def _row(one: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    values = (one.get(key, "?") for key in keys)
    return tuple(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)


def _planned(one: Mapping[str, Any]) -> str:
    planned = one.get("plan")
    return str(planned.get("words", planned.get("error", ""))) if isinstance(planned, dict) else ""
