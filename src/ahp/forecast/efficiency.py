"""How much of a device's peak an operator reaches: from measured tables, else from a curve for its kind of device."""

from __future__ import annotations

import math

import numpy as np

from ahp.cluster.model import Device, Measurements
from ahp.forecast.tables import PRECISION_OF, Attention, ElementWise, nearest_workers

BEST_MATMUL: tuple[tuple[str, float], ...] = (
    ("A100-PCIe", 0.811), ("A100", 0.869), ("A800", 0.869), ("GH200", 0.838), ("H100", 0.803), ("H800", 0.803),
    ("H200", 0.803), ("GB200", 0.55), ("GB300", 0.55), ("B200", 0.55), ("B300", 0.55), ("MI300X", 0.514),
)  # fmt: skip
"""Share of the dense bf16 peak that a large product reaches, by the start of the device's name. Maximum achievable
matrix product, stas00/ml-engineering compute/accelerator/README.md 7bc7c305; Blackwell instead from the 514 products
that SimuMax v1.2 measured on B200 under power limits (best 0.655, and 0.55 best fits all of them)."""

BEST_MATMUL_ELSE = 0.80
"""[Empirical] the median of the table's GPUs, for a device that is not in it."""

HALF_DEPTH = 256
"""Depth K at which a product spends half its time filling and draining the pipeline: eff ~ K / (K + 256). Fitted to
183 products SimuMax measured on A100 (spread of the rest 6.9 %), and confirmed on its 514 on B200."""

TILES: tuple[tuple[int, int], ...] = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Output tiles that the vendor's library chooses from."""

TILE_EXPONENT = 0.15
"""[Empirical] a smaller tile reads more per FLOP: efficiency ~ (tile area / 256 x 128) ** 0.15, same fit."""

ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.50, 0.40
"""Share of the peak that fused attention reaches on the FLOPs it really does: half of the medians 1.00 and 0.80 that
SimuMax measured on A100 counting the whole square of a causal mask."""

STREAMING = 0.80
"""Share of the memory bandwidth that a streaming kernel reaches: 0.66-0.90 (cost model, section 3.6)."""

CPU_ATTENTION: dict[str, float] = {"fp32": 0.45, "bf16": 0.20}
"""Causal fused attention on a CPU over the rate of a large matrix product in the same precision. [Empirical] torch 2.13,
one thread of an AMD EPYC (Zen 4): 0.36-0.68 in fp32 and 0.10-0.36 in bf16 for sequences of 256-1024 and heads of
32-128; the lower values belong to the small models that train on a CPU."""


def is_cpu(device: Device) -> bool:
    """Whether a device is a worker process on processor cores: nothing overlaps there, all share the cores."""
    return device.name.lower().startswith("cpu")


class Rates:
    """FLOP/s and bytes/s of one worker while ``workers`` of them compute on its node."""

    def __init__(self, device: Device, measured: Measurements | None, workers: int) -> None:
        self.device = device
        self._samples = _products(measured, workers)
        self._attention, self._element_wise = Attention(measured, workers), ElementWise(measured, workers)
        self.bytes_per_s = STREAMING * device.memory_bandwidth_bytes_per_s
        if measured and measured.memory:
            self.bytes_per_s = nearest_workers(measured.memory, workers)[0].bytes_per_s

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s; a precision the device has no units for computes at its fp32 peak."""
        peaks = self.device.peak_flops_per_s
        return peaks.get(precision) or peaks.get("fp32") or max(peaks.values())

    def matmul_s(self, batch: float, m: float, n: float, k: float, precision: str) -> float:
        """Seconds of ``batch`` products (m, k) x (k, n), without the launch."""
        flops = 2.0 * batch * m * n * k
        if (samples := self._samples.get(precision)) is not None:
            return flops / _measured_rate(samples, batch * m, n, k)
        return flops / (self.peak(precision) * self._matmul_efficiency(batch, m, n, k))

    def element_wise_s(self, moved_bytes: float, exponentials: float, dtype: str) -> float:
        """Seconds of an element-wise operator on tensors of ``dtype`` (torch's name), without the launch.

        ``exponentials``: elements of which it takes an exponential. Tensors that fit in a cache move faster than memory
        streams: as fast as ``add`` was measured at their size, where it was.
        """
        precision = PRECISION_OF.get(dtype, "fp32")
        moved_s = self._element_wise.add_s(moved_bytes, precision)
        if moved_s is None:
            moved_s = moved_bytes / self.bytes_per_s
        return max(moved_s, self._element_wise.silu_s(exponentials, precision) or 0.0)

    def attention_s(self, flops: float, sequence: float, head_dim: float, precision: str, *, backward: bool) -> float:
        """Seconds of fused attention that really does ``flops``."""
        rate = self._attention.rate(sequence, head_dim, precision, backward=backward)
        if rate is not None:
            return flops / rate
        if not is_cpu(self.device):
            return flops / (self.peak(precision) * (ATTENTION_BACKWARD if backward else ATTENTION_FORWARD))
        samples = self._samples.get(precision)
        best = self.peak(precision) if samples is None else float(samples[1].max())
        return flops / (best * CPU_ATTENTION.get(precision, min(CPU_ATTENTION.values())))

    def _matmul_efficiency(self, batch: float, m: float, n: float, k: float) -> float:
        best = next((e for name, e in BEST_MATMUL if self.device.name.startswith(name)), BEST_MATMUL_ELSE)
        best *= k / (k + HALF_DEPTH)
        if self.device.num_sms is None:
            return best
        return best * max(
            (batch * m * n)
            / (
                math.ceil(batch * math.ceil(m / a) * math.ceil(n / b) / self.device.num_sms)
                * self.device.num_sms
                * a
                * b
            )
            * (a * b / (256 * 128)) ** TILE_EXPONENT
            for a, b in TILES
        )


def _products(measured: Measurements | None, workers: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By precision: log (m, n, k) of the products measured with the nearest number of workers, and their FLOP/s."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    samples = measured.matmul if measured else ()
    for dtype in {s.dtype for s in samples}:
        alike = nearest_workers((s for s in samples if s.dtype == dtype), workers)
        shapes = np.log(np.array([(s.m, s.n, s.k) for s in alike], dtype=float))
        rates = np.array([2.0 * s.m * s.n * s.k / s.seconds for s in alike])
        found[PRECISION_OF.get(dtype, dtype)] = shapes, rates
    return found


def _measured_rate(samples: tuple[np.ndarray, np.ndarray], m: float, n: float, k: float) -> float:
    """FLOP/s of a shape: the nearest four measured ones, weighted by inverse square distance in log space."""
    shapes, rates = samples
    distance = ((shapes - np.log(np.maximum((m, n, k), 1.0))) ** 2).sum(axis=1)
    near = np.argsort(distance)[:4]
    if distance[near[0]] < 1e-12:
        return float(rates[near[0]])
    weight = 1.0 / distance[near]
    return float(np.exp((weight * np.log(rates[near])).sum() / weight.sum()))
