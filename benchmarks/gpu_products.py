"""Products, grouped products, products in 8 bits and fused attention of gpu_kernels.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from gpu_clock import Row, seconds_of, spread
from torch.nn.attention import SDPBackend, sdpa_kernel

# (n, k) of weights: Llama 3.2 1B and 3B, Llama 3 8B and 70B, whole and divided by tensor degrees, and square ones.
WEIGHTS = (
    (2048, 2048), (3072, 2048), (16384, 2048), (2048, 8192), (3072, 3072), (16384, 3072), (3072, 8192), (1024, 4096),
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (14336, 4096), (4096, 1792), (1536, 8192), (8192, 1024),
    (8192, 8192), (10240, 8192), (7168, 8192), (8192, 3584), (512, 4096), (1024, 1024), (4096, 1024), (128256, 4096),
)  # fmt: skip
TOKENS = (1024, 2048, 4096, 8192, 16384)

# (groups, n, k) of experts: Mixtral 8x7B (w1), Qwen3 30B-A3B, DeepSeek-V3 of 32 experts on a rank, gpt-oss 20B.
EXPERTS = (
    (8, 14336, 4096),
    (8, 4096, 14336),
    (128, 768, 2048),
    (128, 2048, 768),
    (32, 2048, 7168),
    (32, 7168, 2048),
    (32, 2880, 2880),
)
ROWS_OF_EXPERT = (128, 512, 2048)

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
ATTENTION_TOKENS, ATTENTION_WIDTH = 16384, 2048
"""As the published bars of FlashAttention-3: 16384 tokens of 2048 channels in heads of 64 or 128."""


def products() -> Iterator[Row]:
    """Forward (m, k) x (n, k)^T, and its two gradients, in bf16; a few in fp32."""
    for n, k in WEIGHTS:
        for m in TOKENS:
            if m * n * k > 4096 * 128256 * 4096:
                continue
            operands = spread((m, k), (n, k), (m, n))
            calls = {
                "TN": lambda o=operands: F.linear(*next(o)[:2]),
                "NN": lambda o=operands: _data_gradient(*next(o)),
                "NT": lambda o=operands: _weight_gradient(*next(o)),
            }
            sides = {"TN": (m, n, k), "NN": (m, k, n), "NT": (n, k, m)}
            for layout, call in calls.items():
                rows, columns, depth = sides[layout]
                yield {
                    "layout": layout,
                    "dtype": "bf16",
                    "m": rows,
                    "n": columns,
                    "k": depth,
                    "seconds": seconds_of(call),
                }
    for m, n, k in ((4096, 4096, 4096), (8192, 4096, 4096), (4096, 14336, 4096), (2048, 2048, 2048)):
        operands = spread((m, k), (n, k), dtype=torch.float32)
        for allow in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allow
            took = seconds_of(lambda o=operands: F.linear(*next(o)))
            yield {"layout": "TN", "dtype": "tf32" if allow else "fp32", "m": m, "n": n, "k": k, "seconds": took}
        torch.backends.cuda.matmul.allow_tf32 = False


def _data_gradient(x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient @ weight


def _weight_gradient(x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.t() @ x


def eight_bit() -> Iterator[Row]:
    """torch._scaled_mm with one scale a tensor and one a row, of operands that are in 8 bits already."""
    low = torch.float8_e4m3fn
    for n, k in ((2048, 2048), (16384, 2048), (4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (7168, 8192)):
        for m in (2048, 8192, 16384):
            a, b = torch.randn(m, k, device="cuda").to(low), torch.randn(n, k, device="cuda").to(low)
            one, row, column = (
                torch.ones((), device="cuda"),
                torch.ones(m, 1, device="cuda"),
                torch.ones(1, n, device="cuda"),
            )
            for fast in (True, False):
                for name, scales in (("tensor", (one, one)), ("row", (row, column))):
                    call = partial(torch._scaled_mm, a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
                    known = {"m": m, "n": n, "k": k, "scales": name, "fast_accumulate": fast}
                    yield {**known, "seconds": seconds_of(call)}


def grouped() -> Iterator[Row]:
    """torch's grouped product over experts, with as many rows each, and with rows as a router spreads them unevenly."""
    for groups, n, k in EXPERTS:
        for rows in ROWS_OF_EXPERT:
            for even in (True, False):
                sizes = torch.full((groups,), rows) if even else _uneven(groups, rows)
                ends = sizes.cumsum(0).to("cuda", torch.int32)
                total = int(sizes.sum())
                x, g = (torch.randn(total, side, device="cuda", dtype=torch.bfloat16) for side in (k, n))
                weight = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16)
                stages = {
                    "fwd": lambda x=x, w=weight, e=ends: torch._grouped_mm(x, w.transpose(1, 2), offs=e),
                    "bwd_grad_act": lambda g=g, w=weight, e=ends: torch._grouped_mm(g, w, offs=e),
                    "bwd_grad_w": lambda g=g, x=x, e=ends: torch._grouped_mm(g.t(), x, offs=e),
                }
                for stage, call in stages.items():
                    yield {
                        "groups": groups,
                        "m": rows,
                        "n": n,
                        "k": k,
                        "even": even,
                        "stage": stage,
                        "seconds": seconds_of(call),
                    }


def _uneven(groups: int, rows: int) -> torch.Tensor:
    """Rows of each expert in steps of 8, log-normal, the largest three to four times the mean; their sum as where even."""
    weights = torch.randn(groups, generator=torch.Generator().manual_seed(0)).mul(0.5).exp()
    return (weights / weights.sum() * groups * rows / 8).round().clamp(1).long() * 8


def attention() -> Iterator[Row]:
    """Each fused kernel that torch has, forward as training runs it and backward."""
    for name, backend in BACKENDS.items():
        for width in (64, 128):
            for sequence in SEQUENCES:
                for causal in (True, False) if name != "efficient" else (True,):
                    heads = ATTENTION_WIDTH // width
                    for key_heads in (
                        {heads, heads // 4}
                        if causal and sequence in (2048, 4096, 8192) and name != "efficient"
                        else {heads}
                    ):
                        yield from _attention(name, backend, width, sequence, causal, heads, key_heads)


def _attention(
    name: str, backend: SDPBackend, width: int, sequence: int, causal: bool, heads: int, key_heads: int
) -> Iterator[Row]:
    batch = max(1, ATTENTION_TOKENS // sequence)
    q, gradient = (torch.randn(batch, heads, sequence, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, key_heads, sequence, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    row = {
        "kernel": name,
        "head_dim": width,
        "sequence": sequence,
        "batch": batch,
        "heads": heads,
        "key_heads": key_heads,
        "causal": causal,
    }
    run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=key_heads != heads)  # noqa: E731
    try:
        with sdpa_kernel([backend]):
            yield {**row, "phase": "forward", "seconds": seconds_of(run)}
            out = run()
            took = seconds_of(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
            yield {**row, "phase": "backward", "seconds": took}
    except RuntimeError as error:
        print(f"attention {row}: {str(error).splitlines()[0]}", file=sys.stderr)
