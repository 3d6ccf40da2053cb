"""The stack of blocks is found in any module, and blocks that compute alike are one kind."""

from __future__ import annotations

from collections import UserDict

import pytest
from torch import nn

from ahp.errors import BadInput
from ahp.graph.blocks import NoBlocks, block_kinds, find_blocks


class Block(nn.Module):
    def __init__(self, index: int, width: int = 4, window: int | None = None) -> None:
        super().__init__()
        self.layer_idx = index
        self.window = window
        self.proj = nn.Linear(width, width)
        self.proj.number = index + 1


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.small = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.inner = nn.ModuleDict({"h": nn.ModuleList(blocks)})


def test_finds_the_largest_list_by_parameters() -> None:
    model = Model([Block(i) for i in range(3)])
    found = find_blocks(model)
    assert found.path == "inner.h"
    assert found.blocks is model.get_submodule(found.path)
    assert len(found) == 3


def test_experts_inside_a_block_do_not_win_over_the_blocks() -> None:
    blocks: list[nn.Module] = []
    for index in range(2):
        block = Block(index)
        block.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])
        blocks.append(block)
    assert find_blocks(Model(blocks)).path == "inner.h"


def test_a_list_of_unlike_parts_is_not_a_stack() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(99, 99), Model([Block(0), Block(1)])])

    assert find_blocks(Parts()).path == "parts.1.inner.h"


def test_no_list_is_an_input_error() -> None:
    with pytest.raises(NoBlocks, match="ModuleList") as caught:
        find_blocks(nn.Linear(2, 2))
    assert isinstance(caught.value, BadInput)


def test_blocks_in_a_dict_are_named_with_what_to_change() -> None:
    blocks = nn.ModuleDict({str(i): Block(i) for i in range(2)})
    with pytest.raises(
        NoBlocks, match=r"\(layers is an nn\.ModuleDict: make it nn\.ModuleList\(layers\.values\(\)\)\)$"
    ):
        find_blocks(nn.ModuleDict({"layers": blocks, "head": nn.Linear(4, 4)}))


def test_a_counter_does_not_make_a_kind() -> None:
    assert block_kinds(nn.ModuleList([Block(i) for i in range(4)])) == (0, 0, 0, 0)


def test_a_counter_that_passes_a_real_size_changes_nothing() -> None:
    """Block 4 has layer_idx 4 and width 4: only the counter is left out of the comparison."""
    assert block_kinds(nn.ModuleList([Block(i, width=4) for i in range(6)])) == (0,) * 6


@pytest.mark.parametrize(
    "blocks",
    [
        [Block(0, width=8), Block(1), Block(2), Block(3)],
        [Block(0, window=16), Block(1), Block(2), Block(3)],
        [nn.Linear(4, 4), Block(1), Block(2), Block(3)],
    ],
    ids=["shape", "attribute", "class"],
)
def test_what_computes_differently_is_another_kind(blocks: list[nn.Module]) -> None:
    assert block_kinds(nn.ModuleList(blocks)) == (0, 1, 1, 1)


def test_true_is_not_one() -> None:
    blocks = [Block(0), Block(1)]
    blocks[0].flag, blocks[1].flag = True, 1
    assert block_kinds(nn.ModuleList(blocks)) == (0, 1)


def test_a_sequence_of_like_modules_is_a_stack_and_a_mixed_one_is_not() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)))

    assert find_blocks(Model()).path == "layers"
    with pytest.raises(NoBlocks):
        find_blocks(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))


def test_a_module_that_knows_its_own_name_is_no_kind_of_its_own() -> None:
    def named(number: int, start: str) -> nn.Module:
        block = nn.Linear(4, 4)
        block.settings = {"target": f"{start}.{number}.mlp"}  # type: ignore[assignment]
        return block

    assert block_kinds(nn.ModuleList(named(number, "model.layers") for number in range(3))) == (0, 0, 0)
    assert block_kinds(nn.ModuleList(named(0, f"of{number}") for number in range(3))) == (0, 1, 2)


def test_objects_of_a_generic_alias_are_alike() -> None:
    """They carry the alias, ``__orig_class__``, whose attributes are another object at each look."""
    blocks = [Block(0), Block(0)]
    for block in blocks:
        block.notes = UserDict[str, int](calls=1)  # type: ignore[assignment]
    assert block_kinds(nn.ModuleList(blocks)) == (0, 0)
    blocks[1].notes = UserDict[str, int](calls=2)
    assert block_kinds(nn.ModuleList(blocks)) == (0, 1)
