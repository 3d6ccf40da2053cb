"""FLOPs and bytes of single operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.graph.costs import distinct_bytes, flops, traffic

aten = torch.ops.aten
sizes = st.integers(1, 16)


@settings(deadline=None)
@given(m=sizes, k=sizes, n=sizes)
def test_a_product_is_two_flops_a_term(m: int, k: int, n: int) -> None:
    a, b = torch.empty(m, k, device="meta"), torch.empty(k, n, device="meta")
    assert flops(aten.mm.default, (a, b), {}, a @ b) == 2 * m * k * n
    assert flops(aten.mv.default, (a, b[:, 0]), {}, a[:, 0]) == 2 * m * k


@settings(deadline=None)
@given(b=sizes, kv=sizes, group=st.integers(1, 4), s=sizes, d=sizes)
def test_attention_counts_every_query_head_and_the_full_square(b: int, kv: int, group: int, s: int, d: int) -> None:
    query = torch.empty(b, kv * group, s, d, device="meta")
    key = torch.empty(b, kv, s, d, device="meta")
    forward = flops(aten._scaled_dot_product_flash_attention_for_cpu.default, (query, key, key), {}, None)
    backward = flops(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (query, query, key, key), {}, None
    )
    assert forward == 2 * 2 * b * kv * group * s * s * d
    assert backward == 5 * 2 * b * kv * group * s * s * d


def test_grouped_products() -> None:
    rows, k, n, experts = 12, 4, 6, 3
    tokens, weights = torch.empty(rows, k, device="meta"), torch.empty(experts, k, n, device="meta")
    grads = torch.empty(rows, n, device="meta")
    grouped = aten._grouped_mm.default
    assert flops(grouped, (tokens, weights), {}, None) == 2 * rows * k * n
    assert flops(grouped, (tokens.T, grads), {}, None) == 2 * rows * k * n
    assert flops(grouped, (torch.empty(experts, 5, k), weights), {}, None) == 2 * experts * 5 * k * n


def test_an_elementwise_operator_has_no_flops() -> None:
    x = torch.empty(4, device="meta")
    assert flops(aten.relu.default, (x,), {}, x) == 0


@settings(deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), times=st.integers(2, 7))
def test_repetitions_are_read_once(shape: list[int], times: int) -> None:
    x = torch.empty(*shape, 1, device="meta")
    assert distinct_bytes(x.expand(*shape, times)) == distinct_bytes(x) == x.numel() * 4


def test_an_empty_tensor_has_no_bytes() -> None:
    assert distinct_bytes(torch.empty(0, 4).expand(3, 0, 4)) == 0


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("add", [8, 8], (64, 32)),
        ("copy_", [8, 8], (32, 32)),
        ("zero_", [8], (0, 32)),
        ("empty_like", [8], (0, 0)),
    ],
)
def test_bytes_moved(name: str, inputs: list[int], expected: tuple[int, int]) -> None:
    func = {
        "add": aten.add.Tensor,
        "copy_": aten.copy_.default,
        "zero_": aten.zero_.default,
        "empty_like": aten.empty_like.default,
    }[name]
    tensors = [torch.empty(n) for n in inputs]
    assert traffic(func, tensors, [torch.empty(8)], is_view=False) == expected


def test_a_view_moves_nothing() -> None:
    x = torch.empty(4, 4)
    assert traffic(aten.t.default, [x], [x.t()], is_view=True) == (0, 0)
