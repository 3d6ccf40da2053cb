"""Rewrites a traced graph: no writes into fresh memory, no operators that take a tensor only for its shape or type, and one name for
operators that have several.

Each replacement computes the same. Writes that something else could see are left as they are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

_SYNONYMS: dict[Any, Any] = {
    aten.swapaxes.default: aten.transpose.int,
    aten.swapdims.default: aten.transpose.int,
    aten.concat.default: aten.cat.default,
    aten.concatenate.default: aten.cat.default,
    aten.broadcast_to.default: aten.expand.default,
}
"""Other names of operators, with the same arguments. Slicing and the cutting of sequences know one name of each."""
COMPOSED = {
    operator: operator.decompose
    for operator in (
        aten.einsum.default, aten.tensordot.default, aten.inner.default, aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int,
        aten.moveaxis.intlist, aten.narrow.default, aten.tensor_split.sections, aten.tensor_split.indices, aten.hstack.default,
        aten.vstack.default, aten.dstack.default, aten.column_stack.default, aten.atleast_1d.Sequence, aten.atleast_2d.Sequence,
        aten.atleast_3d.Sequence, aten.tile.default, aten.std.dim, aten.var.dim, aten.std_mean.dim, aten.var_mean.dim,
        aten.cosine_similarity.default, aten.pairwise_distance.default, aten.linalg_vecdot.default, aten.take_along_dim.default,
        aten.diff.default, aten.trapezoid.dx, aten.nanmean.default, aten.broadcast_tensors.default,
    )
}  # fmt: skip
"""Operators that torch composes of others: traced as those, of which slicing and the cutting of sequences know each."""
_OF_MATRICES = {aten.numpy_T.default, aten.mT.default}
"""x.T and x.mT, which take no dims; x.mT, and x.T of a matrix, is one transposition (Falcon's layers multiply by weight.T)."""
_EMPTY = {aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default}


def simplify(graph: Graph) -> None:
    """Make the replacements, in place."""
    for node in list(graph.nodes):
        if node.op == "call_function":
            _take_usual_name(node)
            _take_no_example(graph, node)
            if node.target in _EMPTY:
                _join_pieces(graph, node)
    _without_writes(graph)
    graph.eliminate_dead_code()


def _take_usual_name(node: Node) -> None:
    node.target = _SYNONYMS.get(node.target, node.target)
    if node.target in _OF_MATRICES and ((rank := node.meta["val"].dim()) == 2 or node.target is aten.mT.default):
        node.target, node.args = aten.transpose.int, (node.args[0], rank - 2, rank - 1)


def _take_no_example(graph: Graph, node: Node) -> None:
    """x.view_as(y) and x.type_as(y) need only y's shape or type: replace them by operators without y."""
    value: Any = node.meta.get("val")
    if node.target is aten.type_as.default:
        node.target, node.args = aten.to.dtype, (node.args[0], value.dtype)
    elif node.target in (aten.view_as.default, aten.reshape_as.default):
        target = aten.view.default if node.target is aten.view_as.default else aten.reshape.default
        node.target, node.args = target, (node.args[0], list(value.shape))
    elif node.target is aten.expand_as.default:
        node.target, node.args = aten.expand.default, (node.args[0], list(value.shape))


def _join_pieces(graph: Graph, empty: Node) -> None:
    """``x = empty(...); x[..., :n] = a; x[..., n:] = b`` is cat([a, b], -1)."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    pieces = [user for user in empty.users if user.target is aten.slice.Tensor]
    writes = [next(iter(piece.users)) for piece in pieces if len(piece.users) == 1]
    if not writes or len(writes) < len(pieces) or any(w.target is not aten.copy_.default or w.users for w in writes):
        return
    if any(w.args[0] is not piece for w, piece in zip(writes, pieces, strict=True)):
        return
    last = max(writes, key=position.__getitem__)
    if any(position[user] < position[last] for user in empty.users if user not in pieces):
        return
    dims = [piece.args[1] if len(piece.args) > 1 else 0 for piece in pieces]
    dim = dims[0]
    ordered = sorted(zip(pieces, writes, strict=True), key=lambda pair: _start(pair[0]))
    if (
        any(d != dim for d in dims)
        or not isinstance(dim, int)
        or not _tile([piece for piece, _ in ordered], empty, dim)
    ):
        return
    with graph.inserting_after(last):
        joined = graph.call_function(aten.cat.default, ([], dim))
    joined.meta = dict(empty.meta)
    with graph.inserting_before(joined):
        joined.args = ([_as_piece(graph, write.args[1], piece) for piece, write in ordered], dim)
    for piece, write in ordered:
        graph.erase_node(write)
        graph.erase_node(piece)
    empty.replace_all_uses_with(joined)


def _start(piece: Node) -> int:
    start = piece.args[2] if len(piece.args) > 2 else 0
    return start if isinstance(start, int) else 0


def _tile(pieces: list[Node], whole: Node, dim: int) -> bool:
    """Whether the ordered pieces cover the whole along ``dim`` exactly once."""
    at = 0
    for piece in pieces:
        if _start(piece) != at:
            return False
        at += piece.meta["val"].shape[dim]
    return at == whole.meta["val"].shape[dim]


def _as_piece(graph: Graph, source: object, piece: Node) -> Node:
    """The copied tensor, in the shape and type of the place it is copied to."""
    assert isinstance(source, Node)
    value, given = piece.meta["val"], source.meta["val"]
    if given.dtype != value.dtype:
        source = graph.call_function(aten.to.dtype, (source, value.dtype))
        source.meta["val"] = given.to(value.dtype)
    if given.shape != value.shape:
        source = graph.call_function(aten.expand.default, (source, list(value.shape)))
        source.meta["val"] = value
    return source


def _without_writes(graph: Graph) -> None:
    """Replace ``x.op_(...)`` by ``op(x, ...)`` wherever nothing else reads the memory of x; leave the others.

    This holds if an operator returned x in memory of its own, and no view of x was made before the write.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        functional = _functional(node)
        if functional is None or not _is_alone(node.args[0], node, position):
            continue
        target: Node = node.args[0]  # type: ignore[assignment]
        with graph.inserting_before(node):
            new = graph.call_function(functional, node.args, node.kwargs)
            new.meta = dict(node.meta)
            position[new] = position[node]
            if any(i.meta["val"].dtype != target.meta["val"].dtype for i in new.all_input_nodes):
                new = graph.call_function(aten.to.dtype, (new, target.meta["val"].dtype))
                new.meta = dict(node.meta)
                position[new] = position[node]
        node.replace_all_uses_with(new)
        target.replace_all_uses_with(new, delete_user_cb=lambda user, at=position[node]: position[user] > at)
        graph.erase_node(node)


def _functional(node: Node) -> torch._ops.OpOverload | None:
    """The operator that returns what this one writes into its first argument."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_") or not node.args or not isinstance(node.args[0], Node):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, target._overloadname, None)


def _is_alone(written: object, writer: Node, position: dict[Node, int]) -> bool:
    assert isinstance(written, Node)
    if not _owns_memory(written):
        return False
    before = [user for user in written.users if position[user] < position[writer]]
    return not any(is_view(user) for user in before)


def _owns_memory(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and source.op == "call_function" and not is_view(source)
    return not is_view(node)


def is_view(node: Node) -> bool:
    """Whether the result of a call may share memory with its arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    if node.target in (aten.to.dtype, aten.contiguous.default, aten.reshape.default):
        return True  # these may return their argument
    return any(result.alias_info is not None for result in node.target._schema.returns)
