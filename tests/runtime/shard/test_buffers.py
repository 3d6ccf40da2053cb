"""Buffers that forward writes: the same on every rank that holds them, written once a micro-batch, kept over a restart."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.runtime.device_limits import CPU_COMPILERS
from ahp.runtime.weights.allocate import initial_weights
from tests.marks import cases
from tests.runtime.averages import MICRO_BATCHES, Average, How, averaging
from tests.runtime.graphs import no_kernels
from tests.runtime.models import JOB, batch
from tests.runtime.restarts import Restart, check, stored
from tests.runtime.test_equality import assert_same_curve, world_size
from tests.runtime.workers import Pool

STEPS = 3
"""Of MICRO_BATCHES on each rank, which so writes as often as one process."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 2},
    "zero0": {"data_parallel_replicate_degree": 2},
    "zero3": {"data_parallel_shard_degree": 2},
    "tp": {"tensor_parallel_degree": 2, "micro_batch_size": 2},
    "sequence": {"tensor_parallel_degree": 2, "enable_sequence_parallel": True, "micro_batch_size": 2},
    "1f1b": {"pipeline_parallel_degree": 2, "micro_batch_size": 2},
    "zbv": {
        "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble", "virtual_stages_per_rank": 2,
        "micro_batch_size": 2,
    },
    "zero0-x-1f1b": {"data_parallel_replicate_degree": 2, "pipeline_parallel_degree": 2},
    "zero3-x-tp": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    "full": {"micro_batch_size": 2, "activation_checkpoint": "full"},
    "selective": {"micro_batch_size": 2, "activation_checkpoint": "selective"},
    "tp-full": {"tensor_parallel_degree": 2, "micro_batch_size": 2, "activation_checkpoint": "full"},
    "1f1b-full": {"pipeline_parallel_degree": 2, "micro_batch_size": 2, "activation_checkpoint": "full"},
}  # fmt: skip
SAME_ROWS = ("one", "tp", "sequence", "1f1b", "zbv", "full", "selective", "tp-full", "1f1b-full")
"""Layouts under which a stage sees all micro-batches of a step: they equal one process, whatever a buffer holds."""
HOWS: tuple[How, ...] = ("in place", "assigned", "batch norm")
TURNS = {layout: HOWS[turn % len(HOWS)] for turn, layout in enumerate(LAYOUTS)}
CASES = [(layout, how) for layout in LAYOUTS for how in (*HOWS, "counted")]
WIDE = [(layout, how) for layout, how in CASES if how != (TURNS[layout] if layout in SAME_ROWS else "counted")]


def train(rank: int, world: int, how: How, layout: dict[str, Any]) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(averaging(how), {"job": JOB, "parallelism": layout})
    found: dict[str, Any] = {"losses": [], "norms": [], "buffers": []}
    for step in range(STEPS):
        result = parallel.step(parallel.shard(batch(step)))
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        found["buffers"] += [
            {name: buffer.clone() for name, buffer in stage.model.named_buffers() if "scratch" not in name}
            for stage in parallel.stages.values()
        ]
    return found


def plain(how: How) -> dict[str, Any]:
    """Plain PyTorch on one process, micro-batch by micro-batch."""
    model = averaging(how)
    o = JOB["optimizer"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=o["learning_rate"], betas=o["betas"], eps=o["eps"], weight_decay=o["weight_decay"]
    )
    found: dict[str, Any] = {"losses": [], "norms": [], "buffers": []}
    for step in range(STEPS):
        rows = batch(step)
        scored, total = (rows["labels"][:, 1:] != -100).sum(), 0.0
        for ids, labels in zip(*(rows[key].chunk(MICRO_BATCHES) for key in ("input_ids", "labels")), strict=True):
            logits = model(ids)[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / scored
            loss.backward()
            total += loss.item()
        found["losses"].append(total)
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), o["grad_clip"]).item())
        optimizer.step()
        optimizer.zero_grad()
        found["buffers"].append({name: b.clone() for name, b in model.named_buffers() if "scratch" not in name})
    return found


@pytest.mark.parametrize(("layout", "how"), cases(CASES, wide=WIDE))
def test_buffers_are_the_same_on_all_ranks_and_those_of_one_process(pool: Pool, layout: str, how: How) -> None:
    results, expected = pool.run(train, world_size(LAYOUTS[layout]), how, LAYOUTS[layout]), plain(how)
    equals_one = how == "counted" or layout in SAME_ROWS
    if equals_one:
        assert_same_curve(results[0], expected)
    seen: dict[tuple[int, str], torch.Tensor] = {}
    for result in results:
        assert result["norms"] == results[0]["norms"], "ranks disagree"
        stages = len(result["buffers"]) // STEPS
        for place, buffers in enumerate(result["buffers"]):
            step = place // stages
            for name, buffer in buffers.items():
                assert torch.equal(buffer, seen.setdefault((step, name), buffer)), f"ranks disagree about {name}"
                if (equals_one and how != "counted") or "count" in name:
                    torch.testing.assert_close(buffer, expected["buffers"][step][name], rtol=1e-4, atol=1e-5)
    assert {name for _, name in seen} == set(expected["buffers"][0])


BAD = 7
"""A token whose weights are no numbers."""


def with_a_bad_batch(
    rank: int, world: int, how: How, layout: dict[str, Any], bad: int
) -> list[dict[str, torch.Tensor]]:
    """Buffers of this rank after each step; the batch of step ``bad`` alone has the bad token."""
    from ahp.runtime.parallel import parallelize

    module = averaging(how)
    with torch.no_grad():
        module.get_parameter("tokens.weight")[BAD] = torch.nan
    parallel = parallelize(module, {"job": JOB, "parallelism": layout})
    found = []
    for step in range(STEPS):
        rows = batch(step)
        rows["input_ids"][rows["input_ids"] == BAD] = BAD + 1
        if step == bad:
            rows["input_ids"][:, 3] = BAD
        assert parallel.step(parallel.shard(rows)).failed == (step == bad)
        stages = [dict(stage.model.named_buffers()) for stage in parallel.stages.values()]
        held = [{name: buffer.clone() for name, buffer in stage.items() if "scratch" not in name} for stage in stages]
        found.append({f"{place}.{name}": buffer for place, stage in enumerate(held) for name, buffer in stage.items()})
    return found


@pytest.mark.parametrize(
    ("layout", "how"),
    cases(
        [("one", "assigned"), ("1f1b", "batch norm"), ("zero3-x-tp", "in place"), ("full", "in place")],
        wide=[("zero3-x-tp", "in place"), ("full", "in place")],
    ),
)
def test_a_step_that_is_left_out_leaves_buffers_as_they_were(pool: Pool, layout: str, how: How) -> None:
    """One bad batch made every average no number, and so every later loss."""
    for first, then, last in pool.run(with_a_bad_batch, world_size(LAYOUTS[layout]), how, LAYOUTS[layout], 1):
        assert all(torch.equal(then[name], buffer) for name, buffer in first.items())
        assert not all(torch.equal(last[name], buffer) for name, buffer in first.items())
        assert all(buffer.isfinite().all() for buffer in last.values())


@pytest.mark.parametrize(
    ("first", "then"),
    cases(
        [("zero0", "zero0"), ("zero3", "1f1b"), ("zbv", "tp"), ("tp", "zero0-x-1f1b"), ("zero0-x-1f1b", "one")],
    ),
)
def test_buffers_are_kept_over_a_restart(pool: Pool, tmp_path: Path, first: str, then: str) -> None:
    same = first == then
    build = partial(averaging, "in place" if same else "counted")
    job = {"global_batch_size": 8, "sequence_length": 16}
    check(pool, Restart(build, LAYOUTS[first], LAYOUTS[then], job=job), tmp_path)
    names = {name.removeprefix("buffer.") for name in stored(tmp_path / "first") if name.startswith("buffer.")}
    assert names == {name for name, _ in build().named_buffers() if "scratch" not in name}


def export_after_steps(rank: int, world: int, layout: dict[str, Any], folder: str) -> None:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(averaging("in place"), {"job": JOB, "parallelism": layout})
    for step in range(2):
        parallel.step(parallel.shard(batch(step)))
    parallel.export_hf(folder)


def buffers_from(rank: int, world: int, layout: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(averaging("in place"), {"job": JOB, "parallelism": layout, "init_from": folder})
    return {name: buffer for stage in parallel.stages.values() for name, buffer in stage.model.named_buffers()}


def test_buffers_that_no_rule_writes_are_refused_on_the_meta_device() -> None:
    """They would start as what lay in memory."""
    with torch.device("meta"):
        module = averaging("in place")
    with pytest.raises(BadInput, match=r"leaves out the buffers first, last, before.mean \(2\d in all\)"):
        initial_weights(module, seed=0)
    for part in module.modules():
        if isinstance(part, Average):
            part.reset_parameters = partial(reset, part, "mean", "count", "scratch")  # type: ignore[assignment]
    module.reset_parameters = partial(reset, module, "first", "last")  # type: ignore[assignment]
    initial_weights(module, seed=0)
    assert all(buffer.count_nonzero() == 0 for buffer in module.buffers())


def reset(module: nn.Module, *names: str) -> None:
    for name in names:
        module.get_buffer(name).zero_()


def test_buffers_go_out_with_the_weights_and_come_back(pool: Pool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pool.run(export_after_steps, 2, LAYOUTS["1f1b"], str(tmp_path))
    files = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    written = {name: tensor for tensors in files for name, tensor in tensors.items()}
    kept = {name for name, _ in averaging("in place").named_buffers() if "scratch" not in name}
    assert kept <= set(written)
    assert not any("scratch" in name for name in written)
    assert all(written[name].count_nonzero() for name in kept)
    for found in pool.run(buffers_from, 4, LAYOUTS["zero0-x-1f1b"], str(tmp_path)):
        for name in kept & set(found):
            assert torch.equal(found[name], written[name]), name


def train_compiled(rank: int, world: int, how: How, recompute: str) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    layout = {**LAYOUTS["one"], "activation_checkpoint": recompute}
    with no_kernels():
        parallel = parallelize(averaging(how), {"job": JOB, "parallelism": layout, "engine": {"compile": True}})
        results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    (stage,) = parallel.stages.values()
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "buffers": dict(stage.model.named_buffers()),
    }


@pytest.mark.skipif(not any(map(shutil.which, CPU_COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(
    ("how", "recompute"),
    [("in place", "none"), ("in place", "full"), ("assigned", "full"), ("batch norm", "full")],
)
def test_compiled_blocks_write_their_buffers_once(pool: Pool, how: How, recompute: str) -> None:
    (found,), expected = pool.run(train_compiled, 1, how, recompute), plain(how)
    assert_same_curve(found, expected)
    for name, buffer in expected["buffers"][-1].items():
        torch.testing.assert_close(found["buffers"][name], buffer, rtol=1e-4, atol=1e-5)


def refusal(rank: int, world: int) -> str:
    from ahp.errors import BadInput

    try:
        train_compiled(rank, world, "in place", "selective")
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.skipif(not any(map(shutil.which, CPU_COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_selective_recompute_of_blocks_that_write_is_refused(pool: Pool) -> None:
    assert (
        "writes into its buffers or its input (valid: none, full; or engine.compile false)" in pool.run(refusal, 1)[0]
    )
