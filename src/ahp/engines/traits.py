"""How an engine's kernels, buffers and overlap behave, so that a forecast is for that stack: one record a concern.

The records are named tuples: the search has traits as keys, and tuples are hashed and compared without a line of Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ahp.engines.fp8 import NVIDIAS_FP8, Fp8Recipe
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


class StateTraits(NamedTuple):
    """Bytes of one parameter in each of its states."""

    master_weight_bytes: int
    """Bytes of one weight element as the optimizer holds it."""
    optimizer_bytes: float
    """Bytes of all optimizer states of one parameter (AdamW: two of fp32)."""
    compute_weight_bytes: int
    """Bytes of one weight element in the copy that computes, where that copy is apart from the master; 0 = it is not."""
    no_matrix_bytes: int = 0
    """Bytes of optimizer states more, of a parameter outside of the blocks or of stacked experts (Muon leaves them to AdamW)."""
    flattened_bytes: int = 0
    """Bytes of one weight element that weights left behind in the allocator when they were moved into one flat tensor."""
    host_bytes: int = 0
    """Of ``optimizer_bytes``, those that lie in host memory: for each update they come to the device, and go back."""
    host_bucket_bytes: int = 0
    """So many of them are on the device at once, at most."""
    trained_share: float = 1.0
    """Of the model's parameters those that are trained. The others have no gradient and no optimizer state, and are held as they compute.
    The share is the whole model's: adapters are in the blocks alone, and what a stage has beside them is counted with a little too much."""

    @property
    def device_bytes(self) -> float:
        """Of ``optimizer_bytes``, those that stay on the device."""
        return self.optimizer_bytes - self.host_bytes


class GradientTraits(NamedTuple):
    """Gradients as they are kept until the optimizer."""

    element_bytes: int
    """Bytes of one element."""
    whole: bool
    """Whether they wait for it whole, rather than as the shard of the rank."""
    beside_bytes: int = 0
    """Bytes of one gradient element as a pass makes it, where all of them stay in memory beside those that are kept."""
    update_bytes: int = 0
    """Bytes of one gradient element in the flat copy that the update reads. It comes when activations are gone, but is one tensor, which
    fits into none of what they leave."""
    fused_accumulation: bool = False
    """Whether the products that make weight gradients add them to the fp32 ones directly. The gradients that autograd asks
    for lie in memory beside them, of one block and the head, in the compute type, with nothing in them."""


class GatherTraits(NamedTuple):
    """How sharded weights are gathered."""

    overlap: float
    """Share of a gathering's time that can hide."""
    forward: Gathers
    """How often a sharded weight is gathered for the forward pass."""
    backward: Gathers
    """How often for the backward pass beyond that."""
    keeps_weights: bool
    """Whether every gathered weight of the rank is whole in memory at once, from its first use to its last."""
    bucket_elements: int = 0
    """Elements of sharded weights, of whatever units, that one collective gathers; 0 = those of one unit."""
    block_bytes: int = 0
    """Bytes of one weight element of a block as it is gathered; 0 = as it computes."""
    ahead_elements: int = 0
    """Elements of gathered weights that lie in memory at once, where they are freed after use; 0 = those of the block that computes
    and of the next one."""
    at_start: bool = False
    """Whether all ranks gather their weights as the step begins, so that of a pipeline only the first stage waits for them; else
    each stage when its first micro-batch is there."""
    beside_stages: bool = False
    """Whether a rank's weights that are gathered once a step are on their way from its start on, where the schedule lets them
    (``PipelineSchedule.gathers_ahead``), and each stage waits for its own."""
    ends_apart: bool = False
    """Whether the embedding and the head are units of their own, gathered when they are needed and sent when their gradients are
    there; else what is in no block is one unit, gathered first and sent last."""
    each_weight: bool = False
    """Whether sharded weights are gathered and their gradients reduced one tensor at a time, not a unit at once."""

    @property
    def in_each_forward(self) -> bool:
        """Whether the forward pass of every micro-batch gathers sharded weights."""
        return self.forward == "per_micro_batch"

    @property
    def in_each_backward(self) -> bool:
        """Whether the backward pass of every micro-batch does."""
        return self.backward == "per_micro_batch"

    @property
    def is_waited_for(self) -> bool:
        """Whether the forward pass of every stage waits for gathered weights."""
        return self.forward != "never" and not self.at_start


class ReduceTraits(NamedTuple):
    """How gradients are reduced."""

    element_bytes: int
    """Bytes of one gradient element as it is sent."""
    overlap: float
    """Share of a reduction's time that can hide."""
    every_micro_batch: bool
    """Whether gradients are reduced after each micro-batch; else once per step, after the last."""
    copies: bool
    """Whether gradients are copied into a flat buffer to be sent."""
    bucket_elements: int = 0
    """Elements of gradients, of whatever units, that one collective sums; 0 = those of one unit."""
    buckets_on_first_stage_alone: bool = False
    """Whether only the first stage of a pipeline sends such buckets, and every other all of its gradients at once."""
    collects_in_bucket: bool = False
    """Whether a buffer of that size, allocated whole, collects them before they are copied to be sent."""
    keeps_buckets: bool = False
    """Whether buckets for all gradients lie in memory from the first step on."""
    gradients_in_buckets: bool = False
    """Whether these buckets are where gradients are kept; else they lie beside them."""
    to_all: bool = False
    """Whether gradients of which each rank needs a part are summed whole on every rank."""
    beside_stages: bool = False
    """Whether a rank of several stages computes the others while the gradients of one are reduced, and waits for all after its last action."""
    on_own_stream: bool = False
    """Whether units are gathered and reduced one by one on streams of their own (FSDP): what is allocated there, the allocator gives to
    no other stream."""


class TensorTraits(NamedTuple):
    """Tensor and sequence parallelism."""

    overlap_backward: float = 0.0
    """Share of the tensor-parallel collectives of a backward pass that hides behind products for weight gradients."""
    in_pieces: bool = False
    """Whether the collectives of sequence parallelism travel in as many pieces as there are ranks, beside the products that
    read or make them, instead of before and after."""
    gathers_inputs_again: bool = True
    """Whether sequence parallelism gathers what column products read a second time, for their weight gradients; else the
    gathered tensor is kept."""
    copies: bool = False
    """Whether the collectives of sequence parallelism copy what they gather or scatter, because sequences are its second dim."""
    few_keys: FewKeys = "refused"
    """What it does with keys and values of fewer heads than there are tensor-parallel ranks. whole: every rank makes all of them.
    gathered: the ranks share the products for queries, keys and values, gather what these give, and take their heads of it."""


class ContextTraits(NamedTuple):
    """Context parallelism."""

    ways: tuple[ContextWay, ...] = ("gather",)
    """How attention sees tokens of other context ranks; of several, the fastest is taken. gather: all keys and values are
    gathered first. ring: they go round while attention computes on those that are there. all-to-all: tokens are exchanged for
    heads, and back."""
    sums_bytes: int = 0
    """Bytes of one element of the gradients of keys and values that go round a ring; 0 = as keys and values."""


class PipelineTraits(NamedTuple):
    """Stages, and what they send."""

    sends_split_by_tensor: bool = False
    """Whether a pipeline message is cut over the tensor-parallel ranks, sent in parts and gathered (Megatron's scatter-gather)."""
    in_torch: bool = False
    """Whether torch's pipeline runtime runs the stages: it allocates what a stage receives for every micro-batch."""
    torch_orders: bool = False
    """Whether torch's own classes say the order of actions, so that their rules for the number of micro-batches hold."""
    ends: Ends = "hold_layers"
    """How the engine cuts the layers where it is not told: what the first and the last stage hold."""


class RecomputeTraits(NamedTuple):
    """What is run again in the backward pass."""

    stops_at_last_read: bool = False
    """Whether ``full`` ends with the last result that the backward pass reads, before a block's last product; else all is run again."""
    selective: Selective = "core"
    """What ``selective`` recomputes. core: that of unfused attention (scores, softmax, dropout, their product with the values);
    where it is fused, norms and activations. beside_products: all but products with a weight and fused attention, whose
    results are kept. every_second_product: of these products the second, fourth, ... as well, and those of stacked experts."""
    keeps_cudnn_attention: bool = True
    """Whether ``every_second_product`` keeps what fused attention gives where it is cuDNN's; else that runs again too."""
    sends_again: SendsAgain = "nothing"
    """Which collectives of a block ``selective`` runs again: none, the all-gathers of sequence parallelism, or all of tensor and of
    context parallelism."""


class ExpertTraits(NamedTuple):
    """Layers of experts."""

    folded: bool = False
    """Whether every tensor-parallel rank holds whole experts and sends them its own part of the sequence, so that expert-parallel groups may
    span these ranks (Megatron's parallel folding); else each expert is divided over them."""
    gather_tokens: bool = False
    """Whether a sequence-parallel rank sends to the experts all tokens, gathered first, or its own part."""
    tokens_once_to_a_node: bool = False
    """Whether a token whose experts are on another node is sent there once, instead of once for each of them."""
    overlap_between_nodes: float = 0.0
    """Share of the all-to-alls that can hide behind the opposite pass of another micro-batch, where they cross nodes."""
    fused_permutation: bool = False
    """Whether tokens are put in the order of their experts, and back, by one kernel each, backward as forward; else by torch's indexing."""
    launched_one_by_one: bool = False
    """Whether the product of each expert is a kernel of its own; else torch's grouped product computes all of them in one."""
    one_graph_in_mxfp8: bool = False
    """Whether in 8 bits on Blackwell (MXFP8) a step is one CUDA graph, which no launch holds up: experts' products are one kernel with
    activations and casts, attention is in 8 bits too, and all-to-alls may run beside the opposite pass on one node as well."""
    leaves_lone: bool = False
    """Whether weights of experts that no other rank holds a part of stay out of what is gathered and reduced, with no copy."""
    whole_biased: bool = False
    """Whether experts that add a bias to their last product stay whole under tensor parallelism, computed by every rank."""


class KernelTraits(NamedTuple):
    """Which kernels compute a block and the loss."""

    fusion: Fusion
    """Which element-wise operators run as one kernel: none, those of one module (a norm, an activation), whole chains."""
    fusion_at_the_ends: Fusion | None = None
    """The same of the embedding, the last norm, the head and the loss; None = as in blocks."""
    attention: Literal["flash1", "flash2", "cudnn", "masked"] | None = None
    """Fused attention on a GPU: FlashAttention of the first or second generation, cuDNN's, or None = what torch's scaled_dot_product_attention takes."""
    flash2_on: tuple[str, ...] = ()
    """Generations of GPUs (forecast/kernels.yaml) on which it is torch's FlashAttention-2, whatever torch takes now."""
    recent_cudnn: bool = False
    """Whether cuDNN is 9.19 or later, where attention is cuDNN's."""
    fused_loss: bool = False
    """Whether cross-entropy is one kernel that keeps nothing beside the logits."""
    loss_chunk_tokens: int | None = None
    """Tokens of which the logits, their loss and their gradient exist at a time; None = all of a micro-batch."""


class CheckpointHost(NamedTuple):
    """What torch's checkpoint of eager blocks asks of the host, over what the operators of a block's forward pass do. Each: beside these operators
    while the block runs first, and in all while it runs again."""

    full: tuple[float, float]
    """Of blocks that are recomputed whole."""
    selective: tuple[float, float]
    """Of blocks of which Python sees every operator, to keep the results of some."""


class HostTraits(NamedTuple):
    """What the host does."""

    operators_per_unit: float
    """What the engine does at each unit (a block) and micro-batch beside the model's own operators, forward and backward,
    as a number of operators that take the host as long. On a CPU it adds to the computation; on a GPU it shows where
    kernels are so short that the host cannot keep ahead."""
    launches_per_operator: float
    """Host time of one operator of the traced graph, over the device's ``kernel_launch_s``: autograd, Python and dispatch."""
    experts_operators: tuple[float, float] = (0.0, 0.0)
    """What a layer's experts take of it beside their operators, forward and backward, as a number of operators of a forward pass."""
    checkpoint: CheckpointHost | None = None
    """None: the operators that run again take as long as they did first, and no others are there."""


@dataclass(frozen=True)
class Traits:
    """The behaviour of one engine for one layout.

    Overlap figures are the share of a collective's time that can hide behind computation, where the device has
    engines to move data beside it; on a CPU nothing hides, both need the cores.
    """

    states: StateTraits
    gradients: GradientTraits
    gather: GatherTraits
    reduce: ReduceTraits
    kernels: KernelTraits
    host: HostTraits
    source: str
    tensor: TensorTraits = field(default=TensorTraits())
    context: ContextTraits = field(default=ContextTraits())
    pipeline: PipelineTraits = field(default=PipelineTraits())
    recompute: RecomputeTraits = field(default=RecomputeTraits())
    experts: ExpertTraits = field(default=ExpertTraits())
    fp8: Fp8Recipe = field(default=NVIDIAS_FP8, hash=False)  # an engine has one or two, and its own hash takes long
