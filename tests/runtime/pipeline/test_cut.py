"""Stages of a model whose forward asks for more of its modules than what they return."""

from __future__ import annotations

import torch

from ahp.graph.outline import outline
from ahp.runtime.pipeline.cut import cut
from tests.runtime.models import Custom, batch


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
    assert "model.tokens.weight" not in last.state_dict()
