"""The time of one kernel on a GPU that was not measured, from the catalogue's figures only.

A product is tiles of its output, spread in waves over the SMs; each tile also pays for loading its operands and for its
first and last steps, and a small output is split along K. Three roofs limit that: the tensor units at the clock that the
device holds (its burst clock for a moment, its sustained clock for minutes, by the power it can draw), and memory.
Fused attention and element-wise kernels follow the same pattern with their own constants. kernels.yaml holds every
constant with its source; benchmarks/kernels.py compares them with measured rows and derives them again.

All times are seconds on the device; what the host takes to launch a kernel is counted elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from ahp.cluster.model import Device
from ahp.shipped import shipped

AttentionKernel = Literal["flash1", "flash2", "torch_flash2", "cudnn", "cudnn_9_19", "masked", "recent"]
"""FlashAttention-2 from its own library or torch's copy, or the vendor's kernel (cuDNN; FlashAttention-3 on Hopper is 4-17 % faster).
masked: the kernel that torch takes to read a mask; recent: the one that it takes with cuDNN 9.19 or later."""

EFFICIENT: AttentionKernel = "flash1"
"""torch's efficient kernel is as fast as FlashAttention's first generation (arXiv 2307.08691)."""

GroupedKernel = Literal["each", "torch", "fused"]
"""Products of experts. each: launched one by one, several at once (Transformer Engine); torch: one kernel for all (torch._grouped_mm), as fast as
single products of Ampere's kind; fused: one persistent kernel with the operators between two products."""

ElementWiseKind = Literal[
    "stream", "norm", "gather", "cross_entropy", "optimizer", "log_softmax", "log_softmax_backward"
]  # fmt: skip
"""stream: add, copy, cast; norm: norms, softmax, dropout; gather: embedding, permutation; the fused loss; AdamW; softmax over the vocabulary."""

MIB_BYTES = 2**20

ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

WIDEST_TILE = (256, 128)
"""The tile that reaches the burst rate; smaller ones load more operands per FLOP."""


@cache
def constants() -> dict[str, Any]:
    """kernels.yaml, read once."""
    return shipped("ahp.forecast", "kernels.yaml")


def takes_cudnn(generation: str | None) -> bool:
    """Whether torch takes cuDNN's fused attention on a generation, for heads that cuDNN can compute."""
    return generation in constants()["attention"]["takes"]["cudnn"]["generations"]


def kernel_of_lengths(generation: str | None) -> AttentionKernel | None:
    """torch's kernel for attention by the lengths of sequences, FlashAttention-2, on a generation; None where there is none."""
    attention = constants()["attention"]
    if generation not in attention["takes"]["lengths"]:
        return None
    own = {**attention["product_share"]["torch_flash2"], **attention["like"]["torch_flash2"]}
    return "torch_flash2" if generation in own else "flash2"


@dataclass(frozen=True, slots=True)
class Reach:
    """FLOP/s of products: for a moment, and for minutes."""

    burst: float
    sustained: float


class Gpu:
    """Kernel times of one device.

    ``data``: constants to judge in place of those in kernels.yaml.
    """

    def __init__(self, device: Device, data: Mapping[str, Any] | None = None) -> None:
        self.device = device
        self._data = constants() if data is None else data
        self._entry = next(e for e in self._data["devices"] if device.name.startswith(e["name"]))
        self.generation: str = self._entry["generation"]
        self._sms = device.num_sms or 1
        self._cache_bytes = self._entry.get("cache_mib", 0) * MIB_BYTES
        self._reach = {p: self._reached(p) for p in device.peak_flops_per_s}
        self._tiles = self._tile_costs()
        kind: ElementWiseKind = "stream"
        self.bytes_per_s = self._data["element_wise"]["share"][kind] * device.memory_bandwidth_bytes_per_s

    def torch_kernel(self, precision: str, head_dim: float, *, masked: bool = False) -> AttentionKernel:
        """The kernel of torch's scaled_dot_product_attention: the first that can run. ``masked``: every query has a mask of its own."""
        cudnn, flash2 = (self._data["attention"]["takes"][name] for name in ("cudnn", "flash2"))
        if precision == "fp32":
            return EFFICIENT
        if self.generation in cudnn["generations"] and head_dim % 8 == 0 and head_dim <= cudnn["head_dim"]:
            return "cudnn"
        refused = masked or self.generation in flash2["not_generations"] or head_dim > flash2["head_dim"]
        return EFFICIENT if refused else "flash2"

    def reach(self, precision: str) -> Reach:
        """FLOP/s of large products; a precision the device has no units for computes as fp32."""
        return self._reach.get(precision) or self._reach.get("fp32") or next(iter(self._reach.values()))

    def product_s(
        self,
        batch: float,
        m: float,
        n: float,
        k: float,
        precision: str,
        *,
        output_bytes: float | None = None,
        accumulate: bool = False,
        may_persist: bool = True,
        shown: float = 0.0,
    ) -> float:
        """Seconds of ``batch`` products (m, k) x (k, n). Operands count once: a wave of tiles shares them through the cache.

        ``output_bytes``: of one output element; None = as torch, that of the operands (16 bits for fp8).
        ``accumulate``: the output is read and added to, as Megatron's fused weight gradient does.
        ``may_persist``: the kernel is persistent on generations that have such kernels.
        ``shown``: bytes whose way to or from memory does not hide behind the computation where power limits it.
        """
        persistent = may_persist and self.generation in self._data["products"]["persistent"]
        reach = self.reach(precision)
        element = ELEMENT_BYTES.get(precision, 4)
        written = batch * m * n * (output_bytes or max(2, element)) * (2 if accumulate else 1)
        moved = batch * (m * k + k * n) * element + written
        memory_s = moved / (self._data["products"]["memory_share"] * self.device.memory_bandwidth_bytes_per_s)
        tiles_s = self._tiles_s(batch, m, n, k, reach.burst / self._sms, written, persistent)
        held_s = 2.0 * batch * m * n * k / reach.sustained + shown / self.device.memory_bandwidth_bytes_per_s
        if persistent:
            held_s += self.output_s(written)
        return max(tiles_s, memory_s, held_s)

    @property
    def fp32_sums(self) -> float:
        """Time of an 8-bit product with sums in fp32, as in backward passes, over that of one without."""
        return self._data["eight_bits"]["fp32_sums"].get(self.generation, 1.0)

    def grouped_s(
        self,
        groups: float,
        m: float,
        n: float,
        k: float,
        precision: str,
        *,
        output_bytes: float | None = None,
        accumulate: bool = False,
        kernel: GroupedKernel = "each",
        makes_weights: bool = False,
    ) -> float:
        """Seconds of a product (m, k) x (k, n) for each of ``groups`` experts; ``makes_weights``: of the gradients of their weights.

        Where each is a kernel of its own, its weights come from memory, and their gradients go there, beside the computation where power limits
        it: few tokens read them once. Without this, SimuMax's 108 products of experts on B200 are forecast 13 to 21 % too fast.
        """
        how: dict[str, Any] = {"output_bytes": output_bytes, "accumulate": accumulate, "may_persist": kernel == "fused"}
        if kernel != "each":
            return self.product_s(groups, m, n, k, precision, **how)
        element = ELEMENT_BYTES.get(precision, 4)
        weights = m * (output_bytes or max(2, element)) * (2 if accumulate else 1) if makes_weights else k * element
        seconds = self.product_s(groups, m, n, k, precision, **how, shown=groups * n * weights)
        return max(seconds, groups * self._data["groups"]["launch_s"])

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
        value_dim: float | None = None,
    ) -> float:
        """Seconds of fused attention that really does ``flops`` (half with a causal mask), over all heads and sequences at once.

        A head whose values are narrower than its queries is computed as wide as the queries.
        """
        data = self._data["attention"]
        phase = data["backward" if backward else "forward"]
        if kernel is None or kernel in ("masked", "recent"):
            taken = self.torch_kernel(precision, head_dim, masked=kernel == "masked")
            kernel = "cudnn_9_19" if taken == "cudnn" and kernel == "recent" else taken
        rate = self._attention_rate(kernel, head_dim, precision, backward=backward)
        width = head_dim + (value_dim or head_dim)
        keys = sequence / 2 if causal else sequence
        heads = flops / ((5 if backward else 2) * sequence * keys * width)
        rows = data["block_queries"].get(self.generation, data["block_queries"][kernel])
        blocks = max(1.0, heads * math.ceil(sequence / rows))
        extra = phase.get("prologue_keys_of", {}).get(kernel, phase["prologue_keys"])
        extra += phase["diagonal_keys"] if causal else 0
        work_s = flops * (2 * head_dim / width) * (keys + extra) / keys / rate
        block_s = work_s * self._sms / blocks
        longest_s = (2 if causal else 1) * block_s
        return max(work_s + phase["tail"] * longest_s, block_s, flops / self.reach(precision).sustained)

    def _attention_rate(self, kernel: str, head_dim: float, precision: str, *, backward: bool) -> float:
        """FLOP/s of many long blocks: the time of the products at the burst rate, plus that of the softmax.

        An exponential takes the same time whatever the tensor units can do: each SM has separate units for it.
        """
        data = self._data["attention"]
        like = data["like"][kernel].get(self.generation, self.generation)
        peak = self.device.peak(precision)
        if like != self.generation:  # a kernel for an older generation is no faster on a newer SM than on its own
            peak = min(peak, data["flops_per_sm"][like] * self._sms)
        power = self._power()
        product_s = 1.0 / (data["product_share"][kernel][like][backward] * peak * self._shares(precision)[0] * power)
        phase = data["backward" if backward else "forward"]
        shown = phase["exponentials"] * data["shown"].get(like, 1.0)
        softmax_s = shown / (phase["flops_of_score"] * head_dim * self._exponentials_per_s * power)
        return 1.0 / (product_s + softmax_s)

    @property
    def _exponentials_per_s(self) -> float:
        """Exponentials/s of the whole device, from its fp32 peak, which is proportional to clock and SMs."""
        return self._exponentials_per_fma * self.device.peak("fp32") / 2.0

    @property
    def _exponentials_per_fma(self) -> float:
        of_generation = self._data["attention"]["exponentials_per_fma"][self.generation]
        return self._entry.get("exponentials_per_fma", of_generation)

    @property
    def _sm_clocks_per_s(self) -> float:
        """SMs times their clock: an SM does 64 multiply-adds per clock if its 16 exponentials are a quarter of that number, else 128."""
        of_generation = self._data["attention"]["exponentials_per_fma"][self.generation]
        return self.device.peak("fp32") / 2.0 * min(of_generation, self._exponentials_per_fma) / 16

    def unvectorized_s(self, elements: float) -> float:
        """Seconds of an element-wise kernel that computes an address for each of its ``elements``, without the time of memory."""
        return elements / (self._data["unvectorized"]["elements"] * self._sm_clocks_per_s)

    def element_wise_s(self, moved_bytes: float, *, kind: ElementWiseKind = "stream") -> float:
        """Seconds of a kernel bound by memory; what fits in the level-2 cache moves faster."""
        if moved_bytes <= 0:
            return 0.0
        data = self._data["element_wise"]
        held = min(1.0, max(0.0, 2.0 - 2.0 * moved_bytes / self._cache_bytes)) if self._cache_bytes else 0.0
        slowness = 1.0 - held * (1.0 - 1.0 / data["cache_speedup"])
        rate = data["share"][kind] * self.device.memory_bandwidth_bytes_per_s
        return data["start_s"] + moved_bytes * slowness / rate

    def output_s(self, written: float) -> float:
        """Seconds of writing ``written`` bytes of output that a persistent kernel does not hide, where power limits it."""
        share = self._data["products"]["persistent_output_share"].get(self.generation, 0.0)
        return share * written / self.device.memory_bandwidth_bytes_per_s

    def _tiles_s(
        self, batch: float, m: float, n: float, k: float, sm_flops_per_s: float, written: float, persistent: bool
    ) -> float:
        """Seconds with the fastest tile and split of K, in whole waves over the SMs, plus the output that nothing hides.

        Persistent kernels begin a tile while the one before is written out: they start once, and hide their output.
        """
        products, sms = self._data["products"], self._sms
        start_s, share = products["tile_start_s"], 0.0 if persistent else products["output_share"]
        bandwidth = self.device.memory_bandwidth_bytes_per_s
        partial_s = products["output_share"] * 8.0 * batch * m * n / bandwidth  # each split writes and reads fp32
        best = math.inf
        for rows, columns, flops_per_depth in self._tiles:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            for split in products["splits"]:
                if split > 1 and tiles * (split - 1) > 2 * sms:
                    break  # several full waves already: a further split only adds traffic
                waves = math.ceil(tiles * split / sms)
                seconds = waves * flops_per_depth * k / split / sm_flops_per_s
                seconds += start_s if persistent else waves * start_s
                best = min(best, seconds + (split * partial_s if split > 1 else 0.0))
        return best + share * written / bandwidth

    def _tile_costs(self) -> tuple[tuple[int, int, float], ...]:
        """(rows, columns, FLOPs per step of K, with the time to load operands counted as FLOPs)."""
        products = self._data["products"]
        share, tiles = products["operand_share"], products["tiles"]
        if self.generation in products["persistent"]:
            tiles = tiles + products["persistent_tiles"]
        widest = sum(WIDEST_TILE) / math.prod(WIDEST_TILE)
        return tuple((a, b, 2.0 * a * b * (1 - share + share * (a + b) / (a * b) / widest)) for a, b in tiles)

    def _reached(self, precision: str) -> Reach:
        shares = self._shares(precision)
        rate = self.device.peak(precision) * self._power()
        return Reach(rate * shares[0], rate * shares[-1])

    def _shares(self, precision: str) -> list[float]:
        """Shares of the peak: for a moment and for minutes; a single one where they do not differ."""
        key = "half" if precision in ("bf16", "fp16") else precision
        return self._entry.get(key) or self._entry["half"]

    def _power(self) -> float:
        """The share of its clock that a limit below the device's rated power leaves."""
        limit, rated = self.device.power_limit_w, self.device.rated_power_w
        if limit is None or rated is None or limit >= rated:
            return 1.0
        return (limit / rated) ** self._data["power"]["exponent"]
