"""One search: what is computed, on what, for which job, and what the user has fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ahp.cached_method import cached_method
from ahp.cluster.meshes import on_part
from ahp.cluster.model import Cluster, NodeGroup
from ahp.config import Config, Constraints
from ahp.divisors import divisors
from ahp.engines.registry import get, traits_of
from ahp.engines.traits import Traits
from ahp.errors import BadInput, NotExpressible, bad_input
from ahp.forecast import rules
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.priced import Priced, on_graph
from ahp.forecast.pricer import Pricer
from ahp.forecast.step import graph_of_engine, pricer
from ahp.graph.operators import ModelGraph
from ahp.job import Job, Precision
from ahp.plan import AXES, DEGREE, Axis, ContextMethod, EngineChoice, Forecast, Parallelism, Plan, validated
from ahp.schedule.orders import SYNTHESIZED, any_order
from ahp.schedule.registry import PLAIN
from ahp.schedule.stages import Ends
from ahp.stage_place import in_words

NEEDS_DEGREE = {
    "pipeline_parallel_schedule": ("pipeline_parallel_degree", PLAIN),
    "enable_sequence_parallel": ("tensor_parallel_degree", False),
}
"""Keys that have no effect while another degree is 1: that degree, and their value then."""
OF_PLACEMENTS = ("stages", "micro_batches_per_replica")
"""Keys that mean nothing on a cluster of one group, or on one group alone."""


@dataclass(frozen=True)
class Problem:
    """The arguments of a search, checked; prices layouts."""

    graph: ModelGraph
    cluster: Cluster
    job: Job
    constraints: Constraints
    engine: EngineChoice
    own_order: bool = False
    """Whether the user asks for schedules that are made for each layout's own stages (``Synthesized``). Even then layouts are compared
    under the fixed patterns, and ``found_orders`` makes orders for the best layouts."""
    left_out: tuple[NodeGroup, ...] = ()
    """The user's groups that are not in ``cluster``: their devices cannot compute in the job's precision, while other groups' can."""
    either_blocks: bool = False
    """Whether every layout can have compiled or eager blocks, because ``engine.compile`` is None: a layout is legal if either can run it,
    the pricer gives a lower bound for both, and a forecast is that of the faster. If this is False, None means eager."""
    is_group_alone: bool = False
    """Whether the cluster is one group of a mixed cluster: a layout may leave some of its devices over even if degrees are fixed, as it
    leaves the other groups over."""

    def __getstate__(self) -> dict[str, Any]:
        """Without what it has computed, which a copy and another process compute again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def capacity_bytes(self) -> int:
        """Memory of the smallest device."""
        return min(group.device.memory_bytes for group in self.cluster.groups)

    def price(self, parallelism: Parallelism) -> Forecast:
        """Forecast of one layout, made once for layouts that cost the same. Raises BadInput or NotExpressible if it is not legal."""
        if self.either_blocks:
            return self.with_blocks(parallelism).price(parallelism)
        return self._forecast(self.first_alike(parallelism))

    @cached_method
    def _forecast(self, parallelism: Parallelism) -> Forecast:
        return self.priced(parallelism).forecast

    def with_blocks(self, layout: Parallelism) -> Problem:
        """This problem with compiled or eager blocks, whichever are faster under a layout; ``either_blocks`` must be set."""
        if not self.faster_eager(layout):
            return self.compiled
        return min(self.compiled, self.eager, key=lambda one: _worst(one.price_or_none(layout)))

    def faster_eager(self, layout: Parallelism) -> list[Parallelism]:
        """Variants of a layout that eager blocks may run faster, or that only they can run: one for each method of context parallelism under
        which compiled blocks have other traits than the lower bound of both."""
        methods = (
            self.context_methods(layout.context_parallel_degree) if layout.context_parallel_method is None else [None]
        )
        layouts = [
            layout if way is None else layout.model_copy(update={"context_parallel_method": way}) for way in methods
        ]
        return [one for one in layouts if self.compiled.refused(one) or self.compiled.traits(one) != self.traits(one)]

    @cached_property
    def compiled(self) -> Problem:
        """This problem with compiled blocks."""
        return self._compiling(True)

    @cached_property
    def eager(self) -> Problem:
        """This problem with eager blocks."""
        return self._compiling(False)

    def _compiling(self, compile: bool) -> Problem:
        return replace(self, engine=self.engine.model_copy(update={"compile": compile}), either_blocks=False)

    def price_or_none(self, parallelism: Parallelism) -> Forecast | None:
        """Forecast of one layout, or None if it is not legal."""
        try:
            return self.price(parallelism)
        except (BadInput, NotExpressible):
            return None

    def bound_or_none(self, parallelism: Parallelism) -> float | None:
        """Lower bound in seconds of the step of one layout on a cluster of one group, quicker than its forecast; None if it is not legal."""
        try:
            return self.pricer.bound_s(parallelism)
        except (BadInput, NotExpressible):
            return None

    def first_alike(self, layout: Parallelism) -> Parallelism:
        """The layout with the lowest ZeRO stage above 0 that the engine runs in the same way: a forecast depends on the stage only through
        the engine's traits (two engines run stages 1 and 2 in the same way under a pipeline)."""
        if layout.zero_stage < 2 or self.cluster.is_mixed or self.refused(layout):
            return layout
        own = self.traits(layout)
        for stage in range(1, layout.zero_stage):
            other = layout.model_copy(update={"zero_stage": stage})
            if self.offers(other) and self.traits(other) == own:
                return other
        return layout

    def stages_alike(self, layout: Parallelism) -> list[int]:
        """The other ZeRO stages with an equal forecast; without gradient accumulation two that the engine runs differently can be equal."""
        if layout.weight_shards == 1 or layout.stages is not None or self.cluster.is_mixed:
            return []
        others = (layout.model_copy(update={"zero_stage": stage}) for stage in (1, 2, 3) if stage != layout.zero_stage)
        own = self.price(layout)
        return [other.zero_stage for other in others if self.offers(other) and self.price(other) == own]

    def priced(self, parallelism: Parallelism) -> Priced:
        """The forecast of one layout with everything it was made from, on a mixed cluster too."""
        return self.any_pricer.price(parallelism)

    @property
    def any_pricer(self) -> Pricer | MixedPricer:
        """The pricer of layouts, on any kind of cluster."""
        return pricer(self.graph, self.cluster, self.job, self.engine, either_blocks=self.either_blocks)

    @cached_property
    def pricer(self) -> Pricer:
        """The pricer of layouts on a cluster of one group. Raises BadInput on a mixed one."""
        found = self.any_pricer
        if not isinstance(found, Pricer):
            names = [group.name for group in self.cluster.groups]
            raise BadInput(f"cluster.groups = {names}: this is asked of one group of devices alone")
        return found

    @property
    def mixed_pricer(self) -> MixedPricer:
        """The pricer of layouts on a cluster of several groups."""
        found = self.any_pricer
        assert isinstance(found, MixedPricer), "asked of a mixed cluster"
        return found

    def traits(self, layout: Parallelism) -> Traits:
        """How the engine behaves under a layout that it can run."""
        return traits_of(self.job, layout, self._choice)

    @cached_property
    def _choice(self) -> EngineChoice:
        return self.engine if self.either_blocks else self.engine.decided()

    @property
    def most_stages(self) -> int:
        """The most stages that the layers can be cut into on this engine."""
        return self.graph.num_layers + 2 * (self.stage_ends != "hold_layers")

    def decided(self, layout: Parallelism) -> Parallelism:
        """A layout with every key filled in that the forecast decides."""
        return layout if self.cluster.is_mixed else self.pricer.decided(layout)

    @property
    def stage_ends(self) -> Ends:
        """What the engine's first and last stage hold."""
        return self._pipeline_traits.pipeline.ends

    @property
    def torch_orders(self) -> bool:
        """Whether torch's own rules for schedules hold."""
        return self._pipeline_traits.pipeline.torch_orders

    @cached_property
    def _pipeline_traits(self) -> Traits:
        return self.traits(Parallelism(pipeline_parallel_degree=2))

    def context_methods(self, degree: int) -> list[ContextMethod | None]:
        """The ways in which ``degree`` ranks can share a sequence if the engine has a choice, else [None]."""
        ways = self.traits(Parallelism(context_parallel_degree=degree)).context.ways
        return [way for way in ways if way != "gather"] if degree > 1 and len(ways) > 1 else [None]

    def can_divide(self, tensor: int, context: int) -> bool:
        """Whether the model and the engine allow these tensor and context degrees."""
        layout = Parallelism(tensor_parallel_degree=tensor, context_parallel_degree=context)
        return not (rules.divided(self.graph, self.job, layout, self.engine) or self.refused(layout))

    def refused(self, parallelism: Parallelism) -> str | None:
        """Why the engine cannot express a layout, or cannot run the model under it; or None."""
        refused = get(self.engine.name).refuses(self.job, parallelism, self.engine)
        return refused or rules.of_model(self.graph, parallelism, self.engine)

    def untold(self, parallelism: Parallelism) -> str | None:
        """Why no configuration file of the engine can express a layout that it could run. None if one can, or if the user has fixed
        the key at fault: given values are kept, and ``Ranking.notes`` has the reason."""
        reason = get(self.engine.name).no_key_for(self.job, parallelism, self.engine)
        return None if reason is None or reason.partition(" = ")[0] in self.constraints.given else reason

    def offers(self, parallelism: Parallelism) -> bool:
        """Whether the engine can run a layout, and its configuration file can express it."""
        return not (self.refused(parallelism) or self.untold(parallelism))

    def refused_experts(self, degree: int, **keys: Any) -> str | None:
        """Why the engine cannot share experts among ``degree`` ranks, however they share other weights; or None."""
        return self.refused(self._sharing_experts({**keys, "expert_parallel_degree": degree}))

    def _sharing_experts(self, keys: Mapping[str, Any]) -> Parallelism:
        """A layout with these keys, one that the engine can express if there is any: in some engines, ranks that share experts must
        share other weights too."""
        degrees = dict.fromkeys((1, keys.get("expert_parallel_degree", 1)))
        layouts = [Parallelism(**keys, data_parallel_shard_degree=shard) for shard in degrees]
        return next((layout for layout in layouts if not self.refused(layout)), layouts[-1])

    def refused_order(self, order: tuple[Axis, ...]) -> str | None:
        """Why the engine cannot number ranks in this order, whatever the degrees of the axes."""
        degrees: dict[str, Any] = {DEGREE[axis]: 2 for axis in order}
        refused = self.refused(Parallelism(**degrees, mesh_order=order))
        return refused if refused and refused.startswith("mesh_order") else None

    def check(self) -> None:
        """Raise if no layout at all can run, whatever is searched.

        NotExpressible: the engine cannot run the job, or not with what the user has fixed. BadInput: everything else, such as
        a precision that the device does not have.
        """
        kept: tuple[str, ...] = ("enable_sequence_parallel", "activation_checkpoint")
        degrees = ("context_parallel_degree", "expert_parallel_degree")
        given = self.constraints.given
        if self.own_order and (reason := self.refused(any_order())):
            raise NotExpressible(reason)
        for key in OF_PLACEMENTS:
            if key in given and not self.cluster.is_mixed:
                rule = "the search treats the replicas and stages of a cluster of one group alike"
                if self.left_out:
                    idle = ", ".join(group.name for group in self.left_out)
                    rule = f"the devices of {idle} do not compute in {self.job.precision}, and {rule}"
                raise bad_input(f"parallelism.{key}", in_words(given[key]), rule, [None])
        order = given.get("mesh_order", ())
        usual = [axis for axis in AXES if axis in order]
        if sorted(usual) != sorted(order):
            raise bad_input("parallelism.mesh_order", list(order), "must name each axis once", [usual])
        if self.cluster.is_mixed and list(order) != usual:
            rule = "on a mixed cluster ranks are numbered in the usual order"
            raise bad_input("parallelism.mesh_order", list(order), rule, [usual])
        if given.get("context_parallel_degree", 1) > 1:
            kept = (*kept, "context_parallel_method")
        if given.get("enable_sequence_parallel"):
            kept = (*kept, "tensor_parallel_degree")
            some = next((degree for degree in (2, 3, 5, 7) if self.can_divide(degree, 1)), 2)
            given = {"tensor_parallel_degree": some, **given}
        keys = {key: given[key] for key in (*kept, *degrees) if key in given}
        if reason := self.refused(self._sharing_experts(keys)) or self._refused_method():
            raise NotExpressible(reason)
        # The space decides which ranks share the experts; here only whether the experts can be shared among this many.
        expert = keys.pop("expert_parallel_degree", 1)
        shared = Parallelism(data_parallel_shard_degree=expert, expert_parallel_degree=expert)
        if reason := rules.experts(self.graph, self.job, shared, self.engine):
            raise BadInput(reason)
        layout = Parallelism(**keys)
        reasons = []
        for group in self.cluster.groups:
            alone = self.cluster.with_groups([group])
            count = layout.world_size  # judges the degrees alone, not where ranks are placed
            cluster = with_devices(alone, count) or _part(alone, 1, count)
            reasons.append(rules.illegal(self.graph, cluster, self.job, layout, self.engine))
        if all(reasons):
            raise BadInput(reasons[0] or "")

    def _refused_method(self) -> str | None:
        """Why the engine cannot use the context-parallel method that the user asks for, at the given degree or else at 2; or None."""
        method, degree = self.constraints.context_parallel_method, self.constraints.context_parallel_degree or 2
        if method is None or degree == 1:
            return None
        return self.refused(Parallelism(context_parallel_degree=degree, context_parallel_method=method))

    def on(self, cluster: Cluster) -> Problem:
        return replace(self, cluster=cluster)

    def of_plan(self, plan: Plan) -> Problem:
        """This problem on the cluster of a plan and with its engine."""
        assert plan.cluster is not None, "plans of a search have one"
        cluster = self.cluster if plan.cluster == self.cluster.plain() else Cluster.resolve(plan.cluster)
        return replace(self, cluster=cluster, engine=plan.engine)


def _worst(forecast: Forecast | None) -> tuple[bool, bool, float]:
    """Sort key of forecasts, the best first: any before none, one that fits before one that does not, then the shorter step."""
    return (True, True, 0.0) if forecast is None else (False, not forecast.fits, forecast.step_time_s)


def problem(
    graph: ModelGraph,
    cluster: Cluster | Mapping[str, Any] | str | Path,
    job: Job | Mapping[str, Any],
    constraints: Constraints | Parallelism | Mapping[str, Any] | None = None,
    engine: EngineChoice | Mapping[str, Any] | str | None = None,
) -> Problem:
    """Check the arguments of a search; plain dicts become records. Raises BadInput or NotExpressible."""
    if not isinstance(graph, ModelGraph):
        raise bad_input("graph", type(graph).__name__, "must be a ModelGraph", ["ahp.analyze(model, job)"])
    where = Cluster.resolve(cluster)
    contract = validated(Job, job, "job", Config)
    choice = validated(EngineChoice, EngineChoice() if engine is None else engine, "engine", Config)
    if isinstance(constraints, Parallelism):
        fixed = Constraints.exactly(constraints)
    else:
        fixed = validated(Constraints, {} if constraints is None else constraints, "parallelism", Config)
    if graph.sequence_length != contract.sequence_length:
        raise bad_input(
            "job.sequence_length",
            contract.sequence_length,
            f"the graph was traced for sequences of {graph.sequence_length}; analyze the model with this job",
        )
    if fixed.pipeline_parallel_order is not None:
        rule = "the search finds orders itself; ahp simulate and ahp train PLAN take one that is given"
        raise bad_input("parallelism.pipeline_parallel_order", list(fixed.pipeline_parallel_order), rule, [None])
    given = fixed.given
    for key, (degree, plain) in NEEDS_DEGREE.items():
        if given.get(degree) == 1 and given.get(key, plain) != plain and "stages" not in given:
            raise bad_input(f"parallelism.{key}", given[key], f"needs a {degree} above 1", [plain])
    own_order = fixed.pipeline_parallel_schedule == SYNTHESIZED
    if own_order:
        fixed = fixed.model_copy(update={"pipeline_parallel_schedule": None})
    usable, left_out = _that_compute_in(contract.precision, where)
    run = graph_of_engine(graph, contract, choice)
    found = Problem(run, usable, on_graph(contract, run), fixed, choice, own_order, left_out)
    found.check()
    return found


def problem_of(plan: Plan) -> Problem:
    """A plan's model, cluster and job with what its user had fixed, ready to price other layouts. The plan names a cluster."""
    from ahp.graph.kept import analyze

    graph = analyze(plan.model, plan.job, attention=plan.engine.attention)
    fixed = validated(Constraints, plan.fixed, "fixed")
    return problem(graph, plan.cluster or {}, plan.job, fixed, plan.engine.decided())


def _that_compute_in(precision: Precision, cluster: Cluster) -> tuple[Cluster, tuple[NodeGroup, ...]]:
    """The cluster of the groups whose devices have the precision, and the other groups; the whole cluster if no group has it."""
    can = tuple(group for group in cluster.groups if precision in group.device.peak_flops_per_s)
    if len(can) in (0, len(cluster.groups)):
        return cluster, ()
    return cluster.with_groups(can), tuple(group for group in cluster.groups if group not in can)


def with_devices(cluster: Cluster, count: int) -> Cluster | None:
    """``count`` devices of a cluster of one group, equally many of each node, on as few nodes as possible; None if there is no such part."""
    group = cluster.groups[0]
    fewest = -(-count // group.devices_per_node)
    nodes = next((nodes for nodes in divisors(count) if fewest <= nodes <= group.nodes), None)
    return None if nodes is None else _part(cluster, nodes, count // nodes)


def _part(cluster: Cluster, nodes: int, per_node: int) -> Cluster:
    group = cluster.groups[0]
    domain = group.devices_per_nvlink_domain
    if domain is not None:
        domain = None if nodes == 1 else domain // group.devices_per_node * per_node
    switch = on_part(group.device.name, per_node, group.nvlink_switch)
    update = {
        "nodes": nodes,
        "devices_per_node": per_node,
        "devices_per_nvlink_domain": domain,
        "nvlink_switch": switch,
    }
    return cluster.with_groups([group.model_copy(update=update)])
