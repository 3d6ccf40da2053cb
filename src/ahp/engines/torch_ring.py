"""torch's own context parallelism (``torch.distributed.tensor.experimental``), which torchtitan and accelerate use."""

from __future__ import annotations

from ahp.engines.traits import ContextTraits


def torch_ring(*, compiled: bool, repeats_keys: bool = False) -> ContextTraits:
    """How context ranks share tokens: one all-gather of keys and values (``_AllGatherRotater``, the default), a round for each rank, and gradients that go round.

    torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py, lines 186, 299 and 506 to 652; pytorch 03fcbc25c756 of late 2024,
    distributed/_tensor/experimental/attention.py, is alike. All sums are in fp32 (``convert_to_f32``). A compiled block waits for each collective where
    it starts (``_functional_collectives.py``, line 1402); an eager one waits later, and is priced alike.

    Eager, a round's results are joined by a cast (6 bytes an element), a difference (12), a product with a share of the softmax (8) and a sum (12). Gradients
    are added (10), and those of keys and values copied into one message (8). A compiler makes one kernel of each: a sum in fp32 and what it adds are
    read, and the sum is written. A part of a tensor is replaced by a copy of the whole (``_partial_update``), so that rounds of half the queries or keys are alike.
    """
    return ContextTraits(
        sums_bytes=4, joined_bytes=(10.0, 10.0) if compiled else (38.0, 18.0), repeats_keys=repeats_keys
    )
