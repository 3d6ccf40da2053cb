"""Makes a stage ready to take steps: sliced, its products in 8 bits, its experts divided, compiled, recomputed, sharded, in the
one order that works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from ahp.errors import bad_input
from ahp.graph.call import Documents
from ahp.graph.fake_run import train_whole
from ahp.graph.outline import Outline
from ahp.plan import Plan
from ahp.runtime.compute.compile import (
    FullRecomputeCompiler,
    compile_block,
    selective_recompute_compiler,
    split_backward_compiler,
)
from ahp.runtime.compute.fp8 import Fp8
from ahp.runtime.compute.recompute import recompute
from ahp.runtime.experts.balance_loss import Balance, Routers
from ahp.runtime.experts.dispatch import divide_experts
from ahp.runtime.pipeline.cut import Stage, cut
from ahp.runtime.pipeline.weight_gradients import WeightGradients
from ahp.runtime.ranks.mesh import Mesh
from ahp.runtime.sequence.document_attention import DocumentAttention
from ahp.runtime.sequence.own_tokens import SequenceSharding
from ahp.runtime.shard.ends import GatheredOnce, units_of
from ahp.runtime.shard.fsdp import COMPUTE_DTYPE, Sharding
from ahp.runtime.shard.ownership import ParameterNames
from ahp.runtime.tensor.slice import slice_module
from ahp.runtime.weights.allocate import allocate_on, hold_in, store_frozen
from ahp.schedule.orders import splits_backward
from ahp.schedule.stages import layer_ranges, layers_of_stages
from ahp.search.slicing.model import ModelSlicing
from ahp.search.slicing.placement import Split


def cut_stages(module: nn.Module, found: Outline | None, plan: Plan, documents: Documents | None) -> list[Stage]:
    """All stages of the model's pipeline, made on every rank."""
    stages = _stages(module, found, plan)
    for stage in stages:
        stage.documents = documents
    return stages


def _stages(module: nn.Module, found: Outline | None, plan: Plan) -> list[Stage]:
    p = plan.parallelism
    if p.num_stages == 1:
        return [Stage(module, None)]
    assert found is not None, "a model without blocks is not cut"
    beside = f"the model computes with what {found.blocks_path} return beside their hidden states, which a stage has of its own blocks alone"
    if (rule := found.changes or (beside if found.reads_beside else None)) is not None:
        raise bad_input("pipeline_parallel_degree", p.pipeline_parallel_degree, rule, [1])
    ranges = layer_ranges(layers_of_stages(p, found.num_layers))
    stages = [cut(module, found, layers, COMPUTE_DTYPE[plan.job.precision]) for layers in ranges]
    if splits_backward(p):
        for stage in stages:
            stage.later = WeightGradients()
    return stages


@dataclass
class StageSetup:
    """What a rank's stages have in common. Calling it prepares a stage, and notes how its parameters are split."""

    plan: Plan
    mesh: Mesh
    names: ParameterNames
    sharding: Sharding
    blocks_path: str | None
    """None for a model without blocks."""
    num_layers: int
    found: Outline | None
    """None if the plan does not need it (``needs_outline``), or for a model without blocks."""
    sliced: ModelSlicing | None
    balance: Balance | None
    tokens: SequenceSharding | None
    documents: DocumentAttention | None
    streamed: bool
    """Whether parameters stay on the meta device until they are cut."""
    ends: tuple[str, str] | None
    """Paths of the embedding and the head; None if they are not separate modules."""
    splits: dict[str, Split] = field(default_factory=dict)
    """Parameters that are split over the tensor-parallel axis, and how."""
    experts: set[str] = field(default_factory=set)
    """Parameters that are divided over the expert-parallel axis."""

    def __call__(self, index: int, stage: Stage) -> None:
        """Prepare a stage, in place. Collective."""
        layers = self._layers(index, stage)
        train_whole(stage.model)
        if not self.streamed:
            stage.to(self.mesh.device)
        if self.plan.job.lora is not None:
            store_frozen(stage, COMPUTE_DTYPE[self.plan.job.precision])
        if self.plan.job.dtype != "fp32":
            hold_in(stage, COMPUTE_DTYPE[self.plan.job.dtype])
        splits = self._slice(stage, layers, self._fp8(stage))
        experts = self._divide_experts(stage, splits)
        self._wrap_blocks(index, stage, layers)
        if self.streamed and not self.sharding.uses_fsdp:  # ``Replicas`` hooks the parameters themselves
            allocate_on(stage, self.mesh.device)
        embedding, head = units_of(stage.model, self.ends)
        if head is not None and self.plan.engine.loss_chunk_tokens is not None:
            stage.head = head = GatheredOnce(head)
        stage.calls = self.sharding.apply(stage, list(layers.values()), experts, embedding, head)
        if self.streamed and self.sharding.uses_fsdp:
            allocate_on(stage, self.mesh.device)

    def _layers(self, index: int, stage: Stage) -> dict[int, nn.Module]:
        """The blocks on a stage, keyed by their number in the whole model; a block listed twice has its first number."""
        if self.blocks_path is None:
            return {}
        blocks = stage.model.get_submodule(self.blocks_path)
        layers = layer_ranges(layers_of_stages(self.plan.parallelism, self.num_layers))[index]
        found = {number: blocks.get_submodule(str(number)) for number in layers}
        first = {id(block): number for number, block in reversed(found.items())}
        return {number: block for number, block in found.items() if first[id(block)] == number}

    def _slice(self, stage: Stage, layers: dict[int, nn.Module], fp8: Fp8 | None) -> dict[str, Split]:
        if self.sliced is None:
            if fp8 is not None:
                for block in layers.values():
                    fp8.convert(block)
            return {}
        p, group = self.plan.parallelism, self.mesh.weights["tp"]
        experts = self.sliced.outline.experts if p.expert_parallel_degree > 1 else ()
        splits = slice_module(stage.model, self.sliced, layers, group, p.context_parallel_degree, experts, fp8)
        self.splits.update({self.names.of[name]: split for name, split in splits.items()})
        return splits

    def _fp8(self, stage: Stage) -> Fp8 | None:
        """How the stage's blocks compute their linear layers in 8 bits; None if they do not."""
        if self.plan.job.precision != "fp8":
            return None
        return Fp8(() if self.tokens is None else (self.mesh.group("cp"),), stage.later)

    def _divide_experts(self, stage: Stage, splits: dict[str, Split]) -> list[nn.Module]:
        if self.found is None or self.plan.parallelism.expert_parallel_degree == 1:
            return []
        experts = divide_experts(stage.model, self.found, self.mesh, splits)
        self.experts.update(self.names.of[name] for name in _parameter_names(experts))
        return list(experts.values())

    def _wrap_blocks(self, index: int, stage: Stage, layers: dict[int, nn.Module]) -> None:
        """Wrap the forward of each block, from the inside out."""
        p = self.plan.parallelism
        if self.balance is not None:
            stage.routers = Routers(stage.model, layers.values(), self.balance)
        some, kind = p.recomputed_layers(self.mesh.rank("dp_replicate")), p.activation_checkpoint
        recomputed = list(layers.values())[: None if some is None else some[index]]
        compiles, in_full = self.plan.engine.compile, FullRecomputeCompiler(stage.later)
        if compiles:
            plain = split_backward_compiler(stage.later)
            keeping = {"selective": selective_recompute_compiler(stage.later), "full": in_full}.get(kind, plain)
            for block in layers.values():
                compile_block(block, keeping if block in recomputed else plain)
        if self.tokens is not None:
            for block in layers.values():
                self.tokens.attend(block)
        if self.documents is not None:  # outside of the above, so its mode sees attention over whole sequences
            for number, block in layers.items():
                self.documents.attend(block, number)
        for block in recomputed:
            if compiles and kind == "full":
                in_full.recompute_outside(block, stage.forward_context)
            elif not compiles and kind in ("selective", "full"):
                recompute(block, kind, stage.forward_context)
        if self.tokens is not None:
            for number, block in layers.items():
                self.tokens.take_own_tokens(block, number, stage.after_blocks)


def _parameter_names(modules: dict[str, nn.Module]) -> Iterator[str]:
    """Names of the modules' parameters, in the model that holds the modules."""
    return (f"{path}.{name}" for path, module in modules.items() for name, _ in module.named_parameters())
