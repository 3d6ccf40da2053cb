"""On every family with a hand-written tensor-parallel plan the slicing moves no more bytes than that plan.

Both are priced by the same dynamic program: the plan by giving it the places of the weights. Where it needs it, the plan
may gather what a column split gives and cut what a row split reads, which its styles do; the slicing may not.
"""

from __future__ import annotations

import pytest

from ahp.errors import BadInput
from ahp.graph.capture import Capture
from ahp.search.slicing.conversion import Permission
from ahp.search.slicing.placement import Placement, R, Split, shape_of
from ahp.search.slicing.solve import SPARING, Slicing, solve
from ahp.search.slicing.words import module_of
from tests.marks import cases
from tests.search.families import families, generic, one_of_each_plan, traced, written_plan

FAST = ("mixtral", "phi3", "deepseek_v2")
COMPARED = {"one of each plan": 45, "all": 96}
"""Families that could be built and traced, of 51 and 104, when this was written."""


def written_places(captured: Capture, plan: dict[str, str]) -> dict[str, Placement]:
    """Where a plan puts the weights of a block; those that it does not name are whole."""
    return {
        name: _place(plan, name, shape_of(node)) for name, node in captured.weight_nodes().items() if shape_of(node)
    }


def _place(plan: dict[str, str], name: str, shape: tuple[int, ...]) -> Placement:
    style = plan.get(module_of(generic(name)), plan.get(generic(name), ""))
    columns = max(len(shape) - 2, 0)
    if style in ("colwise", "colwise_gather_output"):
        return Split(columns, (shape[columns],))
    if style == "packed_colwise":
        return Split(columns, (shape[columns] // 2,) * 2)
    if len(shape) > 1 and style in ("rowwise", "rowwise_split_input"):
        return Split(len(shape) - 1, (shape[-1],))
    if len(shape) > 1 and style == "packed_rowwise":
        return Split(len(shape) - 1, (shape[-1] // 2,) * 2)
    return R


def price(captured: Capture, places: dict[str, Placement]) -> Slicing:
    """What a plan comes to; with gathers and cuts only where it cannot do without."""
    try:
        return solve(captured, 2, places, permission=SPARING)
    except BadInput:
        return solve(captured, 2, places, permission=Permission(gathers_weights=True))


def compare(model_type: str) -> list[tuple[int, int]]:
    """For each kind of block that the plan speaks of: bytes that the slicing moves, and that the plan moves."""
    module, found_outline = traced(model_type)
    plan = written_plan(module.config)
    found = []
    for captured in found_outline.captures:
        if isinstance(captured, BadInput):
            raise captured
        places = written_places(captured, plan)
        split = {name for name, place in places.items() if isinstance(place, Split)}
        if not split:
            continue
        theirs = price(captured, places)
        ours = solve(captured, 2)
        if any(isinstance(place, Split) and name not in split for name, place in ours.weights.items()):
            # The plan leaves something whole that the slicing splits, which takes bytes: what both may split is compared.
            ours = solve(captured, 2, {name: R for name in places if name not in split})
        found.append((ours.cost[2], theirs.cost[2]))
    return found


@pytest.mark.parametrize("model_type", FAST)
def test_moves_no_more_than_the_written_plan(model_type: str) -> None:
    compared = compare(model_type)
    assert compared
    assert all(0 < ours <= theirs for ours, theirs in compared), compared


@pytest.mark.parametrize("which", cases(COMPARED, wide=COMPARED))
def test_moves_no_more_than_any_written_plan(capsys: pytest.CaptureFixture[str], which: str) -> None:
    left_out, compared, worse = {}, {}, {}
    for model_type in families() if which == "all" else one_of_each_plan():
        try:
            bytes_moved = compare(model_type)
        except Exception as reason:  # what a family cannot be built or traced for is told below
            left_out[model_type] = f"{type(reason).__name__}: {str(reason).strip().splitlines()[-1][:120]}"
            continue
        if bytes_moved:
            compared[model_type] = bytes_moved
        else:
            left_out[model_type] = "the plan names nothing of its blocks"
        if any(ours > theirs for ours, theirs in bytes_moved):
            worse[model_type] = bytes_moved
    with capsys.disabled():
        fewer = sum(any(ours < theirs for ours, theirs in pairs) for pairs in compared.values())
        print(f"\n{len(compared)} families compared; fewer bytes than the plan on {fewer}; left out:")
        for model_type, reason in left_out.items():
            print(f"  {model_type}: {reason}")
    assert not worse
    assert len(compared) >= COMPARED[which]
