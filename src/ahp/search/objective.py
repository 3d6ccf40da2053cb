"""What is searched for: the shortest step, the cheapest token, the most tokens a day, or the fewest devices.

All but the first let the search use fewer devices than there are (``search/counts.py``). On a given number of devices
every objective is best where the step is shortest, so one search by step time per number of devices serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from ahp.cluster.model import Cluster
from ahp.cluster.reliability import SECONDS_PER_HOUR, Failures, defaults, failures_per_device_hour
from ahp.errors import BadInput, bad_input
from ahp.job import Record
from ahp.plan import Parallelism, validated
from ahp.search.problem import Problem
from ahp.words import compared, count, duration, number_of, percent

ObjectiveName = Literal["speed", "cost", "tokens-per-day", "fewest-devices"]
Positive = Annotated[float, Field(gt=0)]

SECONDS_PER_DAY = 86400.0
FAILURES = ("failures_per_device_hour", "checkpoint_blocks_s", "restart_s")
USES: dict[str, tuple[str, ...]] = {
    "speed": (),
    "cost": ("price_per_device_hour",),
    "tokens-per-day": FAILURES,
    "fewest-devices": ("target_tokens_per_s",),
}
"""The keys that each objective reads; a key that the chosen one does not read is refused."""


class Objective(Record):
    """What makes one plan better than another, with the figures that it needs."""

    name: ObjectiveName = "speed"
    price_per_device_hour: Positive | dict[str, Positive] | None = None
    """One price for all devices, or one for each device by its name; in any currency."""
    failures_per_device_hour: Positive | None = None
    """Failures that stop the job; None = the cluster's, else reliability.yaml."""
    checkpoint_blocks_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds that a checkpoint stops training; None = from its size if the storage was measured, else reliability.yaml."""
    restart_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds from a failure until the job trains again; None = reliability.yaml."""
    target_tokens_per_s: Positive | None = None
    """Tokens per second of all devices together."""

    @field_validator("price_per_device_hour", mode="before")
    @classmethod
    def _one_price_or_one_each(cls, value: Any) -> Any:
        for price in value.values() if isinstance(value, dict) else [value]:
            if value is not None and (isinstance(price, bool) or not isinstance(price, (int, float)) or not price > 0):
                raise ValueError(
                    f"objective.price_per_device_hour = {value!r}: must be a price above 0, or a mapping of device names "
                    "to such prices"
                )
        return value

    def words(self) -> str:
        """``cost: price_per_device_hour 2.5``: the name with what was given."""
        given = self.model_dump(mode="json", exclude_none=True, exclude={"name"})
        keys = ", ".join(f"{key} {value}" for key, value in given.items())
        return f"{self.name}{': ' if keys else ''}{keys}"

    @property
    def may_use_fewer(self) -> bool:
        """Whether fewer devices than there are can be the better choice."""
        return self.name != "speed"


def objective_of(given: Objective | Mapping[str, Any] | str) -> Objective:
    """An objective from its name, its keys or itself. Raises BadInput for keys that contradict it or are missing."""
    if isinstance(given, str) and given not in get_args(ObjectiveName):
        raise bad_input("objective", given, "no such objective", get_args(ObjectiveName))
    found = validated(Objective, {"name": given} if isinstance(given, str) else given, "objective")
    for key in Objective.model_fields:
        value, readers = getattr(found, key), [name for name, keys in USES.items() if key in keys]
        if key == "name" or value is None or found.name in readers:
            continue
        raise bad_input(f"objective.{key}", value, f"the objective {found.name} does not read it", readers)
    if found.name == "cost" and found.price_per_device_hour is None:
        rule = "cost needs the price of an hour of one device; give --objective.price-per-device-hour 2.5"
        raise bad_input("objective.price_per_device_hour", None, rule)
    if found.name == "fewest-devices" and found.target_tokens_per_s is None:
        rule = "fewest-devices needs the speed to reach; give --objective.target-tokens-per-s 20000"
        raise bad_input("objective.target_tokens_per_s", None, rule)
    return found


@dataclass(frozen=True)
class Worth:
    """What a plan is worth by an objective."""

    devices: int
    step_time_s: float
    score: float
    """Less is better."""
    figures: Mapping[str, float]
    words: str
    """The figure for a table."""


class Scale:
    """Measures plans of one problem, on all its devices or fewer, by one objective."""

    def __init__(self, objective: Objective, asked: Problem) -> None:
        self.objective, self.asked = objective, asked
        self._prices = self._price_of_each()

    @property
    def target_s(self) -> float:
        """Seconds of the longest step that reaches the target speed."""
        return self.asked.job.tokens_per_step / (self.objective.target_tokens_per_s or 1.0)

    def weight(self, cluster: Cluster) -> float:
        """What a second of a step on this cluster adds to the score; infinite where failures leave no time to train."""
        if self.objective.name == "cost":
            return self._price_per_hour(cluster) / SECONDS_PER_HOUR / self.asked.job.tokens_per_step
        if self.objective.name == "tokens-per-day":
            goodput = self.failures(cluster).goodput
            return 1.0 / goodput if goodput else float("inf")
        return 1.0

    def worth(self, cluster: Cluster, step_s: float) -> Worth:
        """What a step of ``step_s`` seconds on this cluster is worth."""
        speed, devices = self.asked.job.tokens_per_step / step_s, cluster.num_devices
        figures = {"devices": float(devices), "tokens_per_s": speed}
        words = f"{count(speed)} tok/s"
        if self.objective.name == "cost":
            per_token = self.weight(cluster) * step_s
            figures |= {"cost_per_token": per_token, "cost_per_hour": self._price_per_hour(cluster)}
            words = f"{1e6 * per_token:.4g}"
        elif self.objective.name == "tokens-per-day":
            failures = self.failures(cluster)
            per_day = speed * SECONDS_PER_DAY * failures.goodput
            figures |= {
                "tokens_per_day": per_day,
                "goodput": failures.goodput,
                "failures_per_s": failures.per_s,
                "checkpoint_blocks_s": failures.checkpoint_blocks_s,
                "checkpoint_interval_s": failures.best_interval_s,
                "restart_s": failures.restart_s,
            }
            words = count(per_day)
        return Worth(devices, step_s, self.weight(cluster) * step_s, figures, words)

    def compared(self, other: Worth, best: Worth) -> str:
        """Why a plan on another number of devices is not the first."""
        faster = best.step_time_s / other.step_time_s
        speed = f"{faster:.2f} times the speed"
        if self.objective.name == "fewest-devices":
            more = other.devices - best.devices
            if more < 0:
                return f"{speed}, which misses the target"
            return f"{more} device{'s' * (more > 1)} more, {speed}" if more else f"as many devices, {speed}"
        more, lost = other.score / best.score - 1, 1 - best.score / other.score
        if self.objective.name == "cost":
            return f"costs {compared(max(more, 0.0), 'more', '', 'as much')}, {speed}"
        return f"{compared(max(lost, 0.0), 'fewer', '', 'as many')} tokens a day, {speed}"

    def why(self, worth: Worth) -> tuple[str, ...]:
        """The first plan's figures by the objective, in words."""
        cost, speed = worth.figures.get("cost_per_token", 0.0), count(worth.figures["tokens_per_s"])
        on = f"on {worth.devices} of {number_of(self.asked.cluster.num_devices, 'device')}"
        if self.objective.name == "cost":
            hour = worth.figures["cost_per_hour"]
            return (f"cheapest: {1e6 * cost:.4g} for a million tokens, {hour:.6g} an hour {on}, {speed} tokens/s",)
        if self.objective.name == "fewest-devices":
            target = count(self.objective.target_tokens_per_s or 0.0)
            return (f"fewest devices that reach {target} tokens/s: {speed} tokens/s {on}",)
        return self._failure_words(worth, on)

    def _failure_words(self, worth: Worth, on: str) -> tuple[str, ...]:
        of = worth.figures
        apart = duration(1.0 / of["failures_per_s"])
        steps = max(1, round(of["checkpoint_interval_s"] / worth.step_time_s))
        most = (
            f"most tokens a day: {count(of['tokens_per_day'])} {on}, which train {percent(of['goodput'])} of the time"
        )
        every = f"best every {duration(of['checkpoint_interval_s'])} ({steps:,} step{'s' * (steps > 1)})"
        stops = f"a checkpoint stops it for {duration(of['checkpoint_blocks_s'])}, {every}"
        return (
            most,
            f"a failure every {apart}, {duration(of['restart_s'])} until it trains again; {stops}",
            *self.assumed(),
        )

    def assumed(self) -> tuple[str, ...]:
        """The figures that the user did not give, with where they come from."""
        notes = []
        for key in USES[self.objective.name]:
            if key in defaults.all and getattr(self.objective, key) is None:
                notes.append(f"objective.{key} not given: {self._taken(key)}")
        return tuple(notes)

    def _taken(self, key: str) -> str:
        written = write_bytes_per_s(self.asked.cluster)
        if key == "checkpoint_blocks_s" and written:
            return (
                f"a checkpoint of {checkpoint_bytes(self.asked) / 1e9:.3g} GB written to the storage as it was measured "
                f"({written / 1e9:.3g} GB/s of all nodes)"
            )
        default = defaults.all[key]
        if key == "failures_per_device_hour" and (rate := self.asked.cluster.failures_per_device_hour):
            return f"{rate:g} {default.unit} (the cluster's)"
        return f"{default.value:g} {default.unit} ({default.derivation.split(':')[0].split(';')[0].strip()})"

    @property
    def failure_rate(self) -> tuple[str, float]:
        """The key that gives the failure rate, or would, and the failures of one device per hour."""
        given, clusters = self.objective.failures_per_device_hour, self.asked.cluster.failures_per_device_hour
        if given is None and clusters is not None:
            return "cluster.failures_per_device_hour", clusters
        return "objective.failures_per_device_hour", given or failures_per_device_hour(None)

    def failures(self, cluster: Cluster) -> Failures:
        """Failures of a job on this cluster."""
        given = self.objective
        _, rate = self.failure_rate
        blocks_s, restart_s = given.checkpoint_blocks_s, given.restart_s
        if blocks_s is None:
            writes = write_bytes_per_s(cluster)
            blocks_s = checkpoint_bytes(self.asked) / writes if writes else defaults.value("checkpoint_blocks_s")
        return Failures(
            per_s=rate * cluster.num_devices / SECONDS_PER_HOUR,
            checkpoint_blocks_s=blocks_s,
            restart_s=defaults.value("restart_s") if restart_s is None else restart_s,
        )

    def _price_per_hour(self, cluster: Cluster) -> float:
        return sum(group.num_devices * self._prices[group.device.name] for group in cluster.groups)

    def _price_of_each(self) -> dict[str, float]:
        """Price per hour, keyed by device name. Raises BadInput if a device has no price, or a price has no device."""
        given, names = self.objective.price_per_device_hour, [g.device.name for g in self.asked.cluster.groups]
        if not isinstance(given, dict):
            return dict.fromkeys(names, given or 0.0)
        there = [*names, *(group.device.name for group in self.asked.left_out)]
        for name in given:
            if name not in there:
                raise bad_input("objective.price_per_device_hour", name, "the cluster has no such device", there)
        if missing := [name for name in names if name not in given]:
            raise BadInput(f"objective.price_per_device_hour = {given}: no price for {', '.join(missing)}")
        return given


def checkpoint_bytes(asked: Problem) -> int:
    """Bytes of a checkpoint: weights and optimizer states, each once, as the engine keeps them."""
    states = asked.traits(Parallelism()).states
    trained = states.trained_share
    frozen_bytes = states.compute_weight_bytes or states.master_weight_bytes
    each_bytes = trained * (states.master_weight_bytes + states.optimizer_bytes) + (1 - trained) * frozen_bytes
    return round(asked.graph.num_parameters * each_bytes)


def write_bytes_per_s(cluster: Cluster) -> float | None:
    """Bytes per second that all nodes write together, by measurements of storage; None if a group has none.

    Each node's own disk adds to the rate; storage behind a network is shared by all nodes and does not.
    """
    rates = []
    for group in cluster.groups:
        rate, shared = group.host.storage_write_bytes_per_s, group.host.storage_kind == "network"
        if not rate:
            return None
        rates.append((rate * (1 if shared else group.nodes), shared))
    shared_rates = [rate for rate, shared in rates if shared]
    return min(shared_rates) if shared_rates else sum(rate for rate, _ in rates)
