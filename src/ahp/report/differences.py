"""The settings in which plans differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ahp.cluster.plain_groups import plain_groups
from ahp.plan import Plan
from ahp.report.plan_sections import devices

Row = tuple[str, tuple[object, ...]]
"""A setting, and its value in each plan."""

TOLD = {"name", "nodes", "devices_per_node", "nvlink_switch", "bandwidth_bytes_per_s", "measured"}
"""Keys of a cluster's group that have rows of their own."""
NO_FIGURES = {"source", "runs", "host", "hosts"}
"""Keys of a cluster's group that change no forecast, but for a CPU's cores, which a probe senses with everything else."""


def differences(plans: Sequence[Plan]) -> list[Row]:
    """The settings of model, cluster, job, layout and engine that are not the same in all plans."""
    settings = [_settings(plan) for plan in plans]
    _add(settings, [{"measured cluster": said} for said in _measured(plans)])
    if len({one["devices"] for one in settings}) == 1:  # figures of other devices are told by their names
        _add(settings, [dict(_figures(plan)) for plan in plans])
    models = [plan.model for plan in plans if not isinstance(plan.model, str)]
    if len(models) == len(plans):
        _add(
            settings,
            [{f"model {key}": value for key, value in model.items() if key != "model_type"} for model in models],
        )
    keys = dict.fromkeys(key for one in settings for key in one)
    rows = [(key, tuple(one.get(key) for one in settings)) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _add(settings: Sequence[dict[str, object]], more: Sequence[dict[str, object]]) -> None:
    for one, own in zip(settings, more, strict=True):
        one.update({key.replace("_", " "): value for key, value in own.items()})


def _settings(plan: Plan) -> dict[str, object]:
    job = plan.job.model_dump()
    optimizer = job.pop("optimizer")
    layout = plan.parallelism.model_dump(exclude={"pipeline_parallel_order"})
    model = plan.model if isinstance(plan.model, str) else plan.model.get("model_type", "model")
    found: dict[str, object] = {"model": model, "init_from": plan.init_from, **_cluster(plan), **job}
    found |= {f"optimizer {key}": value for key, value in optimizer.items()}
    found |= {**layout, **{f"engine {key}": value for key, value in plan.engine.model_dump().items()}}
    found |= {f"version of {name}": value for name, value in plan.versions.items()}
    return {key.replace("_", " "): value for key, value in found.items()}


def _cluster(plan: Plan) -> dict[str, object]:
    """Devices and links, as far as the plan has them."""
    groups = plain_groups(plan.cluster)
    nodes = [f"{group['nodes']} x {group['devices_per_node']}" for group in groups]
    links = " + ".join(_rates(group.get("intra_node"), group.get("inter_node")) for group in groups)
    said = [group.get("nvlink_switch") for group in groups]
    switches = " + ".join("not said" if one is None else str(one).lower() for one in said)
    return {"devices": devices(plan), "nodes": " + ".join(nodes), "links": links, "nvlink switch": switches}


def _measured(plans: Sequence[Plan]) -> Iterator[object]:
    """Whether each plan's cluster was measured; which measurement, where there are several."""
    tables = [[group.get("measured") for group in plain_groups(plan.cluster)] for plan in plans]
    unlike = [own for at, own in enumerate(tables) if any(own) and own not in tables[:at]]
    for own in tables:
        yield f"measurement {unlike.index(own) + 1}" if any(own) and len(unlike) > 1 else any(own)


def _rates(within: dict[str, Any] | None, between: dict[str, Any] | None) -> str:
    """The rates of a device's links within a node, and of a node's network cards between nodes."""
    named = {"within": within, "between": between}
    return ", ".join(f"{of['bandwidth_bytes_per_s'] / 1e9:g} GB/s {where} nodes" for where, of in named.items() if of)


def _figures(plan: Plan) -> Iterator[tuple[str, object]]:
    """Figures of devices, links and calibrations, each with the value of every group where there are several."""
    groups = [dict(_leaves(group)) for group in plain_groups(plan.cluster)]
    for key in dict.fromkeys(key for group in groups for key in group):
        values = [group.get(key) for group in groups]
        yield key, values[0] if len(values) == 1 else values
    for link in (plan.cluster or {}).get("links") or ():
        figures = link.get("link") or link  # a person writes them beside "between"
        yield (
            f"link of {' and '.join(sorted(link['between']))}",
            {key: value for key, value in figures.items() if key not in {"between", *NO_FIGURES}},
        )


def _leaves(of: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    """The figures below a key of a group, named by their path."""
    for key, value in of.items():
        if key in TOLD | NO_FIGURES or value is None:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key} ")
        else:
            yield f"{above}{key}", value
