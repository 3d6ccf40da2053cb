"""The graph as text: JSON that reads back to the same graph, and DOT for graphviz."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from ahp.graph.operators import ModelGraph, Operator, Parameter, Segment, TensorSpec

GRAPH_SCHEMA_VERSION = 5

PLAIN_FIELDS = ("name", "model", "micro_batch_size", "sequence_length", "dtype", "layers", "tied", "config",
                "document_mask", "lora", "uncuttable")  # fmt: skip
"""Fields of a ModelGraph that are JSON already."""
REASONS = ("needs_masks", "two_types", "several_graphs")
"""Fields that few models have."""

PHASE_COLOURS = {"forward": "#dbe9f6", "backward": "#fbe3d4"}


def to_json(graph: ModelGraph) -> str:
    """The whole graph with its law of growth, so that ``at`` works on the graph that ``from_plain`` reads.

    A tensor is ``[dtype, size, size, ...]``; sizes in elements, ``bytes_*`` in bytes, ``flops`` as in ahp.graph.costs.
    ``totals`` counts each repetition of a block; it is for readers, not for ``from_plain``.
    """
    totals = {
        "num_parameters": graph.num_parameters,
        "forward_flops": graph.flops("forward"),
        "backward_flops": graph.flops("backward"),
        "saved_bytes": sum(segment.saved_bytes for segment in graph.segments()),
    }
    head = {"schema_version": GRAPH_SCHEMA_VERSION, "totals": totals}
    return json.dumps(head | to_plain(graph))


def to_dot(graph: ModelGraph) -> str:
    """The dependencies as a DOT digraph, one cluster for each segment.

    Edges inside a segment are data dependencies. Between segments one edge stands for the hidden states, and repeated
    blocks are drawn once, with their number.
    """
    parts = {part.name: part for part in (graph.embedding, *graph.blocks, graph.head)}
    lines = [f"digraph {_quoted(graph.name)} {{", "  rankdir=TB; node [shape=box, style=filled, fontsize=10];"]
    for name, part in parts.items():
        lines += _cluster(part, _times(graph, name))
    order = [part for part in parts.values() if part.operators]
    lines += [
        f'  {_node(a, _last_forward(a))} -> {_node(b, 0)} [style=bold, label="hidden states"];'
        for a, b in pairwise(order)
    ]
    return "\n".join([*lines, "}", ""])


def to_plain(graph: ModelGraph) -> dict[str, Any]:
    """The graph as plain data for JSON, without its totals."""
    plain: dict[str, Any] = {name: getattr(graph, name) for name in PLAIN_FIELDS}
    plain["embedding"] = _segment_to_plain(graph.embedding)
    plain["blocks"] = [_segment_to_plain(block) for block in graph.blocks]
    plain["head"] = _segment_to_plain(graph.head)
    plain["larger"] = None if graph.larger is None else to_plain(graph.larger)
    if graph.by_lengths is not None:
        plain["by_lengths"] = to_plain(graph.by_lengths)
    for name in REASONS:
        if getattr(graph, name) is not None:
            plain[name] = getattr(graph, name)
    return plain


def from_plain(data: dict[str, Any]) -> ModelGraph:
    """The graph that ``to_plain`` wrote."""
    made: dict[str, Any] = {
        "layers": tuple(data["layers"]),
        "tied": tuple(tuple(names) for names in data["tied"]),
        "embedding": _segment_from_plain(data["embedding"]),
        "blocks": tuple(_segment_from_plain(block) for block in data["blocks"]),
        "head": _segment_from_plain(data["head"]),
        "larger": None if data["larger"] is None else from_plain(data["larger"]),
        "by_lengths": from_plain(data["by_lengths"]) if "by_lengths" in data else None,
    }
    plain: dict[str, Any] = {name: data[name] for name in PLAIN_FIELDS} | {name: data.get(name) for name in REASONS}
    return ModelGraph(**(plain | made))


def _segment_to_plain(segment: Segment) -> dict[str, Any]:
    return {
        "name": segment.name,
        "parameters": [[parameter.name, *parameter.shape] for parameter in segment.parameters],
        "frozen": [parameter.name for parameter in segment.parameters if not parameter.trainable],
        "output": None if segment.output is None else _tensor_to_plain(segment.output),
        "operators": [_operator_to_plain(operator) for operator in segment.operators],
    }


def _segment_from_plain(data: dict[str, Any]) -> Segment:
    frozen = set(data["frozen"])
    return Segment(
        name=data["name"],
        operators=tuple(_operator_from_plain(item) for item in data["operators"]),
        parameters=tuple(Parameter(name, tuple(shape), name not in frozen) for name, *shape in data["parameters"]),
        output=None if data["output"] is None else _tensor_from_plain(data["output"]),
    )


def _operator_to_plain(operator: Operator) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(operator, name) for name in Operator.__dataclass_fields__}
    plain["inputs"] = [_tensor_to_plain(tensor) for tensor in operator.inputs]
    plain["outputs"] = [_tensor_to_plain(tensor) for tensor in operator.outputs]
    return plain


def _operator_from_plain(data: dict[str, Any]) -> Operator:
    return Operator(
        **data
        | {
            "inputs": tuple(_tensor_from_plain(item) for item in data["inputs"]),
            "outputs": tuple(_tensor_from_plain(item) for item in data["outputs"]),
            "depends_on": tuple(data["depends_on"]),
            "parameters": tuple(data["parameters"]),
        }
    )


def _tensor_to_plain(tensor: TensorSpec) -> list[Any]:
    return [tensor.dtype, *tensor.shape]


def _tensor_from_plain(data: list[Any]) -> TensorSpec:
    return TensorSpec(tuple(data[1:]), data[0])


def _cluster(segment: Segment, times: int) -> list[str]:
    title = segment.name + (f" x {times}" if times > 1 else "")
    lines = [f"  subgraph {_quoted('cluster_' + segment.name)} {{", f"    label={_quoted(title)};"]
    for operator in segment.operators:
        shape = " ".join("x".join(map(str, t.shape)) or "scalar" for t in operator.outputs)
        text = "\n".join(word for word in (operator.name, operator.module, shape) if word)
        colour = PHASE_COLOURS[operator.phase]
        lines.append(f'    {_node(segment, operator.index)} [label={_quoted(text)}, fillcolor="{colour}"];')
        lines += [f"    {_node(segment, i)} -> {_node(segment, operator.index)};" for i in operator.depends_on]
    return [*lines, "  }"]


def _times(graph: ModelGraph, name: str) -> int:
    names = [block.name for block in graph.blocks]
    return graph.layers.count(names.index(name)) if name in names else 1


def _last_forward(segment: Segment) -> int:
    return max((o.index for o in segment.operators if o.phase == "forward"), default=0)


def _node(segment: Segment, index: int) -> str:
    return _quoted(f"{segment.name}/{index}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
