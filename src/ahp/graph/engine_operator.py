"""One operator for attention that knows sliding windows and sinks, under a name that transformers finds (``graph.engine_attention``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ahp.graph.models import ENGINE


@contextmanager
def known_to_transformers() -> Iterator[None]:
    """transformers finds such an attention under the name ``ENGINE``; models that are built in here only run in here."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[ENGINE] = _attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[ENGINE]


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """Causal attention [batch, heads, tokens, width] in one operator. A window of w tokens gets the first 2 w keys: causal attention counts half of
    the scores, so that each token has w."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if sliding_window is not None and 2 * sliding_window < key.shape[2]:
        key, value = key[:, :, : 2 * sliding_window], value[:, :, : 2 * sliding_window]
    output, _weights = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
    return output, None
