"""The kernels that a device really runs for a traced segment: which operators become one, the bytes it moves, what is kept.

The graph is traced as eager PyTorch runs on a CPU. On a GPU dropout is one kernel with a mask of one byte per element. An
engine with fused kernels runs a chain of element-wise operators between two products as one kernel: values inside the
chain stay in registers, and the values that autograd would keep are recomputed from the chain's input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ahp.engines.traits import KernelTraits
from ahp.forecast.division import GROUPED
from ahp.forecast.efficiency import kind_of
from ahp.forecast.fp32_loss import loss_in_fp32
from ahp.forecast.gpu import GroupedKernel
from ahp.forecast.joined import moved_where_joined
from ahp.forecast.norms import in_norms, read_for_weights, reads_besides
from ahp.forecast.one_by_one import one_by_one
from ahp.forecast.titan_attention import moved_around_attention
from ahp.forecast.titan_experts import OfExperts, moved_by_torch
from ahp.graph.operators import LOSS, Operator, Segment

MASKS = ("bernoulli", "dropout")
"""Parts of the names of operators that make random masks, which cannot be recomputed."""

CAST = "aten._to_copy"
SOFTMAX_BACKWARD = "_softmax_backward"

REDUCED = 4
"""With more input elements than this for each element of a result, torch's compiler does not recompute it (torch 2.13,
functorch/partitioners.py, ban_recompute_reductions)."""

INPUT = -1
"""Stands for the segment's input, where operators are named by their index."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of a segment after fusion, keyed by operator."""

    moved_bytes: dict[int, float]
    """Bytes read and written; operators that are no kernel of their own are absent."""
    launched: frozenset[int]
    """Operators that the host launches a kernel for."""
    saved_bytes: dict[int, float]
    """Bytes of a forward operator's output that are kept until backward; zeros are left out."""
    saved_input_bytes: float
    """Bytes of the segment's own input, kept where a chain that starts with it is recomputed and nothing else keeps it."""
    unvectorized: Mapping[int, float] = field(default_factory=dict)
    """Elements of which torch's own GPU kernels compute an address, by operator."""
    grouped: GroupedKernel = "torch"
    """Which kernel computes products of experts."""
    one_graph: bool = False
    """Whether the compiler saw both passes: it drops those of a policy's kept results that nothing reads."""


def kernels(
    segment: Segment, how: KernelTraits, *, biases_apart: bool = True, grouped: GroupedKernel = "torch"
) -> Kernels:
    """The kernels of one segment.

    By ``how.fusion``: ``traced``: one for each operator, as on a CPU. ``eager``: as PyTorch on a GPU. ``modules``: the element-wise operators of
    one module are one kernel (norms, activation functions); norms are torch's own kernels, so that their backward passes and the gradients of their weights
    are kernels apart (ATen/native/cuda/layer_norm_kernel.cu). ``fused``: those of a chain are one kernel, whatever their modules.
    ``biases_apart``: whether the biases of joined products are added by a kernel of their own.
    """
    saved = {op.index: float(op.saved_bytes) for op in segment.operators if op.saved_bytes}
    if how.fusion == "traced":
        moved = {op.index: float(op.bytes_read + op.bytes_written) for op in segment.operators if _runs(op)}
        return Kernels(moved, frozenset(moved), saved, 0.0)
    masks = _masks(segment)
    for index in masks.values():
        made = segment.operators[index].outputs[0]
        saved[index] = saved.get(index, 0.0) / max(1, made.bytes // max(1, made.numel))
    if how.fusion == "eager":
        return _eager(segment, masks, saved, repeated_keys=how.repeated_keys, grouped=grouped)
    if how.fusion == "fused":
        saved = _weighted_before_the_last_product(segment, saved)
    across, by_module = how.fusion == "fused", how.fusion == "modules"
    chains = _Chains(
        segment,
        masks,
        across_modules=across,
        fused_loss=how.fused_loss,
        dropout_apart=how.dropout_apart,
        norms=in_norms(segment) if how.norms_apart or by_module else frozenset(),
        joined=how.joined_products,
    )
    kept, input_bytes = chains.kept(saved)
    alone = () if how.fused_loss else (op for op in segment.operators if op.module == LOSS)
    moved = chains.moved_bytes(kept)
    of_weights = read_for_weights(segment) if how.norm_weights_apart or by_module else {}
    of_joined = moved_where_joined(segment, chains.owner) if how.joined_products else {}
    biased = how.joined_products and biases_apart
    apart = one_by_one(
        segment,
        chains.owner,
        positions=how.positions_apart,
        scaled=how.scaled_apart,
        biased=biased,
        gates=how.gate_apart,
    )
    moved.update(apart.moved_bytes)
    kept = {**kept, **apart.saved_bytes}
    around, pairs = moved_around_attention(
        segment, chains.owner, complex_positions=how.complex_positions, repeated_keys=how.repeated_keys, compiled=across
    )
    summed, of_experts = how.experts_summed, OfExperts({}, {})
    if summed is not None:
        of_experts = moved_by_torch(segment, summed, compiled=how.experts_compiled)
    if how.loss_keeps_fp32:
        kept, moved = loss_in_fp32(segment, chains.owner, kept, moved)
    besides = of_weights, of_joined, apart.more_bytes, around, of_experts.more_bytes
    for index, more in (item for each in besides for item in each.items()):
        moved[index] = moved.get(index, 0.0) + more
    return Kernels(
        moved,
        chains.launched(kept),
        kept,
        input_bytes,
        {**_unvectorized(alone), **apart.addresses, **pairs, **of_experts.addresses},
        grouped,
        one_graph=across,
    )


def _eager(
    segment: Segment, masks: dict[int, int], saved: dict[int, float], *, repeated_keys: bool, grouped: GroupedKernel
) -> Kernels:
    """PyTorch's own. They turn by cosine and sine, as traced, with as many bytes as by complex numbers."""
    moved = _eager_bytes(segment, masks)
    of_keys, _ = moved_around_attention(
        segment, owners(segment), complex_positions=False, repeated_keys=repeated_keys, compiled=False
    )
    for index, more in of_keys.items():
        moved[index] += more
    alone = _unvectorized(op for op in segment.operators if op.index in moved)
    return Kernels(moved, frozenset(moved), saved, 0.0, alone, grouped)


def _weighted_before_the_last_product(segment: Segment, saved: dict[int, float]) -> dict[int, float]:
    """What is kept where a router's weights scale the input of the experts' last product, not its output.

    The sum is the same, and the chain before that product can be recomputed from what is kept anyway, so that no hidden state
    per expert of a token waits for its backward (Megatron-Core d98e8a6, transformer/moe/experts.py).
    """
    products = [op.index for op in segment.phase("forward") if op.name in GROUPED]
    return {i: count for i, count in saved.items() if i not in products[-1:]}


def owners(segment: Segment) -> dict[int, int]:
    """The operator that made the memory of each operator's output: itself, unless it is a view."""
    owner: dict[int, int] = {}
    for op in segment.operators:
        sources = [i for i in op.depends_on if i in owner]
        is_view = op.bytes_written == 0 and op.flops == 0
        owner[op.index] = owner[sources[0]] if is_view and sources else op.index
    return owner


def _runs(op: Operator) -> bool:
    return op.flops > 0 or op.bytes_read + op.bytes_written > 0


def _unvectorized(ops: Iterable[Operator]) -> dict[int, float]:
    slow = (op for op in ops if _is_chain(op) and kind_of(op.name) == "stream" and _is_unvectorized(op))
    return {op.index: float(op.outputs[0].numel) for op in slow}


def _is_unvectorized(op: Operator) -> bool:
    """Whether an element-wise operator's output has a wider type than an input with as many elements, or broadcasts an input.
    Casts to a narrower type have a kernel of their own, and masks are read as they are."""
    made = op.outputs[0]
    if "slice_backward" in op.name or "pad" in op.name:
        return False  # zeros, and a copy into them; cat does compute an address for each element
    return any(
        spec.bytes < made.bytes if spec.numel == made.numel else 1 < spec.numel < made.numel
        for spec in op.inputs
        if spec.dtype != "bool"
    )


def _is_chain(op: Operator) -> bool:
    """An element-wise operator (norms, softmax and sums count as one)."""
    return op.flops == 0 and op.bytes_written > 0


def _is_row_by_row(op: Operator) -> bool:
    return kind_of(op.name) == "gather" or op.name == "aten.index"


def _masks(segment: Segment) -> dict[int, int]:
    """Index of each random draw -> the operator whose output is kept as the mask (the draw, or the scaling after it)."""
    found: dict[int, int] = {}
    for op in segment.operators:
        if op.phase != "forward" or "bernoulli" not in op.name:
            continue
        after = [o for o in segment.operators[op.index + 1 :] if op.index in o.depends_on and o.name == "aten.div_"]
        found[op.index] = after[0].index if after else op.index
    return found


def _eager_bytes(segment: Segment, masks: dict[int, int]) -> dict[int, float]:
    """Bytes moved as traced, except that a dropout is one kernel: it reads its input, writes its output and a mask of bytes."""
    made, scaled = set(masks), set(masks.values())
    moved: dict[int, float] = {}
    for op in segment.operators:
        if not _runs(op) or op.index in made or op.index in scaled:
            continue
        moved[op.index] = float(op.bytes_read + op.bytes_written)
        if scaled & set(op.depends_on):  # the product of mask and input, forward or backward
            moved[op.index] -= op.outputs[0].bytes - op.outputs[0].numel
    return moved


class _Chains:
    """Element-wise operators that run together: between the same products, in the same phase."""

    def __init__(
        self,
        segment: Segment,
        masks: dict[int, int],
        *,
        across_modules: bool,
        fused_loss: bool,
        dropout_apart: bool,
        norms: frozenset[int],
        joined: bool = False,
    ) -> None:
        """``norms``: operators of norms that run with no other in their phase that reads them. ``joined``: what a chain reads is read once, whatever
        its modules, as the two gradients of a gate are made in one kernel where one product has both."""
        self.segment, self.ops = segment, segment.operators
        self.owner = owners(segment)
        self.across_modules, self.fused_loss, self.dropout_apart = across_modules, fused_loss, dropout_apart
        self.norms, self.joined = norms, joined
        self.masks = set(masks.values())
        self.draws = set(masks)
        self.level = self._levels()
        self.readers: dict[int, list[int]] = defaultdict(list)
        for op in self.ops:
            if not (op.bytes_written == 0 and op.flops == 0):
                for source in self._sources(op):
                    self.readers[source].append(op.index)
        self.output = self._output()
        self._run_late()

    def _run_late(self) -> None:
        """An operator that one later chain alone reads runs with it: backward operators on kept results alone wait for the gradient.
        What is read or written row by row, out of order, is there before."""
        for op in reversed(self.ops):
            readers = [self.ops[r] for r in self.readers[op.index] if self.ops[r].phase == op.phase]
            levels = {self.level[reader.index] for reader in readers}
            if len(levels) == 1 and all(_is_chain(one) and not _is_row_by_row(one) for one in (op, *readers)):
                self.level[op.index] = levels.pop()

    def _sources(self, op: Operator) -> list[int]:
        return list(dict.fromkeys(self.owner[i] for i in op.depends_on))

    def _levels(self) -> dict[int, int]:
        """Number of products on the longest path to each operator: a chain does not reach across a product that depends on it."""
        level: dict[int, int] = {}
        for op in self.ops:
            level[op.index] = max((level[i] + (self.ops[i].flops > 0) for i in op.depends_on), default=0)
        return level

    def _output(self) -> int | None:
        """The operator that makes the segment's output."""
        forward = [op.index for op in self.ops if op.phase == "forward" and _runs(op)]
        return self.owner[forward[-1]] if forward else None

    def _materialised(self, op: Operator) -> bool:
        """Whether an element-wise output must be in memory for what runs after it in its phase."""
        readers = [r for r in self.readers[op.index] if self.ops[r].phase == op.phase]
        if op.index == self.output or (op.phase == "backward" and not readers):
            return True
        return not all(self._together(op, self.ops[r]) for r in readers)

    def _together(self, op: Operator, reader: Operator) -> bool:
        """Whether one kernel can hold both operators."""
        if not _is_chain(reader) or self.level[reader.index] != self.level[op.index]:
            return False
        return self._fusible(op, reader)

    def _fusible(self, op: Operator, other: Operator) -> bool:
        if LOSS in (op.module, other.module):
            return op.module == other.module and self.fused_loss
        if self.dropout_apart and SOFTMAX_BACKWARD in other.name and self.masks & set(op.depends_on):
            return False
        if op.index in self.norms and other.index not in self.norms:
            return False
        return self.across_modules or other.module == op.module

    def _chain(self, index: int) -> tuple[set[int], list[Operator]]:
        """The chain that makes a forward output: where it starts, operators with outputs in memory, and its operators."""
        found: set[int] = set()
        waiting, seen = [index], dict[int, Operator]()
        while waiting:
            op = self.ops[waiting.pop()]
            if op.index in seen:
                continue
            seen[op.index] = op
            for source in self._sources(op):
                inner = _is_chain(self.ops[source]) and not self._materialised(self.ops[source])
                if inner and source not in self.masks:
                    waiting.append(source)
                elif self.ops[source].bytes_written > 0:
                    found.add(source)
        return found, list(seen.values())

    def _roots(self, index: int) -> tuple[set[int], bool]:
        """Where the chain that makes a forward output starts: operators with outputs in memory, and whether the segment's input too."""
        found, chain = self._chain(index)
        return found, any(not self._sources(op) or self._reads_input(op) for op in chain)

    def _reads_input(self, op: Operator) -> bool:
        made = sum(self.ops[s].bytes_written > 0 for s in self._sources(op))
        return len(op.inputs) - len(op.parameters) > max(made, len(op.depends_on))

    def kept(self, saved: dict[int, float]) -> tuple[dict[int, float], float]:
        """Bytes kept when chains are recomputed in the backward pass, by operator, and those of the segment's input kept for that."""
        # The input is the output of the block before, which counts it if outputs are kept.
        given = self.output in saved
        kept = {i: b for i, b in saved.items() if i == self.output or i in self.masks or not self._again(self.ops[i])}
        input_bytes = 0.0
        for index in sorted(set(saved) - set(kept)):
            roots, takes_input = self._roots(index)
            missing = {r: float(self.ops[r].bytes_written) for r in roots if r not in kept}
            needs = sum(missing.values())
            takes_input = takes_input and not given
            if takes_input and not input_bytes and self.segment.output is not None:
                needs += self.segment.output.bytes
            if needs > saved[index] or (missing and needs == saved[index]):
                kept[index] = saved[index]
                continue
            kept.update(missing)
            if takes_input and self.segment.output is not None:
                input_bytes = float(self.segment.output.bytes)
        return kept, input_bytes

    def _again(self, op: Operator) -> bool:
        """Whether a kept output can be recomputed: an element-wise one that only element-wise operators read backward, or
        a cast, whatever reads it (a router's product in fp32 reads the hidden states in bf16)."""
        if op.name == CAST and self.across_modules:
            return True
        backward = [self.ops[r] for r in self.readers[op.index] if self.ops[r].phase == "backward"]
        if not _is_chain(op) or any(name in op.name for name in MASKS) or not all(map(_is_chain, backward)):
            return False
        return all(self._fusible(op, reader) for reader in backward) and not self._is_reduced(op)

    def _is_reduced(self, op: Operator) -> bool:
        """Whether an output is reduced from what its chain starts with, to one number per row: cheaper to keep than to reduce again."""
        if not self.across_modules:
            return False
        roots, takes_input = self._roots(op.index)
        read = max((self.ops[root].outputs[0].numel for root in roots), default=0)
        if takes_input and self.segment.output is not None:
            read = max(read, self.segment.output.numel)
        return op.outputs[0].numel * REDUCED < read

    def moved_bytes(self, kept: dict[int, float]) -> dict[int, float]:
        """Bytes of each kernel: what must be in memory is written once, and read once by each chain that needs it."""
        moved: dict[int, float] = {}
        read: set[tuple[str, str, int, int]] = set()
        for op in self.ops:
            if op.flops > 0:
                moved[op.index] = float(op.bytes_read + op.bytes_written)
                continue
            if not _runs(op) or op.index in self.draws - self.masks:
                continue
            written = self._written(op, kept)
            total = self._read(op, kept, read) + written
            if total > 0:
                moved[op.index] = total
        return moved

    def launched(self, kept: dict[int, float]) -> frozenset[int]:
        """Products, and one kernel for each output that a chain writes; masks come out of the kernel that uses them."""
        masks = self.masks | self.draws
        return frozenset(
            op.index
            for op in self.ops
            if op.flops > 0 or (_runs(op) and op.index not in masks and self._written(op, kept) > 0)
        )

    def _written(self, op: Operator, kept: dict[int, float]) -> float:
        if op.index in self.masks:
            return kept.get(op.index, 0.0)
        return float(op.bytes_written) if op.index in kept or self._materialised(op) else 0.0

    def _read(self, op: Operator, kept: dict[int, float], done: set[tuple[str, str, int, int]]) -> float:
        """Bytes from memory: each source once for the chain (module, phase and level) that reads it."""
        total, known = 0.0, 0.0
        for source in self._sources(op):
            made = self.ops[source]
            besides = made.outputs[0].bytes if reads_besides(op, made) else 0
            known += made.bytes_written - besides
            if made.bytes_written == 0 or (source in self.masks and made.phase == op.phase):
                continue  # the kernel that makes a mask has it in registers
            for root in self._read_from(made, op, kept):
                module = "" if self.joined and op.index not in self.norms else op.module
                key = (module, op.phase, self.level[op.index], root)
                if key not in done:
                    done.add(key)
                    total += self._bytes_of(root, kept) - besides
        if op.index in self.draws or op.index in self.masks:
            return total
        return total + max(0.0, op.bytes_read - known)

    def _bytes_of(self, root: int, kept: dict[int, float]) -> float:
        if root == INPUT:
            return float(self.segment.output.bytes) if self.segment.output else 0.0
        return kept.get(root, 0.0) if root in self.masks else float(self.ops[root].bytes_written)

    def _read_from(self, made: Operator, op: Operator, kept: dict[int, float]) -> list[int]:
        if not _is_chain(made) or made.index in kept:
            return [made.index]
        if made.phase == op.phase:
            return [made.index] if self._materialised(made) else []
        roots, chain = self._chain(made.index)
        return sorted(roots | {INPUT} if any(map(self._reads_input, chain)) else roots)
