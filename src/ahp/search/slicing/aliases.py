"""Memory that tensors share and the graph writes into: every rank keeps these tensors whole, so that it sees each write."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ahp.graph.functional import is_view
from ahp.search.slicing.placement import args_of, tensor_inputs


def written(nodes: list[Node]) -> set[Node]:
    """Nodes whose memory some operator writes into, and nodes that read such memory before the last write.

    A reader after the last write sees the final contents, and may read a part.
    """
    memory = _memory_of(nodes)
    last_write: dict[Node, int] = {}
    for position, node in enumerate(nodes):
        if writes(node):
            last_write[memory[node]] = position
    found = {node for node in nodes if memory.get(node) in last_write}
    for position, node in enumerate(nodes):
        if any(position < last_write.get(memory[source], -1) for source in tensor_inputs(node)):
            found.add(node)
    return found


def _memory_of(nodes: list[Node]) -> dict[Node, Node]:
    """The node that made the memory in which each node lies; what may be a view counts as one."""
    memory: dict[Node, Node] = {}
    for node in nodes:
        sources = tensor_inputs(node) if node.op == "call_function" else []
        shares = bool(sources) and (writes(node) or is_view(node))
        memory[node] = memory[sources[0]] if shares else node
    return memory


def writes(node: Node) -> bool:
    """Whether a call writes into a tensor that it is given."""
    target: Any = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable and bool(args_of(node))
