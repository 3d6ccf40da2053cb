"""What kernels, launches and copies take on the GPU of this machine, as data that kernels.py judges the forecast by.

    python benchmarks/gpu_kernels.py FILE.json              about a minute and a half
    python benchmarks/gpu_kernels.py FILE.json --only products attention

Products, grouped products, products in 8 bits, fused attention, element-wise kernels, the host's time to launch, copies between
host and device, and what a long product holds while the power controller answers. Operands are random normal numbers, spread over
more memory than the level-2 cache has; times are of CUDA events around batches of calls, medians of several batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_clock import Row, seconds_of, spread, timed_s
from gpu_products import attention, eight_bit, grouped, products

HELD_S = 6.0
"""Of one product again and again: the power controller answers within some hundred milliseconds."""


def element_wise() -> Iterator[Row]:
    """Kernels bound by memory, with the bytes that they read and write."""
    for elements in (2**18, 2**20, 2**22, 2**24, 2**26, 2**28):
        yield from _streams(elements)
    for tokens, hidden in ((2048, 2048), (4096, 4096), (8192, 4096), (16384, 8192)):
        yield from _norms(tokens, hidden)
    for tokens, vocabulary in ((2048, 32000), (4096, 128256), (8192, 128256)):
        yield from _losses(tokens, vocabulary)
    for elements in (2**22, 2**26, 2**28):
        yield from _optimizers(elements)


def _streams(elements: int) -> Iterator[Row]:
    pairs = spread((elements,), (elements,))
    wide = spread((elements,), dtype=torch.float32)
    calls = {
        "add": (6, lambda: torch.add(*next(pairs))),
        "copy": (4, lambda: next(pairs)[0].clone()),
        "silu": (4, lambda: F.silu(next(pairs)[0])),
        "fp32 to bf16": (6, lambda: next(wide)[0].to(torch.bfloat16)),
        "bf16 to fp32": (6, lambda: next(pairs)[0].to(torch.float32)),
        "dropout": (5, lambda: F.dropout(next(pairs)[0], 0.1)),
        "zero": (2, lambda: next(pairs)[0].zero_()),
    }
    for name, (num_bytes, call) in calls.items():
        yield {"kernel": name, "elements": elements, "bytes": num_bytes * elements, "seconds": seconds_of(call)}


def _norms(tokens: int, hidden: int) -> Iterator[Row]:
    inputs = spread((tokens, hidden))
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    x = next(inputs)[0].clone().requires_grad_()
    gradient = torch.randn_like(x)
    out = F.rms_norm(x, (hidden,), weight)
    layer = F.layer_norm(x, (hidden,), weight, weight)
    table = torch.randn(128256, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(128256, (tokens,), device="cuda")
    taken = F.embedding(ids, table)
    calls = {
        "rms_norm": (4, lambda: F.rms_norm(next(inputs)[0], (hidden,), weight)),
        "rms_norm backward": (6, lambda: torch.autograd.grad(out, x, gradient, retain_graph=True)),
        "layer_norm": (4, lambda: F.layer_norm(next(inputs)[0], (hidden,), weight, weight)),
        "layer_norm backward": (6, lambda: torch.autograd.grad(layer, x, gradient, retain_graph=True)),
        "softmax": (4, lambda: next(inputs)[0].softmax(-1)),
        "embedding": (4, lambda: F.embedding(ids, table)),
        "embedding backward": (
            2 + 2 * 128256 / tokens,
            lambda: torch.autograd.grad(taken, table, gradient, retain_graph=True),
        ),
    }
    for name, (num_bytes, call) in calls.items():
        yield {
            "kernel": name,
            "tokens": tokens,
            "hidden": hidden,
            "bytes": num_bytes * tokens * hidden,
            "seconds": seconds_of(call),
        }


def _losses(tokens: int, vocabulary: int) -> Iterator[Row]:
    logits = torch.randn(tokens, vocabulary, device="cuda", dtype=torch.float32, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    loss = F.cross_entropy(logits, targets)
    low = logits.detach().bfloat16()
    calls = {
        "cross_entropy": (
            12,
            lambda: F.cross_entropy(logits, targets),
        ),  # log-softmax reads twice at most and writes once
        "cross_entropy backward": (8, lambda: torch.autograd.grad(loss, logits, retain_graph=True)),
        "logits to fp32": (6, lambda: low.float()),
    }
    for name, (num_bytes, call) in calls.items():
        yield {
            "kernel": name,
            "tokens": tokens,
            "vocabulary": vocabulary,
            "bytes": num_bytes * tokens * vocabulary,
            "seconds": seconds_of(call),
        }


def _optimizers(elements: int) -> Iterator[Row]:
    for parts in (1, 64):
        weights = [torch.nn.Parameter(torch.randn(elements // parts, device="cuda")) for _ in range(parts)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        fused = torch.optim.AdamW(weights, fused=True)
        each = torch.optim.AdamW(weights, foreach=True)
        yield {
            "kernel": "AdamW fused",
            "elements": elements,
            "tensors": parts,
            "bytes": 28 * elements,
            "seconds": seconds_of(fused.step),
        }
        yield {
            "kernel": "AdamW foreach",
            "elements": elements,
            "tensors": parts,
            "bytes": 28 * elements,
            "seconds": seconds_of(each.step),
        }
        gradients = [weight.grad for weight in weights]
        norm = lambda g=gradients: torch.nn.utils.get_total_norm(g)  # noqa: E731
        yield {
            "kernel": "gradient norm",
            "elements": elements,
            "tensors": parts,
            "bytes": 4 * elements,
            "seconds": seconds_of(norm),
        }
        clip = lambda w=weights: torch.nn.utils.clip_grads_with_norm_(w, 1.0, torch.ones((), device="cuda"))  # noqa: E731
        yield {
            "kernel": "clip",
            "elements": elements,
            "tensors": parts,
            "bytes": 8 * elements,
            "seconds": seconds_of(clip),
        }


def launches() -> Iterator[Row]:
    """Seconds of the host for an operator, by what has so little work that the device is faster."""
    tiny = torch.ones(16, device="cuda")
    leaf, low = (
        torch.ones(16, device="cuda", requires_grad=True),
        torch.ones(16, 16, device="cuda", dtype=torch.bfloat16),
    )
    calls = {
        "add_": lambda: tiny.add_(1.0),
        "mul": lambda: tiny * tiny,
        "mul with autograd": lambda: leaf * tiny,
        "linear": lambda: F.linear(low, low),
        "view": lambda: tiny.view(4, 4),
        "empty": lambda: torch.empty(16, device="cuda"),
    }
    for name, call in calls.items():
        yield {"operator": name, "seconds": _host_s(call)}
    yield from _layers()


def _host_s(call: Callable[[], Any], count: int = 2000) -> float:
    for _ in range(100):
        call()
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count)
        torch.cuda.synchronize()
    return statistics.median(found)


def _layers() -> Iterator[Row]:
    """A LLaMA of transformers whose kernels are tiny, forward and backward: seconds and operators of each pass."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import LlamaConfig, LlamaForCausalLM

    class Count(TorchDispatchMode):
        views = kernels = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.is_view:
                self.views += 1
            else:
                self.kernels += 1
            return func(*args, **(kwargs or {}))

    layers = 8
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    for kind in ("eager", "compiled"):
        model = LlamaForCausalLM(config).to("cuda")
        for block in model.model.layers if kind == "compiled" else ():
            block.compile(dynamic=False)
        ids = torch.randint(256, (1, 64), device="cuda")

        def forward(model: Any = model, ids: torch.Tensor = ids) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return model.model(ids).last_hidden_state.sum()

        counts = {}
        if kind == "eager":
            with Count() as counted:
                loss = forward()
            counts["forward"] = (counted.kernels, counted.views)
            with Count() as counted:
                loss.backward()
            counts["backward"] = (counted.kernels, counted.views)
        for _ in range(3):
            forward().backward()
        forwards, backwards = [], []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = forward()
            middle = time.perf_counter()
            torch.cuda.synchronize()
            again = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            forwards.append(middle - start)
            backwards.append(end - again)
        for phase, found in (("forward", forwards), ("backward", backwards)):
            kernels, views = counts.get(phase, (None, None))
            yield {
                "operator": f"LLaMA {kind} {phase}",
                "layers": layers,
                "kernels": kernels,
                "views": views,
                "seconds": statistics.median(found),
            }


def copies() -> Iterator[Row]:
    """Between page-locked memory of the host and the device, and within the device."""
    size = 2**30
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    other, here = torch.empty_like(there), torch.empty(size, dtype=torch.uint8, pin_memory=True)
    ways = {"to the device": (there, here), "to the host": (here, there), "within the device": (other, there)}
    for name, (target, source) in ways.items():
        yield {
            "way": name,
            "bytes": size,
            "seconds": seconds_of(lambda t=target, s=source: t.copy_(s, non_blocking=True), 50e-3),
        }


def small() -> Iterator[Row]:
    """Kernels that the host is too slow for, as replays of a recorded graph: what each takes on the device alone."""
    for elements in (2**10, 2**14, 2**16, 2**18, 2**20, 2**22):
        a, b = (torch.randn(elements, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        yield {
            "kernel": "add",
            "bytes": 6 * elements,
            "seconds": _replayed_s(lambda a=a, b=b, o=out: torch.add(a, b, out=o)),
        }
    for m, n, k in (
        (256, 256, 256),
        (512, 512, 512),
        (1024, 1024, 1024),
        (2048, 1024, 1024),
        (1024, 2048, 2048),
        (4096, 512, 4096),
    ):
        x, w = (
            torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16),
        )
        yield {"kernel": "product", "m": m, "n": n, "k": k, "seconds": _replayed_s(lambda x=x, w=w: F.linear(x, w))}
    for tokens, hidden in ((1024, 1024), (2048, 2048), (2048, 4096)):
        x, w = (
            torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16),
            torch.ones(hidden, device="cuda", dtype=torch.bfloat16),
        )
        yield {
            "kernel": "rms_norm",
            "bytes": 4 * tokens * hidden,
            "seconds": _replayed_s(lambda x=x, w=w: F.rms_norm(x, w.shape, w)),
        }


def _replayed_s(call: Callable[[], Any], count: int = 200) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return seconds_of(graph.replay) / count


def compiled() -> Iterator[Row]:
    """What torch.compile makes of the element-wise parts of a LLaMA layer, forward, with the bytes that must move."""

    def norm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + r
        wide = total.float()
        return total, w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def gate(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * r

    def rope(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * w + torch.cat((-second, first), -1) * w

    for tokens, hidden in ((2048, 2048), (8192, 4096), (8192, 14336)):
        operands = spread((tokens, hidden), (tokens, hidden))
        weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        for name, function, num_bytes in (("add and norm", norm, 8), ("gate", gate, 6), ("rope", rope, 4)):
            run = torch.compile(function, dynamic=False)
            took = seconds_of(lambda f=run, o=operands, w=weight: f(*next(o), w))
            yield {
                "kernel": name,
                "tokens": tokens,
                "hidden": hidden,
                "bytes": num_bytes * tokens * hidden,
                "seconds": took,
            }


def beside() -> Iterator[Row]:
    """A product alone, and while page-locked memory of the host is copied there, back, and both ways."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    size = 2**30
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pairs = {"nothing": [], "to the device": [(there[0], pinned[0])], "to the host": [(pinned[1], there[1])]}
    pairs["both"] = pairs["to the device"] + pairs["to the host"]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for name, copied in pairs.items():
        for _ in range(2):
            torch.cuda.synchronize()
            for stream, (target, source) in zip(streams, copied, strict=False):
                with torch.cuda.stream(stream):
                    for _ in range(4):  # longer than the products
                        target.copy_(source, non_blocking=True)
            took = timed_s(lambda: x @ x, 30)
            torch.cuda.synchronize()
        yield {"beside": name, "seconds": took}


def held() -> Iterator[Row]:
    """A large product for seconds: its rate by the time since its start, with clock and power as NVML reads them."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        read = lambda: (pynvml.nvmlDeviceGetClockInfo(handle, 1), pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)  # noqa: E731
    except Exception as error:  # no NVML here: the rates alone
        print(f"NVML: {error}", file=sys.stderr)
        read = lambda: (None, None)  # noqa: E731
    for side, kind in ((8192, "normal"), (8192, "zeros")):
        make = torch.randn if kind == "normal" else torch.zeros
        a, b = (make(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        time.sleep(1.0)
        start = time.perf_counter()
        while (since := time.perf_counter() - start) < (HELD_S if kind == "normal" else 1.0):
            took = timed_s(lambda: torch.mm(a, b, out=out), 100)  # noqa: B023
            clock, watts = read()
            yield {
                "values": kind,
                "side": side,
                "since_s": since,
                "flops_per_s": 2 * side**3 / took,
                "sm_mhz": clock,
                "power_w": watts,
            }


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "launches": launches, "copies": copies, "products": products, "attention": attention, "element_wise": element_wise,
    "grouped": grouped, "eight_bit": eight_bit, "small": small, "compiled": compiled, "beside": beside, "held": held,
}  # fmt: skip


def facts() -> Row:
    found = torch.cuda.get_device_properties(0)
    return {
        "device": found.name, "num_sms": found.multi_processor_count, "memory_bytes": found.total_memory, "l2_bytes": found.L2_cache_size,
        "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def write(found: dict[str, Any], file: Path) -> None:
    """JSON, a row a line."""
    parts = []
    for name, rows in found.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows) if isinstance(rows, list) else None
        parts.append(f" {json.dumps(name)}: " + (json.dumps(rows) if lines is None else f"[\n{lines}\n ]"))
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the rows go")
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections (default: all)"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu_kernels.py: torch finds no GPU here", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"facts": facts()}
    for name in arguments.only:
        start = time.perf_counter()
        found[name] = []
        try:
            for row in SECTIONS[name]():
                found[name].append(row)
        except Exception as error:  # the other sections still count
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
        write(found, arguments.file)
        print(f"{name}: {len(found[name])} rows, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
