"""Embedding and head are units of their own: when they are gathered and sent, and where they cannot be apart."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ahp.graph.outline import outline
from ahp.runtime.shard.ends import ends_of, units_of
from tests.runtime.models import BUILDERS, JOB, SEQUENCE, VOCABULARY, NormedRows, batch
from tests.runtime.workers import Pool

WIDTH = 32
END = VOCABULARY * WIDTH
"""Elements of the embedding, and of the head."""


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama", ("model.embed_tokens", "lm_head")),
        ("gpt2", ("transformer.wte", "lm_head")),
        ("custom", ("tokens", "head")),
        ("biased", None),  # the head is a function, which reads the embedding's weight
    ],
)
def test_ends_are_found(model: str, expected: tuple[str, str] | None) -> None:
    module = BUILDERS[model]()
    found = outline(module, batch_size=1, sequence_length=SEQUENCE)
    assert ends_of(module, found) == expected
    if hasattr(module, "get_output_embeddings"):
        assert ends_of(module, None) == expected
    else:
        assert ends_of(module, None) is None


def test_an_embedding_with_a_norm_inside_is_no_unit() -> None:
    """Its backward reads the norm's weight, and FSDP2 gathers an embedding for its forward alone: freed memory would be read."""
    module = BUILDERS["llama"]()
    module.set_input_embeddings(NormedRows(VOCABULARY, WIDTH))
    assert ends_of(module, None) is None
    assert ends_of(module, outline(module, batch_size=1, sequence_length=SEQUENCE)) is None


def test_tied_weights_are_no_units() -> None:
    assert units_of(BUILDERS["gpt2"](), ("transformer.wte", "lm_head")) == (None, None)
    llama = BUILDERS["llama"]()
    assert units_of(llama, ("model.embed_tokens", "lm_head")) == (llama.model.embed_tokens, llama.lm_head)
    llama.lm_head = nn.Identity()  # as on a stage that is not the last
    assert units_of(llama, ("model.embed_tokens", "lm_head")) == (llama.model.embed_tokens, None)


def sent(rank: int, world: int, zero_stage: int, engine: dict[str, Any]) -> list[tuple[str, int]]:
    """Collectives of FSDP2 in one step of two micro-batches, with the elements that they gather or reduce."""
    from ahp.runtime.parallel import parallelize

    layout = {"data_parallel_shard_degree": 2, "zero_stage": zero_stage, "micro_batch_size": 2}
    parallel = parallelize(BUILDERS["llama"](), {"job": JOB, "parallelism": layout, "engine": engine})
    parallel.step(parallel.shard(batch(0)))
    with Collectives() as collectives:
        parallel.step(parallel.shard(batch(1)))
    return collectives.found


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "c10d::_allgather_base_":
            self.found.append(("gather", args[0].numel()))
        if name == "c10d::_reduce_scatter_base_":
            self.found.append(("reduce", args[1].numel()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", [{}, pytest.param({"loss_chunk_tokens": 8}, marks=pytest.mark.slow)], ids=str)
def test_the_head_comes_last_and_is_sent_first(pool: Pool, engine: dict[str, Any]) -> None:
    """Also where the loss is computed in chunks: once around all chunks."""
    found = pool.run(sent, 2, 3, engine)[0]
    half = found[: len(found) // 2]
    assert found == half * 2, "every micro-batch sends the same"
    gathers, reduces = ([size for kind, size in half if kind == wanted] for wanted in ("gather", "reduce"))
    blocks = set(gathers) - {END, WIDTH}
    assert len(blocks) == 1
    (block,) = blocks
    # The root, which has the last norm alone, the embedding, five blocks, the head; in backward blocks alone.
    assert gathers == [WIDTH, END, *[block] * 5, END, *[block] * 5]
    assert reduces[:6] == [END, *[block] * 5]
    assert sorted(reduces[6:]) == [WIDTH, END]


def test_weights_that_stay_are_gathered_once_a_step(pool: Pool) -> None:
    found = pool.run(sent, 2, 2, {})[0]
    assert [size for kind, size in found if kind == "gather"].count(END) == 2
    assert [size for kind, size in found if kind == "reduce"].count(END) == 4
