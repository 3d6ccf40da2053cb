"""Who drops the same elements, and who others: read off hidden states that are nothing but the masks of dropout.

Random numbers are alike where a tensor is whole on several ranks, and differ wherever elements, tokens, rows, blocks, micro-batches
or steps do.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.runtime.models import BUILDERS, JOB, SEQUENCE, VOCABULARY, batch
from tests.runtime.test_equality import world_size
from tests.runtime.workers import Pool

WIDTH, BLOCKS, STEPS = 32, 2, 2
TENSOR = {"tensor_parallel_degree": 2, "micro_batch_size": 2}
SEQUENCES = {**TENSOR, "enable_sequence_parallel": True}
CONTEXT = {"context_parallel_degree": 2, "context_parallel_method": "all-to-all"}


class Dropping(nn.Module):
    """Adds to its input, as digits in base 2, what the dropouts kept of ones: one of a part under tensor parallelism, one of the
    whole. ``scale``: the value of its first digit."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.bare = nn.Parameter(torch.ones(WIDTH))
        with torch.no_grad():
            self.up.weight.zero_()
            self.up.bias.fill_(1.0)
            self.down.weight.copy_(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of_part = self.down(F.dropout(self.up(x), 0.5, self.training))
        of_whole = F.dropout(0 * x + self.bare, 0.5, self.training)
        return x + (of_part + 2 * of_whole) * (self.scale / 2)


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Dropping(4**number) for number in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.zeros_(self.tokens.weight)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BUILDERS["digits"] = Digits


def draw(rank: int, world: int, layout: dict[str, Any]) -> dict[str, Any]:
    """Of each step, and of the last one again: hidden states of each micro-batch, where the rank has the head; and its place."""
    from ahp.runtime.parallel import parallelize

    job = {**JOB, "optimizer": {**JOB["optimizer"], "learning_rate": 0.0, "weight_decay": 0.0}}
    torch.manual_seed(0)  # ranks start from the same weights
    parallel = parallelize(Digits(), {"job": job, "parallelism": layout})
    seen: list[torch.Tensor] = []
    for stage in parallel.stages.values():
        if isinstance(head := stage.model.get_submodule("head"), nn.Linear):
            head.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    steps = []
    for step in [*range(STEPS), STEPS - 1]:
        parallel.state.num_steps_done = step
        parallel.step(parallel.shard(batch(step)))
        steps.append(torch.stack(seen) if seen else None)
        seen.clear()
    return {"steps": steps, "tokens": parallel.mesh.token_rank, "tensor": parallel.mesh.rank("tp")}


def masks(hidden: torch.Tensor) -> torch.Tensor:
    """[...] -> bool [2 x blocks, ...]: of each block what the dropout of a part kept, then that of the whole."""
    digits = hidden.round().long()
    assert torch.equal(digits.float(), hidden), "something else than masks was added up"
    return torch.stack([(digits >> place) % 2 == 1 for place in range(2 * BLOCKS)])


def assert_unlike(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Independent masks of one half differ in one half of their elements, here to five standard deviations."""
    share, bound = (a != b).float().mean().item(), 2.5 / a.numel() ** 0.5
    assert abs(share - 0.5) < bound, f"{what}: {share:.3f} of the elements differ"


def check(results: list[dict[str, Any]]) -> None:
    """All but what depends on how a layout cuts a tensor."""
    results = [result for result in results if result["steps"][0] is not None]
    for result in results:
        first, second, again = (masks(hidden) for hidden in result["steps"])
        assert torch.equal(second, again), "a step that is done again draws other numbers"
        assert_unlike(first, second, "steps")
        assert_unlike(first, torch.ones_like(first), "shares that are dropped")
        for a, b in combinations(first, 2):
            assert_unlike(a, b, "blocks, and dropouts of a block")
        for a, b in combinations(first.unbind(1), 2):
            assert_unlike(a, b, "micro-batches")
    for a, b in combinations(results, 2):
        one, other = (masks(result["steps"][0]) for result in (a, b))
        if a["tokens"] == b["tokens"]:
            assert torch.equal(one, other), "ranks that hold the same tokens whole drop others"
        else:
            assert_unlike(one, other, "ranks with tokens of their own")


@pytest.mark.parametrize("layout", [TENSOR, SEQUENCES], ids=["tp", "sequence"])
def test_parts_of_a_tensor_are_dropped_by_numbers_of_their_own(pool: Pool, layout: dict[str, Any]) -> None:
    results = pool.run(draw, 2, layout)
    check(results)
    found = masks(results[0]["steps"][0])
    of_part, of_whole = found[0::2], found[1::2]
    assert_unlike(of_part[..., : WIDTH // 2], of_part[..., WIDTH // 2 :], "columns of two ranks")
    assert_unlike(of_whole[..., : SEQUENCE // 2, :], of_whole[..., SEQUENCE // 2 :, :], "tokens of two ranks")


@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "micro_batch_size": 1},
        {"data_parallel_shard_degree": 2, "pipeline_parallel_degree": 2, "activation_checkpoint": "full", "micro_batch_size": 2},
        {**SEQUENCES, **CONTEXT, "data_parallel_shard_degree": 2},
    ],
    ids=["data", "pipeline", "data-x-context-x-sequence"],
)  # fmt: skip
def test_ranks_micro_batches_stages_and_steps_drop_other_elements(pool: Pool, layout: dict[str, Any]) -> None:
    check(pool.run(draw, world_size(layout), layout))
