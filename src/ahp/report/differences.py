"""The settings in which plans differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ahp.cluster.plain_groups import plain_groups
from ahp.plan import Plan
from ahp.report.plan_sections import devices

Row = tuple[str, tuple[object, ...]]
"""A setting, and its value in each plan."""


def differences(plans: Sequence[Plan]) -> list[Row]:
    """The settings of model, cluster, job, layout and engine that are not the same in all plans."""
    settings = [_settings(plan) for plan in plans]
    keys = dict.fromkeys(key for one in settings for key in one)
    rows = [(key, tuple(one.get(key) for one in settings)) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _settings(plan: Plan) -> dict[str, object]:
    job = plan.job.model_dump()
    optimizer = job.pop("optimizer")
    layout = plan.parallelism.model_dump(exclude={"pipeline_parallel_order"})
    model = plan.model if isinstance(plan.model, str) else plan.model.get("model_type", "model")
    found: dict[str, object] = {"model": model, **_cluster(plan), **job}
    found |= {f"optimizer {key}": value for key, value in optimizer.items()}
    found |= {**layout, **{f"engine {key}": value for key, value in plan.engine.model_dump().items()}}
    found |= {f"version of {name}": value for name, value in plan.versions.items()}
    return {key.replace("_", " "): value for key, value in found.items()}


def _cluster(plan: Plan) -> dict[str, object]:
    """Devices and links, as far as the plan has them."""
    groups = plain_groups(plan.cluster)
    nodes = [f"{group['nodes']} x {group['devices_per_node']}" for group in groups]
    links = " + ".join(_rates(group.get("intra_node"), group.get("inter_node")) for group in groups)
    measured = any(group.get("measured") for group in groups)
    said = [group.get("nvlink_switch") for group in groups]
    switches = " + ".join("not said" if one is None else str(one).lower() for one in said)
    found = {"devices": devices(plan), "nodes": " + ".join(nodes), "links": links, "nvlink switch": switches}
    return {**found, "measured cluster": measured}


def _rates(within: dict[str, Any] | None, between: dict[str, Any] | None) -> str:
    """The rates of a device's links within a node, and of a node's network cards between nodes."""
    named = {"within": within, "between": between}
    return ", ".join(f"{of['bandwidth_bytes_per_s'] / 1e9:g} GB/s {where} nodes" for where, of in named.items() if of)
