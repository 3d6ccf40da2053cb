"""The outline tells what is before, in and after the blocks of models that it has never heard of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.blocks import NoBlocks
from ahp.graph.call import logits_of
from ahp.graph.capture import Capture
from ahp.graph.fake_mode import as_on_data
from ahp.graph.outline import outline, why_uncuttable
from tests.runtime.models import Custom, NormedRows, custom, gpt2, llama


def test_llama() -> None:
    found = outline(llama(), batch_size=3, sequence_length=8)
    assert found.before == ("model.embed_tokens",)
    assert found.after == ("model.norm", "lm_head")
    assert (found.token_embedding, found.head) == ("model.embed_tokens", "lm_head")
    assert found.hidden.shape == (3, 8, 32)
    assert found.logits.shape == (3, 8, 128)
    assert found.kinds == (0, 0, 0, 0, 0)
    assert isinstance(found.captures[0], Capture)


def test_dtype_is_that_of_the_computation() -> None:
    assert outline(llama(), batch_size=1, sequence_length=8, dtype=torch.bfloat16).hidden.dtype is torch.bfloat16


def test_gpt2_keeps_its_positions_apart_from_its_tokens() -> None:
    found = outline(gpt2(), batch_size=2, sequence_length=8)
    assert found.before == ("transformer.wte", "transformer.wpe")
    assert found.token_embedding == "transformer.wte"


def test_the_module_itself_counts_when_it_holds_a_table() -> None:
    module = custom()
    found = outline(module, batch_size=2, sequence_length=8)
    assert found.before == ("tokens",)
    assert found.after == ("norm", "head", "")
    assert all(not p.grad and p.device.type == "cpu" for p in module.parameters())


def uncuttable(module: nn.Module) -> str | None:
    """As both ways to ask say."""
    found = outline(module, batch_size=1, sequence_length=4).uncuttable
    assert why_uncuttable(module, sequence_length=4) == found
    return found


class Tied(nn.Module):
    """The logits come from a function, not a module: nothing may be split by vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.tokens.weight.T


def test_a_functional_head_is_no_module() -> None:
    assert outline(Tied(), batch_size=1, sequence_length=4).head is None


def test_refuses_what_it_cannot_run() -> None:
    with pytest.raises(NoBlocks):
        outline(nn.Linear(2, 2), batch_size=1, sequence_length=4)
    broken = Tied()
    broken.tokens = nn.Embedding(16, 9)
    with pytest.raises(BadInput, match="fails on fake tensors"):
        outline(broken, batch_size=1, sequence_length=4)
    with pytest.raises(BadInput, match="logits"):
        logits_of(object())


class Between(Tied):
    """The model scales the hidden states between its blocks."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x) * 0.5
        return x @ self.tokens.weight.T


def test_code_between_blocks_is_seen() -> None:
    assert uncuttable(Tied()) is None
    assert "between blocks 0 and 1" in str(uncuttable(Between()))


class InOrder(Tied):
    """Its blocks run in the order of these numbers."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order, self.blocks = order, nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for number in self.order:
            x = self.blocks[number](x)
        return x @ self.tokens.weight.T


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, 1, 2, 0, 1, 2), "runs block 0 of blocks 2 times"),
        ((0, 1, 2, 2, 2), "runs block 2 of blocks 3 times"),
        ((0, 2), "runs block 1 of blocks never"),
        ((0, 2, 1), "runs block 2 of blocks before block 1"),
    ],
)
def test_blocks_that_do_not_run_once_each_in_their_order_are_seen(order: tuple[int, ...], words: str) -> None:
    """A cut at the first and the last block would leave runs out: a curve of another model, or ranks that wait for each other."""
    assert words in str(uncuttable(InOrder(*order)))


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return x * self.weight + more


class Skips(nn.Module):
    """Each block is given a trainable tensor: the same for all, or what the block before was given."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.tokens, self.more = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Adds() for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, more = self.tokens(input_ids), self.more(input_ids)
        for block in self.blocks:
            before, x = x, block(x, more)
            if self.skip:
                more = before
        return x @ self.tokens.weight.T


@pytest.mark.slow
def test_trainable_inputs_beside_the_hidden_states_are_seen() -> None:
    same = outline(Skips(skip=False), batch_size=1, sequence_length=4)
    assert same.shares_inputs
    assert same.uncuttable is None
    assert "skip connection" in str(uncuttable(Skips(skip=True)))
    assert not outline(llama(), batch_size=1, sequence_length=4).shares_inputs


class NormedHead(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.norm = nn.LayerNorm(sizes[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def test_ends_that_hold_more_than_rows_of_the_vocabulary_are_not_cut_by_it() -> None:
    module = custom()
    module.tokens, module.head = NormedRows(128, 32), NormedHead(32, 128)
    found = outline(module, batch_size=2, sequence_length=8)
    assert (found.token_embedding, found.head) == (None, None)


class Tabled(Custom):
    """Its positions are a plain tensor, as TrOCR's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(64, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.table[: input_ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def test_a_tensor_that_is_neither_parameter_nor_buffer() -> None:
    assert outline(Tabled(), batch_size=2, sequence_length=8).token_embedding == "tokens"


class Changing(nn.Module):
    """Takes other modules into its blocks at its first sequence, as BigBird does where it is short."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(128, 32), nn.Linear(32, 128)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            block[0] = nn.Linear(32, 32)
            x = block(x)
        return self.head(x)


def test_a_model_that_changes_its_blocks_is_refused() -> None:
    with pytest.raises(BadInput, match="Changing: its forward puts other modules into the blocks of blocks"):
        outline(Changing(), batch_size=2, sequence_length=8)
    reason = why_uncuttable(Changing(), sequence_length=8)
    assert reason is not None
    assert "puts other modules" in reason


class Chosen(nn.Module):
    """Also returns what the next block reads, without a gradient: chosen tokens, as HY-V4's."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = x.argmax(dim=-1, keepdim=True) if chosen is None else chosen
        return self.mix(x) + x.gather(-1, chosen), chosen


class HandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(128, 32), nn.Linear(32, 128)
        self.blocks = nn.ModuleList(Chosen() for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, chosen = self.tokens(input_ids), None
        for block in self.blocks:
            x, chosen = block(x, chosen)
        return self.head(x)


def test_blocks_that_hand_on_more_than_hidden_states() -> None:
    expected = "block 2 of blocks is given more of an earlier block than its hidden states"
    assert outline(HandsOn(), batch_size=2, sequence_length=8).uncuttable == expected
    assert why_uncuttable(HandsOn(), sequence_length=8) == expected


def test_a_module_may_be_of_a_class_whose_file_is_no_module() -> None:
    """Such as one that ``exec`` made: it ended in a KeyError where caches beside it were looked for."""
    kind = type("Own", (nn.Linear,), {"__module__": "nowhere"})
    with as_on_data(kind(2, 2)):
        pass
