"""Prices layouts of one model, cluster, job and engine; what they share is computed once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from ahp.cluster.model import Cluster, NodeGroup
from ahp.engines import steps
from ahp.engines.engine import Traits
from ahp.engines.registry import get
from ahp.errors import BadInput, NotExpressible
from ahp.forecast import margins, memory
from ahp.forecast.communication import Network, pair_group, strided_group
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.groups import data_groups, expert_groups, shard_ranks
from ahp.forecast.rules import illegal
from ahp.forecast.stage import DataParallel, Recompute, StageCost, stage_cost
from ahp.forecast.units import UnitPricer, Units, axes_of
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Forecast, Parallelism
from ahp.schedule.actions import Schedule
from ahp.schedule.makespan import Makespan, makespan, peak_kept
from ahp.schedule.patterns import stage_ranks
from ahp.schedule.simulate import StageTimes, Timeline
from ahp.schedule.stages import layer_ranges, layers_of_stages

NORMAL_90 = 1.645
"""Half width of the central 90 % of a normal distribution, in standard errors."""

CLIP_BYTES = 12
"""Bytes moved per gradient element by clipping in fp32: one read for the norm, one read and write for the scale."""


@dataclass(frozen=True)
class Priced:
    """A layout with everything its forecast was made from."""

    forecast: Forecast
    parallelism: Parallelism
    """As given, with activation_checkpoint ``auto`` decided."""
    span: Makespan
    """How long the schedule takes, rank by rank."""
    stages: tuple[StageCost, ...]
    optimizer_s: float

    @property
    def timeline(self) -> Timeline:
        """Every action with its start and end; made when it is asked for."""
        return self.span.timeline

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule


class Pricer:
    """Forecasts for one model, cluster, job and engine."""

    def __init__(self, graph: ModelGraph, cluster: Cluster, job: Job, choice: EngineChoice) -> None:
        self.graph, self.cluster, self.job, self.choice = graph, cluster, job, choice
        self.nodes = cluster.groups[0]
        self.network = Network(self.nodes)
        self.slowest_share = 0.0 if is_cpu(self.nodes.device) else slowest_share(cluster.num_devices)
        self.unit_pricer = UnitPricer(graph, self.nodes, self.network, job.precision)

    def price(self, parallelism: Parallelism) -> Priced:
        """Price one layout. ``activation_checkpoint`` auto is the lightest that fits.

        Raises NotExpressible when the engine cannot run the layout, BadInput when it breaks another rule.
        """
        if parallelism.activation_checkpoint != "auto":
            return self._price(parallelism)
        priced = None
        for lightest_first in ("none", "selective", "full"):
            layout = parallelism.model_copy(update={"activation_checkpoint": lightest_first})
            if priced is not None and get(self.choice.name).refuses(self.job, layout, self.choice):
                continue
            priced = self._price(layout)
            if priced.forecast.fits:
                break
        assert priced is not None
        return priced

    def _price(self, parallelism: Parallelism) -> Priced:
        engine = get(self.choice.name)
        if reason := engine.refuses(self.job, parallelism, self.choice):
            raise NotExpressible(reason)
        if reason := illegal(self.graph, self.cluster, self.job, parallelism, self.choice):
            raise BadInput(reason)
        traits = engine.traits(self.job, parallelism, self.choice)
        stages, units = self._stages(parallelism, traits)
        p, v = parallelism.pipeline_parallel_degree, parallelism.virtual_stages_per_rank
        name = parallelism.pipeline_parallel_schedule if p > 1 else "1F1B"
        times = self._stage_times(parallelism, traits, stages, units)
        span = makespan(name, p, v, parallelism.num_micro_batches(self.job), times)
        optimizer_s = self._optimizer_s(parallelism, traits, span, stages)
        tied_s = self.tied_s(parallelism, units)
        slowest_s = (span.makespan_s + tied_s + optimizer_s) * self.slowest_share
        step_s = span.makespan_s + tied_s + optimizer_s + slowest_s
        step = _step_parts(span, stages, tied_s)
        step["optimizer"] = optimizer_s
        if slowest_s:
            step["slowest_rank"] = slowest_s
        rank, used = self._fullest(parallelism, traits, span, stages, units)
        return Priced(
            self._forecast(parallelism, step_s, step, rank, used, units),
            parallelism, span, stages, optimizer_s,
        )  # fmt: skip

    def stage_times(self, parallelism: Parallelism) -> list[StageTimes]:
        """What each stage of a legal layout takes, without the schedule and without memory."""
        traits = get(self.choice.name).traits(self.job, parallelism, self.choice)
        return self._stage_times(parallelism, traits, *self._stages(parallelism, traits))

    def units(self, parallelism: Parallelism) -> Units:
        """The model's blocks and ends, priced for one rank of the layout and one micro-batch."""
        traits = get(self.choice.name).traits(self.job, parallelism, self.choice)
        axes = axes_of(parallelism, self.nodes.devices_per_node)
        return self.unit_pricer.units(parallelism.micro_batch_size, axes, traits)

    def _stages(self, parallelism: Parallelism, traits: Traits) -> tuple[tuple[StageCost, ...], Units]:
        per_node = self.nodes.devices_per_node
        units = self.units(parallelism)
        on_cpu = is_cpu(self.nodes.device)
        shard, replicate = data_groups(parallelism, per_node)
        data = DataParallel(
            shard=shard,
            replicate=replicate,
            experts=expert_groups(parallelism, per_node),
            traits=traits,
            micro_batches=parallelism.num_micro_batches(self.job),
            overlap=0.0 if on_cpu else 1.0,
            operator_s=self.nodes.device.kernel_launch_s,
            host_is_device=on_cpu,
        )
        ranges = self._ranges(parallelism)
        made: dict[tuple[tuple[int, ...], bool, bool], StageCost] = {}
        stages = []
        for index, layers in enumerate(ranges):
            first, last = index == 0, index == len(ranges) - 1
            kinds = tuple(self.graph.layers[i] for i in layers), first, last
            if kinds not in made:
                made[kinds] = stage_cost(
                    units, layers, first=first, last=last, recompute=recompute_of(parallelism, traits, units),
                    data=data, network=self.network, bytes_per_s=self.unit_pricer.rates.bytes_per_s,
                )  # fmt: skip
            stages.append(made[kinds])
        return tuple(stages), units

    def _ranges(self, parallelism: Parallelism) -> tuple[range, ...]:
        ends = get(self.choice.name).traits(self.job, parallelism, self.choice).stage_ends
        return layer_ranges(layers_of_stages(parallelism, self.graph.num_layers, ends=ends))

    def _stage_times(
        self, parallelism: Parallelism, traits: Traits, stages: tuple[StageCost, ...], units: Units
    ) -> list[StageTimes]:
        p, v, count = parallelism.pipeline_parallel_degree, parallelism.virtual_stages_per_rank, len(stages)
        rank = stage_ranks(parallelism.pipeline_parallel_schedule, p, v) if p > 1 else (0,)
        send = [
            self.send_s(parallelism, traits, source, target, units)
            for source, target in zip(rank, (*rank[1:], rank[0]), strict=True)
        ]
        return [
            StageTimes(
                forward_s=sum(cost.forward.values()),
                backward_s=sum(cost.backward.values()),
                input_gradient_s=sum(cost.backward.values()) - cost.weight_gradient_s,
                weight_gradient_s=cost.weight_gradient_s,
                send_forward_s=send[stage] if stage < count - 1 else 0.0,
                send_backward_s=send[stage - 1] if stage > 0 else 0.0,
                first_forward_extra_s=sum(cost.first_forward.values()),
                last_backward_extra_s=sum(cost.last_backward.values()),
            )
            for stage, cost in enumerate(stages)
        ]

    def send_s(self, parallelism: Parallelism, traits: Traits, source: int, target: int, units: Units) -> float:
        """Seconds to hand one micro-batch's hidden states from one pipeline rank to another."""
        if source == target:
            return 0.0
        width = parallelism.world_size // parallelism.pipeline_parallel_degree
        group = pair_group(source, target, width, self.nodes.devices_per_node)
        whole = not parallelism.enable_sequence_parallel and traits.sends_split_by_tensor
        parts = parallelism.tensor_parallel_degree if whole else 1
        return self.network.time_s("send_recv", units.hidden_bytes / parts, group)

    def _optimizer_s(
        self, parallelism: Parallelism, traits: Traits, span: Makespan, stages: tuple[StageCost, ...]
    ) -> float:
        """Norm, clipping and AdamW on the shard of the fullest rank, and the one collective of loss and norm."""
        shard = max(_optimized(span, stages, rank, parallelism) for rank in range(span.p))
        world = strided_group(parallelism.world_size, 1, self.nodes.devices_per_node)
        moved_s = shard * self.optimizer_bytes(traits) / self.unit_pricer.rates.bytes_per_s
        return moved_s + self.network.time_s("all_reduce", 16, world)

    def optimizer_bytes(self, traits: Traits) -> int:
        """Bytes moved for each parameter by norm, clipping and AdamW."""
        # AdamW reads weight, gradient and states, and writes weight and states, in one kernel (fused=True).
        moved = 2 * (traits.master_weight_bytes + traits.optimizer_state_bytes) + traits.gradient_bytes
        # The copy that computes is made again, where no gather makes it.
        if traits.compute_weight_bytes and traits.forward_gathers == "never":
            moved += traits.master_weight_bytes + traits.compute_weight_bytes
        return moved + (CLIP_BYTES if self.job.optimizer.grad_clip is not None else CLIP_BYTES // 3)

    def tied_s(self, parallelism: Parallelism, units: Units) -> float:
        """The gradient of weights that the first and the last stage share, summed over both."""
        p = parallelism.pipeline_parallel_degree
        if p == 1 or units.tied_parameters == 0:
            return 0.0
        width = parallelism.world_size // p
        group = pair_group(0, p - 1, width, self.nodes.devices_per_node)
        return self.network.time_s("all_reduce", 4 * units.tied_parameters, group)

    def _fullest(
        self,
        parallelism: Parallelism,
        traits: Traits,
        span: Makespan,
        stages: tuple[StageCost, ...],
        units: Units,
    ) -> tuple[int, memory.RankMemory]:
        """The pipeline rank that needs the most memory, and what it needs."""
        in_flight = peak_kept(span.name, span.p, span.v, span.m, [cost.kept_bytes for cost in stages])
        ranks = []
        for rank in range(span.p):
            own = _own(span, rank)
            weights = self._rank_weights(parallelism, units, own, sum(stages[s].parameters for s in own))
            parts = memory.state_bytes(
                weights, traits,
                shards=shard_ranks(parallelism), micro_batches=span.m,
                expert_ranks=parallelism.expert_parallel_degree,
            )  # fmt: skip
            parts["activations"] = round(in_flight[rank])
            parts["temporaries"] = max(stages[s].temporary_bytes for s in own)
            parts["pipeline_buffers"] = _pipeline_buffers(span, own, units.hidden_bytes, traits)
            if span.m == 1:
                parts = _one_backward(parts)
            ranks.append(memory.rank_memory(parts, self.nodes.device, num_groups(parallelism)))
        fullest = max(range(len(ranks)), key=lambda r: ranks[r].total)
        return fullest, ranks[fullest]

    def _rank_weights(self, parallelism: Parallelism, units: Units, own: list[int], total: int) -> memory.RankWeights:
        ranges = self._ranges(parallelism)
        blocks = [units.blocks[units.layers[i]] for stage in own for i in ranges[stage]]
        sizes = [unit.parameters for unit in blocks]
        is_last = parallelism.num_stages - 1 in own
        head = units.head.parameters + units.tied_parameters if is_last else 0
        return memory.RankWeights(
            total=total,
            largest_block=max(sizes, default=0),
            outside_blocks=total - sum(sizes),
            head=head,
            experts=sum(unit.experts for unit in blocks),
            shapes=max((unit.shapes for unit in blocks), default=0),
        )

    def _forecast(
        self,
        parallelism: Parallelism,
        step_s: float,
        step: dict[str, float],
        rank: int,
        used: memory.RankMemory,
        units: Units,
    ) -> Forecast:
        device, world = self.nodes.device, parallelism.world_size
        band = math.exp(NORMAL_90 * step_error(self.nodes))
        peak = self.unit_pricer.rates.peak(self.job.precision)
        model_flops = 3 * units.forward_flops * (self.job.global_batch_size / parallelism.micro_batch_size)
        probability = memory.fit_probability(used.total, device.memory_bytes)
        return Forecast(
            step_time_s=step_s,
            step_time_low_s=step_s / band,
            step_time_high_s=step_s * band,
            tokens_per_s_per_device=self.job.tokens_per_step / (step_s * world),
            mfu=model_flops / (step_s * world * peak),
            mfu_peak=(
                f"{device.name}, dense {self.job.precision} peak {peak / 1e12:.4g} TFLOP/s; 3 x the traced forward FLOPs "
                "(matrix products and attention, the whole square of a causal mask), recompute not counted"
            ),
            memory_allocated_bytes=used.allocated,
            memory_reserved_bytes=used.reserved,
            fit_probability=probability,
            fits=probability >= 0.95,
            step=step,
            memory=used.parts,
            fullest_rank=rank * (world // parallelism.pipeline_parallel_degree),
        )


def step_error(nodes: NodeGroup) -> float:
    """Standard error of the log of the step time on such nodes."""
    if is_cpu(nodes.device):
        return margins.value("step_error_cpu")
    return margins.value("step_error_catalogue" if nodes.measured is None else "step_error_measured")


def slowest_share(num_ranks: int) -> float:
    """By how much of the mean step the slowest of ``num_ranks`` is behind: the expected maximum of so many normal draws
    (Blom's approximation, within 1 %: Statistical estimates and transformed beta-variables, 1958)."""
    return steps.value("rank_spread") * NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


def num_groups(parallelism: Parallelism) -> int:
    """Process groups whose communicators a rank holds."""
    degrees = (
        parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree,
        parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree, parallelism.world_size,
    )  # fmt: skip
    return sum(degree > 1 for degree in degrees)


def recompute_of(parallelism: Parallelism, traits: Traits, units: Units) -> Recompute:
    """What ``activation_checkpoint`` means on an engine, for a model with these blocks.

    Where attention is fused it has no core to recompute: norms and activation functions are next (Megatron's
    ``--recompute-modules``).
    """
    if parallelism.activation_checkpoint != "selective":
        return "full" if parallelism.activation_checkpoint == "full" else "none"
    has_core = any(unit.memory.saved_in_core for unit in units.blocks)
    return "core" if has_core and not traits.selective_keeps_products else "chains"


def _own(span: Makespan, rank: int) -> list[int]:
    """The stages of a pipeline rank."""
    return [s for s, holder in enumerate(stage_ranks(span.name, span.p, span.v)) if holder == rank]


def _optimized(span: Makespan, stages: tuple[StageCost, ...], rank: int, parallelism: Parallelism) -> float:
    """Parameters that a rank updates: its shard of the dense ones, and of the experts that it holds."""
    shards = shard_ranks(parallelism)
    own = [stages[s] for s in _own(span, rank)]
    dense = sum(cost.parameters - cost.experts for cost in own)
    return dense / shards + sum(cost.experts for cost in own) / max(1.0, shards / parallelism.expert_parallel_degree)


def _pipeline_buffers(span: Makespan, own: list[int], hidden_bytes: int, traits: Traits) -> int:
    """What is received from other stages: one tensor of each, or with torch 2.13 one for every micro-batch
    (pipelining/stage.py, recv infos)."""
    if span.p == 1:
        return 0
    received = sum((stage > 0) + (stage < span.p * span.v - 1) for stage in own)
    return received * (span.m if traits.torch_pipeline else 1) * hidden_bytes


def _one_backward(parts: dict[str, int]) -> dict[str, int]:
    """With a single backward pass gradients grow as activations go: the peak is at its start or at its end."""
    if parts["activations"] >= parts["gradients"]:
        return {**parts, "gradients": 0}
    return {**parts, "activations": 0}


def _step_parts(span: Makespan, stages: tuple[StageCost, ...], tied_s: float) -> dict[str, float]:
    """Where the time of the rank that ends last goes, in seconds; without the optimizer. Parts of 0 are left out."""
    rank = max(range(span.p), key=lambda r: (span.end_s(r), span.busy_s[r]))
    parts: dict[str, float] = {}
    for cost in (stages[s] for s in _own(span, rank)):
        counted = (cost.forward, span.m), (cost.backward, span.m), (cost.first_forward, 1), (cost.last_backward, 1)
        for times, count in counted:
            for part, seconds in times.items():
                parts[part] = parts.get(part, 0.0) + count * seconds
    parts["gradient_reduce"] = parts.get("gradient_reduce", 0.0) + tied_s
    parts["bubble"] = span.idle_s[rank]
    # What is left of sums that cancel is rounding, not time.
    return {part: seconds for part, seconds in parts.items() if seconds > 1e-12 * span.makespan_s}
