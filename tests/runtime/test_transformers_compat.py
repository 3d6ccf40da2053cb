"""What AHP reaches into transformers for."""

from __future__ import annotations

import sys

import pytest
import torch

from ahp.graph.call import model_arguments
from ahp.runtime.pipeline.cut import Stage
from ahp.runtime.transformers_compat import MASKING, consecutive_positions
from tests.runtime.looks import Looks
from tests.runtime.models import BUILDERS, batch


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_no_model_looks_at_positions_that_it_made_itself(model: str) -> None:
    module, ids = BUILDERS[model]().eval(), batch(0)["input_ids"]
    args, kwargs = model_arguments(module, ids)
    with torch.no_grad():
        with Looks() as plain:
            expected = module(*args, **kwargs).logits
        with Looks() as ours:
            got = Stage(module, None)(ids, input_ids=ids)
    assert plain.count > 0, "transformers no longer looks: consecutive_positions can go"
    assert ours.count == 0
    assert torch.equal(got, expected)


def test_what_was_there_is_put_back() -> None:
    BUILDERS["llama"]()
    module = sys.modules[MASKING]
    look = module.find_packed_sequence_indices

    def fail() -> None:
        with consecutive_positions():
            assert module.find_packed_sequence_indices(torch.zeros(1, 2)) is None
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert module.find_packed_sequence_indices is look
