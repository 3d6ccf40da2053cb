"""On small graphs the dynamic program equals brute force over every way to run every operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Node

from ahp.errors import BadInput
from ahp.graph.capture import Capture, capture
from ahp.search.slicing.conversion import Permission, Step, allowed, bytes_of, steps
from ahp.search.slicing.packing import VIEWS
from ahp.search.slicing.placement import P, Placement, R, Split, Strategy, is_tensor, numel_of, shape_of, tensor_inputs
from ahp.search.slicing.solve import BYTES_FIRST, LAST_RESORT, SPARING, Problem, flops_of, problem, solve
from tests.examples import many

WIDTH = 4


class Random(nn.Module):
    """A chain of operators drawn by hypothesis; each letter is one."""

    def __init__(self, letters: str, biases: bool) -> None:
        super().__init__()
        self.letters = letters
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=biases) for _ in letters)
        self.packed = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=biases) for _ in letters)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x
        for letter, product, packed in zip(self.letters, self.products, self.packed, strict=True):
            if letter == "p":
                x = product(x)
            elif letter == "r":
                x = torch.relu(x)
            elif letter == "n":
                x = self.norm(x)
            elif letter == "+":
                x = x + kept
                kept = x
            elif letter == "g":
                a, b = packed(x).chunk(2, dim=-1)
                x = a * b
            elif letter == "m":
                x = x * x.pow(2).mean(-1, keepdim=True)
        return x


def brute_force(task: Problem) -> tuple[int, ...]:
    """The least cost of all assignments, each priced from its own definition."""
    nodes = [node for node in task.capture.nodes if node.op in ("call_function", "output")]
    return min(
        (tuple(cost[i] for i in task.order) for chosen in _assignments(task, nodes) if (cost := price(task, chosen))),
        default=(),
    )


def _assignments(task: Problem, nodes: list[Node]) -> Iterator[dict[Node, Strategy]]:
    """Every way to run every call, without those whose inputs cannot be brought where they are wanted."""

    def further(
        position: int, chosen: dict[Node, Strategy], at: dict[Node, Placement]
    ) -> Iterator[dict[Node, Strategy]]:
        if position == len(nodes):
            yield chosen
            return
        node = nodes[position]
        for option in task.options(node):
            places = dict(at)
            if all(
                _brought(task, source, wanted, places)
                for source, wanted in zip(tensor_inputs(node), option.inputs, strict=True)
            ):
                yield from further(position + 1, {**chosen, node: option}, {**places, node: option.output})

    yield from further(0, {}, dict(task.boundary))


def _brought(task: Problem, source: Node, wanted: Placement, places: dict[Node, Placement]) -> bool:
    if source in task.weights:
        if wanted == P or (isinstance(wanted, Split) and wanted.tokens):
            return False
        return places.setdefault(source, task.pinned.get(source, wanted)) == wanted
    way = steps(places[source], wanted, needs_sum=False)
    return way is not None and all(allowed(step, source, task.permission, task.context) for step in way)


def price(task: Problem, chosen: dict[Node, Strategy]) -> tuple[int, int, int, int]:
    degree = task.context.degree
    places: dict[Node, Placement] = dict(task.boundary)
    conversions: set[tuple[Node, Step]] = set()
    flops = moved = written = 0
    for node, option in chosen.items():
        for source, wanted in zip(tensor_inputs(node), option.inputs, strict=True):
            have = places.setdefault(source, wanted)
            shared = option.output != R and wanted == R and source in task.with_gradient
            conversions |= {(source, step) for step in steps(have, wanted, needs_sum=shared) or ()}
        if option.adds_bias_after_sum:
            for step in steps(P, option.output, needs_sum=False) or ():
                moved += bytes_of(step, node, degree, has_gradient=node in task.with_gradient)
        share = degree if option.output != R or option.adds_bias_after_sum else 1
        flops += flops_of(node) // share
        written += numel_of(node) // share if is_tensor(node) and node.target not in VIEWS else 0
        places[node] = option.output
    moved += sum(bytes_of(step, node, degree, has_gradient=node in task.with_gradient) for node, step in conversions)
    elements = sum(
        numel_of(weight) // (degree if isinstance(places[weight], Split) else 1)
        for weight in task.weights
        if weight in places and len(shape_of(weight)) > 1
    )
    return flops, elements, moved, written


def traced(letters: str, biases: bool, gradient: bool, batch: int = 3) -> Capture:
    """A batch of 3 cannot be split in two, so that there are fewer ways."""
    return capture(Random(letters, biases), (torch.zeros(batch, 4, WIDTH, requires_grad=gradient),), {})


def _few_ways(letters: str) -> bool:
    """Something to split, and brute force is over within a second."""
    return ("p" in letters or "g" in letters) and letters.count("g") + letters.count("m") <= 1


LETTERS = st.text("prn+gm", min_size=1, max_size=3).filter(_few_ways)


@pytest.mark.parametrize("permission", [SPARING, LAST_RESORT, Permission(gathers_weights=True)], ids=str)
@given(letters=LETTERS, biases=st.booleans(), gradient=st.booleans())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_equals_brute_force(permission: Permission, letters: str, biases: bool, gradient: bool) -> None:
    check(permission, traced(letters, biases, gradient), hidden=None)


@given(letters=LETTERS, biases=st.booleans())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_regions_of_the_sequence_equal_brute_force(letters: str, biases: bool) -> None:
    captured = traced(letters, biases, gradient=True)
    first = solve(captured, 2)
    task = problem(captured, 2, first.weights, hidden=0, permission=Permission(first.permission.gathers_weights, True))
    found = solve(captured, 2, hidden=0)
    assert tuple(found.cost[i] for i in BYTES_FIRST) == brute_force(task)


@pytest.mark.slow
@given(
    letters=LETTERS,
    biases=st.booleans(),
    gradient=st.booleans(),
    permission=st.builds(Permission, st.booleans(), st.booleans()),
)
@settings(max_examples=many(60), deadline=None)
def test_equals_brute_force_on_many(permission: Permission, letters: str, biases: bool, gradient: bool) -> None:
    check(permission, traced(letters, biases, gradient), hidden=None)


def check(permission: Permission, captured: Capture, hidden: int | None) -> None:
    task = problem(captured, 2, hidden=hidden, permission=permission)
    best = brute_force(task)
    assert best, "everything whole is always possible"
    try:
        assert solve(captured, 2, permission=permission).cost == best
    except BadInput:
        pytest.fail("brute force found a way")
