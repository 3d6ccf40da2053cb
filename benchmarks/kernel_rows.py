"""Measured kernels on GPUs as rows that can be priced: from a JSON list, and from three files beside this one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ahp.cluster.catalogue import find
from ahp.forecast.gpu import ElementWiseKind, Gpu

CATALOGUE = {
    "A100-PCIe": "A100-PCIe-80GB", "B200-SXM": "B200-SXM", "NVIDIA A100 SXM": "A100-SXM-80GB",
    "NVIDIA A100 PCIe": "A100-PCIe-80GB", "NVIDIA H100 SXM": "H100-SXM-80GB", "NVIDIA H200 SXM": "H200-SXM-141GB",
    "NVIDIA GH200 SXM": "GH200-96GB", "NVIDIA B200 SXM": "B200-SXM", "NVIDIA B300 SXM": "B300-SXM",
    "NVIDIA GB200 SXM": "GB200-NVL72", "AMD MI300X": "MI300X",
    "AMD MI325X": "MI325X", "AMD MI355X": "MI355X",
}  # fmt: skip
"""The catalogue's name of a row's accelerator."""

LONG_S = 1.0e-3
"""From here on a product is long: the power controller has answered."""

LARGEST = "largest product"
"""A kind of row: the best of a device, measured for a moment, so compared without the sustained clock."""

UNSEEN = "unseen attention"
"""A kind of row: what attention_unseen.yaml has, which no constant may be derived from."""

OWN = "own "
"""Kinds of rows begin with it that gpu_kernels.py measured. kernels.yaml says which of its constants are from them; ``--derive`` uses none."""

HOST_BOUND = 2.0
"""Times what the host took to launch it: a kernel that was shorter may have waited for the host, and is left out."""


@dataclass(frozen=True)
class Row:
    """One measured kernel."""

    id: str
    device: str
    kind: str
    detail: str
    seconds: float
    predict: Callable[[Gpu], float]
    share: tuple[str, str, int] | None = None
    """Attention: (kernel, generation, 0 forward or 1 backward)."""


def rows_of(path: Path) -> tuple[list[Row], int]:
    """The rows that the catalogue has a device for, and the number of those that it has not."""
    found: list[Row] = []
    skipped = 0
    for raw in json.loads(path.read_text(encoding="utf-8")):
        device = CATALOGUE.get(raw["accelerator"])
        row = None
        if device and raw["kind"].startswith("per_shape_"):
            row = _shaped(raw, device)
        elif device and raw["kind"] == "max_achievable_matmul" and raw.get("shape_MxNxK"):
            row = _largest(raw, device)
        if row is None:
            skipped += 1
        else:
            found.append(row)
    return found + h100_attention() + unseen_attention() + own_rows(), skipped


def _shaped(raw: dict[str, Any], device: str) -> Row:
    shape = dict(part.strip().split("=") for part in raw["shape"].split(","))
    kind = raw["kind"].removeprefix("per_shape_")
    rate = raw["efficiency"] * raw["theory_tflops"] * 1e12
    if kind == "matmul":
        return _product(raw["id"], device, shape, rate)
    return _group(raw["id"], device, shape, rate) if kind == "group_matmul" else _attention(raw, device, shape, rate)


def _product(name: str, device: str, shape: dict[str, str], rate: float) -> Row:
    b, m, n, k = (int(shape[key]) for key in "bmnk")
    seconds = 2.0 * b * m * n * k / rate
    out, accumulate = _bytes(shape["out_dtype"]), shape["accumulate"] == "True"
    detail = f"{shape['layout']} {shape['out_dtype']}, {'long' if seconds > LONG_S else 'short'}"
    predict = lambda gpu: gpu.product_s(b, m, n, k, "bf16", output_bytes=out, accumulate=accumulate)  # noqa: E731
    return Row(name, device, "product", detail, seconds, predict)


def _group(name: str, device: str, shape: dict[str, str], rate: float) -> Row:
    groups, m, n, k = (int(shape[key]) for key in ("ng", "M", "N", "K"))
    stage, accumulate = shape["stage"], shape["accumulate"] == "True"
    sides = {"fwd": (m, n, k), "bwd_grad_act": (m, k, n), "bwd_grad_w": (n, k, m)}[stage]
    out = _bytes(shape["main_grad_dtype"] if stage == "bwd_grad_w" else shape["out_dtype"])
    how = {"output_bytes": out, "accumulate": accumulate, "makes_weights": stage == "bwd_grad_w"}
    predict = lambda gpu: gpu.grouped_s(groups, *sides, "bf16", **how)  # noqa: E731
    return Row(name, device, "grouped product", stage, 2.0 * groups * m * n * k / rate, predict)


def _attention(raw: dict[str, Any], device: str, shape: dict[str, str], rate: float) -> Row:
    s, heads, d, v = (int(shape[key]) for key in ("seq_len", "head_num", "qk_head_dim", "v_head_dim"))
    backward = "bwd" in raw["kind"]
    whole = (2.5 if backward else 1.0) * 2.0 * int(shape["batch"]) * heads * s * s * (d + v)  # causal mask not counted
    return _attention_row(raw["id"], device, whole / 2, whole / rate, s, d, v, backward, True, None)


def _attention_row(
    name: str,
    device: str,
    flops: float,
    seconds: float,
    s: int,
    d: int,
    v: int,
    backward: bool,
    causal: bool,
    kernel: Any,
) -> Row:
    gpu = Gpu(find(device).device)
    predict = lambda g: g.attention_s(  # noqa: E731
        flops, s, d, "bf16", backward=backward, kernel=kernel, causal=causal, value_dim=v
    )
    kernel = kernel or gpu.torch_kernel("bf16", d)
    detail = f"{kernel} {'backward' if backward else 'forward'}"
    share = (kernel, gpu.generation, int(backward))
    return Row(name, device, "attention", detail, seconds, predict, share)


def h100_attention() -> list[Row]:
    """The published bars on H100."""
    data = yaml.safe_load((Path(__file__).parent / "attention_h100.yaml").read_text(encoding="utf-8"))
    found = []
    for line in data["series"]:
        d, causal, backward = line["head_dim"], line["causal"], line["phase"] == "backward"
        for s, tflops in zip(data["sequences"], line["tflops"], strict=True):
            flops = (2.5 if backward else 1.0) * 4.0 * data["tokens"] * s * data["width"] * (0.5 if causal else 1.0)
            name = f"h100-{line['kernel']}-{line['phase']}-d{d}-{'causal-' if causal else ''}s{s}"
            args = flops, flops / (tflops * 1e12), s, d, d, backward, causal, line["kernel"]
            found.append(_attention_row(name, "H100-SXM-80GB", *args))
    return found


def unseen_attention() -> list[Row]:
    """Other people's figures of attention on A100, H100, H20, H200, B200, GB200, GB300 and MI355X."""
    data = yaml.safe_load((Path(__file__).parent / "attention_unseen.yaml").read_text(encoding="utf-8"))
    found = []
    for line in data["series"]:
        for s, tflops in zip(line.get("sequences", data["sequences"]), line["tflops"], strict=True):
            tokens = line.get("tokens") or line["batch"] * s
            forward = 4.0 * tokens * s * line["width"] * (0.5 if line["causal"] else 1.0)
            flops = {"forward": 1.0, "backward": 2.5, "both": 3.5}[line["phase"]] * forward
            name = "-".join(str(line[key]) for key in ("device", "kernel", "phase", "head_dim", "causal")) + f"-s{s}"
            predict = lambda gpu, f=forward, of=line, s=s: _passes_s(gpu, f, of, s)  # noqa: E731
            detail = f"{line['kernel']} {line['phase']}"
            found.append(Row(name, line["device"], UNSEEN, detail, flops / (tflops * 1e12), predict))
    return found


def _passes_s(gpu: Gpu, forward: float, of: dict[str, Any], s: int) -> float:
    """Seconds of the passes that a line has; ``forward``: FLOPs of the forward pass."""
    how = {"kernel": of["kernel"], "causal": of["causal"]}
    passes = {"forward": (1.0,), "backward": (2.5,), "both": (1.0, 2.5)}[of["phase"]]
    return sum(gpu.attention_s(n * forward, s, of["head_dim"], "bf16", backward=n > 1, **how) for n in passes)


OWN_DEVICES = {"kernels_h100.json": "H100-SXM-80GB", "kernels_h200.json": "H200-SXM-141GB"}


def own_rows() -> list[Row]:
    """What gpu_kernels.py wrote on an H100 and an H200, without what waited for the host."""
    found = []
    for file, device in OWN_DEVICES.items():
        data = json.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))
        host_s = {row["operator"]: row["seconds"] for row in data["launches"]}
        for section, of in OWN_SECTIONS.items():
            slowest_s = HOST_BOUND * host_s["linear" if section in ("products", "eight_bit", "grouped") else "mul"]
            for number, raw in enumerate(data[section]):
                name = f"{device}-{section}-{number}"
                if raw["seconds"] > slowest_s and (row := of(name, device, raw)) is not None:
                    found.append(row)
    return found


def _own_product(name: str, device: str, raw: dict[str, Any]) -> Row | None:
    precision = raw.get("dtype", "fp8")
    if precision == "tf32":
        return None
    sides = raw["m"], raw["n"], raw["k"]
    detail = f"{raw['layout']} {precision}" if "layout" in raw else f"fp8, a scale a {raw['scales']}"
    in_fp32 = not raw.get("fast_accumulate", True)
    detail += ", fp32 sums" if in_fp32 else ""
    detail += f", {'long' if raw['seconds'] > LONG_S else 'short'}"
    predict = lambda gpu: gpu.product_s(1, *sides, precision) * (gpu.fp32_sums if in_fp32 else 1.0)  # noqa: E731
    return Row(name, device, f"{OWN}product", detail, raw["seconds"], predict)


def _own_group(name: str, device: str, raw: dict[str, Any]) -> Row:
    m, n, k = raw["m"], raw["n"], raw["k"]
    sides = {"fwd": (m, n, k), "bwd_grad_act": (m, k, n), "bwd_grad_w": (n, k, m)}[raw["stage"]]
    predict = lambda gpu: gpu.grouped_s(raw["groups"], *sides, "bf16", kernel="torch")  # noqa: E731
    detail = f"{raw['stage']}, {'even' if raw['even'] else 'uneven'}"
    return Row(name, device, f"{OWN}grouped product", detail, raw["seconds"], predict)


def _own_attention(name: str, device: str, raw: dict[str, Any]) -> Row | None:
    if raw["kernel"] == "efficient":
        return None
    kernel = {"cudnn": "cudnn_9_19", "flash2": "torch_flash2"}[raw["kernel"]]
    s, d, backward, causal = raw["sequence"], raw["head_dim"], raw["phase"] == "backward", raw["causal"]
    flops = 4.0 * raw["batch"] * raw["heads"] * s * s * d * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    how = {"backward": backward, "kernel": kernel, "causal": causal}
    predict = lambda gpu: gpu.attention_s(flops, s, d, "bf16", **how)  # noqa: E731
    return Row(name, device, f"{OWN}attention", f"{raw['kernel']} {raw['phase']}, {d}", raw["seconds"], predict)


OWN_KINDS: dict[str, ElementWiseKind] = {
    "rms_norm": "norm", "rms_norm backward": "norm", "layer_norm": "norm", "layer_norm backward": "norm", "softmax": "norm",
    "dropout": "norm", "embedding": "gather", "embedding backward": "gather", "AdamW fused": "optimizer",
}  # fmt: skip
"""All others stream. Cross-entropy is several kernels, and AdamW without ``fused`` as many as it has operators."""

UNVECTORIZED = ("bf16 to fp32", "logits to fp32")


def _own_element_wise(name: str, device: str, raw: dict[str, Any]) -> Row | None:
    kernel = raw["kernel"]
    if kernel.startswith("cross_entropy") or kernel == "AdamW foreach":
        return None
    predict = lambda gpu: gpu.element_wise_s(raw["bytes"], kind=OWN_KINDS.get(kernel, "stream"))  # noqa: E731
    if kernel in UNVECTORIZED:
        predict = lambda gpu: gpu.unvectorized_s(raw["bytes"] / 6)  # noqa: E731
    return Row(name, device, f"{OWN}element-wise", kernel, raw["seconds"], predict)


OWN_SECTIONS: dict[str, Callable[[str, str, dict[str, Any]], Row | None]] = {
    "products": _own_product, "eight_bit": _own_product, "grouped": _own_group, "attention": _own_attention,
    "element_wise": _own_element_wise,
}  # fmt: skip


def _largest(raw: dict[str, Any], device: str) -> Row:
    m, n, k = (int(side) for side in raw["shape_MxNxK"].split("x"))
    precision = "fp8" if raw["dtype"].startswith("fp8") else raw["dtype"]
    flops = 2.0 * m * n * k
    predict = lambda gpu: gpu.product_s(1, m, n, k, precision)  # noqa: E731
    return Row(raw["id"], device, LARGEST, precision, flops / (raw["mean_tflops"] * 1e12), predict)


def _bytes(dtype: str) -> int:
    return 4 if dtype in ("fp32", "float32") else 2
