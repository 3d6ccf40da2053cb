"""fp8: every layout computes what torchao's own Float8Linear computes in one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from ahp.errors import BadInput, HardwareMismatch
from ahp.forecast.rules import products
from ahp.forecast.split import in_8_bits
from ahp.graph.blocks import find_blocks
from ahp.graph.outline import outline
from ahp.graph.trace import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism, Plan
from ahp.runtime.compute import fp8
from ahp.runtime.pipeline.weight_gradients import WeightGradients
from ahp.search.slicing.model import slice_outline
from tests.marks import cases
from tests.runtime.graphs import no_kernels
from tests.runtime.models import JOB, OPTIMIZER, VOCABULARY, batch
from tests.runtime.test_equality import LAYOUTS, world_size
from tests.runtime.workers import Pool

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao (the extra fp8) is not installed"
)

STEPS = 10
MICRO = 4
RATE = 3e-4
EACH_STEP = 1e-5
"""Relative, of loss and norm, from the same weights and with fp32 around the products."""
FLIPPED, SAME_STEPS = 5e-3, 3
"""Layouts that add up in another order: a number at the edge between two 8-bit numbers (3 or 4 significant bits) is now and then
rounded to the other one. No step may differ by more than this causes, and so many of ten steps must be within EACH_STEP. With the
scales of parts instead of the whole tensor, none of the ten steps is within it, under any of these layouts."""
FIRST, LAST = 2e-2, 5e-2
"""Relative, at the first and at the tenth step, with bf16 around the products. 8 bits have 4 or 3 significant ones: where layouts add
up in another order, a flipped rounding is 6e-2 of a number, and the steps of AdamW carry the difference on."""


def llama() -> nn.Module:
    """Wide enough for parts of 16 columns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=3, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Packed projections with biases, whose weights lie the other way round; tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


BUILDERS = {"llama": llama, "gpt2": gpt2}


def with_torchaos_layers(model: nn.Module) -> nn.Module:
    """The model with torchao's own linear layers in its blocks, routers left as they are. transformers' Conv1D, which
    torchao does not know, becomes such a layer on the transposed weight."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore
    from transformers.pytorch_utils import Conv1D

    from ahp.graph.experts import num_stacked

    config = Float8LinearConfig()

    class Turned(nn.Module):
        def __init__(self, given: Conv1D) -> None:
            super().__init__()
            self.weight, self.bias = given.weight, given.bias
            K, N = given.weight.shape
            self.layer = [convert_to_float8_training(nn.Sequential(nn.Linear(K, N, device="meta")), config=config)[0]]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional_call(self.layer[0], {"weight": self.weight.t(), "bias": self.bias}, (x,))

    blocks = model.get_submodule(find_blocks(model).path)
    experts = {num_stacked(module) for module in blocks.modules()}
    for path, module in list(blocks.named_modules()):
        if isinstance(module, Conv1D):
            parent, _, leaf = path.rpartition(".")
            setattr(blocks.get_submodule(parent), leaf, Turned(module))
    convert_to_float8_training(
        blocks, module_filter_fn=lambda layer, path: getattr(layer, "out_features", None) not in experts, config=config
    )
    return model


Step = tuple[float, float, dict[str, torch.Tensor]]
"""Loss, gradient norm before clipping, and the fp32 weights before the step."""


def plain(name: str, dtype: torch.dtype) -> Iterator[Step]:
    """One process, in the micro-batches of the layouts; ``dtype``: of all that is not a product of the blocks."""
    model = with_torchaos_layers(BUILDERS[name]())
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=RATE, betas=OPTIMIZER["betas"], weight_decay=OPTIMIZER["weight_decay"]
    )
    for step in range(STEPS):
        before = {n: p.detach().clone() for n, p in parameters.items()}
        data, total = batch(step), 0.0
        cast = {n: p.to(dtype) for n, p in parameters.items()}
        scored = (data["labels"][:, 1:] != -100).sum()
        for ids, labels in zip(data["input_ids"].split(MICRO), data["labels"].split(MICRO), strict=True):
            scores = functional_call(model, cast, (ids,)).logits[:, :-1].reshape(-1, VOCABULARY).float()
            loss = F.cross_entropy(scores, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum") / scored
            loss.backward(retain_graph=True)
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        yield total, norm.item(), before


@pytest.fixture(scope="module")
def reference() -> Callable[..., list[Step]]:
    @cache
    def steps(name: str, dtype: torch.dtype, *, quick: bool) -> list[Step]:
        with quick_products() if quick else nullcontext():
            return list(plain(name, dtype))

    return steps


def quick_products() -> Any:
    """Within, processor cores compute products in 8 bits as they compute those in fp32: torch's own kernel there takes a hundred times as
    long. That one computes what ``test_a_product_is_torchaos_to_the_bit`` compares, and one layout (``TORCHS_KERNEL``)."""

    def product(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        **_: Any,
    ) -> torch.Tensor:
        return (a.float() @ b.float() * (scale_a * scale_b)).to(out_dtype)

    return mock.patch.object(torch, "_scaled_mm", product)


def parallel_of(model: str, layout: dict[str, Any], engine: dict[str, Any]) -> Any:
    """On processor cores, which stand for devices; ``parallelize`` refuses them."""
    from ahp.plan import validated
    from ahp.runtime.parallel import rehearse

    job = {**JOB, "precision": "fp8", "optimizer": {**OPTIMIZER, "learning_rate": RATE}}
    plan = validated(Plan, {"job": job, "parallelism": layout, "engine": engine}, "plan")
    return rehearse(BUILDERS[model](), plan, torch.device("cpu"))


def steps_from(
    rank: int,
    world: int,
    model: str,
    layout: dict[str, Any],
    engine: dict[str, Any],
    weights: list[dict[str, torch.Tensor]],
    quick: bool,
) -> list[tuple[float, float]]:
    """Runs in each worker: each step from given weights, with fp32 around the products, so that no rounding hides a scale."""
    from ahp.runtime.shard.fsdp import COMPUTE_DTYPE
    from ahp.runtime.torch_compat import local_tensor

    in_fp32 = mock.patch.dict(COMPUTE_DTYPE, {"fp8": torch.float32})
    # The compiler of kernels takes long.
    with in_fp32, no_kernels(), quick_products() if quick else nullcontext():
        parallel = parallel_of(model, layout, engine)
        found = []
        for step, whole in enumerate(weights):
            for name, parameter in parallel.parameters.items():
                local_tensor(parameter.detach()).copy_(parallel.state.layout.own_part(name, whole[name]))
            result = parallel.step(parallel.shard(batch(step)))
            found.append((result.loss, result.grad_norm))
        return found


def free_steps(
    rank: int, world: int, model: str, layout: dict[str, Any], other: dict[str, Any], folder: str
) -> list[tuple[float, float]]:
    """Runs in each worker: a run as it is, in the middle saved and continued under another layout."""
    results = []
    parallel = parallel_of(model, layout, {})
    with quick_products():
        for step in range(STEPS):
            if step == STEPS // 2:
                parallel.save(folder)
                parallel = parallel_of(model, other, {})
                parallel.load(folder)
            results.append(parallel.step(parallel.shard(batch(step))))
    assert {p.dtype for p in parallel.parameters.values()} == {torch.float32}
    return [(result.loss, result.grad_norm) for result in results]


def in_micro_batches(layout: dict[str, Any]) -> dict[str, Any]:
    return {**layout, "micro_batch_size": MICRO}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ZeRO-3, full recompute, loss in chunks": (
        "llama", {**LAYOUTS["zero3"], "activation_checkpoint": "full"}, {"loss_chunk_tokens": 16}
    ),
    "ZeRO-1": ("llama", LAYOUTS["zero1"], {}),
    "split backward, recompute": ("llama", LAYOUTS["zbv-recompute"], {}),
    "tensor": ("gpt2", LAYOUTS["tp"], {}),
    "tensor and sequence, split backward, selective": ("llama", LAYOUTS["sequence+zbv-selective"], {}),
    "sequence, compiled": ("llama", LAYOUTS["sequence"], {"compile": True}),
    "ZeRO-3, compiled, selective": ("llama", LAYOUTS["zero3-selective"], {"compile": True}),
    "ring": ("llama", {"context_parallel_degree": 2, "context_parallel_method": "ring"}, {}),
    "tensor and context": ("llama", {"context_parallel_degree": 2, "tensor_parallel_degree": 2}, {}),
    "ZeRO-2, tensor": (
        "llama", {"data_parallel_shard_degree": 2, "zero_stage": 2, "tensor_parallel_degree": 2}, {}
    ),
}  # fmt: skip


WIDE = {
    "sequence, compiled", "tensor", "tensor and context", "tensor and sequence, split backward, selective", "ring",
    "ZeRO-3, full recompute, loss in chunks", "ZeRO-1",
}  # fmt: skip
"""What the others have in parts."""
TORCHS_KERNEL = {"ZeRO-1"}


@needs_torchao
@pytest.mark.parametrize("case", cases(CASES, wide=WIDE))
def test_each_step_is_that_of_torchaos_layers(pool: Pool, reference: Callable[..., list[Step]], case: str) -> None:
    (model, layout, engine), quick = CASES[case], case not in TORCHS_KERNEL
    expected = reference(model, torch.float32, quick=quick)
    layout = in_micro_batches(layout)
    world = world_size(layout)
    results = pool.run(steps_from, world, model, layout, engine, [weights for _, _, weights in expected], quick)
    assert all(result == results[0] for result in results), "ranks disagree"
    found = [
        max(abs(loss / expected_loss - 1), abs(norm / expected_norm - 1))
        for (loss, norm), (expected_loss, expected_norm, _) in zip(results[0], expected, strict=True)
    ]
    if not {"tensor_parallel_degree", "context_parallel_degree"} & set(layout):  # every sum is in the same order
        assert max(found) <= EACH_STEP, found
    else:
        assert max(found) <= FLIPPED, found
        assert sum(difference <= EACH_STEP for difference in found) >= SAME_STEPS, found


@needs_torchao
def test_a_run_continues_under_another_plan(pool: Pool, reference: Callable[..., list[Step]], tmp_path: Path) -> None:
    layouts = in_micro_batches(LAYOUTS["zero3"]), in_micro_batches(LAYOUTS["tp"])
    results = pool.run(free_steps, 2, "llama", *layouts, str(tmp_path))
    for step, ((loss, norm), (expected_loss, expected_norm, _)) in enumerate(
        zip(results[0], reference("llama", torch.bfloat16, quick=True), strict=True)
    ):
        allowed = FIRST + (LAST - FIRST) * step / (STEPS - 1)
        assert loss == pytest.approx(expected_loss, rel=allowed), f"loss of step {step}"
        assert norm == pytest.approx(expected_norm, rel=allowed), f"norm of step {step}"


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [32, 24])
@pytest.mark.parametrize("kind", ["linear", "transposed", "later"])
def test_a_product_is_torchaos_to_the_bit(kind: str, tokens: int) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore

    from ahp.runtime.compute.fp8_product import Product

    torch.manual_seed(0)
    linear = nn.Linear(64, 96).bfloat16()
    x, gradient = torch.randn(2, tokens // 2, 64).bfloat16(), torch.randn(2, tokens // 2, 96).bfloat16()
    theirs = convert_to_float8_training(nn.Sequential(linear), config=Float8LinearConfig(pad_inner_dim=True))
    expected_x = x.clone().requires_grad_()
    expected = theirs(expected_x)
    expected.backward(gradient)
    expected_weight = linear.weight.grad
    assert expected_weight is not None
    assert expected_x.grad is not None

    turned = kind == "transposed"
    weight = nn.Parameter(linear.weight.detach().t().contiguous() if turned else linear.weight.detach().clone())
    later = WeightGradients() if kind == "later" else None
    own_x = x.clone().requires_grad_()
    out = Product(transposed=not turned, later=later)(own_x, weight, linear.bias.detach())
    out.backward(gradient)
    if later is not None:
        assert weight.grad is None
        later.take()()
    assert weight.grad is not None
    assert own_x.grad is not None
    assert torch.equal(out, expected)
    assert torch.equal(own_x.grad, expected_x.grad)
    assert torch.equal(weight.grad.t() if turned else weight.grad, expected_weight)


@needs_torchao
@pytest.mark.slow
def test_a_compiled_product_is_the_same_to_the_bit() -> None:
    from ahp.runtime.compute.fp8_product import Product

    torch.manual_seed(0)
    layer, gradient = nn.Linear(64, 96, bias=False).bfloat16(), torch.randn(32, 96).bfloat16()
    product, found = Product(transposed=True), []
    eager: Callable[[torch.Tensor], torch.Tensor] = lambda x: product(x, layer.weight)  # noqa: E731
    for run in (eager, torch.compile(eager, dynamic=False, fullgraph=True)):
        x = torch.linspace(-1, 1, 32 * 64).reshape(32, 64).bfloat16().requires_grad_()
        layer.weight.grad = None
        out = run(x)
        out.backward(gradient)
        found.append((out, x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Mixture(nn.Module):
    """A block with a router that is a linear layer, and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 16)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.zeros(16, 96, 64))
        self.shared, self.gate = nn.Linear(64, 96), nn.Linear(64, 1)


def test_which_layers_compute_in_8_bits() -> None:
    with torch.device("meta"):
        assert fp8.linear_weights(Mixture()) == {"shared.weight": True}
        assert set(fp8.linear_weights(gpt2().transformer.h[0]).values()) == {False}  # type: ignore[union-attr,index,operator]
        assert len(fp8.linear_weights(llama().model.layers[0])) == 7  # type: ignore[union-attr,index,operator]


def test_refuses_parts_that_are_too_narrow() -> None:
    model = llama()
    found = outline(model, batch_size=1, sequence_length=16)
    fp8.check_parts(model, found, slice_outline(found, 2), 2)
    with pytest.raises(
        BadInput, match=r"tensor_parallel_degree = 4: would cut model.layers.0.*k_proj.*parts of 8.*\(valid: 1, 2\)"
    ):
        fp8.check_parts(model, found, slice_outline(found, 4), 4)


@pytest.mark.slow
def test_the_forecast_refuses_what_the_runtime_does() -> None:
    model, job = llama(), Job(sequence_length=16, precision="fp8")
    graph, reasons = analyze(model, job), {}
    graph = replace(graph, config={})  # where key heads are not what refuses first
    for degree in (1, 2, 4):
        reasons[degree] = products(graph, job, Parallelism(tensor_parallel_degree=degree), EngineChoice())
    assert {degree for degree, reason in reasons.items() if reason} == {4}
    for block in graph.blocks:
        assert {name for name, _ in in_8_bits(block, None)} == set(fp8.linear_weights(model.model.layers[0]))  # type: ignore[arg-type]


def test_refuses_a_model_without_such_layers() -> None:
    with pytest.raises(BadInput, match="no blocks to compute in 8 bits"):
        fp8.check_linear(None)


def plan_for(*devices: dict[str, Any]) -> Plan:
    plan = Plan.model_validate({"job": {"precision": "fp8"}, "parallelism": {}})
    return plan.model_copy(update={"cluster": {"groups": [{"device": device} for device in devices]}})


H100 = {"name": "H100-SXM-80GB", "peak_flops_per_s": {"bf16": 1e15, "fp8": 2e15}}
A100 = {"name": "A100-SXM-80GB", "peak_flops_per_s": {"bf16": 3e14}}


def test_refuses_devices_without_8_bits_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    fp8.refuse_without_fp8(plan_for(H100), "cuda")
    with pytest.raises(
        HardwareMismatch, match=r"job\.precision = 'fp8': A100-SXM-80GB has no products in 8 bits \(valid"
    ):
        fp8.refuse_without_fp8(plan_for(H100, A100), "cuda")
    with pytest.raises(HardwareMismatch, match="processor cores have no products in 8 bits"):
        fp8.refuse_without_fp8(plan_for(), "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"torchao is not installed.*pip install 'adaptive-hybrid-parallelism\[fp8\]'"):
        fp8.refuse_without_fp8(plan_for(H100), "cuda")


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_a_worker_looks_at_its_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], refused: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    if not refused:
        fp8.refuse_device(torch.device("cuda"))
        return
    with pytest.raises(HardwareMismatch, match=r"needs compute capability 8\.9, and NVIDIA A100 has 8\.0"):
        fp8.refuse_device(torch.device("cuda"))
