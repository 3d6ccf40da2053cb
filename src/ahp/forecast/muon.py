"""What Muon's update of a block's matrices costs: each is gathered, orthogonalised whole, and a rank keeps its part.

Every rank that holds a part of a matrix orthogonalises all of it (runtime/optimizer.py), so that neither sharding nor tensor
parallelism divides this work; pipeline stages do.
"""

from __future__ import annotations

from ahp.engines.engine import Traits
from ahp.forecast.communication import Group, Network
from ahp.forecast.division import product_bytes
from ahp.forecast.efficiency import Rates, is_cpu
from ahp.forecast.split import split
from ahp.graph.operators import ModelGraph, Segment

STEPS = 5
"""Newton-Schulz iterations (torch.optim._muon, DEFAULT_NS_STEPS)."""

WHOLE_BYTES = (4 + 2) + 2 + (2 + 2) + STEPS * 2
"""Bytes moved for each element of a whole matrix beside the products: the cast to bf16, its norm, the division by it, and
at each iteration what is added to a product (torch.optim._muon, _zeropower_via_newtonschulz)."""

PART_BYTES = (3 * 4) + (3 * 4) + (2 * 4) + (4 + 2 + 4)
"""For each element of a rank's part: momentum, its mean with the gradient, weight decay, the update from bf16, each an
operator of its own (runtime/optimizer.py)."""

LAUNCHES = 3 * STEPS + 12
"""Operators that the host launches for one matrix: three products an iteration; before and after them casts, norm, copies."""

GATHERED_BYTES = 4
"""Of one element of the update before it is orthogonalised."""


class Muon:
    """Prices the updates of a model's blocks on one kind of node."""

    def __init__(self, graph: ModelGraph, rates: Rates, network: Network) -> None:
        self._blocks, self._rates, self._network = graph.blocks, rates, network
        self._split = [split(block, "block").parameters for block in graph.blocks]
        self._products = [sum(self.product_s(shape) for _, shape in matrices(block)) for block in graph.blocks]

    def block_s(self, kind: int, tensor: Group, shard: Group, traits: Traits) -> float:
        """Seconds of one block of a kind beyond what AdamW's element-wise pass over the rank's shard takes."""
        device, found = self._rates.device, self._products[kind]
        moved, launches, gathers_s = 0.0, 0.0, 0.0
        for name, (rows, columns) in matrices(self._blocks[kind]):
            numel, degree = rows * columns, tensor.size if name in self._split[kind] else 1
            part = numel / degree / shard.size
            priced = 2 * (traits.master_weight_bytes + traits.optimizer_state_bytes) + traits.gradient_bytes
            moved += numel * WHOLE_BYTES + part * (PART_BYTES - priced)
            launches += LAUNCHES
            gathers_s += self._network.time_s("all_gather", GATHERED_BYTES * numel / degree, shard)
            gathers_s += self._network.time_s("all_gather", GATHERED_BYTES * numel, tensor) if degree > 1 else 0.0
        busy_s = found + moved / self._rates.bytes_per_s
        if is_cpu(device):
            return busy_s + launches * device.kernel_launch_s + gathers_s
        return max(busy_s, launches * device.kernel_launch_s * traits.host_launches_per_operator) + gathers_s

    def least_s(self) -> float:
        """Of the cheapest block its products alone: no layout takes less for a layer."""
        return min(self._products, default=0.0)

    def product_s(self, shape: tuple[int, int]) -> float:
        """Seconds of the products that orthogonalise one matrix, in bf16: with r rows and c columns, r the smaller, three an
        iteration, (r x c)(c x r), (r x r)(r x r) and (r x r)(r x c)."""
        r, c = sorted(shape)
        return STEPS * sum(self._one_s(m, n, k) for m, n, k in ((r, r, c), (r, r, r), (r, c, r)))

    def _one_s(self, m: int, n: int, k: int) -> float:
        moved = product_bytes((1, m, n, k), "bfloat16")
        return max(self._rates.matmul_s(1, m, n, k, "bf16"), moved / self._rates.bytes_per_s)


def matrices(block: Segment) -> list[tuple[str, tuple[int, int]]]:
    """The parameters of a block that Muon updates, as the runtime chooses them (runtime/optimizer.py, matrices_of)."""
    return [(p.name, (p.shape[0], p.shape[1])) for p in block.parameters if len(p.shape) == 2]
