"""Which kernel a ring takes on a GPU: what can say how its parts are joined, on the part that is there."""

from __future__ import annotations

import pytest
import torch

from ahp.runtime.sequence.partial_attention import Rule, _takes_flash

WHOLE = Rule(causal=False, mask=None, scale=1.0)


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "takes"),
    [
        ((8, 0), torch.bfloat16, 128, True),
        ((9, 0), torch.float16, 64, True),
        ((7, 5), torch.float16, 64, False),  # FlashAttention-2 has no kernels for it
        ((8, 0), torch.float32, 64, False),
        ((8, 0), torch.bfloat16, 60, False),
        ((8, 0), torch.bfloat16, 264, False),
    ],
)
def test_flash_attention_where_it_exists(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, width: int, takes: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _takes_flash(torch.empty(1, 2, 16, width, dtype=dtype), WHOLE) == takes
