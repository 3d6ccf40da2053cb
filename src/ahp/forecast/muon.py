"""The cost of Muon's update of a stage's matrices: each is sent to its owner, orthogonalized there, and every rank is sent its part.

The matrices are dealt out over all ranks of a stage (runtime/optimizer/muon.py), so that sharding, tensor parallelism and replicas divide
this work as pipeline stages do, as long as there are enough matrices.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ahp.cached_method import cached_method
from ahp.engines.traits import Traits
from ahp.forecast.communication import Network, Times
from ahp.forecast.division import product_bytes
from ahp.forecast.efficiency import Rates, is_cpu
from ahp.forecast.group import Group
from ahp.forecast.groups import data_groups, data_ranks
from ahp.forecast.mesh import axis_group, first_of, group_of, runs
from ahp.forecast.split import KeysWay, split, way_of_keys
from ahp.graph.operators import ModelGraph, Segment
from ahp.plan import Parallelism

STEPS = 5
"""Newton-Schulz iterations (torch.optim._muon, DEFAULT_NS_STEPS)."""

WHOLE_BYTES = (2 + 2) + 2 + (2 + 2) + STEPS * 2 + (2 + 2)
"""Bytes moved per element of a whole matrix besides the products: to join its parts, to take its norm, to divide by it, to add to a
product in each iteration (torch.optim._muon, _zeropower_via_newtonschulz), and to pack the result."""

PART_BYTES = (3 * 4) + (2 * 4) + (2 + 4 + 4)
"""Bytes moved per element of a rank's part: momentum, weight decay, the update from bf16, each an operator of its own
(runtime/optimizer/adamw.py)."""

OWN_PART_BYTES = (3 * 4) + (4 + 2) + (2 + 2)
"""Further bytes for matrices that the rank's own replica orthogonalizes: the mean of momentum and gradient, its cast, its packing."""

LAUNCHES = 3 * STEPS + 12
"""Operators that the host launches for one matrix that the rank owns: three products per iteration; norm and copies before and
after them."""

PART_LAUNCHES = 6
"""Operators for every matrix, owned or not: momentum, the mean, its cast, weight decay, the update, and one of packing."""

SENT_BYTES = 2
"""Bytes sent per element, to the owner and back."""

HELD_ELEMENTS = 2**27
"""Elements of the matrices that an owner has at a time on average; at least one matrix (runtime/optimizer/muon.py)."""

HELD_BYTES = 12
"""The most bytes per element held: as matrices are made, packed, sent, joined and iterated on. [Empirical] torch 2.13 on CPUs and gloo,
LLaMA of hidden size 128, six layouts of one to four ranks: 5 to 10 with several matrices at a time, 13 to 19 with one, of which 4 are
scratch of the CPU's products."""


class Places(NamedTuple):
    """The ranks of a stage."""

    tensor: Group
    shard: Group
    replica: Group
    """The ranks of one replica, over both axes."""
    replicas: Group

    @property
    def owners(self) -> int:
        return self.replica.size * self.replicas.size


def places_of(parallelism: Parallelism, devices_per_node: int) -> Places:
    """Where the ranks that hold parts of the same matrices lie."""
    tensor = axis_group(parallelism, "tp", devices_per_node)
    shard, replicas = data_groups(parallelism, devices_per_node)
    shards, _ = first_of(data_ranks(parallelism), parallelism.weight_shards)
    within = group_of((*runs(parallelism, ("tp",)), *shards), devices_per_node, parallelism.world_size)
    return Places(tensor, shard, within, replicas)


Between = tuple[Times, Sequence[Group]] | None
"""What prices collectives between replicas, and for each pipeline rank the ranks of all replicas that hold the same weights."""


class Muon:
    """Prices the updates of a model's blocks on one kind of node."""

    def __init__(self, graph: ModelGraph, rates: Rates, network: Network) -> None:
        self._blocks, self._rates, self._network = graph.blocks, rates, network
        self._products = [sum(self.product_s(shape) for _, shape in matrices(block)) for block in graph.blocks]

    def ranks_s(
        self, layers: Sequence[Mapping[int, int]], places: Places, traits: Traits, between: Between = None
    ) -> list[float]:
        """``stage_s`` of each pipeline rank; ``between``: given where some replicas lie on other kinds of nodes."""
        times, replicas = between or (self._network, [places.replicas] * len(layers))
        return [
            self.stage_s(own, places._replace(replicas=group), traits, times)
            for own, group in zip(layers, replicas, strict=True)
        ]

    def stage_s(self, layers: Mapping[int, int], places: Places, traits: Traits, times: Times | None = None) -> float:
        """Seconds to update ``layers`` (blocks of each kind), beyond AdamW's element-wise pass over the rank's shard; ``times``: prices the
        exchange between replicas, None = the network of these nodes."""
        device, count, busy_s = self._rates.device, 0, self._longest_s(tuple(sorted(layers.items())), places.owners)
        part = sent = back = 0.0
        for kind, blocks in layers.items():
            in_parts = self._parameters_in_parts(
                kind, way_of_keys(self._blocks[kind], places.tensor.size, traits.tensor.few_keys)
            )
            for name, (rows, columns) in matrices(self._blocks[kind]):
                numel, degree = blocks * rows * columns, places.tensor.size if name in in_parts else 1
                count += blocks
                part += numel / degree / places.shard.size
                sent += numel / places.owners if degree * places.shard.size > 1 else 0.0
                back += numel / degree / places.shard.size / places.replicas.size
        priced = (
            2 * (traits.states.master_weight_bytes + traits.states.optimizer_bytes) + traits.gradients.element_bytes
        )
        moved = part * (PART_BYTES - priced + OWN_PART_BYTES / places.replicas.size)
        busy_s += moved / self._rates.bytes_per_s
        launches = PART_LAUNCHES * count + LAUNCHES * -(-count // places.owners)
        exchanged_s = sum(self._network.time_s("all_to_all", SENT_BYTES * n, places.replica) for n in (sent, back))
        exchanged_s += (times or self._network).time_s("all_gather", SENT_BYTES * part, places.replicas)
        if is_cpu(device):
            return busy_s + launches * device.kernel_launch_s + exchanged_s
        return max(busy_s, launches * device.kernel_launch_s * traits.host.launches_per_operator) + exchanged_s

    @cached_method
    def _parameters_in_parts(self, kind: int, way: KeysWay) -> frozenset[str]:
        """Parameters of a kind of block that tensor-parallel ranks hold in parts."""
        return split(self._blocks[kind], "block", way_of_keys=way).parameters

    def held_bytes(self, layers: Mapping[int, int], owners: int) -> int:
        """Temporary bytes of a rank, besides momentum and gradients, while ``layers`` (blocks of each kind) are updated."""
        sizes = [(r * c, blocks) for kind, blocks in layers.items() for _, (r, c) in matrices(self._blocks[kind])]
        largest = max((size for size, _ in sizes), default=0)
        share = -(-sum(size * blocks for size, blocks in sizes) // owners)
        return HELD_BYTES * max(largest, min(HELD_ELEMENTS, share))

    @cached_method
    def _longest_s(self, layers: tuple[tuple[int, int], ...], owners: int) -> float:
        """Seconds of the owner with the most work, as the runtime deals the matrices out."""
        each_s: list[float] = []
        for kind, blocks in layers:
            for _, (rows, columns) in matrices(self._blocks[kind]):
                one_s = self.product_s((rows, columns)) + rows * columns * WHOLE_BYTES / self._rates.bytes_per_s
                each_s += [one_s] * blocks
        if len(each_s) <= owners:
            return max(each_s, default=0.0)
        load_s = [0.0] * owners
        for one_s in sorted(each_s, reverse=True):
            heapq.heapreplace(load_s, load_s[0] + one_s)
        return max(load_s)

    def least_s(self) -> float:
        """Seconds of the cheapest block's products alone, over all owners: no stage takes less for a layer than its share of this time."""
        return min(self._products, default=0.0)

    def product_s(self, shape: tuple[int, int]) -> float:
        """Seconds of the products that orthogonalize one matrix, in bf16: with r rows and c columns, r the smaller, three per
        iteration, (r x c)(c x r), (r x r)(r x r) and (r x r)(r x c)."""
        r, c = sorted(shape)
        return STEPS * sum(self._one_s(m, n, k) for m, n, k in ((r, r, c), (r, r, r), (r, c, r)))

    def _one_s(self, m: int, n: int, k: int) -> float:
        moved = product_bytes((1, m, n, k), "bfloat16")
        return max(self._rates.matmul_s(1, m, n, k, "bf16"), moved / self._rates.bytes_per_s)


def matrices(block: Segment) -> list[tuple[str, tuple[int, int]]]:
    """The parameters of a block that Muon updates, as the runtime chooses them (runtime/optimizer/adamw.py, matrices_of)."""
    return [(p.name, (p.shape[0], p.shape[1])) for p in block.parameters if len(p.shape) == 2 and p.trainable]
