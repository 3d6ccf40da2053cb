"""Each kernel that a ring can take on a GPU beside the products written out in fp32: result, log-sum-exp and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ahp.runtime.sequence.partial_attention import Kernel, kernel_of
from ahp.runtime.torch_compat import fused_attention
from tests.runtime.sequence.test_ring_kernels import HALF, SHAPES, Shape, check, check_joined

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LONG = {
    "long causal": Shape(heads=8, key_heads=2, queries=2048, keys=2048, width=128, causal=True),
    "long": Shape(heads=8, key_heads=8, queries=1024, keys=2048, width=64),
}


def skip_unless_torch_takes(kernel: Kernel, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """torch's own rules say which kernels the device has for a shape."""
    q, k, v, _ = shape.tensors(device, dtype)
    if kernel == "efficient":
        k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    rule = shape.rule(device, dtype)
    with sdpa_kernel([BACKENDS[kernel], SDPBackend.MATH]):
        if fused_attention(q, k, v, rule.mask, causal=rule.causal, scale=rule.scale) != kernel:
            pytest.skip(f"{kernel} does not take this shape on {torch.cuda.get_device_name(device)}")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LONG])
@pytest.mark.parametrize("kernel", BACKENDS)
def test_a_kernel_gives_what_the_products_give(
    kernel: Kernel, shape: str, dtype: torch.dtype, device: torch.device
) -> None:
    given = {**SHAPES, **LONG}[shape]
    skip_unless_torch_takes(kernel, given, device, dtype)
    check(kernel, given, device, dtype, HALF[dtype])


@pytest.mark.parametrize("kernel", [*BACKENDS, None])
@pytest.mark.parametrize("shape", ["whole", "one key head", "width 128", "long"])
def test_parts_joined_are_the_whole(kernel: Kernel | None, shape: str, device: torch.device) -> None:
    given = {**SHAPES, **LONG}[shape]
    if kernel is not None:
        skip_unless_torch_takes(kernel, given, device, torch.bfloat16)
    check_joined(kernel, given, device, torch.bfloat16, HALF[torch.bfloat16])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_ring_takes_a_fused_kernel_wherever_torch_has_one(shape: str, device: torch.device) -> None:
    q, k, v, _ = SHAPES[shape].tensors(device, torch.bfloat16)
    kernel = kernel_of(q, k, v, SHAPES[shape].rule(device, torch.bfloat16))
    assert kernel in BACKENDS


def test_what_torch_is_told_to_leave_out_is_left_out(device: torch.device) -> None:
    given = SHAPES["causal"]
    q, k, v, _ = given.tensors(device, torch.bfloat16)
    for kernel, backend in BACKENDS.items():
        with sdpa_kernel([backend, SDPBackend.MATH]):
            assert kernel_of(q, k, v, given.rule(device, torch.bfloat16)) in (kernel, "math")


def test_fp32_takes_the_efficient_kernel(device: torch.device) -> None:
    given = SHAPES["few keys"]
    q, k, v, _ = given.tensors(device, torch.float32)
    assert kernel_of(q, k, v, given.rule(device, torch.float32)) == "efficient"
    check("efficient", given, device, torch.float32, 1e-3)  # which computes products in TF32 where that is allowed
