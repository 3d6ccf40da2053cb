"""A training loop of the user's own: whatever its random numbers are, ranks that share a weight keep it equal."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ahp.runtime.torch_compat import local_tensor
from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB, VOCABULARY, batch
from tests.runtime.test_equality import world_size
from tests.runtime.workers import Pool, free_port, script_as_rank

STEPS = 3
TENSOR = {"tensor_parallel_degree": 2, "micro_batch_size": 4}


def gpt2_with_dropout() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3, attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


BUILDERS["gpt2-dropout"] = gpt2_with_dropout


def train(rank: int, world: int, layout: dict[str, Any], seed: int) -> dict[str, Any]:
    """Steps between which each rank draws numbers of its own; what it holds at the end, and what it drew."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(gpt2_with_dropout(), {"job": JOB, "parallelism": layout})
    torch.manual_seed(seed + rank)
    losses, drawn = [], []
    for step in range(STEPS):
        result = parallel.step(parallel.shard(batch(step)))
        losses.append(result.loss)
        drawn.append(torch.rand(()).item())
        parallel.evaluate([parallel.shard(batch(step))])
        drawn.append(torch.rand(()).item())
        parallel.find_fault(parallel.shard(batch(step)), result)
        drawn.append(torch.rand(()).item())
    splits, axes = parallel.state.layout.splits, ("pp", "dp_shard", "cp", "tp")
    weights = {name: local_tensor(p.detach()).clone() for name, p in parallel.parameters.items()}
    return {
        "losses": losses,
        "drawn": drawn,
        "weights": {(name, *(parallel.mesh.rank(a) for a in axes if a != "tp" or name in splits)): w
                    for name, w in weights.items()},
    }  # fmt: skip


LAYOUTS = {
    "tp": TENSOR,
    "sequence": {**TENSOR, "enable_sequence_parallel": True},
    "replicas": {"data_parallel_replicate_degree": 2},
    "tp-x-pp": {**TENSOR, "pipeline_parallel_degree": 2, "micro_batch_size": 2},
    "tp-x-zero3": {**TENSOR, "data_parallel_shard_degree": 2, "zero_stage": 3, "micro_batch_size": 2},
    "tp-x-replicas": {**TENSOR, "data_parallel_replicate_degree": 2, "micro_batch_size": 2},
    "tp-x-full-recompute": {**TENSOR, "activation_checkpoint": "full"},
}


@pytest.mark.parametrize("layout", cases(LAYOUTS, wide=("tp", "sequence", "tp-x-zero3")))
def test_ranks_with_seeds_of_their_own_keep_shared_weights_equal(pool: Pool, layout: str) -> None:
    results = pool.run(train, world_size(LAYOUTS[layout]), LAYOUTS[layout], 100)
    held: dict[Any, torch.Tensor] = {}
    shared = 0
    for result in results:
        for place, weight in result["weights"].items():
            shared += place in held
            assert torch.equal(held.setdefault(place, weight), weight), f"{place} has come apart"
    assert shared


def test_the_programs_seed_changes_no_step_and_steps_do_not_change_what_it_draws(pool: Pool) -> None:
    one, other = pool.run(train, 2, TENSOR, 100), pool.run(train, 2, TENSOR, 200)
    assert one[0]["losses"] == one[1]["losses"] == other[0]["losses"]
    for rank, result in enumerate(one):
        generator = torch.Generator().manual_seed(100 + rank)
        assert result["drawn"] == [torch.rand((), generator=generator).item() for _ in range(3 * STEPS)]


ROOT = Path(__file__).parents[2]


def own_loop(readme: str) -> str:
    """The script with a loop of the reader's own."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / readme).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (script,) = (block for block in blocks if "ahp.parallelize(" in block)
    return script


def test_both_readmes_have_the_same_script() -> None:
    assert ast.dump(ast.parse(own_loop("README.md"))) == ast.dump(ast.parse(own_loop("README.zh.md")))


def test_the_readmes_script_runs_as_it_stands(pool: Pool, tmp_path: Path) -> None:
    """On workers that are there already; tests/runtime/run/test_gone.py starts some by torchrun."""
    script = tmp_path / "own_loop.py"
    script.write_text(own_loop("README.md"))
    said = pool.run(script_as_rank, 2, tmp_path, free_port(), script, [])
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said[0])]
    assert len(losses) == 10
    assert all(torch.tensor(losses).isfinite())
    assert said[1] == ""
    assert list((tmp_path / "checkpoint").iterdir())
