"""Lower bounds on the time and memory of a candidate's layers, quick to find for every candidate before layers are priced.

Products count at the rate that no kernel exceeds, with all else that layers compute, and with the part of a replica's collectives that
nothing can hide. Where no ceiling of the rate is known, products count as nothing. Activations count as what is kept when all else is
recomputed.

Dims: K = kinds of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from ahp.arrays import Floats, Ints, unique_rows
from ahp.cached_method import cached_method
from ahp.engines.traits import ContextTraits, ContextWay, KernelTraits, Traits
from ahp.forecast.compute import is_causal
from ahp.forecast.context import gathers_in_backward
from ahp.forecast.dispatch import Routed, pass_waits_s
from ahp.forecast.division import GROUPED, expert_parameters, is_weight_gradient
from ahp.forecast.group import CollectiveKind, Group, on_nodes
from ahp.forecast.kernels import kernels
from ahp.forecast.operator_times import reads_mask
from ahp.forecast.overlap import shown_s
from ahp.forecast.pricer import Pricer
from ahp.forecast.split import KeysWay, TensorSplit, split, way_of_keys
from ahp.forecast.tables import PRECISION_OF
from ahp.graph.operators import Operator, Segment, TensorSpec
from ahp.plan import Parallelism

LEAST_WRITTEN = 2
"""Least bytes of an element that a product writes, a product in 8 bits included."""


class LeastLayers:
    """Lower bounds for one model, job and engine on one kind of node."""

    def __init__(self, pricer: Pricer) -> None:
        self._pricer, self._graph, self._job = pricer, pricer.graph, pricer.job
        self._rates, self._network = pricer.group.unit_pricer.rates, pricer.group.network
        self._of_engine = self._traits(1, 1, 1, 0, 0)
        ways = self._of_engine.context.ways
        self._how = pricer.group.unit_pricer.how(self._of_engine, ways[0], 1)
        self._causal = is_causal(self._graph)
        forward = [list(block.phase("forward")) for block in self._graph.blocks]
        self._attention = [[op for op in of_block if "attention" in op.name] for of_block in forward]
        self._grouped = [next((op for op in of_block if op.name in GROUPED), None) for of_block in forward]

    @cached_property
    def kept_bytes(self) -> float:
        """Bytes of a micro-batch as traced that a layer keeps on a single device, however much of it is recomputed."""
        blocks, own = self._graph.blocks, self._how.kernels
        hidden = blocks[0].output.bytes if blocks and blocks[0].output else 0
        inputs = (
            kernels(block, KernelTraits(own.fusion, fused_loss=own.fused_loss)).saved_input_bytes for block in blocks
        )
        return min([hidden, *inputs])

    @cached_property
    def parameters(self) -> tuple[Ints, Ints]:
        """[K] each: the parameters of a layer outside experts, and those of experts."""
        stacked = [(expert_parameters(block), block.parameters) for block in self._graph.blocks]
        dense = [sum(p.numel for p in parameters if p.name not in names) for names, parameters in stacked]
        experts = [sum(p.numel for p in parameters if p.name in names) for names, parameters in stacked]
        return np.array(dense, dtype=np.int64), np.array(experts, dtype=np.int64)

    def products_s(self) -> float:
        """Seconds of a single device for the products of a step, without attention's."""

        def of(segment: Segment) -> float:
            return sum(self._least_s(op) for op in segment.operators if "attention" not in op.name)

        of_kind = [of(block) for block in self._graph.blocks]
        ends_s = of(self._graph.embedding), of(self._graph.head)
        a_micro_batch_s = sum((*(of_kind[kind] for kind in self._graph.layers), *ends_s))
        return a_micro_batch_s / self._graph.micro_batch_size * self._job.global_batch_size

    def layer_forward_s(self) -> float:
        """Seconds of a single device for the products in the forward pass of the cheapest layer on one sequence."""
        passes = [sum(map(self._least_s, block.phase("forward"))) for block in self._graph.blocks]
        return min(passes, default=0.0) / self._graph.micro_batch_size

    def products_of_kinds_s(self) -> Floats:
        """[3, K] Seconds of a single device for the products of a layer on one sequence, without attention's: of the forward pass, of the
        backward pass, and of the backward pass without weight gradients."""
        found = np.zeros((3, len(self._graph.blocks)))
        for kind, block in enumerate(self._graph.blocks):
            for op in block.operators:
                if op.flops and "attention" not in op.name:
                    backward = op.phase == "backward"
                    found[int(backward), kind] += self._least_s(op)
                    found[2, kind] += self._least_s(op) if backward and not is_weight_gradient(op) else 0.0
        return found / self._graph.micro_batch_size

    def _least_s(self, op: Operator) -> float:
        """Least seconds of an operator; 0 for one that only moves data."""
        if op.flops == 0:
            return 0.0
        precision = PRECISION_OF.get(op.inputs[0].dtype, "fp32")
        fused = "attention" in op.name
        rates = [self._rates.fastest(name, attention=fused) for name in {precision, self._job.precision}]
        # Ranks that have whole documents skip later tokens, whatever the mask.
        skips = fused and self._causal and (self._how.by_lengths or not reads_mask(op))
        seconds = op.flops * (0.5 if skips else 1.0) / max(rates)
        # A weight's gradient is written once for however many sequences, and experts' kernels hide what they write.
        is_hidden = fused or op.name in GROUPED or is_weight_gradient(op)
        return seconds if is_hidden else seconds + self._rates.output_s(LEAST_WRITTEN * op.outputs[0].numel)

    def beside_s(
        self, tensor: Ints, context: Ints, expert: Ints, sequence: Ints, folded: Ints, micro_batch: Ints, local: Ints
    ) -> tuple[Floats, Floats]:
        """[N, K] each: seconds of all that a layer computes besides products, and the least exposed seconds of its collectives, for one
        micro-batch of each of N blocks. Each part is priced once for blocks that are equal in what it depends on.

        ``local``: [N, 3] how many ranks of the tensor, the context and the expert group share a node.
        """
        degrees, at, _ = unique_rows(tensor, context, expert, sequence, folded)
        behaviors = [self._traits(*key) for key in degrees.tolist()]
        number = {traits: index for index, traits in enumerate(dict.fromkeys(behaviors))}
        of, different = np.array([number[traits] for traits in behaviors], dtype=np.int64)[at], list(number)

        def each(price: Callable[..., Iterable[float]], *columns: Ints) -> Floats:
            keys, at, _ = unique_rows(of, *columns)
            found = [price(different[traits], *key) for traits, *key in keys.tolist()]
            return np.array(found, dtype=float).reshape(len(keys), len(self._graph.blocks))[at]

        in_parts = np.where(tensor > 1, sequence, 0)
        gathers = np.array([traits.experts.gather_tokens for traits in different], dtype=bool)[of]
        sent_parts = context * np.where((in_parts > 0) & ~gathers, tensor, 1)
        of_tensor, of_context, of_expert = local.T
        collectives_s = each(self._of_tensor_s, micro_batch, tensor, of_tensor, in_parts, context)
        collectives_s += each(self._of_context_s, micro_batch, context, of_context, tensor)
        collectives_s += each(self._of_experts_s, micro_batch, expert, of_expert, sent_parts)
        return each(self._beside_products_s, micro_batch, tensor, in_parts, context), collectives_s

    def _beside_products_s(
        self, traits: Traits, micro_batch: int, tensor: int, in_parts: int, context: int
    ) -> tuple[float, ...]:
        """[K]"""
        return self._pricer.group.unit_pricer.beside_products_s(traits, micro_batch, tensor, bool(in_parts), context)

    def _of_tensor_s(
        self, traits: Traits, micro_batch: int, tensor: int, local: int, in_parts: int, context: int
    ) -> Floats:
        """[K]"""
        size = micro_batch / self._graph.micro_batch_size / context
        of_both = shown_s(1.0, np.inf, 1.0 if traits.tensor.in_pieces else traits.tensor.overlap_backward)
        shown = of_both if traits.tensor.in_pieces else 1.0, of_both
        again = traits.tensor.gathers_inputs_again
        return self._tensor_s(on_nodes(tensor, local), bool(in_parts), traits.experts.folded, size, *shown, again)

    def _of_context_s(self, traits: Traits, micro_batch: int, context: int, local: int, tensor: int) -> Floats:
        """[K]"""
        size = micro_batch / self._graph.micro_batch_size / tensor
        return self._contexts_s(on_nodes(context, local), traits.context, size)

    def _of_experts_s(self, _: Traits, micro_batch: int, expert: int, local: int, parts: int) -> Floats:
        """[K]"""
        return self._experts_s(on_nodes(expert, local), micro_batch / self._graph.micro_batch_size / parts)

    @cached_method
    def _traits(self, tensor: int, context: int, expert: int, sequence: int, folded: int) -> Traits:
        layout = Parallelism(
            tensor_parallel_degree=tensor,
            context_parallel_degree=context,
            expert_parallel_degree=expert,
            expert_tensor_parallel_degree=1 if folded else tensor,
            enable_sequence_parallel=bool(sequence),
        )
        return self._pricer.traits(layout)

    def _of_kinds(self, group: Group, each_s: Callable[[int], float]) -> Floats:
        """[K] Seconds of each kind's collectives in a group."""
        kinds = range(len(self._graph.blocks))
        return np.array([each_s(kind) if group.size > 1 else 0.0 for kind in kinds])

    def _time_s(self, kind: CollectiveKind, tensors: Iterable[TensorSpec], group: Group, size: float) -> float:
        # Weight products in 8 bits can gather what they read in 8 bits.
        part = 0.5 if kind == "all_gather" and self._job.precision == "fp8" else 1.0
        return sum(self._network.time_s(kind, part * size * spec.bytes, group) for spec in tensors)

    @cached_method
    def _tensor_s(
        self,
        group: Group,
        in_parts: bool,
        folded: bool,
        size: float,
        forward_shown: float,
        backward_shown: float,
        again: bool,
    ) -> Floats:
        """[K] Seconds of the tensor-parallel collectives of both passes.

        ``in_parts``: under sequence parallelism; ``size``: of the hidden states, over those traced; ``forward_shown``: the least
        exposed share of a forward pass's collectives; ``again``: whether the backward pass gathers what products read.
        """

        def of_kind(kind: int) -> float:
            way = way_of_keys(self._graph.blocks[kind], group.size, self._of_engine.tensor.few_keys)
            parts = self._split(kind, way, folded)
            forward, backward = self._passes_s(parts, group, in_parts, size, again=again)
            return forward_shown * forward + backward_shown * backward

        return self._of_kinds(group, of_kind)

    @cached_method
    def _split(self, kind: int, way: KeysWay, folded: bool) -> TensorSplit:
        experts = self._of_engine.experts._replace(folded=folded)
        return split(self._graph.blocks[kind], "block", experts=experts, way_of_keys=way)

    def _passes_s(
        self, parts: TensorSplit, group: Group, in_parts: bool, size: float, *, again: bool
    ) -> tuple[float, float]:
        if not in_parts:
            forward = self._time_s("all_reduce", parts.forward_reduce, group, size)
            return forward, self._time_s("all_reduce", parts.backward_reduce, group, size)
        hidden = [spec for spec in parts.forward_reduce if len(spec.shape) > 1]
        forward = self._time_s("reduce_scatter", hidden, group, size)
        forward += self._time_s("all_gather", parts.backward_reduce, group, size)
        backward = self._time_s("all_gather", (*hidden, *(parts.backward_reduce if again else ())), group, size)
        return forward, backward + self._time_s("reduce_scatter", parts.backward_reduce, group, size)

    @cached_method
    def _contexts_s(self, group: Group, how: ContextTraits, size: float) -> Floats:
        """[K] Seconds to exchange keys, values and their gradients between context ranks. ``size``: all ranks' keys, over those traced."""

        def of_kind(kind: int) -> float:
            each = ([self._context_s(op, way, how, group, size) for way in how.ways] for op in self._attention[kind])
            return sum(map(min, each))

        return self._of_kinds(group, of_kind)

    def _context_s(self, op: Operator, way: ContextWay, how: ContextTraits, group: Group, size: float) -> float:
        """Least seconds that attention of both passes waits for other context ranks."""
        if way == "all-to-all":
            sent = (size * spec.bytes / group.size for spec in (*op.inputs[:3], op.outputs[0]))
            return 2 * sum(self._network.time_s("all_to_all", amount, group) for amount in sent)
        keys = size * sum(spec.bytes for spec in op.inputs[1:3])
        if how.repeats_keys:
            keys *= op.inputs[0].shape[1] / op.inputs[1].shape[1]
        shown = shown_s(1.0, np.inf, 1.0 if way == "ring" else 0.0)
        gathers = 1.0 + gathers_in_backward(op, how, group.size)
        return gathers * shown * self._network.time_s("all_gather", keys, group)

    @cached_method
    def _experts_s(self, group: Group, size: float) -> Floats:
        """[K] Seconds to send tokens to expert ranks and back, in both passes. ``size``: what a rank sends, over what was traced."""
        tokens, how = self._graph.micro_batch_size * self._graph.sequence_length, self._how
        overlap = how.expert_overlap(group.nodes)

        def of_kind(kind: int) -> float:
            first = self._grouped[kind]
            if first is None:
                return 0.0
            routed = Routed.of(first, size, tokens)
            return 2 * pass_waits_s(routed, group, self._network, np.inf, how.experts, overlap=overlap)

        return self._of_kinds(group, of_kind)
