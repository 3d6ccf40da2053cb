"""Lower bounds of all layouts of a block at once, of time and memory, before any of its units is priced.

A step cannot take less than its products at the rate that no kernel passes, spread evenly over the devices, with all else that
layers compute, the forward passes that fill the pipeline before a rank of average place can start, and the collectives within a
replica as far as nothing can hide them. Where the rate is not known to be a ceiling the products count as nothing.

However the layers are cut, the fullest rank holds its part of their states, and of the inputs of layers for the
micro-batches in flight: what is kept when all else is recomputed.

Both hold for every cut of the layers into stages, even or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from ahp.engines.registry import get
from ahp.engines.traits import ContextWay, Traits
from ahp.forecast.compute import is_causal
from ahp.forecast.dispatch import Routed, pass_waits_s
from ahp.forecast.division import GROUPED, expert_parameters
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.group import CollectiveKind, Group
from ahp.forecast.kernels import Fusion, kernels
from ahp.forecast.overlap import shown_s
from ahp.forecast.split import KeysWay, TensorSplit, split, way_of_keys
from ahp.forecast.tables import PRECISION_OF
from ahp.forecast.turns import least_share
from ahp.forecast.units import KernelOptions
from ahp.graph.operators import Operator, TensorSpec
from ahp.plan import Parallelism
from ahp.schedule.bounds import in_flight
from ahp.search.bounds.split_columns import SplitColumns
from ahp.search.bounds.splits import Splits
from ahp.search.choices import ScheduleChoice
from ahp.search.problem import Problem
from ahp.search.space import Space
from ahp.search.unique_rows import unique_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def block_bounds_s(asked: Problem, space: Space, which: Ints) -> Floats:
    """Seconds that every row of some blocks takes at least, [number of these]."""
    found, layers = _BlockBounds(asked), asked.graph.num_layers
    blocks = space.blocks.at(which)
    pipeline, m = blocks.pipeline, blocks.micro_batches
    columns = blocks.tensor, blocks.context, blocks.expert, blocks.sequence_parallel, blocks.micro_batch
    keys, at = unique_rows(*columns)
    per_layer = np.array([found.beside_products_s(*key) for key in keys.tolist()], dtype=float)[at]
    keys, at = unique_rows(*columns, *space.local(blocks.mesh))
    per_layer += np.array([found.collectives_s(*key) for key in keys.tolist()])[at]
    products_s = found.products_s() / asked.cluster.num_devices
    # Mean over the ranks: work, and the forwards of the stages before, each with as few layers as any cut leaves it.
    shortest = layers // (pipeline * np.maximum(asked.most_stages // pipeline, 1))
    per_replica = blocks.tensor * blocks.context
    forward_s = found.layer_forward_s() * blocks.micro_batch / per_replica
    fill_s = (pipeline - 1) / 2 * shortest * forward_s
    work_s = products_s + m * per_layer * layers / pipeline
    bound = np.maximum(work_s, (fill_s + work_s) * least_share(asked.pricer.turns, pipeline))
    return bound * asked.pricer.stretch


def block_needs_bytes(asked: Problem, space: Space, splits: Callable[[int], Splits]) -> Floats:
    """Bytes that the fullest rank of every row of each block needs at least, [number of blocks].

    ``splits``: those of a block and of all that differ from it in where ranks lie.
    """
    of = space.blocks
    if not len(of):
        return np.zeros(0)
    # Where ranks lie changes no memory.
    columns = of.tensor, of.context, of.pipeline, of.expert, of.sequence_parallel, of.data, of.micro_batch
    keys, at = unique_rows(*columns)
    first = np.zeros(len(keys), dtype=np.int64)
    first[at[::-1]] = np.arange(len(of))[::-1]
    return _BlockNeeds(asked, space).needs_bytes(first, [splits(block) for block in first.tolist()])[at]


@lru_cache(maxsize=1 << 12)
def fewest_in_flight(pipes: tuple[ScheduleChoice, ...], pipeline: int, micro_batches: int) -> Ints:
    """[kinds, p] Micro-batches of which each rank keeps something at once, at least, wherever in it a layer lies; of the
    pipelines that may hold the least."""
    if pipeline == 1:
        return np.ones((1, 1), dtype=np.int64)
    counts = [in_flight(name, pipeline, virtual, micro_batches).min(axis=1) for name, virtual in pipes]
    found = np.unique(np.stack(counts), axis=0)
    # A pipeline in which no rank keeps fewer than in another one holds no less.
    no_fewer = (found[:, None] >= found).all(axis=-1)
    return found[no_fewer.sum(axis=1) == 1]


def fullest_of_any_cut(each: Floats, num_layers: int) -> Floats:
    """What the fullest rank holds at least, however ``num_layers`` are shared among ranks that hold ``each`` [..., p] of one.

    The least is where all ranks are equally full.
    """
    return num_layers / (1.0 / np.maximum(each, 1e-9)).sum(axis=-1)


class _BlockNeeds:
    """What a problem's blocks share for their memory."""

    def __init__(self, asked: Problem, space: Space) -> None:
        self.asked, self.space, self.graph = asked, space, asked.graph
        device = asked.pricer.nodes.device
        self._hidden = self.graph.blocks[0].output.bytes if self.graph.blocks and self.graph.blocks[0].output else 0
        traits = get(asked.engine.name).traits(asked.job, Parallelism(), asked.engine)
        fusion: Fusion = "traced" if is_cpu(device) and traits.kernels.fusion != "fused" else traits.kernels.fusion
        inputs = [
            kernels(block, fusion, fused_loss=traits.kernels.fused_loss).saved_input_bytes
            for block in self.graph.blocks
        ]
        self._kept = min([self._hidden, *inputs])
        """Bytes of a micro-batch that a block keeps however much of it is recomputed."""
        stacked = [(expert_parameters(block), block.parameters) for block in self.graph.blocks]
        dense = [sum(p.numel for p in parameters if p.name not in names) for names, parameters in stacked]
        experts = [sum(p.numel for p in parameters if p.name in names) for names, parameters in stacked]
        self._dense, self._experts = min(dense, default=0), min(experts, default=0)

    def needs_bytes(self, which: Ints, splits: Sequence[Splits]) -> Floats:
        """[blocks] Of some blocks; ``splits``: of each of them, those that several share one object."""
        of = self.space.blocks.at(which)
        cut = of.context * np.where(of.sequence_parallel > 0, of.tensor, 1)
        kept = self._kept * of.micro_batch / self.graph.micro_batch_size / cut
        states = _States({id(one): one for one in splits}.values(), self._dense, self._experts)
        rows, block, starts = states.rows(splits)
        found = np.empty(len(rows))
        for (p, m), at in _alike(of.pipeline[block], of.micro_batches[block]):
            in_flight = fewest_in_flight(self.space.pipes(int(which[block[at[0]]])), p, m)
            found[at] = states.needs_bytes(rows[at], kept[block[at]], in_flight, m, self.graph.num_layers)
        return np.minimum.reduceat(found, starts)


class _States:
    """The states of a layer under each of several ways to share them, one block's behind the other's."""

    def __init__(self, splits: Iterable[Splits], dense: int, experts: int) -> None:
        """``dense``, ``experts``: parameters of a layer at least, and beside them those of its experts."""
        each = list(splits)
        counts = [len(one.layouts) for one in each]
        self._number = {id(one): number for number, one in enumerate(each)}
        self._counts, self._starts = np.array(counts), np.cumsum([0, *counts[:-1]])
        self._columns = SplitColumns.joined([one.columns for one in each])
        degrees = [
            (layout.tensor_parallel_degree, layout.expert_parallel_degree)
            for layout in (one.layouts[0] for one in each)
        ]
        own = [(int(dense / tensor), int(experts / expert / tensor)) for tensor, expert in degrees]
        of_rank = np.repeat(np.array(own, dtype=float), counts, axis=0)
        # Of the number of micro-batches a rank's states ask only whether there are several.
        self._of_layer = [self._columns.states_of_layer(of_rank[:, :1], of_rank[:, 1:], m) for m in (1, 2)]

    def rows(self, splits: Sequence[Splits]) -> tuple[Ints, Ints, Ints]:
        """The ways of some blocks, which block has each, and where each block's begin."""
        numbers = np.array([self._number[id(one)] for one in splits])
        counts = self._counts[numbers]
        starts = np.cumsum(counts) - counts
        rows = np.repeat(self._starts[numbers] - starts, counts) + np.arange(counts.sum())
        return rows, np.repeat(np.arange(len(splits)), counts), starts

    def needs_bytes(self, rows: Ints, kept: Floats, in_flight: Ints, micro_batches: int, num_layers: int) -> Floats:
        """[rows] Bytes that the fullest rank needs at least; ``kept`` [rows]: of activations of a layer and a micro-batch."""
        states, gradients = (part[rows][..., None] for part in self._of_layer[micro_batches > 1])
        each = states + np.maximum(in_flight * kept[:, None, None] - gradients, 0.0)
        least = fullest_of_any_cut(each, num_layers).min(axis=-1, keepdims=True)
        return self._columns.part(rows).device_bytes(least)[:, 0]


def _alike(*columns: Ints) -> Iterator[tuple[list[int], Ints]]:
    """The rows of a table that differ, and where each of them is."""
    keys, at = unique_rows(*columns)
    order = np.argsort(at, kind="stable")
    ends = np.cumsum(np.bincount(at, minlength=len(keys)))
    yield from zip(keys.tolist(), np.split(order, ends[:-1]), strict=True)


class _BlockBounds:
    """What a problem's blocks share."""

    def __init__(self, asked: Problem) -> None:
        self.asked, self.graph, self.rates = asked, asked.graph, asked.pricer.unit_pricer.rates
        self._causal = is_causal(self.graph)
        self._network, self._nodes = asked.pricer.network, asked.pricer.nodes
        traits = get(asked.engine.name).traits(asked.job, Parallelism(), asked.engine)
        self._of_engine = traits
        self._split = cache(self._split_of)
        forward = [list(block.phase("forward")) for block in self.graph.blocks]
        self._attention = [[op for op in of_block if "attention" in op.name] for of_block in forward]
        self._grouped = [next((op for op in of_block if op.name in GROUPED), None) for of_block in forward]
        share = np.bincount(self.graph.layers, minlength=len(self.graph.blocks)) / max(self.graph.num_layers, 1)
        self._share = share.tolist()
        """Of all layers, those of each kind."""
        self._traits, self._how = cache(self._traits_of), cache(self._how_of)
        self._beside_products = cache(asked.pricer.unit_pricer.beside_products_s)
        self._of_tensor, self._of_context, self._of_experts = map(
            cache, (self._tensor_s, self._contexts_s, self._experts_s)
        )

    def products_s(self) -> float:
        """Seconds of one device alone for the products of a step."""
        whole = [*(self.graph.blocks[kind] for kind in self.graph.layers), self.graph.embedding, self.graph.head]
        by_segment = {
            id(segment): sum(self._least_s(op) for op in segment.operators if "attention" not in op.name)
            for segment in whole
        }
        a_micro_batch_s = sum(by_segment[id(segment)] for segment in whole)
        return a_micro_batch_s / self.graph.micro_batch_size * self.asked.job.global_batch_size

    def layer_forward_s(self) -> float:
        """Seconds of one device alone for the forward pass of the cheapest layer on one sequence."""
        passes = [sum(map(self._least_s, block.phase("forward"))) for block in self.graph.blocks]
        return min(passes, default=0.0) / self.graph.micro_batch_size

    def _least_s(self, op: Operator) -> float:
        """Seconds that an operator takes at least; 0 for those that only move data."""
        if op.flops == 0:
            return 0.0
        precision = PRECISION_OF.get(op.inputs[0].dtype, "fp32")
        fused = "attention" in op.name
        rates = [self.rates.fastest(name, attention=fused) for name in {precision, self.asked.job.precision}]
        return op.flops * (0.5 if fused and self._causal else 1.0) / max(rates)

    def beside_products_s(self, tensor: int, context: int, expert: int, sequence: int, micro_batch: int) -> float:
        """Seconds of all that a layer of average kind computes beside products, for one micro-batch."""
        how = self._how(tensor, context, expert, sequence)
        each = self._beside_products(micro_batch, tensor, bool(sequence) and tensor > 1, context, how)
        return self._of_kinds(each.__getitem__)

    def collectives_s(
        self, tensor: int, context: int, expert: int, sequence: int, micro_batch: int, *local: int
    ) -> float:
        """Seconds of the collectives that a layer of average kind shows at least, for one micro-batch.

        ``local``: how many ranks of the tensor, the context and the expert group share a node.
        """
        groups = (Group(size, on, -(-size // on)) for size, on in zip((tensor, context, expert), local, strict=True))
        of_tensor, of_context, of_experts = groups
        in_parts, traits = bool(sequence) and tensor > 1, self._traits(tensor, context, expert, sequence)
        size = micro_batch / self.graph.micro_batch_size
        shown = 1.0, shown_s(1.0, np.inf, traits.tensor.overlap_backward)
        if traits.tensor.in_pieces:
            shown = (shown_s(1.0, np.inf, 1.0),) * 2
        each_has_parts = in_parts and not traits.experts.gather_tokens
        return (
            self._of_tensor(of_tensor, in_parts, size / context, *shown)
            + self._of_context(of_context, traits.context.ways, size / tensor)
            + self._of_experts(of_experts, size / (context * (tensor if each_has_parts else 1)))
        )

    def _traits_of(self, tensor: int, context: int, expert: int, sequence: int) -> Traits:
        layout = Parallelism(
            tensor_parallel_degree=tensor,
            context_parallel_degree=context,
            expert_parallel_degree=expert,
            enable_sequence_parallel=bool(sequence),
        )
        return get(self.asked.engine.name).traits(self.asked.job, layout, self.asked.engine)

    def _how_of(self, *degrees: int) -> KernelOptions:
        traits = self._traits(*degrees)
        return self.asked.pricer.unit_pricer.how(traits, traits.context.ways[0])

    def _of_kinds(self, each_s: Callable[[int], float]) -> float:
        """Of a layer of average kind, from what one of each kind takes."""
        return sum(share * each_s(kind) for kind, share in enumerate(self._share))

    def _time_s(self, kind: CollectiveKind, tensors: Iterable[TensorSpec], group: Group, size: float) -> float:
        # Weight products in 8 bits may gather what they read in 8 bits.
        part = 0.5 if kind == "all_gather" and self.asked.job.precision == "fp8" else 1.0
        return sum(self._network.time_s(kind, part * size * spec.bytes, group) for spec in tensors)

    def _tensor_s(
        self, group: Group, in_parts: bool, size: float, forward_shown: float, backward_shown: float
    ) -> float:
        """Tensor-parallel collectives of both passes.

        ``in_parts``: under sequence parallelism; ``size``: of the hidden states, over those traced; ``forward_shown``: the part
        of a forward pass's collectives that shows at least.
        """

        def of_kind(kind: int) -> float:
            parts = self._split(kind, way_of_keys(self.graph.blocks[kind], group.size, self._of_engine.tensor.few_keys))
            forward, backward = self._passes_s(parts, group, in_parts, size)
            return forward_shown * forward + backward_shown * backward

        return self._of_kinds(of_kind) if group.size > 1 else 0.0

    def _split_of(self, kind: int, way: KeysWay) -> TensorSplit:
        whole = self._of_engine.experts.whole_biased
        return split(self.graph.blocks[kind], "block", whole_biased_experts=whole, way_of_keys=way)

    def _passes_s(self, parts: TensorSplit, group: Group, in_parts: bool, size: float) -> tuple[float, float]:
        if not in_parts:
            forward = self._time_s("all_reduce", parts.forward_reduce, group, size)
            return forward, self._time_s("all_reduce", parts.backward_reduce, group, size)
        hidden = [spec for spec in parts.forward_reduce if len(spec.shape) > 1]
        forward = self._time_s("reduce_scatter", hidden, group, size)
        forward += self._time_s("all_gather", parts.backward_reduce, group, size)
        backward = self._time_s("all_gather", (*hidden, *parts.backward_reduce), group, size)
        return forward, backward + self._time_s("reduce_scatter", parts.backward_reduce, group, size)

    def _contexts_s(self, group: Group, ways: tuple[ContextWay, ...], size: float) -> float:
        """Keys, values and their gradients between context ranks. ``size``: of all ranks' together, over those traced."""

        def of_kind(kind: int) -> float:
            return sum(min(self._context_s(op, way, group, size) for way in ways) for op in self._attention[kind])

        return self._of_kinds(of_kind) if group.size > 1 else 0.0

    def _context_s(self, op: Operator, way: ContextWay, group: Group, size: float) -> float:
        """What attention of both passes needs of other context ranks, at least."""
        if way == "all-to-all":
            sent = (size * spec.bytes / group.size for spec in (*op.inputs[:3], op.outputs[0]))
            return 2 * sum(self._network.time_s("all_to_all", amount, group) for amount in sent)
        keys = size * sum(spec.bytes for spec in op.inputs[1:3])
        shown = shown_s(1.0, np.inf, 1.0 if way == "ring" else 0.0)
        return 3 * shown * self._network.time_s("all_gather", keys, group)

    def _experts_s(self, group: Group, size: float) -> float:
        """Tokens to expert ranks and back, in both passes. ``size``: of what a rank sends, over what was traced."""
        tokens, traits = self.graph.micro_batch_size * self.graph.sequence_length, self._of_engine
        once, overlap = traits.experts.tokens_once_to_a_node, traits.experts.overlap_between_nodes

        def of_kind(kind: int) -> float:
            first = self._grouped[kind]
            if first is None:
                return 0.0
            routed = Routed.of(first, size, tokens)
            return 2 * pass_waits_s(routed, group, self._network, np.inf, once_to_a_node=once, overlap=overlap)

        return self._of_kinds(of_kind) if group.size > 1 else 0.0
