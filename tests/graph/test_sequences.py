"""Which models mix the sequences of a micro-batch, as found without data, beside what they compute on data."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ahp.graph.call import logits_of
from ahp.graph.models import build_model
from ahp.graph.trace import analyze
from tests.marks import cases

SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


class Centred(nn.Module):
    """``over``: the dims over which the hidden states are centred, or, where ``used`` is false, only looked at."""

    def __init__(self, over: tuple[int, ...] = (0,), *, used: bool = True) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(97, 32), nn.Linear(32, 97)
        self.over, self.used = over, used

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        mean = x.mean(self.over, keepdim=True)
        return self.head(x - mean) if self.used else self.head(x)


class Reshaped(nn.Module):
    """Rows of all tokens, sequences behind the tokens, and heads beside the sequences, each put back as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(97, 32), nn.Linear(32, 97)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        B, S = input_ids.shape
        x = self.tokens(input_ids).view(B * S, 32).relu()
        x = x.view(B, S, 32).transpose(0, 1).reshape(S * B, 32).sigmoid().view(S, B, 32).transpose(0, 1)
        x = x.reshape(B, S, 4, 8).transpose(1, 2).reshape(B * 4, S, 8).softmax(1).view(B, 4, S, 8).transpose(1, 2)
        return self.head(x.reshape(B, S, 32))


MODELS: dict[str, Any] = {
    "a router that reads other tokens": {"model_type": "doge", **SIZE, "is_moe": True, "num_experts": 16, "num_experts_per_tok": 4},
    "the same family without experts": {"model_type": "doge", **SIZE},
    "experts": {"model_type": "mixtral", **SIZE, "num_local_experts": 4},
    "a mean over sequences": Centred(),
    "a mean over all": Centred((0, 1)),
    "a mean over tokens": Centred((1,)),
    "a mean that is not used": Centred(used=False),
    "reshapes": Reshaped(),
}  # fmt: skip


# What the test of the warning has too is slow here, beside the same family without experts.
@pytest.mark.parametrize(
    "name",
    cases(MODELS, fast=[name for name, model in MODELS.items() if isinstance(model, nn.Module) or name == "experts"]),
)
@pytest.mark.filterwarnings("ignore:.*mixes the sequences")
def test_a_model_mixes_sequences_as_it_does_on_data(name: str) -> None:
    torch.manual_seed(0)
    module = build_model(MODELS[name], device="cpu").eval()
    rows = torch.randint(97, (3, 8))
    with torch.no_grad():
        together, alone = logits_of(module(rows)), torch.cat([logits_of(module(row[None])) for row in rows])
    mixed = not torch.allclose(together, alone, atol=1e-5)
    assert mixed == bool(_told(MODELS[name]))
    assert mixed == (name in ("a router that reads other tokens", "a mean over sequences", "a mean over all"))


class Often(nn.Module):
    """Gradients of a token's row are divided by how often the token occurs among those that are looked up together."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(97, 32, scale_grad_by_freq=True), nn.Linear(32, 97)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(input_ids))


def test_gradients_that_depend_on_the_other_sequences_are_told() -> None:
    torch.manual_seed(0)
    module, rows = Often(), torch.arange(8).repeat(3, 1)
    together = torch.autograd.grad(module(rows).sum(), module.tokens.weight)[0]
    alone = sum(torch.autograd.grad(module(row[None]).sum(), module.tokens.weight)[0] for row in rows)
    torch.testing.assert_close(alone, 3 * together)
    [told] = _told(module)
    assert told.startswith(
        "embedding of tokens mixes the sequences of a micro-batch, so the loss depends on micro_batch_size"
    )


@pytest.mark.slow
def test_the_warning_names_the_operator_its_module_and_the_key() -> None:
    [told] = _told(MODELS["a router that reads other tokens"])
    assert told.startswith("view of mlp mixes the sequences of a micro-batch, so the loss depends on micro_batch_size")


def _told(model: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        analyze(model, {"sequence_length": 8, "precision": "fp32"})
    return [str(one.message) for one in caught if "mixes" in str(one.message)]
