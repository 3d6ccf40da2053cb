"""Which layouts are measured on hosts that differ: the plan, even ones, plain data parallelism, and others near enough to be the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from task import Task

WAITED_FOR = 0.6
"""Of its share of the batch, what every other host gets while all wait for those of one group."""

PARTS = 12
"""Micro-batches of all replicas together, where shares of the batch are drawn around the ratio of the speeds."""

MOST_RANKED, MOST_EVEN = 4, 2
"""Of the search's own ranking, and of the ranking for a cluster whose hosts are all taken for the slowest."""


@dataclass
class Layout:
    """One layout of several hosts, or each host alone if there is no forecast."""

    words: str
    roles: tuple[str, ...]
    plan: Any = None
    forecast: Any = None
    on: tuple[str, ...] = ()
    """Names of the hosts that take part."""
    alone: dict[str, Any] | None = None
    """The plan of each host, by its name."""

    def plain(self) -> dict[str, Any]:
        return {"plan": self.plan, "on": self.on, "alone": self.alone}


def waiting_for_each(cluster: Any, task: Task) -> list[Layout]:
    """A layout for each group in which all wait for it, so that steps say how long each group takes."""
    import ahp

    job, graph = _job_and_graph(task)
    groups, speeds = _hosts(cluster, job)
    found = []
    for slow in cluster.groups:
        each, total = _parts(job)
        shares = [max(1, int(WAITED_FOR * total * speed / sum(speeds))) for speed in speeds]
        own = [at for at, group in enumerate(groups) if group is slow]
        left = total - sum(share for at, share in enumerate(shares) if at not in own)
        for number, at in enumerate(own):
            shares[at] = left // len(own) + (number < left % len(own))
        parallelism = _shared(shares, each)
        forecast = ahp.simulate(model=graph, cluster=cluster, job=job, parallelism=parallelism)
        plan, on = _plan(cluster, task, parallelism), taking_part(cluster, parallelism)
        found.append(Layout(parallelism.short(), (f"waiting for {slow.name}",), plan, forecast, on))
    return found


def calibrated(cluster: Any, task: Task, layouts: Sequence[Layout], seconds: Sequence[float], steps: int) -> Any:
    """The cluster as ``ahp calibrate`` corrects it by runs of these layouts, of which a step took so long."""
    import ahp
    from ahp.runtime.check.calibrate import MeasuredRun, calibrated_groups, group_ratios

    job, graph = _job_and_graph(task)
    ways = [ahp.Parallelism.model_validate(layout.plan["parallelism"]) for layout in layouts]
    runs = [MeasuredRun(layout.words, step_s, steps) for layout, step_s in zip(layouts, seconds, strict=True)]

    def forecasts_s(corrected: Any) -> list[float]:
        made = (ahp.simulate(model=graph, cluster=corrected, job=job, parallelism=way) for way in ways)
        return [forecast.step_time_s for forecast in made]

    return calibrated_groups(cluster, group_ratios(cluster, runs, forecasts_s), runs)


def layouts_of(cluster: Any, probed: Any, task: Task, *, few: bool) -> list[Layout]:
    """All layouts of a calibrated cluster, each once, with what it is taken for, and the plan for it as it was probed; the last is each host alone."""
    import ahp
    from ahp.errors import AhpError

    job, graph = _job_and_graph(task)
    found: dict[str, Layout] = {}
    for role, parallelism in wanted(graph, cluster, probed, job, task.model_keys()["num_hidden_layers"], few=few):
        key = parallelism.model_dump_json()
        if key in found:
            if role not in found[key].roles:
                found[key].roles = (*found[key].roles, role)
            continue
        try:
            forecast = ahp.simulate(model=graph, cluster=cluster, job=job, parallelism=parallelism)
        except AhpError:  # a cell of it would lie on two groups, or a rank runs out of memory
            continue
        found[key] = Layout(
            parallelism.short(), (role,), _plan(cluster, task, parallelism), forecast, taking_part(cluster, parallelism)
        )
    return [*found.values(), _alone(graph, cluster, job, task)]


def _job_and_graph(task: Task) -> tuple[Any, Any]:
    import ahp

    job = ahp.Job.model_validate(task.job(100))
    return job, ahp.analyze({"model_type": "llama", **task.model_keys()}, job)


def wanted(graph: Any, cluster: Any, probed: Any, job: Any, layers: int, *, few: bool) -> Iterator[tuple[str, Any]]:
    """Layouts over all hosts by their roles; some may come twice."""
    import ahp

    ranking = ahp.search(graph, cluster, job, keep=2 if few else MOST_RANKED)
    yield "plan", ranking.best.parallelism
    yield "as probed", ahp.search(graph, probed, job, keep=1).best.parallelism
    hosts, batch = sum(group.nodes for group in cluster.groups), job.global_batch_size
    yield "ddp", ahp.Parallelism(data_parallel_replicate_degree=hosts, micro_batch_size=batch // hosts)
    yield "even", ahp.Parallelism(data_parallel_replicate_degree=hosts, micro_batch_size=batch // hosts)
    for plan in ahp.search(graph, taken_for_the_slowest(cluster, job), job, keep=2 if few else 2 * MOST_EVEN).plans[
        :MOST_EVEN
    ]:
        yield "even", plan.parallelism
    for plan in ranking.plans:
        yield "other", plan.parallelism
    if not few:
        yield from (("other", parallelism) for parallelism in uneven(cluster, job, layers))


def taking_part(cluster: Any, parallelism: Any) -> tuple[str, ...]:
    """So many hosts of each group as the layout uses; each has one worker."""
    from ahp.cluster.cells import place

    used = place(cluster, parallelism).used
    return tuple(name for group in cluster.groups for name in group.hosts[: used.get(group.name, 0)])


def taken_for_the_slowest(cluster: Any, job: Any) -> Any:
    """As many hosts, all like the slowest."""
    from ahp.cluster.model import Cluster

    slowest = min(cluster.groups, key=lambda group: group.device.peak_flops_per_s[job.precision])
    nodes = sum(group.nodes for group in cluster.groups)
    links = [one.link for one in cluster.links] + [g.inter_node for g in cluster.groups if g.inter_node is not None]
    link = min(links, key=lambda one: one.bandwidth_bytes_per_s)
    return Cluster(groups=(slowest.model_copy(update={"nodes": nodes, "inter_node": link}),))


def uneven(cluster: Any, job: Any, layers: int) -> Iterator[Any]:
    """Shares of the batch, and cuts of the layers, around the ratio of the hosts' speeds, which the search may have passed over."""
    import ahp

    groups, speeds = _hosts(cluster, job)
    each, total = _parts(job)
    for shares in _around(total, speeds):
        yield _shared(shares, each)
    for cut in _around(layers, speeds):
        stages = [{"group": group.name, "layers": count} for group, count in zip(groups, cut, strict=True)]
        yield ahp.Parallelism.model_validate(
            {"pipeline_parallel_degree": len(groups), "micro_batch_size": 2 * each, "stages": stages}
        )


def _hosts(cluster: Any, job: Any) -> tuple[list[Any], list[float]]:
    """The group of each host, and its speed."""
    groups = [group for group in cluster.groups for _ in range(group.nodes)]
    return groups, [group.device.peak_flops_per_s[job.precision] for group in groups]


def _parts(job: Any) -> tuple[int, int]:
    """Sequences of a micro-batch, and micro-batches of all replicas together."""
    each = max(1, job.global_batch_size // PARTS)
    return each, job.global_batch_size // each


def _shared(shares: Sequence[int], each: int) -> Any:
    """Only data parallelism, with so many micro-batches on each host."""
    import ahp

    return ahp.Parallelism(
        data_parallel_replicate_degree=len(shares), micro_batch_size=each, micro_batches_per_replica=tuple(shares)
    )


def _around(total: int, speeds: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Whole shares of a total in the ratio of speeds, and those with one more for the first, the fastest."""
    rest = [max(1, round(total * speed / sum(speeds))) for speed in speeds[1:]]
    for shift in (0, 1):
        shares = (total - sum(rest) + shift, *rest[:-1], rest[-1] - shift)
        if min(shares) > 0:
            yield shares


def _plan(cluster: Any, task: Task, parallelism: Any) -> dict[str, Any]:
    return {"job": task.job(100), "cluster": cluster.plain(), "parallelism": parallelism.model_dump(mode="json")}


def _alone(graph: Any, cluster: Any, job: Any, task: Task) -> Layout:
    """The best plan of each host by itself; all hosts run at the same time."""
    import ahp
    from ahp.cluster.model import Cluster

    plans = {}
    for group in cluster.groups:
        own = Cluster(groups=(group.model_copy(update={"nodes": 1, "inter_node": None}),))
        best = ahp.search(graph, own, job, keep=1).best.parallelism
        plain = {"job": task.job(100), "parallelism": best.model_dump(mode="json")}
        plans |= dict.fromkeys(group.hosts, plain)
    return Layout("each host alone", ("alone",), alone=plans)
