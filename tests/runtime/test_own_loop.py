"""A training loop of the user's own: whatever its random numbers are, ranks that share a weight keep it equal."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ahp.errors import BadInput
from ahp.runtime.parameters import mark_taken, refuse_parameters
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


def nothing_scored(
    rank: int, world: int, layout: dict[str, Any], name: str, precision: str, between: bool
) -> list[tuple[float, float]]:
    """Two steps; ``between`` them one whose batch has no scored token."""
    from ahp.runtime.parallel import parallelize

    job = {**JOB, "precision": precision, "optimizer": {**JOB["optimizer"], "name": name}}
    parallel = parallelize(BUILDERS["llama"](), {"job": job, "parallelism": layout})
    parallel.halts_at_fault = True
    results = [parallel.step(parallel.shard(batch(0)))]
    if between:
        part = parallel.shard(batch(1))
        result = parallel.step({**part, "labels": torch.full_like(part["labels"], -100)})
        assert result.loss != result.loss
        assert (result.grad_norm, result.skipped, result.failed) == (0.0, True, False)
    results.append(parallel.step(parallel.shard(batch(2))))
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize(
    ("layout", "name", "precision"),
    cases(
        [
            ("zero3", "adamw", "fp32"),
            ("pipe", "muon", "fp32"),
            ("tp", "adamw", "fp16"),
            ("replicas", "adamw8bit", "bf16"),
        ],
        fast=[("zero3", "adamw", "fp32"), ("pipe", "muon", "fp32")],
    ),
)
def test_a_batch_without_a_scored_token_updates_nothing(pool: Pool, layout: str, name: str, precision: str) -> None:
    """No decay, and no moment that goes on: momentum alone would move the weights."""
    parallelism = {**PIECES, "tp": TENSOR, "pipe": PIPE}[layout]
    expected, found = (pool.run(nothing_scored, 2, parallelism, name, precision, between) for between in (False, True))
    assert found == expected


def in_16_bits(
    rank: int, world: int, layout: dict[str, Any], precision: str, dtype: torch.dtype
) -> list[tuple[float, float]]:
    """Steps of a model whose weights were rounded to ``dtype``, and are held in it where that is not fp32."""
    from ahp.runtime.parallel import parallelize

    module = BUILDERS["llama"]().to(torch.bfloat16).to(dtype)
    parallel = parallelize(module, {"job": {**JOB, "precision": precision}, "parallelism": layout})
    assert {p.dtype for p in parallel.parameters.values()} == {torch.float32}
    results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    return [(result.loss, result.grad_norm) for result in results]


PIECES = {
    "one": {"micro_batch_size": 2},
    "replicas": {"data_parallel_replicate_degree": 2, "micro_batch_size": 1},
    "zero1": {"data_parallel_shard_degree": 2, "zero_stage": 1, "micro_batch_size": 1},
    "zero2": {"data_parallel_shard_degree": 2, "zero_stage": 2, "micro_batch_size": 1},
    "zero3": {"data_parallel_shard_degree": 2, "zero_stage": 3, "micro_batch_size": 1},
    "context": {"context_parallel_degree": 2, "zero_stage": 0, "micro_batch_size": 2},
}
PIPE = {"pipeline_parallel_degree": 2, "micro_batch_size": 2}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["one", "replicas", "pipe"])
def test_a_model_in_16_bits_has_master_weights_in_fp32(pool: Pool, name: str, precision: str) -> None:
    layout = PIPE if name == "pipe" else PIECES[name]
    found = [
        pool.run(in_16_bits, world_size(layout), layout, precision, dtype)[0]
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert found[0] == found[1]


def after_a_fault(
    rank: int, world: int, layout: dict[str, Any], precision: str, fault: str
) -> list[tuple[float, float, float]]:
    """Two steps and a loss on held-out text after one whose last micro-batch raised in its forward, or in its backward, and after a look
    for a fault. Weights change in place after each."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS["custom"](), {"job": {**JOB, "precision": precision}, "parallelism": layout})
    held_out = parallel.shard(batch(9))
    part = {key: value.clone() for key, value in parallel.shard(batch(7)).items()}
    if fault == "forward":
        part["input_ids"][-1, -1] = VOCABULARY
        for call in (parallel.step, lambda given: parallel.evaluate([given])):
            with pytest.raises(IndexError):
                call(part)
    elif fault == "backward":
        left = [3]

        def count(gradient: torch.Tensor) -> None:
            left[0] -= 1
            if not left[0]:
                raise ValueError("a fault")

        norm = parallel.stages[0].model.norm
        hook = norm.register_forward_hook(lambda module, given, output: output.register_hook(count) and None)
        with pytest.raises((ValueError, RuntimeError)):
            parallel.step(part)
        hook.remove()
    elif fault == "own":
        name, parameter = next(iter(parallel.parameters.items()))
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(
            BadInput, match=f"step: {re.escape(name)} had a gradient already, from a backward pass outside of step"
        ):
            parallel.step(part)
    halve(parallel)
    evaluated = parallel.evaluate([held_out])
    results = [parallel.step(held_out)]
    if fault:
        parallel.find_fault(held_out, results[0])
    halve(parallel)
    results.append(parallel.step(parallel.shard(batch(1))))
    return [(result.loss, result.grad_norm, evaluated) for result in results]


@torch.no_grad()
def halve(parallel: Any) -> None:
    for parameter in parallel.parameters.values():
        parameter.mul_(0.5)


goes_on = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="before torch 2.13 a step after one that raised is refused"
)


@goes_on
@pytest.mark.parametrize(
    ("name", "precision"),
    # In 16 bits under replicas and ZeRO-3, between which the others are.
    cases(
        [(name, precision) for name in PIECES for precision in ("fp32", "bf16")],
        wide=[(name, "bf16") for name in ("one", "zero1", "zero2", "context")],
    ),
)
def test_a_step_that_raised_leaves_nothing_to_the_next(pool: Pool, name: str, precision: str) -> None:
    """Whose caller caught what it raised: memory that ran out, Ctrl-C in a notebook."""
    layout = PIECES[name]
    none, *others = (
        pool.run(after_a_fault, world_size(layout), layout, precision, fault)[0]
        for fault in ("", "forward", "backward", "own")
    )
    assert others == [none] * 3


def after_a_fault_in_a_pipeline(rank: int, world: int) -> None:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS["custom"](), {"job": JOB, "parallelism": PIPE})
    part = parallel.shard(batch(0))

    def fails(*unused: object) -> None:
        raise ValueError("a fault")

    name, parameter = next(iter(parallel.parameters.items()))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(BadInput, match=f"step: {re.escape(name)} had a gradient already"):
        parallel.step(part)
    parallel.step(part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel.runner, "run", fails)
        with pytest.raises(ValueError, match="a fault"):
            parallel.step(part)
    with pytest.raises(BadInput, match="raised in the middle of a pipeline"):
        parallel.step(part)


@goes_on
def test_a_pipeline_does_not_go_on_after_a_step_that_raised(pool: Pool) -> None:
    pool.run(after_a_fault_in_a_pipeline, 2)


def other_kinds(rank: int, world: int) -> None:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS["llama"](), {"job": JOB})
    part = parallel.shard(batch(0))
    others = {
        "torch.int32": part["input_ids"].int(),
        "torch.float32": part["labels"].float(),
        "list": part["labels"].tolist(),
    }
    for (kind, value), key in zip(others.items(), ("input_ids", "labels", "labels"), strict=True):
        with pytest.raises(BadInput, match=re.escape(f"part['{key}'] = '{kind}': must be a tensor of int64")):
            parallel.step({**part, key: value})
    with pytest.raises(BadInput, match="global_batch = 'Tensor': must be a dict of input_ids and labels"):
        parallel.shard(part["input_ids"])
    with pytest.raises(BadInput, match=re.escape("global_batch = ['x', 'y']: must be a dict of input_ids and labels")):
        parallel.shard({"x": part["input_ids"], "y": part["labels"]})
    with pytest.raises(BadInput, match=re.escape("global_batch['labels'] = 'ndarray': must be a tensor of int64")):
        parallel.shard({**part, "labels": part["labels"].numpy()})
    frozen = parallelize(BUILDERS["llama"]().requires_grad_(False), {"job": JOB})
    trained = parallelize(BUILDERS["llama"](), {"job": JOB})
    for parameter in trained.parameters.values():  # frozen later
        parameter.requires_grad_(False)
    for each in (frozen, trained):
        with pytest.raises(BadInput, match="module: none of its parameters has requires_grad"):
            each.step(part)


def test_a_part_of_another_kind_is_refused(pool: Pool) -> None:
    pool.run(other_kinds, 1)


def outside(rank: int, world: int, layout: dict[str, Any], key: str, value: int) -> str:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS["llama"](), {"job": JOB, "parallelism": layout})
    part = {name: rows.clone() for name, rows in parallel.shard(batch(0)).items()}
    part[key][0, -2] = value
    with pytest.raises(IndexError) as raised:
        parallel.step(part)
    return str(raised.value)


@pytest.mark.parametrize("value", [-1, VOCABULARY])
@pytest.mark.parametrize("key", ["input_ids", "labels"])
def test_a_token_outside_of_a_divided_vocabulary_is_refused_as_on_one_process(pool: Pool, key: str, value: int) -> None:
    said = pool.run(outside, 2, TENSOR, key, value)
    assert all(f"= {value}: " in each and f"valid: 0 to {VOCABULARY - 1}" in each for each in said)
    assert pool.run(outside, 1, {}, key, value)


def thaw(rank: int, world: int, layout: dict[str, Any], before: str) -> list[tuple[float, float]]:
    """Steps of which the second leaves out some weights. ``before``: what has no gradient from the start."""
    from ahp.runtime.parallel import parallelize

    module = BUILDERS["custom"]()
    for name, p in module.named_parameters():
        p.requires_grad_(not before or before not in name)
    parallel = parallelize(module, {"job": JOB, "parallelism": layout})
    found = []
    for step in range(STEPS):
        for name, p in parallel.parameters.items():
            if ".down." in name:
                p.requires_grad_(step != 1)
        result = parallel.step(parallel.shard(batch(step)))
        found.append((result.loss, result.grad_norm))
    return found


@pytest.mark.parametrize("name", ["replicas", "zero1", "zero3"])
def test_weights_may_rest_for_some_steps(pool: Pool, name: str) -> None:
    """As in plain PyTorch they have no gradient then: no decay, no moment."""
    (expected,) = pool.run(thaw, 1, PIECES["one"], "")
    for found in pool.run(thaw, 2, PIECES[name], ""):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0.0)


def test_a_weight_that_the_optimizer_does_not_have_is_refused(pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"BadInput: step: blocks.0.down.weight has requires_grad now, but not"):
        pool.run(thaw, 1, PIECES["one"], ".down.")


def hooked_later(rank: int, world: int, layout: dict[str, Any], precision: str) -> None:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS["custom"](), {"job": {**JOB, "precision": precision}, "parallelism": layout})
    part, head = parallel.shard(batch(0)), parallel.parameters["head.weight"]
    handles = head.register_hook(lambda gradient: gradient * 2), head.register_post_accumulate_grad_hook(lambda _: None)
    for handle in handles:
        with pytest.raises(BadInput, match=r"step: head\.weight has a gradient hook that was registered after ahp"):
            parallel.step(part)
        handle.remove()
    parallel.step(part)


@pytest.mark.parametrize(("name", "precision"), [("zero3", "fp32"), ("one", "bf16")])
def test_a_hook_that_a_layout_would_leave_out_is_refused(pool: Pool, name: str, precision: str) -> None:
    pool.run(hooked_later, world_size(PIECES[name]), PIECES[name], precision)


def within_modes(rank: int, world: int, layout: dict[str, Any]) -> list[float]:
    """What comes of steps and evaluations in modes of the program's."""
    from ahp.runtime.parallel import parallelize

    module = BUILDERS["custom"]()
    parallel = parallelize(module, {"job": JOB, "parallelism": layout})
    part = parallel.shard(batch(0))
    with torch.inference_mode():
        losses = [parallel.evaluate([part])]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert parallel.evaluate([part]) == losses[0]
    for mode, told in (
        (torch.no_grad(), "step: gradients are disabled"),
        (torch.inference_mode(), "step: gradients are disabled"),
        (torch.autocast("cpu", dtype=torch.bfloat16), "job.precision = 'fp32': torch.autocast is on around step"),
    ):
        with mode, pytest.raises(BadInput, match=told):
            parallel.step(part)
    losses.append(parallel.step(part).loss)
    with pytest.raises(BadInput, match=r"module = .Custom.: ahp\.parallelize has changed it in place already"):
        parallelize(module, {"job": JOB, "parallelism": layout})
    with torch.device("meta"):
        another = BUILDERS["llama"]()
    with torch.inference_mode():
        parallel = parallelize(another, {"job": JOB, "parallelism": layout})
    assert not parallel.step(part).skipped
    return losses


def test_models_may_share_a_module_without_weights() -> None:
    """transformers' FlauBERT has one activation for all models of a process."""
    act = nn.GELU()
    first, second = (nn.Sequential(nn.Linear(2, 2), act) for _ in range(2))
    mark_taken(first, in_stages=True)
    refuse_parameters(second)
    with pytest.raises(BadInput, match="has changed it in place already"):
        refuse_parameters(nn.Sequential(first[0], nn.GELU()))


@pytest.mark.parametrize("name", ["replicas", "zero3"])
def test_modes_around_a_step_change_nothing_or_are_refused(pool: Pool, name: str) -> None:
    for evaluated, stepped in pool.run(within_modes, 2, PIECES[name]):
        assert evaluated == pytest.approx(stepped, rel=1e-6)


def called_between(rank: int, world: int, layout: dict[str, Any]) -> tuple[list[str], list[tuple[float, float]]]:
    """What the program's own call of the module says between two steps, and the steps."""
    from ahp.runtime.parallel import parallelize

    module, told, found = BUILDERS["custom"](), [], []
    parallel = parallelize(module, {"job": JOB, "parallelism": layout})
    for step in range(2):
        part = parallel.shard(batch(step))
        result = parallel.step(part)
        found.append((result.loss, result.grad_norm))
        try:
            with torch.no_grad():
                logits = module(part["input_ids"])
            told.append(str(tuple(logits.shape[1:])))
        except BadInput as error:
            told.append(str(error))
    return told, found


@pytest.mark.parametrize("name", ["one", "replicas", "zero3", "context", "tp", "pipe"])
def test_a_call_of_a_module_that_is_divided_is_refused(pool: Pool, name: str) -> None:
    """It gave a part of the logits, those of old weights, or an error of torch's."""
    layout = {**PIECES, "tp": TENSOR, "pipe": PIPE}[name]
    ((_, expected),) = pool.run(called_between, 1, PIECES["one"])
    for told, found in pool.run(called_between, world_size(layout), layout):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0.0)
        for words in told:
            if name in ("one", "replicas"):
                assert words == str((16, VOCABULARY))
            else:
                assert words.startswith("module = 'Custom': is called outside of step, and each rank has a part of it")
                assert "parallel.evaluate" in words


def unlike_rows(rank: int, world: int, layout: dict[str, Any]) -> list[tuple[float, float]]:
    """A step and an evaluation whose ranks have other numbers of rows, then one as they should."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS["custom"](), {"job": JOB, "parallelism": layout})
    part = parallel.shard(batch(0))
    if world > 1:
        fewer = {key: value[: len(value) - layout["micro_batch_size"] * (rank % 2)] for key, value in part.items()}
        for call in (parallel.step, lambda given: parallel.evaluate([given])):
            with pytest.raises(
                BadInput, match=rf"part: rows = {len(fewer['labels'])}: other ranks have another number, and"
            ):
                call(fewer)
    losses = [parallel.step(parallel.shard(batch(step))) for step in range(2)]
    return [(one.loss, one.grad_norm) for one in losses]


UNEVEN = {"data_parallel_replicate_degree": 2, "micro_batches_per_replica": [2, 6], "micro_batch_size": 1}


@pytest.mark.parametrize("layout", [PIECES["zero3"], PIECES["replicas"], UNEVEN])
def test_ranks_with_other_numbers_of_rows_are_refused_before_they_wait(pool: Pool, layout: dict[str, Any]) -> None:
    (expected,) = pool.run(unlike_rows, 1, PIECES["one"])
    for found in pool.run(unlike_rows, 2, layout):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0.0)


def under_defaults(
    rank: int, world: int, layout: dict[str, Any], dtype: torch.dtype
) -> list[tuple[float, float, float]]:
    """Steps and evaluations of a program whose default dtype is another."""
    from ahp.runtime.parallel import parallelize

    module = BUILDERS["custom"]()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        parallel = parallelize(module, {"job": JOB, "parallelism": layout})
        results = [
            (parallel.step(part), parallel.evaluate([part])) for part in map(parallel.shard, map(batch, range(2)))
        ]
    finally:
        torch.set_default_dtype(before)
    return [(one.loss, one.grad_norm, evaluated) for one, evaluated in results]


@pytest.mark.parametrize("name", ["one", "zero3", "pipe"])
def test_losses_are_added_up_in_fp32_whatever_the_programs_default_is(pool: Pool, name: str) -> None:
    layout = PIPE if name == "pipe" else PIECES[name]
    found = [
        pool.run(under_defaults, world_size(layout), layout, dtype)[0] for dtype in (torch.bfloat16, torch.float32)
    ]
    assert found[0] == found[1]


def within_meta(rank: int, world: int) -> None:
    from ahp.runtime.parallel import parallelize

    told = r"torch.get_default_device\(\) = 'meta': ahp.parallelize makes tensors, .* \(valid: cpu, only the model built under it\)"
    with torch.device("meta"), pytest.raises(BadInput, match=told):
        parallelize(BUILDERS["custom"](), {"job": JOB})


def test_a_call_under_the_meta_device_is_refused(pool: Pool) -> None:
    """Only the model is to be built there."""
    pool.run(within_meta, 1)


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
