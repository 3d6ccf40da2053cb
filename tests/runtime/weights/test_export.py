"""Weights go out as files that transformers reads, in parts that no rank holds more than one of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from ahp.runtime.weights import hf_export
from ahp.runtime.weights.hf_export import Stored, plan_files
from ahp.runtime.weights.hub_names import as_it_is
from tests.marks import cases
from tests.runtime.models import JOB, MODELS, batch
from tests.runtime.test_equality import world_size
from tests.runtime.weights.test_checkpoint import PLANS
from tests.runtime.workers import Pool

SMALL_BYTES = 20_000
"""Of a file, so that the small models have several."""


def export(
    rank: int, world: int, model: str, layout: dict[str, Any], folder: str, precision: str, file_bytes: int
) -> tuple[list[str], int]:
    """The files that this rank wrote, and the most bytes that it held on the host at once."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS[model](), {"job": {**JOB, "precision": precision}, "parallelism": layout})
    written: list[str] = []
    most = 0
    take, write = hf_export._Writer.take, hf_export._Writer._write

    def taken(writer: Any, *order: Any) -> None:
        nonlocal most
        take(writer, *order)
        most = max(most, sum(t.nbytes for t in writer.tensors.values()))

    def noted(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        written.append(path.name)
        write(path, tensors)

    with (
        mock.patch.object(hf_export, "FILE_BYTES", file_bytes),
        mock.patch.object(hf_export._Writer, "take", taken),
        mock.patch.object(hf_export._Writer, "_write", staticmethod(noted)),
    ):
        parallel.export_hf(folder)
    return written, most


EXPORTS = [
    ("tp", "fp32"), ("zero1", "bf16"), ("zero3-x-tp-x-pp", "fp32"), ("zero3-x-tp-x-pp", "bf16"), ("interleaved", "fp16"), ("zero3", "fp32"),
]  # fmt: skip
IN_PRODUCT = [("zero3", "fp32"), ("zero3-x-tp-x-pp", "bf16")]
"""The product has the shards in fp32; ZeRO-1 has bf16."""


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize(("plan", "precision"), cases(EXPORTS, wide=IN_PRODUCT))
def test_export_loads_in_transformers(pool: Pool, tmp_path: Path, model: str, plan: str, precision: str) -> None:
    from transformers import AutoModelForCausalLM

    order = model, PLANS[plan], str(tmp_path), precision, SMALL_BYTES
    results = pool.run(export, world_size(PLANS[plan]), *order)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    files = sorted(file for written, _ in results for file in written)
    assert files == sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert sum(bool(written) for written, _ in results) > 1, "ranks take turns"
    assert all(most <= SMALL_BYTES for _, most in results)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = {name: (file, tensor) for file in files for name, tensor in load_file(tmp_path / file).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in stored.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in stored.values())

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    original = MODELS[model]()
    weights = dict(loaded.named_parameters())
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(weights[name], parameter.to(dtype), rtol=0, atol=0)
    assert loaded.config.dtype == dtype
    input_ids = batch(0)["input_ids"]
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(parameter.to(dtype))
        expected = original(input_ids=input_ids).logits
        torch.testing.assert_close(loaded.float()(input_ids=input_ids).logits, expected)


def test_what_fits_into_one_file_is_one_without_an_index(pool: Pool, tmp_path: Path) -> None:
    order = "gpt2", PLANS["tp"], str(tmp_path), "fp32", hf_export.FILE_BYTES
    assert sorted(written for written, _ in pool.run(export, 2, *order)) == [[], ["model.safetensors"]]
    MODELS["gpt2"]().save_pretrained(tmp_path / "alone")  # type: ignore[operator]
    alone = {file.name for file in (tmp_path / "alone").iterdir()}
    assert {file.name for file in tmp_path.iterdir()} == {*alone, "alone"} >= {"generation_config.json"}
    assert not (tmp_path / "model.safetensors.index.json").exists()


def fail(rank: int, world: int, layout: dict[str, Any], folder: str) -> str:
    """What the rank is told when rank 1 cannot write its first file."""
    from ahp.runtime.parallel import parallelize

    def full(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        raise OSError("No space left on device")

    parallel = parallelize(MODELS["llama"](), {"job": JOB, "parallelism": layout})
    write = full if rank == 1 else hf_export._Writer._write
    with (
        mock.patch.object(hf_export, "FILE_BYTES", SMALL_BYTES),
        mock.patch.object(hf_export._Writer, "_write", staticmethod(write)),
    ):
        try:
            parallel.export_hf(folder)
        except OSError as error:
            return str(error)
    return "nothing"


def test_every_rank_hears_of_one_that_cannot_write(pool: Pool, tmp_path: Path) -> None:
    told = "the weights cannot be written: rank 1: OSError: No space left on device"
    assert pool.run(fail, 2, PLANS["zero1"], str(tmp_path)) == [told] * 2


def test_files_are_of_the_size_asked_for_and_writers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_export, "FILE_BYTES", 100)
    sizes = {"a": 20, "b": 10, "c": 3, "d": 60, "e": 1, "f": 25}
    stored = {name: Stored(int(name > "e"), torch.float32, as_it_is(name, (n,))) for name, n in sizes.items()}
    files = plan_files(stored, [2, 3])
    assert [[piece.stored for piece in file.pieces] for file in files] == [["a"], ["b", "c"], ["d"], ["e"], ["f"]]
    assert [file.num_bytes for file in files] == [80, 52, 240, 4, 100]
    assert [file.writer for file in files] == [0, 1, 0, 1, 0]
    assert [file.pipeline_rank for file in files] == [0, 0, 0, 0, 1]
    assert [file.name for file in files][::4] == [f"model-0000{n}-of-00005.safetensors" for n in (1, 5)]
