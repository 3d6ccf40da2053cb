"""How long an operator takes on a worker: from measured tables, else from a model of its kind of device.

Measured tables: written by probe (tables.py). Without them: gpu.py on a GPU, the shares below on CPU cores.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ahp.cluster.model import Device, Measurements, ProductPhase
from ahp.forecast.constants import constants
from ahp.forecast.gpu import AttentionKernel, ElementWiseKind, Gpu, GroupedKernel
from ahp.forecast.tables import PRECISION_OF, Attention, ElementWise, nearest_workers

CPU_PRODUCT = constants.value("cpu_product")
"""Share of its peak that a large product reaches on a worker that was not measured."""

HALF_DEPTH = constants.value("cpu_half_depth")
"""Depth K at which a product reaches half of ``CPU_PRODUCT`` on such a worker."""

STREAMING = constants.value("cpu_streaming")
"""Share of the memory bandwidth that a streaming kernel reaches on such a worker."""

CPU_ATTENTION: dict[str, float] = {name: constants.value(f"cpu_attention_{name}") for name in ("fp32", "bf16")}
"""Causal fused attention on a CPU over the rate of a large matrix product in the same precision."""


FP32_SUM: dict[str, Any] = {"output_bytes": 4.0, "accumulate": True}
"""What ``Gpu`` must know of a product that is added to an fp32 tensor."""


_Samples = tuple[np.ndarray, np.ndarray]
"""log (m, n, k) of products, and their FLOP/s."""


def is_cpu(device: Device) -> bool:
    """Whether a device is a worker process on processor cores: nothing overlaps there, all share the cores."""
    return device.name.lower().startswith("cpu")


GATHERS = ("embedding", "index_select", "gather", "scatter", "index_put")
"""Operators that read or write rows out of order, by a part of their name."""

NORMS = ("norm", "softmax", "dropout", "bernoulli", "logsumexp", "aten.mean", "aten.sum", "aten.var", "nll_loss")
"""Operators that reduce or draw random numbers between reading and writing, by a part of their name."""


def kind_of(name: str) -> ElementWiseKind:
    """How a traced element-wise operator (aten's name) uses the memory of a GPU."""
    if any(part in name for part in GATHERS):
        return "gather"
    if "log_softmax" in name:
        return "log_softmax_backward" if "backward" in name else "log_softmax"
    return "norm" if any(part in name for part in NORMS) else "stream"


class Rates:
    """Seconds of operators, without their launch, on one worker while ``workers`` workers compute on its node."""

    def __init__(self, device: Device, measured: Measurements | None, workers: int) -> None:
        self.device = device
        self.gpu = None if is_cpu(device) else Gpu(device)
        self._samples = _products(measured, workers)
        self._attention, self._element_wise = Attention(measured, workers), ElementWise(measured, workers)
        self.bytes_per_s = STREAMING * device.memory_bandwidth_bytes_per_s if self.gpu is None else self.gpu.bytes_per_s
        self._memory_measured = bool(measured and measured.memory)
        self._attention_measured = bool(measured and measured.attention)
        if measured and measured.memory:
            self.bytes_per_s = nearest_workers(measured.memory, workers)[0].bytes_per_s
        # The same shapes come up for every micro-batch and degree that a search tries.
        self._gpu_product_s = lru_cache(maxsize=1 << 14)(self.gpu.product_s) if self.gpu else None

    def _forward(self, precision: str) -> _Samples | None:
        return self._samples.get(("forward", precision))

    def fastest(self, precision: str, *, attention: bool) -> float:
        """FLOP/s that no product, or no fused ``attention``, exceeds; infinite where no such limit is known."""
        rates = [of[1].max() for (_, measured), of in self._samples.items() if measured == precision]
        if attention and (self._attention_measured or self.gpu is None):
            return float("inf")
        if rates:
            return float("inf") if attention else float(max(rates))
        return (
            self.gpu.reach(precision).sustained if self.gpu is not None else self.device.peak(precision) * CPU_PRODUCT
        )

    def output_s(self, written: float) -> float:
        """Least seconds of writing its output that an unmeasured product does not hide."""
        return 0.0 if self.gpu is None or self._samples else self.gpu.output_s(written)

    def matmul_s(
        self,
        batch: float,
        m: float,
        n: float,
        k: float,
        precision: str,
        *,
        accumulates: bool = False,
        phase: ProductPhase = "forward",
    ) -> float:
        """Seconds of ``batch`` products (m, k) x (k, n).

        ``accumulates``: the output is fp32, read and added to. It counts only where the product was not measured. ``phase``: counts only
        where products of this phase were measured.
        """
        flops = 2.0 * batch * m * n * k
        if (samples := self._samples.get((phase, precision), self._forward(precision))) is not None:
            return flops / _measured_rate(samples, batch * m, n, k)
        if self._gpu_product_s is not None:
            return self._gpu_product_s(batch, m, n, k, precision, **FP32_SUM if accumulates else {})
        return flops / (self.device.peak(precision) * CPU_PRODUCT * k / (k + HALF_DEPTH))

    def grouped_s(
        self,
        groups: float,
        m: float,
        n: float,
        k: float,
        precision: str,
        *,
        accumulates: bool = False,
        phase: ProductPhase = "forward",
        kernel: GroupedKernel = "each",
    ) -> float:
        """Seconds of a product (m, k) x (k, n) for each of ``groups`` experts; ``kernel`` counts only where products were not measured."""
        if self.gpu is None or self._forward(precision) is not None:
            return self.matmul_s(groups, m, n, k, precision, accumulates=accumulates, phase=phase)
        how = {"kernel": kernel, "makes_weights": phase == "weight_gradient", **(FP32_SUM if accumulates else {})}
        return self.gpu.grouped_s(groups, m, n, k, precision, **how)

    def element_wise_s(
        self,
        moved_bytes: float,
        exponentials: float,
        dtype: str,
        *,
        kind: ElementWiseKind = "stream",
        unvectorized: float = 0.0,
    ) -> float:
        """Seconds of an element-wise operator on tensors of ``dtype`` (torch's name).

        ``exponentials``: elements of which it takes an exponential; on a GPU these hide behind memory. Tensors that fit in
        a cache move faster than memory streams: as fast as ``add`` was measured at their size, where it was. ``kind``: how
        a GPU that was not measured moves them (``kind_of``). ``unvectorized``: elements whose addresses a GPU computes one by
        one (``Kernels.unvectorized``).
        """
        if unvectorized and self.gpu is not None:
            by_memory_s = self.element_wise_s(moved_bytes, exponentials, dtype, kind=kind)
            return max(by_memory_s, self.gpu.unvectorized_s(unvectorized))
        precision = PRECISION_OF.get(dtype, "fp32")
        moved_s = self._element_wise.seconds("add", moved_bytes, precision)
        if moved_s is None:
            if self.gpu is not None and not self._memory_measured:
                return self.gpu.element_wise_s(moved_bytes, kind=kind)
            moved_s = moved_bytes / self.bytes_per_s
        return max(moved_s, self._element_wise.seconds("silu", exponentials, precision) or 0.0)

    def attention_s(
        self,
        flops: float,
        sequence: float,
        head_dim: float,
        precision: str,
        *,
        backward: bool,
        kernel: AttentionKernel | None = None,
        causal: bool = True,
    ) -> float:
        """Seconds of fused attention that really does ``flops`` over all its heads.

        ``kernel``: None = the one torch takes on the device. It and ``causal`` count only on a GPU where attention was not measured.
        """
        rate = self._attention.rate(sequence, head_dim, precision, backward=backward)
        if rate is not None:
            return flops / rate
        if self.gpu is not None:
            return self.gpu.attention_s(
                flops, sequence, head_dim, precision, backward=backward, kernel=kernel, causal=causal
            )
        samples = self._forward(precision)
        best = self.device.peak(precision) if samples is None else float(samples[1].max())
        return flops / (best * CPU_ATTENTION.get(precision, min(CPU_ATTENTION.values())))


def _products(measured: Measurements | None, workers: int) -> dict[tuple[ProductPhase, str], _Samples]:
    """The products measured with the nearest number of workers, keyed by phase and precision."""
    found: dict[tuple[ProductPhase, str], _Samples] = {}
    samples = measured.matmul if measured else ()
    kinds: set[tuple[ProductPhase, str]] = {(s.phase, s.dtype) for s in samples}
    for phase, dtype in kinds:
        alike = nearest_workers((s for s in samples if (s.phase, s.dtype) == (phase, dtype)), workers)
        shapes = np.log(np.array([(s.m, s.n, s.k) for s in alike], dtype=float))
        rates = np.array([2.0 * s.m * s.n * s.k / s.seconds for s in alike])
        found[phase, PRECISION_OF.get(dtype, dtype)] = shapes, rates
    return found


def _measured_rate(samples: _Samples, m: float, n: float, k: float) -> float:
    """FLOP/s of a shape: the nearest four measured ones, weighted by inverse square distance in log space."""
    shapes, rates = samples
    distance = ((shapes - np.log(np.maximum((m, n, k), 1.0))) ** 2).sum(axis=1)
    near = np.argsort(distance)[:4]
    if distance[near[0]] < 1e-12:
        return float(rates[near[0]])
    weight = 1.0 / distance[near]
    return float(np.exp((weight * np.log(rates[near])).sum() / weight.sum()))
