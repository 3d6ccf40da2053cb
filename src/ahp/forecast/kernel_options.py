"""The kernels that an engine has on some devices: the part of its traits that a unit's price depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ahp.engines.fp8 import Fp8Recipe
from ahp.engines.traits import ContextTraits, ContextWay, ExpertTraits, Fusion, KernelTraits, TensorTraits, Traits
from ahp.forecast.gpu import AttentionKernel, kernel_of_lengths, takes_cudnn


class KernelOptions(NamedTuple):
    """The kernels of an engine."""

    kernels: KernelTraits
    """The engine's, with the fusion that the device has."""
    attention: AttentionKernel | None
    by_lengths: bool
    """Attention goes by the lengths of documents, so that the graph with their starts is the one that runs."""
    attention_again: bool
    """``every_second_product`` runs fused attention again."""
    keeps_arrived: bool
    """``every_second_product`` keeps what all-to-alls have sent to experts and back."""
    accumulates: bool
    """Products for weight gradients add to the fp32 gradients."""
    tensor: TensorTraits
    experts: ExpertTraits
    context: ContextWay
    sharing: ContextTraits
    weight_bytes: int
    """Bytes of one weight element in the type that computes."""
    keeps_outputs: bool
    """A pipeline stage keeps what it has sent."""
    one_graph: bool
    """The host launches one CUDA graph for a step."""
    graphed: tuple[str, ...]
    """Parts of a block that one CUDA graph launches."""
    expert_operators: tuple[float, float]
    fp8: Fp8Recipe | None
    """The recipe for products of blocks; None = they are not in 8 bits."""

    def expert_overlap(self, nodes: int) -> float:
        """Share of the all-to-alls between expert ranks on ``nodes`` nodes that the opposite pass of another micro-batch can hide."""
        if nodes > 1:
            return self.experts.overlap_between_nodes
        return max(float(self.one_graph), self.experts.overlap_on_a_node)

    @classmethod
    def of(
        cls,
        traits: Traits,
        way: ContextWay,
        generation: str | None,
        *,
        in_fp8: bool,
        has_experts: bool,
        whole_documents: bool = False,
    ) -> KernelOptions:
        """The kernels of an engine. ``generation``: of the GPU (kernels.yaml), None on a CPU; ``in_fp8``: whether the job's
        precision is fp8; ``has_experts``: whether the model has experts; ``whole_documents``: whether the model allows attention by the
        lengths of documents, and a rank has whole documents."""
        own, on_cpu = traits.kernels, generation is None
        flash2 = generation in own.flash2_on
        in_mxfp8 = in_fp8 and generation == "blackwell"
        one_graph = in_mxfp8 and has_experts and traits.experts.one_graph_in_mxfp8
        fp8 = traits.fp8 if in_fp8 else None
        if fp8 is not None and one_graph:
            fp8 = replace(fp8, attention=True, fused_experts=True)

        recent: AttentionKernel | None = "recent" if own.recent_cudnn else None
        attention = own.attention or recent
        of_lengths = kernel_of_lengths(generation) if attention == "lengths" and whole_documents else None
        if attention == "lengths":
            attention = of_lengths or recent

        def on_device(fusion: Fusion) -> Fusion:
            """On a CPU torch has no fused kernels except for those of its compiler."""
            return "traced" if on_cpu and fusion != "fused" else fusion

        return cls(
            kernels=own._replace(
                fusion=on_device(own.fusion), fusion_at_the_ends=on_device(own.fusion_at_the_ends or own.fusion)
            ),
            attention="torch_flash2" if flash2 else attention,
            by_lengths=of_lengths is not None,
            attention_again=takes_cudnn(generation)
            and not (flash2 or of_lengths or traits.recompute.keeps_cudnn_attention),
            keeps_arrived=traits.recompute.keeps_arrived,
            accumulates=traits.gradients.fused_accumulation,
            # Nothing overlaps on a CPU.
            tensor=traits.tensor._replace(in_pieces=False) if on_cpu else traits.tensor,
            experts=traits.experts._replace(overlap_between_nodes=0.0) if on_cpu else traits.experts,
            context=way,
            sharing=traits.context,
            weight_bytes=traits.states.compute_weight_bytes or traits.states.master_weight_bytes,
            keeps_outputs=traits.pipeline.keeps_outputs,
            one_graph=one_graph,
            graphed=() if on_cpu else traits.host.graphed,
            expert_operators=traits.host.experts_operators,
            fp8=fp8,
        )
