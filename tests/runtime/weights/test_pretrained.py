"""Given weights: every rank reads its own parts, and any plan starts where transformers starts."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from ahp.errors import BadInput
from ahp.graph.models import build_model
from ahp.runtime.shard.parameter_layout import ranges_held
from ahp.runtime.tensor.collectives import cut_segments
from ahp.runtime.weights.hub_names import as_it_is, in_files
from ahp.runtime.weights.pretrained import Pretrained, check_folder
from ahp.search.slicing.placement import Split
from tests.marks import cases
from tests.runtime.models import JOB, MODELS, batch
from tests.runtime.test_equality import world_size
from tests.runtime.weights.test_checkpoint import PLANS
from tests.runtime.workers import Pool

CASES = [(plan, ("gpt2", "llama")[number % 2]) for number, plan in enumerate(PLANS)]
WIDE = [case for case in CASES if case[0] in ("zero0", "zero1", "1f1b")]
"""Packed, tied and in bf16. The models take turns over the plans."""
STEPS = 2
"""The second one comes after an update, so that what was loaded is what is trained."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights as save_pretrained writes them: of an untied model in several files, of a tied one in bf16."""
    root = tmp_path_factory.mktemp("given")
    for name in ("llama", "gpt2"):
        torch.manual_seed(5)
        model: Any = MODELS[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
        model = model.to(torch.bfloat16) if name == "gpt2" else model
        model.save_pretrained(root / name, max_shard_size="20KB" if name == "llama" else "1GB")
    assert len(list((root / "llama").glob("*.safetensors"))) > 3
    return {name: root / name for name in ("llama", "gpt2")}


def start(rank: int, world: int, folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    module = build_model(folder, device="meta")
    assert module.train().training
    module.config.attn_pdrop = module.config.embd_pdrop = module.config.resid_pdrop = 0.0  # type: ignore[union-attr]
    parallel = parallelize(module, {"job": JOB, "parallelism": layout, "init_from": folder})
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in parallel.parameters.values())
    results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "bytes_read": parallel.bytes_read,
        "local": local,
    }


def plain(folder: Path) -> dict[str, list[float]]:
    """from_pretrained, torch.optim.AdamW, clip_grad_norm_."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    settings = JOB["optimizer"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["learning_rate"], betas=settings["betas"], weight_decay=settings["weight_decay"]
    )
    losses, norms = [], []
    for step in range(STEPS):
        data = batch(step)
        logits = model(input_ids=data["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), data["labels"][:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), settings["grad_clip"]).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


@pytest.mark.parametrize(
    ("plan", "model"),
    cases(CASES, wide=WIDE),
)
def test_starts_where_transformers_starts(pool: Pool, folders: dict[str, Path], plan: str, model: str) -> None:
    results = pool.run(start, world_size(PLANS[plan]), str(folders[model]), PLANS[plan])
    expected = plain(folders[model])
    stored = 2 if model == "gpt2" else 4
    for result in results:
        for key in ("losses", "norms"):
            assert result[key] == pytest.approx(expected[key], rel=1e-5)
        assert result["bytes_read"] == result["local"] * stored, "a rank reads what it holds, once, and nothing else"


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.lists(st.sampled_from([4, 8]), min_size=1, max_size=3),
    st.integers(0, 1),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
)
def test_parts_that_are_read_are_those_that_are_held(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    segments: list[int],
    dim: int,
    shards: int,
    degree: int,
) -> None:
    shape = [3, 3]
    shape[dim] = sum(segments)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    folder = tmp_path_factory.mktemp("one")
    save_file({"w": whole}, folder / "model.safetensors")
    split = Split(dim, tuple(segments)) if degree > 1 else None
    rank, shard = data.draw(st.integers(0, degree - 1)), data.draw(st.integers(0, shards - 1))
    held = cut_segments(whole, dim, tuple(segments), degree, rank) if split else whole
    chunks = held.chunk(shards, 0)
    expected = chunks[shard] if shard < len(chunks) else held[:0]
    ranges = ranges_held(tuple(shape), split, (rank, degree), (shard, shards))
    read = Pretrained(folder).part(as_it_is("w", tuple(shape)), ranges)
    assert read.equal(expected)


def test_weights_of_another_model_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def refused(rule: str, folder: Path, model: Any = folders["gpt2"]) -> None:
        with pytest.raises(BadInput, match=rf"init_from = .*{rule}"):
            check_folder(folder, build_model(str(model), device="meta"))

    refused("no such folder", tmp_path / "none")
    refused(r"holds no \*\.safetensors", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    refused(r"holds \*\.bin and no \*\.safetensors; .* convert it", tmp_path)
    (tmp_path / "a.safetensors").mkdir()
    refused(r"a\.safetensors cannot be read", tmp_path)
    refused("not the weights of this model; missing: .*; unknown: ", folders["llama"])
    refused("no tokenizer.json", folders["gpt2"])
    keys = json.loads((folders["gpt2"] / "config.json").read_text())
    other = {key: value for key, value in keys.items() if key in ("model_type", "vocab_size", "n_layer", "n_head")}
    with pytest.raises(BadInput, match=r"has the shape \[\d+, 32\], the model's has \[\d+, 64\]"):
        check_folder(folders["gpt2"], build_model({**other, "n_embd": 64, "n_positions": 64}, device="meta"))
    shutil.copytree(folders["gpt2"], tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    refused("model.safetensors cannot be read", tmp_path / "cut")


def test_names_with_and_without_the_base_models_prefix(folders: dict[str, Path], tmp_path: Path) -> None:
    state = load_file(folders["gpt2"] / "model.safetensors")
    save_file({n.removeprefix("transformer."): t for n, t in state.items()}, tmp_path / "model.safetensors")
    model = build_model(str(folders["gpt2"]), device="meta")
    found = Pretrained(tmp_path).check(model, in_files(model))
    assert [piece.stored for piece in found["transformer.h.0.ln_1.weight"].pieces] == ["h.0.ln_1.weight"]


def test_tied_tensors_that_are_not_alike_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers ties nothing then, and another model than the config's comes out."""
    state = load_file(folders["gpt2"] / "model.safetensors")
    model = build_model(str(folders["gpt2"]), device="meta")
    for factor in (1, 2):
        head = factor * state["transformer.wte.weight"]
        save_file({**state, "lm_head.weight": head}, tmp_path / "model.safetensors")
        source = Pretrained(tmp_path)
        if factor == 1:
            source.check(model, in_files(model))
            assert source.bytes_read == 0, "read to be compared, and again by whoever holds it"
        else:
            with pytest.raises(BadInput, match=r"lm_head\.weight have different values, and the model ties them"):
                source.check(model, in_files(model))


def test_files_are_those_that_transformers_reads(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(folders["llama"], folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name in set(index["weight_map"].values()):  # as of an earlier save in other pieces, which come last by name
        old = {key: tensor + 1 for key, tensor in load_file(folder / name).items()}
        save_file(old, folder / name.replace("-of-0", "-of-9"))
    save_file({"layers.0.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    model = build_model(str(folder), device="meta")
    source = Pretrained(folder)
    source.check(model, in_files(model))
    assert {key: path.name for key, path in source.files.items()} == index["weight_map"]
    (folder / index["weight_map"]["model.norm.weight"]).unlink()
    with pytest.raises(BadInput, match=r"index\.json names model-.*, which is not there"):
        Pretrained(folder)
    save_file({"one": torch.ones(2)}, folder / "model.safetensors")
    assert Pretrained(folder).files.keys() == {"one"}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(BadInput, match=r"index\.json cannot be read"):
        Pretrained(folder)


def test_tables_that_the_model_makes_itself_are_passed_over(folders: dict[str, Path], tmp_path: Path) -> None:
    """Llama 2's files have one in each block. What no checkpoint and no export would hold is not read either."""
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folders["llama"].glob("*.safetensors")):
        state |= load_file(file)
    for name in ("layers.0.self_attn.rotary_emb", "rotary_emb"):
        state[f"model.{name}.inv_freq"] = torch.ones(4)
    save_file(state, tmp_path / "model.safetensors")
    model = build_model(str(folders["llama"]), device="meta")
    assert "model.rotary_emb.inv_freq" not in Pretrained(tmp_path).check(model, in_files(model))
