"""Weights as the hub has them: every family is read from what transformers writes, and goes out the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ahp.errors import BadInput
from ahp.graph.models import build_model
from ahp.runtime.weights.hub_names import in_files, piece_of
from ahp.runtime.weights.pretrained import Pretrained
from tests.runtime.models import JOB
from tests.runtime.test_equality import world_size
from tests.runtime.workers import Pool
from tests.search.families import build

FAMILIES = {
    "mixtral": "experts apart, the first matrix of two",
    "gpt_neox": "the head under another name",
    "granitemoe": "experts under another name",
    "deepseek_v3": "a buffer that is kept",
    "minimax": "experts apart, other names around them",
}
"""What of each the files hold in another form than the module."""
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("mixtral", {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2, "micro_batch_size": 2}),
    "zero3-x-tp": ("gpt_neox", {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "micro_batch_size": 2}),
    "pipeline": ("deepseek_v3", {"pipeline_parallel_degree": 2, "micro_batch_size": 2}),
}


def given(family: str, folder: Path) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model with random weights, and its files as transformers writes them."""
    torch.manual_seed(3)
    model: Any = build(family, device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.normal_()
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_is_read_from_what_transformers_writes(tmp_path: Path, family: str) -> None:
    model, files = given(family, tmp_path)
    known, source = in_files(model), Pretrained(tmp_path)
    found = source.check(model, known)
    draw = random.Random(0)
    for name, parameter in model.named_parameters():
        assert source.part(found[name], {}).equal(parameter), name
        ranges = {dim: some(draw, size) for dim, size in enumerate(parameter.shape)}
        expected = parameter.detach()
        for dim, kept in ranges.items():
            expected = torch.cat([expected.narrow(dim, first, end - first) for first, end in kept], dim)
        before = source.bytes_read
        assert source.part(found[name], ranges).equal(expected), (name, ranges)
        assert source.bytes_read - before == expected.numel() * expected.element_size(), "no more than was asked for"
    written = {
        piece.stored: piece_of(p.detach(), piece)
        for name, p in model.named_parameters()
        for piece in known[name].pieces
    }
    assert set(written) != set(dict(model.named_parameters())), "nothing was converted"
    assert all(files[name].equal(tensor) for name, tensor in written.items())


def some(draw: random.Random, size: int) -> list[tuple[int, int]]:
    """One or two ranges of a dim."""
    edges = sorted(draw.sample(range(size + 1), min(4, size + 1)))
    return [(edges[0], edges[1]), (edges[2], edges[3])] if len(edges) == 4 else [(edges[0], edges[-1])]


def out_again(rank: int, world: int, folder: str, layout: dict[str, Any], out: str) -> tuple[int, int]:
    """Runs in each worker: bytes that it read, and of its parameters."""
    from ahp.runtime.parallel import parallelize
    from ahp.runtime.torch_compat import local_tensor

    plan = {"job": JOB, "parallelism": layout, "init_from": folder}
    parallel = parallelize(build_model(folder, device="meta"), plan)
    parallel.export_hf(out)
    held = [local_tensor(p) for p in parallel.parameters.values()]
    held += [b for stage in parallel.stages.values() for n, b in stage.model.named_buffers() if n in parallel.in_files]
    return parallel.bytes_read, sum(t.numel() * t.element_size() for t in held)


@pytest.mark.parametrize("plan", PLANS)
def test_what_comes_in_goes_out_the_same(pool: Pool, tmp_path: Path, plan: str) -> None:
    family, layout = PLANS[plan]
    _, files = given(family, tmp_path / "given")
    for read, held in pool.run(out_again, world_size(layout), str(tmp_path / "given"), layout, str(tmp_path / "out")):
        assert read == held, "a rank reads what it holds, once, and nothing else"
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    assert set(exported) == set(files)
    assert all(exported[name].equal(tensor) for name, tensor in files.items())


def test_a_parameter_without_elements_is_as_it_is() -> None:
    model = build("llama", device="meta")
    model.register_parameter("nothing", nn.Parameter(torch.empty(3, 0, device="meta")))
    assert in_files(model)["nothing"].shape == (3, 0)


def test_a_missing_expert_is_told(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, files = given("mixtral", tmp_path)
    del files["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(files, tmp_path / "model.safetensors")
    with pytest.raises(
        BadInput, match=r"this model; missing: model.layers.1.block_sparse_moe.experts.2.w3.weight \(1 in all\)$"
    ):
        Pretrained(tmp_path).check(model, in_files(model))
