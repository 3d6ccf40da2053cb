"""Attention over a part of the keys, with the log-sum-exp that joins parts, on the fused kernels of PyTorch.

Shapes: B batch, H query heads, G key heads (H a multiple of G), Q queries, K keys, D width of a head.
The parts are joined as in Ring Attention (arXiv 2310.01889), by the softmax of FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ahp.runtime.torch_compat import fused_attention

aten = torch.ops.aten

Kernel = Literal["cudnn", "flash", "efficient", "cpu", "math"]
"""cuDNN's, FlashAttention, torch's efficient one, FlashAttention for CPUs; math: the products written out, in fp32."""


@dataclass(frozen=True)
class Rule:
    """Which keys a query sees, and by what its products are multiplied."""

    scale: float
    causal: bool = False
    """Query i sees the keys up to i; there are as many keys as queries."""
    mask: torch.Tensor | None = None
    """[1 or B, 1 or H, Q, K], added to the products. Finite: a row that sees no key here has a weight of 0 in the whole."""


def hidden_value(dtype: torch.dtype) -> float:
    """What a mask adds for an unseen key: so low that the key's weight is 0, but finite, so that no row becomes NaN."""
    return torch.finfo(dtype).min / 2


def kernel_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> Kernel:
    """The kernel for these shapes: the choice of torch's own rules on the device, among kernels that return the log-sum-exp.

    torch tries its kernels in the device's order (cuDNN's first on Hopper and Blackwell, then FlashAttention, then the efficient
    one), without those that ``torch.nn.attention.sdpa_kernel`` leaves out.
    """
    if q.device.type == "cpu":
        return "cpu" if q.shape[-1] == v.shape[-1] else "math"
    found = fused_attention(q, k, v, rule.mask, causal=rule.causal, scale=rule.scale)
    if (
        found == "math" and k.shape[1] < q.shape[1]
    ):  # the efficient kernel takes keys that are repeated for each query head
        k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        found = fused_attention(q, k, v, rule.mask, causal=rule.causal, scale=rule.scale)
    return found


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, kernel: Kernel | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, H, Q, D], k and v [B, G, K, D] -> attention [B, H, Q, D] and the log-sum-exp of the products, fp32 [B, H, Q].

    ``kernel``: None = ``kernel_of``.
    """
    kernel = kernel or kernel_of(q, k, v, rule)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, rule.causal, attn_mask=rule.mask, scale=rule.scale
        )
    if kernel == "cudnn":
        out, sums, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, rule.mask, True, 0.0, rule.causal, scale=rule.scale
        )
        return out, sums.view(q.shape[:-1])  # the kernel returns one more dim, of size 1
    if kernel == "flash":
        out, sums, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, rule.causal, scale=rule.scale)
        return out, sums
    k, v = _for_each_query_head(q, k, v)
    if kernel == "math":
        return _forward(q, k, v, rule)
    bias = _aligned(rule.mask, q)
    out, sums, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, rule.causal, scale=rule.scale
    )
    return out, sums[..., : q.shape[2]]  # the kernel pads to 32 queries


def backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    rule: Rule,
    kernel: Kernel | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What these keys add to the gradients of q, k and v. ``out`` and ``sums`` [B, H, Q] are over all keys of the sequence."""
    kernel = kernel or kernel_of(q, k, v, rule)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, sums, 0.0, rule.causal, attn_mask=rule.mask, scale=rule.scale
        )
    none = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of dropout, which is not used
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward(
            gradient, q, k, v, out, sums.unsqueeze(-1), none, none, rule.mask, None, None, q.shape[2], k.shape[2], 0.0,
            rule.causal, scale=rule.scale,
        )  # fmt: skip
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, sums, None, None, q.shape[2], k.shape[2], 0.0, rule.causal, none, none, scale=rule.scale
        )  # fmt: skip
    whole_k, whole_v = _for_each_query_head(q, k, v)
    if kernel == "math":
        return _summed(_backward(gradient, q, whole_k, whole_v, out, sums, rule), k)
    queries = q.shape[2]
    padded = torch.nn.functional.pad(sums, (0, -queries % 32))
    found = aten._scaled_dot_product_efficient_attention_backward(
        gradient, q, whole_k, whole_v, _aligned(rule.mask, q), out, padded, none, none, 0.0, [True, True, True, False],
        rule.causal, scale=rule.scale,
    )  # fmt: skip
    return _summed(found[:3], k)


def _aligned(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The mask as the efficient kernel reads it: expanded to every head, with rows a multiple of 8 elements apart in memory."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    padded = torch.nn.functional.pad(mask, (0, -keys % 8))[..., :keys]
    return padded.expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _for_each_query_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def _summed(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor], k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of keys and values that were repeated for each query head, added up for each key head."""
    of_q, of_k, of_v = gradients
    if of_k.shape[1] == k.shape[1]:
        return gradients
    groups = (k.shape[1], -1)
    return of_q, of_k.unflatten(1, groups).sum(2), of_v.unflatten(1, groups).sum(2)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    products = _products(q, k, rule)
    sums = products.logsumexp(-1)
    return ((products - sums.unsqueeze(-1)).exp() @ v.float()).to(q.dtype), sums


def _backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    rule: Rule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashAttention's backward (arXiv 2205.14135, algorithm 4), written out."""
    weights = (_products(q, k, rule) - sums.unsqueeze(-1)).exp()
    gradient, dtype = gradient.float(), q.dtype
    of_v = weights.transpose(-1, -2) @ gradient
    of_weights = gradient @ v.float().transpose(-1, -2)
    of_products = weights * (of_weights - (gradient * out).sum(-1, keepdim=True)) * rule.scale
    return (of_products @ k.float()).to(dtype), (of_products.transpose(-1, -2) @ q.float()).to(dtype), of_v.to(dtype)


def _products(q: torch.Tensor, k: torch.Tensor, rule: Rule) -> torch.Tensor:
    products = q.float() @ k.float().transpose(-1, -2) * rule.scale
    if rule.causal:
        unseen = torch.ones(products.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        products = products.masked_fill(unseen, hidden_value(products.dtype))
    return products if rule.mask is None else products + rule.mask
