"""What an engine is: it can run a plan, or says why it cannot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from ahp.engines.fp8 import NVIDIAS_FP8, Fp8Recipe
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.schedule.stages import Ends

ContextWay = Literal["gather", "ring", "all-to-all"]
Fusion = Literal["eager", "modules", "fused"]
Gathers = Literal["never", "per_step", "per_micro_batch"]
Selective = Literal["core", "beside_products", "every_second_product"]
SendsAgain = Literal["nothing", "gathers", "all"]
FewKeys = Literal["refused", "whole", "gathered"]

ALL_ELEMENTS = 1_000_000_000
"""A bucket that takes whatever a pipeline stage has. What a stage has beyond it changes the share of the latency alone, which is
small beside so many bytes."""


@dataclass(frozen=True)
class Traits:
    """How an engine's kernels, buffers and overlap behave, so that the forecast is for that stack.

    Overlap figures are the share of a collective's time that can hide behind computation, where the device has
    engines to move data beside it; on a CPU nothing hides, both need the cores.
    """

    gradient_bytes: int
    """Bytes of one gradient element as it is kept until the optimizer."""
    reduce_bytes: int
    """Bytes of one gradient element as it is sent."""
    master_weight_bytes: int
    """Bytes of one weight element as the optimizer holds it."""
    optimizer_state_bytes: int
    """Bytes of all optimizer states of one parameter (AdamW: two of fp32)."""
    fusion: Fusion
    """Which element-wise operators run as one kernel: none, those of one module (a norm, an activation), whole chains."""
    compute_weight_bytes: int
    """Bytes of one weight element in the copy that computes, where that copy is apart from the master; 0 = it is not."""
    gradient_overlap: float
    parameter_gather_overlap: float
    forward_gathers: Gathers
    """How often a sharded weight is gathered for the forward pass."""
    backward_gathers: Gathers
    """How often for the backward pass beyond that."""
    keeps_gathered_weights: bool
    """Whether every gathered weight of the rank is whole in memory at once, from its first use to its last."""
    reduces_every_micro_batch: bool
    """Whether gradients are reduced after each micro-batch; else once per step, after the last."""
    keeps_whole_gradients: bool
    """Whether gradients wait for that whole, rather than as the shard of the rank."""
    reduce_copies: bool
    """Whether gradients are copied into a flat buffer to be sent."""
    host_operators_per_unit: float
    """What the engine does at each unit (a block) and micro-batch beside the model's own operators, forward and backward,
    as a number of operators that take the host as long. On a CPU it adds to the computation; on a GPU it shows where
    kernels are so short that the host cannot keep ahead."""
    host_launches_per_operator: float
    """Host time of one operator of the traced graph, over the device's ``kernel_launch_s``: autograd, Python and dispatch."""
    source: str
    gradient_beside_bytes: int = 0
    """Bytes of one gradient element as a pass makes it, where all of them stay in memory beside those that are kept."""
    reduce_bucket_elements: int = 0
    """Elements of gradients, of whatever units, that one collective sums; 0 = those of one unit."""
    buckets_on_first_stage_alone: bool = False
    """Whether only the first stage of a pipeline sends such buckets, and every other all of its gradients at once."""
    collects_in_bucket: bool = False
    """Whether a buffer of that size, allocated whole, collects them before they are copied to be sent."""
    keeps_reduce_buckets: bool = False
    """Whether buckets for all gradients lie in memory from the first step on."""
    gradients_in_buckets: bool = False
    """Whether these buckets are where gradients are kept; else they lie beside them."""
    gather_bucket_elements: int = 0
    """Elements of sharded weights, of whatever units, that one collective gathers; 0 = those of one unit."""
    gathered_block_bytes: int = 0
    """Bytes of one weight element of a block as it is gathered; 0 = as it computes."""
    gathered_ahead_elements: int = 0
    """Elements of gathered weights that lie in memory at once, where they are freed after use; 0 = those of the block that computes
    and of the next one."""
    reduces_to_all: bool = False
    """Whether gradients of which each rank needs a part are summed whole on every rank."""
    ends_apart: bool = False
    """Whether the embedding and the head are units of their own, gathered when they are needed and sent when their gradients are
    there; else what is in no block is one unit, gathered first and sent last."""
    tensor_overlap_backward: float = 0.0
    """Share of the tensor-parallel collectives of a backward pass that hides behind products for weight gradients."""
    gathers_at_start: bool = False
    """Whether all ranks gather their weights as the step begins, so that of a pipeline only the first stage waits for them; else
    each stage when its first micro-batch is there."""
    tensor_in_pieces: bool = False
    """Whether the collectives of sequence parallelism travel in as many pieces as there are ranks, beside the products that
    read or make them, instead of before and after."""
    gathers_inputs_again: bool = True
    """Whether sequence parallelism gathers what column products read a second time, for their weight gradients; else the
    gathered tensor is kept."""
    tensor_copies: bool = False
    """Whether the collectives of sequence parallelism copy what they gather or scatter, because sequences are its second dim."""
    context_ways: tuple[ContextWay, ...] = ("gather",)
    """How attention sees tokens of other context ranks; of several, the fastest is taken. gather: all keys and values are
    gathered first. ring: they go round while attention computes on those that are there. all-to-all: tokens are exchanged for
    heads, and back."""
    context_sums_bytes: int = 0
    """Bytes of one element of the gradients of keys and values that go round a ring; 0 = as keys and values."""
    sends_split_by_tensor: bool = False
    """Whether a pipeline message is cut over the tensor-parallel ranks, sent in parts and gathered (Megatron's scatter-gather)."""
    recomputes_what_is_read: bool = False
    """Whether ``full`` ends with the last result that the backward pass reads, before a block's last product; else all is run again."""
    selective: Selective = "core"
    """What ``selective`` recomputes. core: that of unfused attention (scores, softmax, dropout, their product with the values);
    where it is fused, norms and activations. beside_products: all but products with a weight and fused attention, whose
    results are kept. every_second_product: of these products the second, fourth, ... as well, and those of stacked experts."""
    selective_sends_again: SendsAgain = "nothing"
    """Which collectives of a block ``selective`` runs again: none, the all-gathers of sequence parallelism, or all of tensor and of
    context parallelism."""
    experts_gather_tokens: bool = False
    """Whether a sequence-parallel rank sends to the experts all tokens, gathered first, or its own part."""
    tokens_once_to_a_node: bool = False
    """Whether a token whose experts are on another node is sent there once, instead of once for each of them."""
    expert_overlap_between_nodes: float = 0.0
    """Share of the experts' all-to-alls that can hide behind the opposite pass of another micro-batch, where they cross nodes."""
    leaves_lone_experts: bool = False
    """Whether weights of experts that no other rank holds a part of stay out of what is gathered and reduced, with no copy."""
    whole_biased_experts: bool = False
    """Whether experts that add a bias to their last product stay whole under tensor parallelism, computed by every rank."""
    few_keys: FewKeys = "refused"
    """What it does with keys and values of fewer heads than there are tensor-parallel ranks. whole: every rank makes all of them.
    gathered: the ranks share the products for queries, keys and values, gather what these give, and take their heads of it."""
    attention_kernel: Literal["flash1", "flash2", "cudnn", "masked"] | None = None
    """Fused attention on a GPU: FlashAttention of the first or second generation, cuDNN's, or None = what torch's scaled_dot_product_attention takes."""
    fused_loss: bool = False
    """Whether cross-entropy is one kernel that keeps nothing beside the logits."""
    loss_chunk_tokens: int | None = None
    """Tokens of which the logits, their loss and their gradient exist at a time; None = all of a micro-batch."""
    torch_pipeline: bool = False
    """Whether torch's pipeline runtime runs the stages: it allocates what a stage receives for every micro-batch."""
    stage_ends: Ends = "hold_layers"
    """How the engine cuts the layers where it is not told: what the first and the last stage hold."""
    no_matrix_state_bytes: int = 0
    """Bytes of optimizer states more, of a parameter outside of the blocks or of stacked experts (Muon leaves them to AdamW)."""
    gathers_each_weight: bool = False
    """Whether sharded weights are gathered and their gradients reduced one tensor at a time, not a unit at once."""
    fp8: Fp8Recipe = field(default=NVIDIAS_FP8, hash=False)  # an engine has one or two, and its own hash takes long
    fused_gradient_accumulation: bool = False
    """Whether the products that make weight gradients add them to the fp32 ones directly. The gradients that autograd asks
    for lie in memory beside them, of one block and the head, in the compute type, with nothing in them."""
    host_state_bytes: int = 0
    """Of ``optimizer_state_bytes``, those that lie in host memory: for each update they come to the device, and go back."""
    host_bucket_bytes: int = 0
    """So many of them are on the device at once, at most."""

    @property
    def device_state_bytes(self) -> int:
        """Of ``optimizer_state_bytes``, those that stay on the device."""
        return self.optimizer_state_bytes - self.host_state_bytes

    @property
    def gathers_in_each_forward(self) -> bool:
        """Whether the forward pass of every micro-batch gathers sharded weights."""
        return self.forward_gathers == "per_micro_batch"

    @property
    def gathers_in_each_backward(self) -> bool:
        """Whether the backward pass of every micro-batch does."""
        return self.backward_gathers == "per_micro_batch"

    @property
    def waits_for_gathers(self) -> bool:
        """Whether the forward pass of every stage waits for gathered weights."""
        return self.forward_gathers != "never" and not self.gathers_at_start


class Engine(ABC):
    """One stack that runs plans. Final classes implement every method; none overrides another's."""

    name: str

    @abstractmethod
    def refuses(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """The reason why this engine cannot express the layout (key, value, rule), or None."""

    @abstractmethod
    def traits(self, job: Job, parallelism: Parallelism, choice: EngineChoice) -> Traits:
        """Its behaviour for the forecast."""
