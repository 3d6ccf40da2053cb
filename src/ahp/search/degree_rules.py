"""Rules that look only at the degrees that a replica's devices share: which combinations of degrees have no legal layout.

They come before anything else is written out, so that orders of ranks are searched only for degrees that can be legal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ahp.arrays import Ints, Mask, unique_rows
from ahp.forecast import rules
from ahp.plan import Parallelism
from ahp.search.choices import Choices, MeshDegrees
from ahp.search.problem import Problem

COLUMNS = (
    "tensor_parallel_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
    "expert_parallel_degree",
    "enable_sequence_parallel",
    "data_parallel_replicate_degree",
)
"""The keys of ``MeshDegrees``; these rules treat all data-parallel ranks as replicas."""

Reason = Callable[[Parallelism], str | None]


class Broken(NamedTuple):
    """A rule and the combinations that break it."""

    name: str
    says: str
    rows: Mask


def broken_degrees(choices: Choices, degrees: list[MeshDegrees]) -> list[Broken]:
    """The rules that some combinations break; ``Broken.rows`` is in the order of ``degrees``."""
    table = np.array(degrees, dtype=np.int64)
    found = [_broken(table, name, reason, keys) for name, reason, keys in _rules(choices)]
    return [one for one in found if one is not None]


def _broken(table: Ints, name: str, reason: Reason, keys: tuple[str, ...]) -> Broken | None:
    """A rule that looks at ``keys`` alone; None if no combination breaks it."""
    values, at, _ = unique_rows(*(table[:, COLUMNS.index(key)] for key in keys))
    reasons = []
    for value in values.tolist():
        chosen: dict[str, Any] = dict(zip(keys, value, strict=True))
        reasons.append(reason(Parallelism(**chosen)))
    says = next(filter(None, reasons), None)
    return None if says is None else Broken(name, says, np.array([text is not None for text in reasons])[at])


def of_tensor(asked: Problem) -> list[tuple[str, Reason, tuple[str, ...]]]:
    """The rules for ranks that share products, whatever else they share: name, reason, and the keys that they look at."""
    graph, job, engine = asked.graph, asked.job, asked.engine
    tensor, both = COLUMNS[:1], (COLUMNS[0], COLUMNS[4])
    return [
        ("tensor", lambda layout: rules.tensor(graph, job, layout, engine), tensor),
        ("products in 8 bits", lambda layout: rules.products(graph, job, layout, engine), tensor),
        ("sequence", lambda layout: rules.sequence(graph, layout), both),
        ("whole attention", lambda layout: rules.whole_attention(graph, job, layout, engine), both),
        ("asynchronous", lambda layout: rules.asynchronous(layout, engine), both),
    ]


def _rules(choices: Choices) -> list[tuple[str, Reason, tuple[str, ...]]]:
    asked, given = choices.asked, choices.given
    graph, job, engine = asked.graph, asked.job, asked.engine
    tensor, context, pipeline, expert, sequence, replicas = COLUMNS
    over_tensor = (tensor, sequence) if choices.folds else ()

    def bad_attention(layout: Parallelism) -> str | None:
        method = given.get("context_parallel_method")
        return rules.context(graph, layout.model_copy(update={"context_parallel_method": method}), engine)

    def with_expert_tensor(layout: Parallelism) -> Parallelism:
        return layout.model_copy(update={"expert_tensor_parallel_degree": given.get("expert_tensor_parallel_degree")})

    def refused_with_sequence(layout: Parallelism) -> str | None:
        if not layout.enable_sequence_parallel:
            return None
        alone = choices.refused(tensor_parallel_degree=layout.tensor_parallel_degree)
        return None if alone else asked.refused(layout)

    def refused_expert_tensor(layout: Parallelism) -> str | None:
        if "expert_tensor_parallel_degree" not in given:
            return None
        reason = asked.refused(with_expert_tensor(layout))
        return reason if reason and reason.startswith("expert_tensor_parallel_degree") else None

    def refused_experts(layout: Parallelism) -> str | None:
        return choices.refused_experts(
            layout.expert_parallel_degree, layout.tensor_parallel_degree, layout.context_parallel_degree
        )

    return [
        *of_tensor(asked),
        ("context", lambda layout: rules.sequence(graph, layout), (context,)),
        ("attention", bad_attention, (tensor, context)),
        (
            "experts",
            lambda layout: rules.experts(graph, job, with_expert_tensor(layout), engine),
            (expert, replicas, context, *over_tensor),
        ),
        (f"engine: {tensor}", asked.refused, (tensor,)),
        (f"engine: {context}", asked.refused, (context,)),
        (f"engine: {pipeline}", lambda layout: choices.bad_depth(layout.pipeline_parallel_degree), (pipeline,)),
        (f"engine: {expert}", refused_experts, (expert, tensor, context)),
        (f"engine: {sequence}", refused_with_sequence, (tensor, sequence)),
        ("engine: expert_tensor_parallel_degree", refused_expert_tensor, (tensor, sequence)),
    ]
