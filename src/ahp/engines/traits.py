"""How an engine's kernels, buffers and overlap behave, so that a forecast is for that stack: one record per concern.

The records are named tuples: the search uses traits as keys, and tuples are hashed and compared without running Python code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ahp.engines.fp8 import NVIDIAS_FP8, Fp8Recipe
from ahp.schedule.stages import Ends

ContextWay = Literal["gather", "ring", "all-to-all"]
Fusion = Literal["traced", "eager", "modules", "fused"]
Gathers = Literal["never", "per_step", "per_micro_batch"]
Selective = Literal["core", "beside_products", "every_second_product"]
SendsAgain = Literal["nothing", "gathers", "all"]
Receives = Literal["one", "waiting", "all"]
FewKeys = Literal["refused", "whole", "gathered"]
SumOfExperts = Literal["scattered", "batched", "atomic"]

WHOLE_DOCUMENTS: tuple[ContextWay, ...] = ("all-to-all",)
"""Ways of sharing sequences in which a rank has all tokens in attention, and so whole documents."""

ALL_ELEMENTS = 1_000_000_000
"""Size of a bucket that holds everything of a pipeline stage. If a stage has more, only the share of the latency changes, which is
small with so many bytes."""


class StateTraits(NamedTuple):
    """Bytes of one parameter in each of its states."""

    master_weight_bytes: int
    """Bytes of one weight element as the optimizer holds it."""
    optimizer_bytes: float
    """Bytes of all optimizer states of one parameter (AdamW: two of fp32)."""
    compute_weight_bytes: int
    """Bytes of one weight element in the compute copy, if that is separate from the master; 0 = it is not."""
    no_matrix_bytes: int = 0
    """Additional bytes of optimizer states of a parameter outside the blocks or of stacked experts (Muon leaves these to AdamW)."""
    flattened_bytes: int = 0
    """Bytes of one weight element that stay unused in the allocator after weights were moved into one flat tensor."""
    host_bytes: int = 0
    """The part of ``optimizer_bytes`` in host memory: it comes to the device for each update, and goes back."""
    host_bucket_bytes: int = 0
    """The most bytes of this part that are on the device at once."""
    trained_share: float = 1.0
    """Share of the model's parameters that is trained. The others have no gradient and no optimizer state, and exist only in the compute type.
    The share is the whole model's: adapters are only in the blocks, so the rest of a stage is counted with a little too much."""

    @property
    def device_bytes(self) -> float:
        """The part of ``optimizer_bytes`` that stays on the device."""
        return self.optimizer_bytes - self.host_bytes


class GradientTraits(NamedTuple):
    """Gradients as they are kept until the optimizer."""

    element_bytes: int
    """Bytes of one element."""
    whole: bool
    """Whether they are kept whole until then, rather than as the shard of the rank."""
    beside_bytes: int = 0
    """Bytes of one gradient element as a backward pass makes it, if all of these stay in memory besides the gradients that are kept."""
    update_bytes: int = 0
    """Bytes of one gradient element in the flat copy that the update reads. It is made when activations are gone, but is one tensor, which
    fits into no gap that they leave."""
    fused_accumulation: bool = False
    """Whether the products that make weight gradients add them to the fp32 ones directly. The gradients that autograd expects, for
    one block and the head in the compute type, then still take memory, but are never filled."""
    adds_first: bool = False
    """Whether the first micro-batch's gradients are added, too, to gradients that were set to zero; else they are kept as they are."""
    cast_apart: bool = False
    """Whether a gradient in another type is copied to the type of the sum before it is added; else one kernel does both."""
    passes: int = 0
    """How often all gradients of the rank are read or written once a step besides this: set to zero, divided by the number of ranks."""
    before_update_bytes: int = 0
    """Bytes moved before the update for each element that the rank updates, besides norm and clipping: copied to fp32, unscaled."""


class GatherTraits(NamedTuple):
    """How sharded weights are gathered."""

    overlap: float
    """Share of a gathering's time that can be hidden."""
    forward: Gathers
    """How often a sharded weight is gathered for the forward pass."""
    backward: Gathers
    """How often it is gathered again for the backward pass."""
    keeps_weights: bool
    """Whether every gathered weight of the rank is whole in memory at once, from its first use to its last."""
    bucket_elements: int = 0
    """Elements of sharded weights, from any units, that one collective gathers; 0 = those of one unit."""
    block_bytes: int = 0
    """Bytes of one weight element of a block when it is gathered; 0 = those of the compute type."""
    ahead_elements: int = 0
    """Elements of gathered weights that are in memory at once, if they are freed after use; 0 = those of the block that computes and
    of the next one."""
    at_start: bool = False
    """Whether all ranks gather their weights as the step begins, so that only the first stage of a pipeline waits for them; else each
    stage gathers when its first micro-batch is there."""
    beside_stages: bool = False
    """Whether weights that are gathered once per step are on their way from the start of the step, if the schedule allows it
    (``PipelineSchedule.gathers_ahead``), and each stage waits only for its own."""
    ends_apart: bool = False
    """Whether the embedding and the head are units of their own, gathered when they are needed and reduced when their gradients are
    there; else everything outside the blocks is one unit, gathered first and reduced last."""
    copies: bool = True
    """Whether gathered weights are copied out of the collective's buffer; else they are parts of it."""
    each_weight: bool = False
    """Whether sharded weights are gathered and their gradients reduced one tensor at a time, instead of one unit at once."""

    @property
    def in_each_forward(self) -> bool:
        """Whether the forward pass of every micro-batch gathers sharded weights."""
        return self.forward == "per_micro_batch"

    @property
    def in_each_backward(self) -> bool:
        """Whether the backward pass of every micro-batch gathers sharded weights."""
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
    """Share of a reduction's time that can be hidden."""
    every_micro_batch: bool
    """Whether gradients are reduced after each micro-batch; else once per step, after the last."""
    copies: bool
    """Whether gradients are copied into a flat buffer to be sent."""
    bucket_elements: int = 0
    """Elements of gradients, from any units, that one collective sums; 0 = those of one unit."""
    buckets_on_first_stage_alone: bool = False
    """Whether only the first stage of a pipeline sends such buckets, and every other stage all of its gradients at once."""
    collects_in_bucket: bool = False
    """Whether a buffer of ``bucket_elements``, allocated whole, collects gradients before they are copied to be sent."""
    keeps_buckets: bool = False
    """Whether buckets for all gradients lie in memory from the first step on."""
    gradients_in_buckets: bool = False
    """Whether gradients are kept in these buckets; else the buckets take memory besides them."""
    to_all: bool = False
    """Whether gradients are summed whole on every rank although each rank needs only a part."""
    beside_stages: bool = False
    """Whether a rank of several stages computes the others while one stage's gradients are reduced, and waits for all after its last action."""
    on_own_stream: bool = False
    """Whether units are gathered and reduced one by one on streams of their own (FSDP): the allocator gives memory allocated there to no
    other stream."""


class TensorTraits(NamedTuple):
    """Tensor and sequence parallelism."""

    overlap_backward: float = 0.0
    """Share of the tensor-parallel collectives of a backward pass that hides behind products for weight gradients."""
    in_pieces: bool = False
    """Whether the collectives of sequence parallelism run in as many pieces as there are ranks, overlapped with the products
    that read or make their data, instead of before and after."""
    gathers_inputs_again: bool = True
    """Whether sequence parallelism gathers the inputs of column products a second time, for their weight gradients; else the
    gathered tensor is kept."""
    copies: bool = False
    """Whether the collectives of sequence parallelism copy what they gather or scatter, because the sequence is the second dim."""
    few_keys: FewKeys = "refused"
    """What happens if there are fewer heads of keys and values than tensor-parallel ranks. whole: every rank computes all heads.
    gathered: the ranks share the products for queries, keys and values, gather the results, and take their heads."""
    gathers_normed: bool = False
    """Whether ranks gather queries and keys after norms of each head, and turn and copy those of all heads, before each takes its own."""
    sums_each_weight: bool = False
    """Whether every backward pass sums the gradient of each whole weight of which ranks read parts, such as a norm's, by itself; else all are
    summed once per step."""
    loss_copies: float | None = None
    """Bytes that the loss of a split vocabulary needs at its peak besides what it keeps, over those of the rank's logits in fp32; None = as
    many as the loss of one device."""


class ContextTraits(NamedTuple):
    """Context parallelism."""

    ways: tuple[ContextWay, ...] = ("gather",)
    """How attention sees tokens of other context ranks; if there are several ways, the fastest is taken. gather: all keys and
    values are gathered first. ring: they go round while attention computes on those that have arrived. all-to-all: tokens are
    exchanged for heads, and back."""
    sums_bytes: int = 0
    """Bytes of one element of the gradients of keys and values, which are sent once by each rank after each round, until they are back; 0 = as many as keys
    and values have, and as often."""
    joined_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes that kernels move for each element where they join what the rounds of a ring bring: of the results in a forward pass, and of the gradients of
    queries, keys and values in a backward pass."""
    packs_heads: bool = False
    """Whether queries, keys and values of one width go in one all-to-all; else each in its own."""
    repeats_keys: bool = False
    """Whether keys and values that several queries share are copied for each of them before they are shared."""


class PipelineTraits(NamedTuple):
    """Pipeline stages and their messages."""

    sends_split_by_tensor: bool = False
    """Whether a pipeline message is cut over the tensor-parallel ranks, sent in parts and gathered (Megatron's scatter-gather)."""
    receives: Receives = "one"
    """The messages that a stage has memory for. one: an output and a gradient. waiting: those that were asked for and that no pass has read
    yet. all: those of every micro-batch, allocated before the first step (torch 2.13, pipelining/stage.py, recv infos)."""
    torch_orders: bool = False
    """Whether torch's own classes set the order of actions, so that their rules for the number of micro-batches hold."""
    ends: Ends = "hold_layers"
    """How the engine cuts the layers by default: what the first and the last stage hold."""
    keeps_outputs: bool = True
    """Whether a stage keeps what it has sent to the next one until its backward pass."""


class RecomputeTraits(NamedTuple):
    """What is run again in the backward pass."""

    stops_at_last_read: bool = False
    """Whether ``full`` ends with the last result that the backward pass reads, before a block's last product; else everything runs again."""
    selective: Selective = "core"
    """What ``selective`` recomputes. core: the core of unfused attention (scores, softmax, dropout, their product with the values);
    with fused attention, norms and activations. beside_products: everything except products with a weight and fused attention, whose
    results are kept. every_second_product: also the second, fourth, ... of these products, and those of stacked experts."""
    keeps_cudnn_attention: bool = True
    """Whether ``every_second_product`` keeps the result of fused attention if it is cuDNN's; else that runs again too."""
    sends_again: SendsAgain = "nothing"
    """Which collectives of a block ``selective`` runs again: none, the all-gathers of sequence parallelism, or all of tensor and of
    context parallelism."""
    keeps_arrived: bool = True
    """Whether ``beside_products`` and ``every_second_product`` keep the tokens that have arrived at a rank's experts, and what came back;
    else both are sent again."""


SumsTokens = Literal["nowhere", "forward", "both passes"]
"""In which passes what belongs to one token is added up over its experts before tensor-parallel ranks that share each expert add it up."""


class ExpertTraits(NamedTuple):
    """Layers of experts."""

    folded: bool = False
    """Whether every tensor-parallel rank holds whole experts and sends them its own part of the sequence, so that expert-parallel groups can
    span these ranks (Megatron's parallel folding); else each expert is divided over them."""
    gather_tokens: bool = False
    """Whether a sequence-parallel rank sends all tokens to the experts, gathered first; else only its own part."""
    sums_tokens: SumsTokens = "nowhere"
    """nowhere: ranks gather and reduce one row for each expert of a token. forward: one for each token; backward all-reduces the
    gradients of the copies that experts get. both passes: and that of the token itself."""
    tokens_once_to_a_node: bool = False
    """Whether a token is sent to another node once, instead of once for each of its experts there."""
    tokens_once_to_a_rank: bool = False
    """The same for another rank of one node."""
    keeps_sums: bool = False
    """Whether selective recompute keeps one sum for each token of what came back from its experts, instead of a result for each of them."""
    leaves_results: bool = False
    """Whether a second run of a block that stops at the last result that the backward pass reads leaves results where they are, if that is
    before they are back."""
    numbers_sent: int = 0
    """Further messages of both passes over a layer, with a number for each copy of a token or for each expert."""
    overlap_between_nodes: float = 0.0
    """Share of the all-to-alls that can hide behind the opposite pass of another micro-batch, if they cross nodes."""
    overlap_on_a_node: float = 0.0
    """The same, if they do not."""
    fused_permutation: bool = False
    """Whether one kernel puts tokens in the order of their experts, and one puts them back, in both passes; else torch's indexing does."""
    sorts_arrived: bool = False
    """Whether NCCL's all-to-all leaves the copies of tokens in the order of the ranks that sent them, so that a kernel puts them in the order of a
    rank's experts, and another one puts the results back."""
    sorts_by_torch: bool = False
    """Whether these two are torch's own kernels, which put and add rows element by element; else they move as fast as memory."""
    launched_one_by_one: bool = False
    """Whether the product of each expert is one kernel; else torch's grouped GEMM computes all products in one kernel."""
    one_after_another: bool = False
    """Whether each expert is an MLP of its own, which reads its tokens from a tensor of all and writes its results into another, so that autograd copies
    whole tensors once for each expert."""
    one_graph_in_mxfp8: bool = False
    """Whether a step in 8 bits on Blackwell (MXFP8) is one CUDA graph, which no launch holds up: experts' products are one kernel with
    activations and casts, attention is in 8 bits too, and all-to-alls can overlap with the opposite pass on one node as well."""
    leaves_lone: bool = False
    """Whether expert weights of which no other rank holds a part are not gathered, reduced or copied."""
    whole_biased: bool = False
    """Whether experts that add a bias to their last product stay whole under tensor parallelism, computed by every rank."""


class KernelTraits(NamedTuple):
    """Which kernels compute a block and the loss."""

    fusion: Fusion
    """Which element-wise operators run as one kernel: none (traced: as the graph has them, on a CPU), those of one module (a norm, an activation),
    whole chains."""
    fusion_at_the_ends: Fusion | None = None
    """The same for the embedding, the last norm, the head and the loss; None = as in blocks."""
    attention: Literal["flash1", "flash2", "cudnn", "lengths"] | None = None
    """Fused attention on a GPU: FlashAttention of the first or second generation, cuDNN's, or None = what torch's scaled_dot_product_attention takes;
    lengths: a kernel that goes by the lengths of documents where the model, the device and the way of sharing tokens allow it, else None."""
    flash2_on: tuple[str, ...] = ()
    """Generations of GPUs (forecast/kernels.yaml) on which attention is torch's FlashAttention-2, whatever torch takes now."""
    recent_cudnn: bool = False
    """Whether cuDNN is 9.19 or later, if attention is cuDNN's."""
    fused_loss: bool = False
    """Whether cross-entropy is one kernel that keeps nothing besides the logits."""
    loss_keeps_fp32: bool = False
    """Whether the fused loss is Megatron-LM's own, which keeps the softmax in fp32 in place of the logits (``forecast/fp32_loss.py``)."""
    dropout_apart: bool = False
    """Whether dropout after the softmax of unfused attention is a kernel of its own in the backward pass too; else one kernel does the backward of both."""
    norms_apart: bool = False
    """Whether the backward pass of a norm is a kernel of its own where whole chains are fused, so that another one adds the residual's gradient."""
    norm_weights_apart: bool = False
    """Whether the gradient of a norm's weight is made by a kernel of its own there, which reads the norm's input and its output's gradient again."""
    joined_products: bool = False
    """Whether one product makes queries, keys and values, and one gate and up, which one kernel then reads."""
    gate_apart: bool = False
    """Whether torch's kernels compute a gate's activation and product one by one, though one product makes what they read."""
    positions_apart: bool = False
    """Whether queries and keys are turned by torch's kernels one by one."""
    scaled_apart: bool = False
    """The same for those whose positions YaRN scales."""
    complex_positions: bool = False
    """Whether queries and keys are turned as complex numbers of fp32, which torch's compiler fuses with nothing, and those of Qwen3 and gpt-oss by cosine and
    sine, which it fuses (``forecast/titan_attention.py``)."""
    repeated_keys: bool = False
    """Whether keys and values that several queries share are copied for each of them."""
    experts_summed: SumOfExperts | None = None
    """How the results of a token's experts are summed where torch's own kernels order tokens and sum (``forecast/titan_experts.py``); None = as traced."""
    experts_compiled: bool = False
    """Whether a compiler makes the kernels around that sum, and the gradient of the ordering."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits, loss and gradient exist at a time; None = as ``loss_chunks`` says."""
    loss_chunks: int = 1
    """Parts of a rank's tokens whose logits, loss and gradient exist at a time."""


class CheckpointHost(NamedTuple):
    """Host time of torch's checkpoint of eager blocks, as a multiple of that of the operators of a block's forward pass. Each pair: the time in
    addition to these operators in the first run, and the total time when the block runs again."""

    full: tuple[float, float]
    """For blocks that are recomputed whole."""
    selective: tuple[float, float]
    """For blocks in which Python sees every operator, to keep the results of some."""


class HostTraits(NamedTuple):
    """The work of the host."""

    operators_per_unit: float
    """The engine's work for each unit (a block) and micro-batch besides the model's own operators, forward and backward,
    as a number of operators that take the host as long. On a CPU it adds to the computation; on a GPU it shows when
    kernels are so short that the host cannot keep ahead."""
    launches_per_operator: float
    """Host time of one operator of the traced graph, divided by the device's ``kernel_launch_s``: autograd, Python and dispatch."""
    experts_operators: tuple[float, float] = (0.0, 0.0)
    """Host time of a layer's experts besides their operators, forward and backward, as a number of operators of a forward pass."""
    graphed: tuple[str, ...] = ()
    """Parts of a block (attn, moe_router) that one CUDA graph launches in each pass."""
    checkpoint: CheckpointHost | None = None
    """None: operators that run again take as long as the first time, and there are no others."""
    waits: bool = False
    """Whether the host waits for each kernel before it prepares the next one, so that neither works while the other does."""


@dataclass(frozen=True)
class Traits:
    """The behavior of one engine for one layout.

    Overlap figures are the share of a collective's time that can hide behind computation, if the device has engines
    to move data at the same time; on a CPU nothing hides, because both need the cores.
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
