"""The price of a layout: ``forecast`` takes typed objects, ``simulate`` plain ones."""

from __future__ import annotations

import json
import warnings
from functools import lru_cache
from typing import Any

from ahp.cluster.model import Cluster
from ahp.engines.registry import ENGINES, get
from ahp.errors import bad_input
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.open_switch import open_switch
from ahp.forecast.priced import Priced
from ahp.forecast.pricer import Pricer
from ahp.graph.engine_attention import with_engine_attention
from ahp.graph.identity import Same
from ahp.graph.key_heads import has_eager_attention
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Forecast, Parallelism, validated

DEFAULT_ENGINE = EngineChoice()


def forecast(
    graph: ModelGraph, cluster: Cluster, job: Job, parallelism: Parallelism, engine: EngineChoice = DEFAULT_ENGINE
) -> Forecast:
    """Forecast one layout. Raises BadInput when ``ahp.forecast.rules.illegal`` gives a reason against it,
    NotExpressible when that reason is the engine's.

    ``activation_checkpoint`` auto is priced as the lightest kind that fits. Calls with the same graph and cluster
    objects share results.
    """
    return price(graph, cluster, job, parallelism, engine).forecast


def price(
    graph: ModelGraph, cluster: Cluster, job: Job, parallelism: Parallelism, engine: EngineChoice = DEFAULT_ENGINE
) -> Priced:
    """``forecast`` with the timeline and the stages it was made from."""
    return pricer(graph, cluster, job, engine).price(parallelism)


def pricer(
    graph: ModelGraph, cluster: Cluster, job: Job, engine: EngineChoice = DEFAULT_ENGINE, *, either_blocks: bool = False
) -> Pricer | MixedPricer:
    """The pricer of layouts: the same object for the same graph and cluster objects, so that calls share their units.

    ``either_blocks``: where ``engine`` leaves open whether blocks are compiled, prices are lower bounds for both; otherwise the
    blocks are eager then.

    Raises BadInput where facts that a price needs are not known.
    """
    choice = engine if either_blocks else engine.decided()
    return _pricer(Same(graph), Same(cluster), job.model_dump_json(), choice.model_dump_json())


def simulate(
    *,
    model: Any,
    cluster: Cluster | dict[str, Any] | str,
    job: Job | dict[str, Any],
    parallelism: Parallelism | dict[str, Any],
    engine: EngineChoice | dict[str, Any] | str | None = None,
) -> Forecast:
    """Price one layout, from plain or typed arguments.

    Args:
        model: what ``ahp.analyze`` takes, or a graph. The graph of a plain model is kept: a second layout costs milliseconds.
        cluster: a Cluster, its plain form, or a short form such as ``8x8xH100-SXM-80GB``.
        job: ``sequence_length``, ``global_batch_size`` (sequences), ``precision``, ``optimizer``, and what else a Job has.
        parallelism: the degrees, under torchtitan's names; what is not given is 1, or decided as the engine does.
        engine: its keys, or its name alone; None = AHP's own.

    Returns:
        Seconds of a step with a 90 % band and where they go, bytes of the fullest rank, and the probability that it fits.

    Raises:
        BadInput: whatever breaks a rule, naming the key, its value and what is valid.
        NotExpressible: the engine cannot run this layout.

    Example:
        >>> import ahp
        >>> job = {"sequence_length": 8192, "global_batch_size": 64, "precision": "bf16"}
        >>> layout = {"data_parallel_shard_degree": 8, "zero_stage": 3, "activation_checkpoint": "full"}
        >>> found = ahp.simulate(model="llama3-8b", cluster="8xH100-SXM-80GB", job=job, parallelism=layout)
        >>> found.fits, found.step_time_low_s < found.step_time_s < found.step_time_high_s
        (True, True)
    """
    contract, layout = validated(Job, job, "job"), validated(Parallelism, parallelism, "parallelism")
    choice = validated(EngineChoice, DEFAULT_ENGINE if engine is None else engine, "engine")
    get(choice.name)  # an engine that cannot be priced is refused before the model is traced
    on = _cluster(cluster)
    if assumed := open_switch(on, layout):
        warnings.warn(assumed, stacklevel=2)
    return forecast(_graph(model, contract, choice), on, contract, layout, choice)


@lru_cache(maxsize=32)
def _pricer(graph: Same, cluster: Same, job: str, engine: str) -> Pricer | MixedPricer:
    of, on = Job.model_validate_json(job), cluster.value
    choice: EngineChoice = EngineChoice.model_validate_json(engine)
    run = graph_of_engine(graph.value, of, choice)
    if not on.is_mixed:
        return Pricer(run, on, of, choice)
    for group in on.groups:
        if group.calibration is not None:
            rule = f"the steps of a mixed cluster do not show which of its groups took longer; leave it out of {group.name!r}"
            raise bad_input("cluster.groups.calibration", group.calibration.step_ratio, rule, ["null"])
    return MixedPricer(run, on, of, choice)


def graph_of_engine(graph: ModelGraph, job: Job, choice: EngineChoice) -> ModelGraph:
    """The graph that an engine runs: with its own attention, where it has one and the graph's is not in one operator or has windows. Warns
    where the attention is eager although ``flash`` was asked for."""
    if choice.attention != "flash":
        return graph
    run = with_engine_attention(graph, job) if get(choice.name).own_attention else graph
    if has_eager_attention(run):
        own = ", ".join(engine.name for engine in ENGINES if engine.own_attention)
        rule = f"transformers has no sdpa attention for it; in {choice.name} it is eager (engines with kernels of their own: {own})"
        warnings.warn(f"{graph.name}: {rule}", stacklevel=1)  # one place for all callers: Python tells it once
    return run


def _graph(model: Any, job: Job, choice: EngineChoice) -> ModelGraph:
    if isinstance(model, ModelGraph):
        for key in ("sequence_length", "document_mask"):
            if getattr(model, key) != getattr(job, key):
                raise bad_input(key, getattr(job, key), "the graph was traced for another", [getattr(model, key)])
        if model.lora != (asked := _lora(job)):
            raise bad_input("job.lora", asked, "the graph was traced for another", [model.lora])
        return model
    key = _canonical(model)
    if key is None:  # a live module has no key that identifies it
        from ahp.graph.kept import analyze

        return analyze(model, job, attention=choice.attention)
    traced = {name: getattr(job, name) for name in ("sequence_length", "precision", "document_mask")}
    return _traced(key, json.dumps(traced | {"lora": _lora(job)}), choice.attention)


def _lora(job: Job) -> dict[str, Any] | None:
    return None if job.lora is None else job.lora.model_dump(mode="json")


@lru_cache(maxsize=64)
def _traced(model: str, job: str, attention: str) -> ModelGraph:
    """The graph of a plain model; ``job``: what a graph depends on."""
    from ahp.graph.kept import analyze

    return analyze(json.loads(model), validated(Job, json.loads(job), "job"), attention=attention)


def _cluster(cluster: Cluster | dict[str, Any] | str) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    key = _canonical(cluster)
    if key is None:
        return Cluster.resolve(cluster)
    return _resolved(key)


@lru_cache(maxsize=256)
def _resolved(key: str) -> Cluster:
    return Cluster.resolve(json.loads(key))


def _canonical(value: Any) -> str | None:
    """The same text for the same plain data; None for other values."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return None
