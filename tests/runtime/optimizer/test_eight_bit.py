"""adamw8bit: every layout computes what torchao's AdamW8bit computes on one process, and a checkpoint takes it to another layout."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ahp
from ahp.errors import BadInput, NotExpressible
from ahp.job import Optimizer
from ahp.plan import Plan, validated
from ahp.runtime.check.verify import verify
from ahp.runtime.optimizer import eight_bit
from ahp.runtime.optimizer.eight_bit import MOMENTS, EightBitAdamW
from tests.marks import cases
from tests.runtime.models import JOB, OPTIMIZER, VOCABULARY, batch
from tests.runtime.pipeline.test_unlike_widths import layout as unlike_layout
from tests.runtime.test_equality import LAYOUTS, assert_same_curve, world_size
from tests.runtime.workers import Pool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao (the extra low-bit) is not installed"
)

STEPS, HALF = 4, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 3,
}  # fmt: skip
SETTINGS = {**OPTIMIZER, "name": "adamw8bit"}
EIGHT: dict[str, Any] = {**JOB, "optimizer": SETTINGS}
RUN = (
    "one",
    "zero0",
    "zero3",
    "tp",
    "1f1b",
    "zero3+tp",
    "zero3-8-ways",
    "sequence+zero3",
    "dp-x-tp-x-pp",
    "zero1+interleaved",
)
WIDE = ("one", "zero0", "zero3", "tp", "1f1b", "zero3-8-ways", "sequence+zero3", "zero1+interleaved", "dp-x-tp-x-pp")
"""Those that stay, and those before and after a checkpoint, have every technique."""


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@cache
def by_torchao() -> dict[str, list[float]]:
    """Its own optimizer, whose kernel runs as it is written: a compiler would take half a minute for the same numbers."""
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    model = llama()
    keys = {"lr": SETTINGS["learning_rate"], **{key: SETTINGS[key] for key in ("betas", "eps", "weight_decay")}}
    optimizer = AdamW8bit(model.parameters(), **keys)
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    with mock.patch("torch.compile", lambda function, **_: function):
        for step in range(STEPS):
            data = batch(step)
            logits = model(input_ids=data["input_ids"]).logits[:, :-1]
            loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), data["labels"][:, 1:].reshape(-1))
            loss.backward()
            found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["grad_clip"]).item())
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
    return found


def train(
    rank: int, world: int, layout: dict[str, Any], steps: range, folder: str = "", left: str = ""
) -> dict[str, Any]:
    """``folder``: a checkpoint to go on from; ``left``: where to leave one."""
    from ahp.runtime.parallel import parallelize

    with mock.patch.object(eight_bit, "CHUNK_ELEMENTS", 256 * 40):  # so that there are several
        parallel = parallelize(llama(), {"job": EIGHT, "parallelism": layout})
        if folder:
            parallel.load(folder)
        results = [parallel.step(parallel.shard(batch(step))) for step in steps]
        if left:
            parallel.save(left)
    held = parallel.state.optimizer.eight_bit
    assert held.shards
    assert all(".weight" in name and "norm" not in name for name in held.shards)
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}


@pytest.mark.parametrize("layout", cases(RUN, wide=WIDE))
def test_each_step_is_that_of_torchaos_optimizer(pool: Pool, layout: str) -> None:
    results = pool.run(train, world_size(LAYOUTS[layout]), LAYOUTS[layout], range(STEPS))
    assert all(result == results[0] for result in results)
    assert_same_curve(results[0], by_torchao())


@pytest.mark.parametrize(
    ("first", "second"),
    cases([("zero3+tp", "1f1b"), ("zero1+interleaved", "tp"), ("tp", "zero3-8-ways")], wide=[("tp", "zero3-8-ways")]),
)
def test_a_checkpoint_takes_codes_and_scales_to_another_layout(
    pool: Pool, tmp_path: Path, first: str, second: str
) -> None:
    left = str(tmp_path / "checkpoint")
    begun = pool.run(train, world_size(LAYOUTS[first]), LAYOUTS[first], range(HALF), "", left)[0]
    ended = pool.run(train, world_size(LAYOUTS[second]), LAYOUTS[second], range(HALF, STEPS), left)[0]
    assert_same_curve({key: begun[key] + ended[key] for key in begun}, by_torchao())


def updated(leave_out: torch.Tensor | None, steps: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    shard = nn.Parameter(torch.randn(24, 512))
    optimizer = EightBitAdamW({"w": shard}, {"w": 0.1}, Optimizer(name="adamw8bit"))
    for step in range(steps):
        shard.grad = torch.randn(24, 512, generator=torch.Generator().manual_seed(step))
        optimizer.step(1e-3, leave_out)
    return shard.detach(), optimizer.moments("w")


def test_codes_are_torchaos_to_the_bit() -> None:
    from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor  # pyright: ignore

    optimizer = EightBitAdamW({}, {}, Optimizer(name="adamw8bit"))
    generator = torch.Generator().manual_seed(0)
    for signed in MOMENTS.values():
        value = torch.randn(256 * 64, generator=generator) * 10 ** (-4 * torch.rand(256 * 64, generator=generator))
        value = value if signed else value.abs()
        table = optimizer._table(signed, value.device)
        scaled, scale = scale_tensor(value, 256)
        codes = quantize_8bit_with_qmap(scaled, table[0])
        found = eight_bit._encoded(value.view(64, 256), table)
        assert found[0].view(-1).equal(codes)
        assert found[1].view(-1).equal(scale)
        assert eight_bit._decoded(*found, table).view(-1).equal(dequant_with_qmap(codes, table[0], scale).view(-1))


def test_an_update_that_is_left_out_changes_nothing() -> None:
    never, states = updated(torch.tensor(True))
    begun, _ = updated(None, steps=0)
    assert never.equal(begun)
    assert states["step"] == 0
    assert not any(states[f"{key}.scale"].any() for key in MOMENTS)
    with_flag, plain = updated(torch.tensor(False)), updated(None)
    assert with_flag[0].equal(plain[0])
    assert all(with_flag[1][key].equal(value) for key, value in plain[1].items())


def test_parts_of_a_weight_that_end_with_a_block_are_updated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, states = updated(None)
    monkeypatch.setattr(eight_bit, "CHUNK_ELEMENTS", 256 * 5)
    parts, others = updated(None)
    assert parts.equal(whole)
    assert all(others[key].equal(value) for key, value in states.items())


@pytest.mark.slow
def test_one_compiled_kernel_updates_weights_of_all_sizes_alike() -> None:
    """As on a GPU. Some results are rounded elsewhere, so that a few codes are the next ones."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"{rows}": torch.randn(rows, 512, generator=generator) for rows in (0, 1, 24, 56, 130)}
    found = []
    for compiles in (False, True):
        shards = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
        decay = dict.fromkeys(shards, 0.1)
        optimizer = EightBitAdamW(shards, decay, Optimizer(name="adamw8bit"))
        if compiles:
            optimizer._update = torch.compile(eight_bit.updated_, fullgraph=True)
        for step in range(5):
            for number, shard in enumerate(shards.values()):
                own = torch.Generator().manual_seed(10 * step + number)
                shard.grad = torch.randn(shard.shape, generator=own)
            with torch._dynamo.config.patch(error_on_recompile=compiles and step > 2):
                optimizer.step(1e-3 / (1 + step), torch.tensor(step == 2) if step > 1 else None)
        found.append((shards, {name: optimizer.moments(name) for name in shards}))
    (expected, states), (got, others) = found
    for name, weight in expected.items():
        assert others[name]["step"] == 4
        torch.testing.assert_close(got[name], weight, rtol=1e-5, atol=2e-5)
        for key in MOMENTS if len(weight) else ():
            other = others[name][f"{key}.codes"] != states[name][f"{key}.codes"]
            assert other.float().mean() < 2e-3


def test_a_layout_that_cuts_a_block_is_refused(pool: Pool) -> None:
    """By the forecast, with the degrees that go, and by the runtime."""
    sizes = {key: value for key, value in SIZES.items() if key != "pad_token_id"} | {"model_type": "llama"}
    layout = {"tensor_parallel_degree": 4, "micro_batch_size": 4}
    told = r"tensor_parallel_degree = 4: would cut the 512 columns of self_attn.o_proj.weight into parts of 128.*\(valid: 1, 2\)"
    job = {"sequence_length": 16, "global_batch_size": 8, "optimizer": "adamw8bit"}
    few = {**sizes, "num_key_value_heads": 4}
    with pytest.raises(BadInput, match=told):
        ahp.simulate(model=few, cluster="4xH100-SXM-80GB", job=job, parallelism=layout)
    assert ahp.simulate(model=few, cluster="2xH100-SXM-80GB", job=job, parallelism={"tensor_parallel_degree": 2}).fits
    with pytest.raises(
        AssertionError, match=r"tensor_parallel_degree = 4: cuts 512 columns of .*o_proj.*\(valid: 1, 2\)"
    ):
        pool.run(train, 4, layout, range(1))


@pytest.mark.slow
def test_the_forecast_counts_codes_and_scales() -> None:
    graph = ahp.analyze("llama3-8b", {"sequence_length": 1024})
    job = {"sequence_length": 1024, "global_batch_size": 8}
    found = {
        name: ahp.simulate(
            model=graph,
            cluster="8xH100-SXM-80GB",
            job=job | {"optimizer": name},
            parallelism={"data_parallel_shard_degree": 8},
        )
        for name in ("adamw", "adamw8bit")
    }
    states = {name: forecast.memory["optimizer_states"] for name, forecast in found.items()}
    assert states["adamw8bit"] / states["adamw"] == pytest.approx(2 * (1 + 4 / 256) / 8, rel=1e-3)
    assert found["adamw8bit"].step["optimizer"] > found["adamw"].step["optimizer"]
    odd = {
        "model_type": "llama",
        **SIZES,
        "hidden_size": 192,
        "head_dim": 64,
        "intermediate_size": 320,
        "pad_token_id": None,
    }
    small = {"sequence_length": 16, "global_batch_size": 8, "optimizer": "adamw8bit"}
    forecast = ahp.simulate(model=odd, cluster="1xH100-SXM-80GB", job=small, parallelism={})
    # One projection alone, o_proj with 256 columns, is held in blocks.
    in_blocks = 4 * 192 * 256
    total = ahp.analyze(odd, {"sequence_length": 16}).num_parameters
    expected = in_blocks * 2 * (1 + 4 / 256) + (total - in_blocks) * 8
    assert forecast.memory["optimizer_states"] == pytest.approx(expected, abs=8)


def test_it_is_refused_where_it_cannot_be() -> None:
    job = {"sequence_length": 1024, "global_batch_size": 8, "optimizer": "adamw8bit"}
    with pytest.raises(NotExpressible, match=r"job\.optimizer\.name = 'adamw8bit'.*valid: adamw"):
        ahp.simulate(model="llama3-8b", cluster="8xH100-SXM-80GB", job=job, parallelism={}, engine="torchtitan")
    with pytest.raises(NotExpressible, match=r"its moments in 8 bits stay on the device"):
        ahp.simulate(
            model="llama3-8b", cluster="8xH100-SXM-80GB", job=job, parallelism={}, engine={"offload_optimizer": True}
        )
    with (
        mock.patch.object(importlib.util, "find_spec", return_value=None),
        pytest.raises(
            BadInput, match=r"torchao is not installed.*pip install 'adaptive-hybrid-parallelism\[low-bit\]'"
        ),
    ):
        eight_bit.refuse_without_torchao()


def is_refused(rank: int, world: int, layout: dict[str, Any]) -> str:
    from ahp.runtime.parallel import parallelize

    with pytest.raises(BadInput) as refusal:
        parallelize(llama(), {"job": EIGHT, "parallelism": layout})
    return str(refusal.value)


def test_ranks_of_a_stage_that_could_hold_its_parts_are_refused_with_the_others(pool: Pool) -> None:
    """In a loop of the user's own no plan was checked before: who was not refused would wait for who was."""
    widths = ((1, 1), (1, 4))
    said = pool.run(is_refused, 5, unlike_layout(*widths, layers=(1, 3)))
    assert len(set(said)) == 1
    assert said[0].startswith("tensor_parallel_degree = 4: cuts 512 columns of ")


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
def test_ahp_verify_knows_moments_in_8_bits() -> None:
    sizes = {**SIZES, "model_type": "llama", "num_hidden_layers": 2, "pad_token_id": None}
    job = {"sequence_length": 16, "global_batch_size": 4, "steps": 4, "precision": "fp32", "optimizer": "adamw8bit"}
    layout = {"data_parallel_shard_degree": 2, "micro_batch_size": 2}
    plan = validated(Plan, {"model": sizes, "job": job, "parallelism": layout}, "plan")
    assert all(one.equal for one in verify(plan, steps=3))
