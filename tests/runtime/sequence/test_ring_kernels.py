"""Attention over parts of the keys, joined: what a kernel calls its log-sum-exp must be that, or the whole would be wrong unseen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ahp.runtime.sequence import partial_attention
from ahp.runtime.sequence.partial_attention import Kernel, Rule, backward, forward, hidden_value, kernel_of
from ahp.runtime.sequence.ring import _join

HALF = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""How far results of 16 bits may be from fp32's, as a share of their norm: a few of the last bits."""
LOG_SUMS = 2e-3
"""In absolute terms: products of 16 bits are added up in fp32."""


@dataclass(frozen=True)
class Shape:
    """``queries`` of the last tokens of ``keys``."""

    heads: int = 4
    key_heads: int = 4
    queries: int = 128
    keys: int = 128
    width: int = 64
    value_width: int | None = None
    causal: bool = False
    masked: bool = False

    def tensors(self, device: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values and a gradient; the keys and values as a ring cuts them, not contiguous."""
        torch.manual_seed(0)
        width = self.value_width or self.width
        q = torch.randn(2, self.heads, self.queries, self.width, device=device).to(dtype)
        k = torch.randn(2, self.key_heads, 2 * self.keys, self.width, device=device).to(dtype)[:, :, : self.keys]
        v = torch.randn(2, self.key_heads, 2 * self.keys, width, device=device).to(dtype)[:, :, : self.keys]
        return q, k, v, torch.randn(2, self.heads, self.queries, width, device=device).to(dtype)

    def rule(self, device: Any, dtype: torch.dtype) -> Rule:
        if not self.masked:
            return Rule(self.width**-0.5, self.causal)
        torch.manual_seed(1)
        seen = torch.rand(2, 1, self.queries, self.keys, device=device) > 0.3
        seen[:, :, 5] = False  # a token of a document that none of these keys is in
        added = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, hidden_value(dtype))
        return Rule(self.width**-0.5, mask=added)


SHAPES = {
    "causal": Shape(causal=True),
    "whole": Shape(),
    "half the keys": Shape(keys=64),
    "half the queries": Shape(queries=64),
    "few keys": Shape(key_heads=2, causal=True),
    "one key head": Shape(key_heads=1, queries=64),
    "odd length": Shape(queries=72, keys=40),
    "width 96": Shape(width=96, causal=True),
    "width 128": Shape(width=128, key_heads=2, causal=True),
    "narrow values": Shape(width=96, value_width=64, causal=True),
    "mask": Shape(masked=True),
    "mask of few keys": Shape(masked=True, key_heads=2, queries=72, keys=40),
}


def found_and_expected(kernel: Kernel, shape: Shape, device: Any, dtype: torch.dtype) -> list[tuple[str, Any, Any]]:
    """What a kernel gives, by name, and what the products written out in fp32 give."""
    q, k, v, gradient = shape.tensors(device, dtype)
    rule = shape.rule(device, dtype)
    out, sums = forward(q, k, v, rule, kernel)
    assert (out.dtype, sums.dtype, sums.shape) == (dtype, torch.float32, q.shape[:-1])
    whole = [x.float() for x in (q, k, v, gradient)]
    in_fp32 = Rule(rule.scale, rule.causal, None if rule.mask is None else rule.mask.float())
    expected, expected_sums = forward(*whole[:3], in_fp32, "math")
    sums, expected_sums = sums.clone(), expected_sums.clone()
    if shape.masked:  # joined with keys that the token sees, what it has of these has no weight
        assert (sums[:, :, 5] < -1e4).all()
        for result, log_sums in ((out, sums), (expected, expected_sums)):
            result[:, :, 5], log_sums[:, :, 5] = 0.0, 1.0
    gradients = backward(gradient, q, k, v, out, sums, rule, kernel)
    expected_gradients = backward(whole[3], *whole[:3], expected, expected_sums, in_fp32, "math")
    names = ("out", "sums", "of q", "of k", "of v")
    found = (out, sums, *gradients)
    return list(zip(names, found, (expected, expected_sums, *expected_gradients), strict=True))


def check(kernel: Kernel, shape: Shape, device: Any, dtype: torch.dtype, tolerance: float) -> None:
    for name, found, expected in found_and_expected(kernel, shape, device, dtype):
        if name == "sums":
            assert (found - expected).abs().max() < LOG_SUMS, (name, found, expected)
        else:
            off = (found.float() - expected).norm() / expected.norm()
            assert off < tolerance, f"{kernel} {shape}: {name} is off by {off:.1e}"


def joined(kernel: Kernel | None, shape: Shape, device: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Attention to two parts of the keys, one after the other, as around a ring of two: the result and the gradients."""
    q, k, v, gradient = shape.tensors(device, dtype)
    rule, half = Rule(shape.width**-0.5), shape.keys // 2
    out = sums = torch.empty(0)
    parts = [(x[:, :, :half], y[:, :, :half]) for x, y in [(k, v)]] + [(k[:, :, half:], v[:, :, half:])]
    for number, (keys, values) in enumerate(parts):
        more, more_sums = forward(q, keys, values, rule, kernel)
        if number:
            _join(out, sums, more.float(), more_sums)
        else:
            out, sums = more.float(), more_sums.clone()
    found = [backward(gradient, q, *part, out.to(dtype), sums, rule, kernel) for part in parts]
    of_q = sum(x[0].float() for x in found)
    return {"out": out, "of q": of_q, "of k": torch.cat([x[1] for x in found], 2), "of v": torch.cat([x[2] for x in found], 2)}  # type: ignore[dict-item]  # fmt: skip


def alone(shape: Shape, device: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """torch's attention to all keys at once, in fp32."""
    *whole, gradient = (x.float() for x in shape.tensors(device, dtype))
    q, k, v = (x.requires_grad_() for x in whole)
    out = F.scaled_dot_product_attention(q, k, v, scale=shape.width**-0.5, enable_gqa=True)
    out.backward(gradient)
    return {"out": out.detach(), "of q": q.grad, "of k": k.grad, "of v": v.grad}  # type: ignore[dict-item]


def check_joined(kernel: Kernel | None, shape: Shape, device: Any, dtype: torch.dtype, tolerance: float) -> None:
    expected = alone(shape, device, dtype)
    for name, value in joined(kernel, shape, device, dtype).items():
        off = (value.float() - expected[name]).norm() / expected[name].norm()
        assert off < tolerance, f"{kernel} {shape}: {name} is off by {off:.1e}"


@pytest.mark.parametrize("shape", [name for name, shape in SHAPES.items() if not shape.value_width])
def test_the_kernel_of_a_cpu_is_what_the_products_give(shape: str) -> None:
    check("cpu", SHAPES[shape], "cpu", torch.float32, 1e-5)


@pytest.mark.parametrize("kernel", ["cpu", "math"])
def test_parts_joined_are_the_whole(kernel: Kernel) -> None:
    check_joined(kernel, Shape(key_heads=2), "cpu", torch.float32, 1e-5)


def test_a_log_sum_exp_of_another_base_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = partial_attention._forward

    def in_base_two(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, sums = own(*args)
        return out, sums / torch.tensor(2.0).log()

    monkeypatch.setattr(partial_attention, "_forward", in_base_two)
    with pytest.raises(AssertionError, match="is off by"):
        check_joined("math", Shape(), "cpu", torch.float32, 1e-5)


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_of_gpus_are_called_as_they_take_it(kernel: Kernel, shape: str) -> None:
    """On tensors without data: the numbers are tests/gpu/test_ring_kernels.py's."""
    given = SHAPES[shape]
    if kernel == "flash" and (given.masked or given.value_width):
        pytest.skip("FlashAttention has no such kernel")
    q, k, v, gradient = (x.to("meta") for x in given.tensors("cpu", torch.bfloat16))
    rule = given.rule("cpu", torch.bfloat16)
    rule = Rule(rule.scale, rule.causal, None if rule.mask is None else rule.mask.to("meta"))
    out, sums = forward(q, k, v, rule, kernel)
    assert (out.shape, sums.shape, sums.dtype) == (gradient.shape, q.shape[:-1], torch.float32)
    assert [x.shape for x in backward(gradient, q, k, v, out, sums, rule, kernel)] == [q.shape, k.shape, v.shape]


def test_keys_are_repeated_where_only_that_has_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The efficient kernel takes as many heads of keys as of queries; torch says "math" of fewer."""
    asked: list[tuple[int, bool]] = []

    def choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *, causal: bool, scale: float) -> Kernel:
        asked.append((k.shape[1], causal))
        return "efficient" if k.shape[1] == q.shape[1] else "math"

    monkeypatch.setattr(partial_attention, "fused_attention", choice)
    q, k = torch.empty(1, 4, 8, 64, device="meta"), torch.empty(1, 2, 8, 64, device="meta")
    assert kernel_of(q, k, k, Rule(1.0, True)) == "efficient"
    assert kernel_of(q, q, q, Rule(1.0)) == "efficient"
    assert asked == [(2, True), (4, True), (4, False)]
