"""Step 4: how each tensor of a block is split over the tensor-parallel axis, by dynamic programming over its graph.

The nodes of the traced forward pass are taken in order. A state is what is known about the tensors that are still to
be read: where they lie, and which of their conversions are already paid for. Costs are compared in this order:
arithmetic per rank, weights per rank, bytes moved forward and backward, elements written per rank. So the degree is
used wherever possible, and among the ways to use it, the one that moves the fewest bytes wins.

A product whose result is made whole right away saves only its own arithmetic, and moves bytes for it. As in splits
written by hand (routers and the narrow projections of latent attention stay whole), this is the last resort, like
splits of batch and m: it is used only in a block where nothing can be split otherwise.

With sequence parallelism the weights lie as they do without it. The block's input and output are split along the
sequence, and a second pass finds where else tokens are split; it compares bytes first, then arithmetic and elements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.fx import Node

from ahp.arrays import Ints
from ahp.cached_method import cached_method
from ahp.errors import BadInput
from ahp.graph.capture import Capture
from ahp.search.slicing.aliases import written
from ahp.search.slicing.conversion import Permission, Step, allowed, bytes_of, steps
from ahp.search.slicing.packing import VIEWS, find_packings
from ahp.search.slicing.placement import (
    C,
    Context,
    P,
    Placement,
    R,
    Split,
    Strategy,
    Tokens,
    args_of,
    is_tensor,
    numel_of,
    shape_of,
    tensor_inputs,
)
from ahp.search.slicing.strategies import is_grouped, strategies
from ahp.search.slicing.words import words

Cost = tuple[int, int, int, int]
"""Per rank: FLOPs of matrix products and attention, elements of its weight matrices, bytes that it sends, elements that
the other operators write."""

MAX_STATES = 1024
"""States kept after each node, cheapest first. The hub's families need fewer than 150; for the regions of sequence
parallelism, blocks with latent attention reach this limit."""

WORK_FIRST = (0, 1, 2, 3)
BYTES_FIRST = (2, 0, 1, 3)
"""The order in which the parts of two costs are compared."""

SPARING = Permission()
LAST_RESORT = Permission(gathers_weights=True, gathers_tokens=True)


@dataclass(frozen=True)
class Slicing:
    """The solution for one block: a strategy for every call node, a placement for every weight and node."""

    chosen: dict[Node, Strategy]
    placed: dict[Node, Placement]
    weights: dict[str, Placement]
    words: dict[str, str]
    """For every weight of a matrix product, and every other one that meets split tokens, how its module is split."""
    cost: Cost
    undivided: tuple[int, int]
    """FLOPs and elements of weight matrices of one device that does all the work."""
    permission: Permission
    """The permission it was found under; the same block at another size is solved under it too."""


@dataclass(frozen=True)
class _State:
    """What a call reads and writes, as one state has it."""

    cost: Cost
    live: dict[Node, Placement]
    paid: frozenset[tuple[Node, Step]]


@dataclass(frozen=True)
class Problem:
    """A block to slice: its graph, and the conditions that the solution must meet."""

    capture: Capture
    context: Context
    permission: Permission
    weights: dict[Node, str]
    pinned: dict[Node, Placement]
    """Weights whose placement is given."""
    boundary: dict[Node, Placement]
    """Placements of the block's input activations and constants."""
    outputs: tuple[Placement, ...]
    """Placements that the block's outputs must have."""
    with_gradient: set[Node]
    whole: set[Node]
    """Calls that use memory which the graph writes into: they run whole on every rank."""
    order: tuple[int, ...]

    def options(self, node: Node) -> list[Strategy]:
        """Every way to run a call, or to return."""
        if node.op == "output":
            return [Strategy(self.outputs, R)]
        found = strategies(node, self.context)
        return found[:1] if node in self.whole else found


def solve(
    capture: Capture,
    degree: int,
    pinned: dict[str, Placement] | None = None,
    *,
    hidden: int | None = None,
    permission: Permission | None = None,
    returns: Placement = R,
) -> Slicing:
    """The cheapest placement of a block over ``degree`` ranks; its input is whole on every rank, and so is its output.

    ``pinned`` fixes the placement of weights (names as in ``capture.names``). ``hidden``: the number of the activation
    that holds the hidden states [batch, sequence, hidden]; if given, they and the first output are split along the
    sequence. ``permission``: the conversions that may be used; None = as few as leave something split. ``returns``: the placement of
    the output instead, for a given permission and without ``hidden``. Raises BadInput when it or ``pinned`` cannot be met.
    """
    if hidden is not None:
        whole = solve(capture, degree, pinned, permission=permission)
        split = replace(whole.permission, gathers_tokens=True)
        return _solve(problem(capture, degree, whole.weights, hidden=hidden, permission=split))
    if permission is not None:
        task = problem(capture, degree, pinned, hidden=None, permission=permission)
        return _solve(replace(task, outputs=tuple(returns for _ in task.outputs)))
    sparing = _solve(problem(capture, degree, pinned, hidden=None, permission=SPARING))
    if any(isinstance(place, Split) for place in sparing.weights.values()):
        return sparing
    return _solve(problem(capture, degree, pinned, hidden=None, permission=LAST_RESORT))


def problem(
    capture: Capture,
    degree: int,
    pinned: dict[str, Placement] | None = None,
    *,
    hidden: int | None,
    permission: Permission,
) -> Problem:
    """The problem that the arguments of ``solve`` describe."""
    nodes = capture.nodes
    weights = {node: name for name, node in capture.weight_nodes().items()}
    inputs = capture.activation_nodes()
    shape = _token_shape(capture, hidden)
    tokens = None
    constants = [node for node in nodes if node.op == "get_attr"]
    boundary: dict[Node, Placement] = dict.fromkeys([*inputs, *constants], R)
    outputs: list[Placement] = [R] * len(tensor_inputs(nodes[-1]))
    if permission.gathers_tokens and shape is not None:
        tokens = Tokens(shape[0], shape[1], (1,) if hidden is not None else (0, 1))
    whole = written(nodes)
    if hidden is not None:
        if inputs[hidden] in whole:
            raise BadInput("enable_sequence_parallel = True: the block writes into its input, which has to be whole")
        split = Split(1, (shape_of(inputs[hidden])[1],), tokens=True)
        boundary[inputs[hidden]] = split
        # What a block returns beside its hidden states the model may read as it is, whatever shape it has.
        outputs[:1] = [split if shape_of(i) == shape_of(inputs[hidden]) else R for i in tensor_inputs(nodes[-1])[:1]]
    return Problem(
        capture=capture,
        context=Context(degree, find_packings(nodes), tokens),
        permission=permission,
        weights=weights,
        pinned={node: pinned[name] for node, name in weights.items() if pinned is not None and name in pinned},
        boundary=boundary,
        outputs=tuple(outputs),
        with_gradient=capture.with_gradient(),
        whole=whole,
        order=WORK_FIRST if hidden is None else BYTES_FIRST,
    )


def _token_shape(capture: Capture, hidden: int | None) -> tuple[int, ...] | None:
    """Shape of the hidden states: of activation ``hidden``, else of the first floating-point one that is [batch, sequence, ...]."""
    inputs = capture.activation_nodes()
    candidates = [inputs[hidden]] if hidden is not None else [i for i in inputs if i.meta["val"].is_floating_point()]
    return next((shape_of(i) for i in candidates if len(shape_of(i)) >= 3), None)


def _solve(task: Problem) -> Slicing:
    nodes = task.capture.nodes
    last_use = {i: position for position, node in enumerate(nodes) for i in node.all_input_nodes}
    options = viable_options(task)
    states = _States(task)
    for position, node in enumerate(nodes):
        if node not in options:
            continue
        states.run(node, options[node], {i for i in node.all_input_nodes if last_use[i] == position})
        if not len(states.costs):
            raise BadInput(
                f"tensor_parallel_degree = {task.context.degree}: no slicing of {node.format_node()} meets the given placements"
            )
    return _unroll(states, task)


class _States:
    """All states after a call, best first, as arrays: a thousand states differ in few ways in what the next call reads, and each way is
    computed once."""

    def __init__(self, task: Problem) -> None:
        self.task = task
        self.live = list(task.boundary)
        """The tensors that are still to be read: every state has the same."""
        self._numbers: dict[tuple[Placement, frozenset[Step]], int] = {}
        self._of_number: list[tuple[Placement, frozenset[Step]]] = []
        """Where a tensor can lie and what is paid for, by number."""
        lies = [self._number(place, frozenset()) for place in task.boundary.values()]
        self.lies = np.array([lies], dtype=np.int64)
        """[states, live]: where each tensor lies, and which conversions of it are paid for, as a number."""
        self.costs = np.zeros((1, 4), dtype=np.int64)
        """[states, 4]: the parts of each state's Cost."""
        self.history: list[tuple[Node, Ints, list[Strategy]]] = []
        """For every call the state before it, and the strategy, of each state after it."""

    def _number(self, place: Placement, paid: frozenset[Step]) -> int:
        number = self._numbers.setdefault((place, paid), len(self._of_number))
        if number == len(self._of_number):
            self._of_number.append((place, paid))
        return number

    def run(self, node: Node, options: list[Strategy], dead: set[Node]) -> None:
        """Run a call in every way in every state, and keep the best states; ``dead``: what is not read again."""
        call = _Call(node, self.task)
        touched = [column for column, source in enumerate(self.live) if source in call.sources]
        kept = [column for column, source in enumerate(self.live) if source not in call.sources]
        left = [source for source in dict.fromkeys((*call.sources, node)) if source not in dead]
        ways, first = _numbered(self.lies[:, touched])
        found: list[tuple[Strategy, _State]] = []
        starts = [0]
        for row in first:
            before = self._seen(touched, row)
            found += [(option, after) for option in options if (after := call.step(before, option)) is not None]
            starts.append(len(found))
        count = np.diff(starts)[ways]
        parent = np.repeat(np.arange(len(ways)), count)
        outcome = np.arange(len(parent)) + np.repeat(np.array(starts)[ways] - (np.cumsum(count) - count), count)
        lies = np.array([[self._lies(after, i) for i in left] for _, after in found], dtype=np.int64)
        added = np.array([after.cost for _, after in found], dtype=np.int64).reshape(-1, 4)
        costs = self.costs[parent] + added[outcome]
        alike = _numbered(self.lies[:, kept])[0][parent] * max(len(found), 1) + _numbered(lies)[0][outcome]
        best = self._best(alike, costs)
        parent, outcome = parent[best], outcome[best]
        self.history.append((node, parent, [found[i][0] for i in outcome]))
        self.lies = np.hstack([self.lies[parent][:, kept], lies.reshape(-1, len(left))[outcome]])
        self.costs = costs[best]
        self.live = [*(self.live[column] for column in kept), *left]

    def _seen(self, columns: list[int], row: int) -> _State:
        """What a state has of some of its tensors, at no cost so far."""
        at = {self.live[column]: self._of_number[self.lies[row, column]] for column in columns}
        paid = frozenset((source, step) for source, (_, steps) in at.items() for step in steps)
        return _State((0, 0, 0, 0), {source: place for source, (place, _) in at.items()}, paid)

    def _lies(self, state: _State, source: Node) -> int:
        return self._number(state.live[source], frozenset(step for i, step in state.paid if i is source))

    def _best(self, alike: Ints, costs: Ints) -> Ints:
        """The numbers of the states to keep: of those that are alike the cheapest, and of all the cheapest, the earlier one first."""
        parts = [costs[:, i] for i in reversed(self.task.order)]  # lexsort's last key is its first
        order = np.lexsort((*parts, alike))
        groups, earliest = np.unique(alike, return_index=True)
        cheapest = order[np.searchsorted(alike[order], groups)]
        return cheapest[np.lexsort((earliest, *(part[cheapest] for part in parts)))][:MAX_STATES]


def _numbered(rows: Ints) -> tuple[Ints, list[int]]:
    """A number for each row, the same for equal rows, and the first row of each number. There may be more columns than
    ``ahp.arrays.unique_rows`` can count through."""
    keys = [row.tobytes() for row in rows]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    first = {key: row for row, key in reversed(list(enumerate(keys)))}
    return np.array([numbers[key] for key in keys], dtype=np.int64), [first[key] for key in numbers]


def viable_options(task: Problem) -> dict[Node, list[Strategy]]:
    """The ways to run each call whose output all its readers can work with: otherwise states that lead nowhere, but
    cost less so far, would crowd out the others."""
    found: dict[Node, list[Strategy]] = {}
    accepted: dict[Node, list[set[Placement]]] = {}
    for node in reversed(task.capture.nodes):
        if node.op not in ("call_function", "output"):
            continue
        readers = accepted.get(node, [])
        found[node] = [
            option for option in task.options(node) if all(_reaches(node, option.output, r, task) for r in readers)
        ]
        for number, source in enumerate(tensor_inputs(node)):
            accepted.setdefault(source, []).append({option.inputs[number] for option in found[node]})
    return found


def _reaches(node: Node, have: Placement, wanted: set[Placement], task: Problem) -> bool:
    """Whether a tensor that lies at ``have`` can be brought to one of the placements."""
    return have in wanted or any(_way(node, have, one, task, needs_sum=have == C) is not None for one in wanted)


def _way(node: Node, have: Placement, wanted: Placement, task: Problem, *, needs_sum: bool) -> tuple[Step, ...] | None:
    """``steps``; None also where the task allows none, and where a call returns several tensors, because a collective takes one: each is taken
    out first."""
    way = steps(have, wanted, needs_sum=needs_sum)
    if way is None or (way and isinstance(node.meta["val"], (tuple, list))):
        return None
    return way if all(allowed(step, node, task.permission, task.context) for step in way) else None


class _Call:
    """One call of the graph. What does not depend on the whole state is computed once, not for each of a thousand states."""

    def __init__(self, node: Node, task: Problem) -> None:
        self.node, self.task, self.sources = node, task, tensor_inputs(node)
        self.flops = flops_of(node)
        self.written = numel_of(node) if is_tensor(node) and node.target not in VIEWS else 0

    def step(self, state: _State, option: Strategy) -> _State | None:
        """The state after the call is run by ``option``, or None when an input cannot be brought there."""
        task, node = self.task, self.node
        live, paid, elements, moved = state.live, state.paid, 0, 0
        for source, wanted in zip(self.sources, option.inputs, strict=True):
            if source in task.weights and source not in live:  # a weight's first use decides where it lies
                if not _may_lie(source, wanted, task):
                    return None
                live = {**live, source: wanted}
                if (
                    len(shape_of(source)) > 1
                ):  # biases and norms weigh nothing next to what their place makes others move
                    elements += numel_of(source) // (task.context.degree if isinstance(wanted, Split) else 1)
            way = self._way(source, live[source], wanted, option.reads_whole_in_parts)
            if way is None:
                return None
            for step, sent in way:
                if (source, step) not in paid:
                    paid = paid | {(source, step)}
                    moved += sent
        if option.adds_bias_after_sum:
            moved += sum(self._bytes(step, node) for step in steps(P, option.output, needs_sum=False) or ())
        share = task.context.degree if option.divides else 1
        cost = _plus(state.cost, (self.flops // share, elements, moved, self.written // share))
        return _State(cost, {**live, node: option.output}, paid)

    @cached_method
    def _way(
        self, source: Node, have: Placement, wanted: Placement, reads_in_parts: bool
    ) -> tuple[tuple[Step, int], ...] | None:
        """The steps that bring an input where it is wanted, each with the bytes it sends; None if the task allows none."""
        task = self.task
        needs_sum = wanted == R and source in task.with_gradient and reads_in_parts
        way = _way(source, have, wanted, task, needs_sum=needs_sum)
        if way is None or (source in task.weights and have != wanted):
            return None
        if wanted == C and source not in task.with_gradient:
            return None
        return tuple((step, self._bytes(step, source)) for step in way)

    def _bytes(self, step: Step, source: Node) -> int:
        return bytes_of(step, source, self.task.context.degree, has_gradient=source in self.task.with_gradient)


def _may_lie(weight: Node, wanted: Placement, task: Problem) -> bool:
    """Whether a weight may lie where its first use wants it: whole, or split by its own columns or rows."""
    if wanted in (P, C) or (isinstance(wanted, Split) and wanted.tokens):
        return False
    return task.pinned.get(weight, wanted) == wanted


def _plus(cost: Cost, more: Cost) -> Cost:
    return cost[0] + more[0], cost[1] + more[1], cost[2] + more[2], cost[3] + more[3]


def _unroll(states: _States, task: Problem) -> Slicing:
    """The best state's strategies."""
    chosen: dict[Node, Strategy] = {}
    number = 0
    for node, parent, strategies_of in reversed(states.history):
        chosen[node] = strategies_of[number]
        number = parent[number]
    chosen = dict(reversed(chosen.items()))
    flops, elements, moved, written_elements = states.costs[0].tolist()
    placed = dict(task.boundary)
    for node, strategy in chosen.items():
        for source, placement in zip(tensor_inputs(node), strategy.inputs, strict=True):
            if source in task.weights:
                placed.setdefault(source, placement)
        placed[node] = strategy.output
    return Slicing(
        chosen=chosen,
        placed=placed,
        weights={name: placed.get(node, R) for node, name in task.weights.items()},
        words=words(chosen, placed, task.weights),
        cost=(flops, elements, moved, written_elements),
        undivided=(
            sum(flops_of(node) for node in chosen),
            sum(numel_of(node) for node in task.weights if node in placed and len(shape_of(node)) > 1),
        ),
        permission=task.permission,
    )


def flops_of(node: Node) -> int:
    """Twice the multiply-adds of the products whose arithmetic the degree divides."""
    aten = torch.ops.aten
    if node.target is aten.linear.default:
        return 2 * numel_of(node) * shape_of(args_of(node)[1])[-1]
    if node.target is aten.addmm.default:
        return 2 * numel_of(node) * shape_of(args_of(node)[2])[0]
    if node.target in (aten.matmul.default, aten.mm.default, aten.bmm.default) or is_grouped(node):
        return 2 * numel_of(node) * shape_of(args_of(node)[0])[-1]
    if node.target is aten.scaled_dot_product_attention.default:
        return 4 * numel_of(node) * shape_of(args_of(node)[1])[-2]
    return 0
