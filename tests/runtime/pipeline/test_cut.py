"""Stages of a model whose forward asks for more of its modules than what they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.blocks import find_blocks
from ahp.graph.outline import outline
from ahp.plan import Plan, validated
from ahp.runtime.limits import refuse_model
from ahp.runtime.pipeline.cut import cut
from tests.runtime.models import JOB, Block, Custom, batch


class Asking(Custom):
    """Brings its tokens to where the table is, as Llama 4 does."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids.to(self.tokens.weight.device))


def test_a_later_stage_has_a_weight_where_the_model_asks_its_embedding_for_one() -> None:
    torch.manual_seed(0)
    model, ids = Asking(layers=2), batch(0)["input_ids"]
    found = outline(model, batch_size=len(ids), sequence_length=ids.shape[1])
    first, last = (cut(model, found, layers, torch.float32) for layers in (range(1), range(1, 2)))
    assert torch.equal(last(first(ids, input_ids=ids), input_ids=ids), model(ids))
    for names in (last.state_dict(), dict(last.named_parameters()), dict(last.named_buffers())):
        assert not [name for name in names if "tokens" in name], "it would be filled, summed and saved"
    assert last.to("meta").model.tokens.weight.device.type == "meta"


class Scaling(Custom):
    """Scales its embeddings in place, as CTRL does."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        x *= 5.0
        return self.head(self.norm(self.blocks(x)))


class FunctionAsHead(Custom):
    """Its logits are a product with the embedding's weight, which no module makes (DeBERTa's newer head)."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(self.tokens(input_ids))) @ self.tokens.weight.T


class ThreeAnswers(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return super().forward(x), None, None


class OfThreeAnswers(Custom):
    """Its blocks return more than two things, as RWKV's."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=layers)
        self.blocks = nn.ModuleList(ThreeAnswers(32, 4) for _ in range(layers))  # type: ignore[assignment]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x, _, _ = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("kind", [Scaling, FunctionAsHead, OfThreeAnswers])
def test_stages_compute_what_the_model_does(kind: type[Custom]) -> None:
    torch.manual_seed(0)
    model, ids = kind(layers=3), batch(0)["input_ids"]
    found = outline(model, batch_size=len(ids), sequence_length=ids.shape[1])
    first, middle, last = (cut(model, found, range(i, i + 1), torch.float32) for i in range(3))
    assert not any("tokens" in name for name, _ in middle.named_parameters()), "only the last stage may need it"
    assert torch.equal(last(middle(first(ids, input_ids=ids), input_ids=ids), input_ids=ids), model(ids))


class Between(Custom):
    """Does something of its own between its blocks."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = 2 * block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"pipeline_parallel_degree": 2}, r"pipeline_parallel_degree = 2: .* cannot be cut into stages \(valid: 1\)"),
        (
            {"tensor_parallel_degree": 2, "enable_sequence_parallel": True},
            r"enable_sequence_parallel = True: .* a part of the sequence \(valid: False\)",
        ),
    ],
    ids=["pipeline", "sequence"],
)
def test_a_model_that_computes_between_its_blocks_is_refused_with_key_and_value(
    layout: dict[str, Any], words: str
) -> None:
    model = Between(layers=2)
    found = outline(model, batch_size=8, sequence_length=16)
    with pytest.raises(BadInput, match=words):
        refuse_model(model, find_blocks(model), found, validated(Plan, {"job": JOB, "parallelism": layout}, "plan"))
