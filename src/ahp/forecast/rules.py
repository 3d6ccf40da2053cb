"""Whether a layout is legal for a model, a cluster and a job: one function for forecast, search and runtime."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from ahp.cluster.model import Cluster, Device
from ahp.divisors import divisors
from ahp.engines.ahp import BLOCK_OF_8_BITS, FP8_MULTIPLE, held_in_8_bits, needs_one_graph
from ahp.engines.registry import get, traits_of
from ahp.engines.traits import FewKeys
from ahp.errors import AhpError, bad_input
from ahp.forecast.division import attention_heads, expert_parameters
from ahp.forecast.groups import num_expert_ranks
from ahp.forecast.mixed_rules import illegal_placement, no_units
from ahp.forecast.split import in_8_bits, split, way_of_keys
from ahp.graph.operators import ModelGraph, Segment
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.schedule.orders import given_order, illegal_order
from ahp.schedule.patterns import illegal as illegal_pattern
from ahp.schedule.stages import layers_of_stages
from ahp.words import number_of

KEY_HEADS = "num_key_value_heads"
TENSOR_PARALLEL_FACTS = ("num_attention_heads", KEY_HEADS, "intermediate_size")
"""Facts of the model that tensor_parallel_degree must divide, where the graph has them."""

MOST_TRIED = 4096
"""The most degrees that are tried one by one to list valid ones in an error."""


def illegal(
    graph: ModelGraph, cluster: Cluster, job: Job, parallelism: Parallelism, engine: EngineChoice
) -> str | None:
    """The first rule that the layout breaks, as ``key = value: rule (valid: ...)``; None when it is legal.

    ``activation_checkpoint`` auto is judged as none, the lightest kind it can become.
    """
    if parallelism.activation_checkpoint == "auto":
        parallelism = parallelism.model_copy(update={"activation_checkpoint": "none"})
    try:
        refused = get(engine.name).refuses(job, parallelism, engine)
    except AhpError as error:
        return str(error)
    return (
        refused
        or two_types(graph, job, engine)
        or of_model(graph, parallelism, engine)
        or _cluster(cluster, job, parallelism)
        or batch(job, parallelism)
        or divided(graph, job, parallelism, engine)
        or asynchronous(parallelism, engine)
        or experts(graph, job, parallelism, engine)
        or stages(graph, job, parallelism, engine)
        or _schedule(job, parallelism, engine)
    )


def two_types(graph: ModelGraph, job: Job, engine: EngineChoice) -> str | None:
    """Refuses weights in 16 bits for a model whose buffers ahp's own runtime would have in fp32 beside them (runtime/shard/block_calls.py)."""
    if graph.two_types is None or engine.name != "ahp":
        return None
    return _broken("job.precision", job.precision, graph.two_types, ["fp32"])


def of_model(graph: ModelGraph, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Refuses what ahp's own runtime cannot do with this model, whatever its sizes."""
    return (
        between_blocks(graph.uncuttable, graph.other_dims, parallelism, engine)
        or one_graph(graph.several_graphs, parallelism, engine)
        or attention_module("attention_module" in graph.config, parallelism, engine)
    )


def between_blocks(
    uncuttable: str | None, other_dims: str | None, parallelism: Parallelism, engine: EngineChoice
) -> str | None:
    """Refuses what ahp's own runtime cannot do with a model that it cannot cut between its blocks, and with hidden states of other dims than
    [batch, sequence, ..], which only stages of one width pass on; the reasons, or None."""
    why = uncuttable or other_dims
    if why is None or engine.name != "ahp":
        return None
    if parallelism.num_stages > 1 and (uncuttable or parallelism.has_unlike_widths):
        rule = f"{why}, so it cannot be cut into stages{'' if uncuttable else ' of unlike width'}"
        return _broken("pipeline_parallel_degree", parallelism.pipeline_parallel_degree, rule, [1])
    if parallelism.context_parallel_degree > 1:
        rule, degree = f"{why}, which would meet a part of the sequence", parallelism.context_parallel_degree
        return _broken("context_parallel_degree", degree, rule, [1])
    if parallelism.enable_sequence_parallel and any(tensor > 1 for _, tensor in parallelism.widths):
        rule = f"{why}, which would meet a part of the sequence"
        return _broken("enable_sequence_parallel", True, rule, [False])
    if engine.loss_chunk_tokens is not None:
        return f"engine.loss_chunk_tokens = {engine.loss_chunk_tokens}: {why} (valid: null)"
    return None


def one_graph(several: str | None, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Refuses what needs one compiled graph of each block for a model whose blocks are several; ``several``: the reason, or None."""
    return None if several is None or not wants_one_graph(parallelism, engine) else not_one_graph(several)


def attention_module(there: bool, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Refuses compiled blocks whose attention context ranks share, where the model has ``nn.MultiheadAttention`` (``there``)."""
    if not (there and engine.name == "ahp" and engine.compile and parallelism.context_parallel_degree > 1):
        return None
    rule = (
        "nn.MultiheadAttention would be compiled to its kernel for evaluation, which sees a context rank's tokens alone"
    )
    return _broken("engine.compile", True, rule, [False])


def wants_one_graph(parallelism: Parallelism, engine: EngineChoice) -> bool:
    """Whether ahp's own runtime needs one compiled graph of each block as the model has it. A block that tensor-parallel ranks divide has been one
    since it was traced."""
    sliced = all(tensor > 1 for _, tensor in parallelism.widths)
    return engine.name == "ahp" and not sliced and needs_one_graph(parallelism, engine)


def not_one_graph(why: str) -> str:
    """The refusal of selective recompute for a block that torch.compile makes several graphs of."""
    rule = f"with engine.compile = True a block must be one graph, and something breaks it: {why}"
    return _broken("activation_checkpoint", "selective", rule, ["none", "full; or engine.compile false"])


def divided(graph: ModelGraph, job: Job, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Checks that the model and its sequences can be cut as the layout says, and stages with a width of their own as they say."""
    for own in parallelism.layouts_of_ranks:
        reason = (
            tensor(graph, job, own, engine)
            or products(graph, job, own, engine)
            or sequence(graph, own)
            or whole_attention(graph, job, own, engine)
            or context(graph, own, engine)
        )
        if reason is not None:
            return of_stage(reason, own, parallelism)
    return unlike_widths(graph, parallelism)


def of_stage(reason: str, own: Parallelism, parallelism: Parallelism) -> str:
    """``reason`` against the layout ``own`` of one pipeline rank, with the key that the value comes from."""
    key = "tensor_parallel_degree"
    is_own = own.tensor_parallel_degree != parallelism.tensor_parallel_degree
    return f"stages.{reason}" if is_own and reason.startswith(key) else reason


def unlike_widths(graph: ModelGraph | Job, parallelism: Parallelism) -> str | None:
    """Checks what stages of different width need: a sequence that every tensor degree divides, and no balance loss of experts."""
    if not parallelism.has_unlike_widths:
        return None
    context = parallelism.context_parallel_degree
    own, of_context = graph.sequence_length // context, f" / context_parallel_degree {context}" if context > 1 else ""
    for _, tensor in parallelism.widths:
        if own % tensor:
            rule = f"each of its ranks sends a part of sequence_length {graph.sequence_length}{of_context}, which it does not divide"
            return _broken("stages.tensor_parallel_degree", tensor, rule, divisors(own))
    if isinstance(graph, ModelGraph) and "balance_loss" in graph.config:
        return BALANCE_OF_UNLIKE_WIDTHS
    return None


BALANCE_OF_UNLIKE_WIDTHS = (
    "stages: a balance loss of experts (output_router_logits) on stages of unlike width: routers add up over a rank's own part of a "
    "micro-batch, and this part differs between stages (valid: the layout's tensor_parallel_degree and data_parallel_shard_degree for every "
    "stage; or output_router_logits false in the model's config)"
)


def _cluster(cluster: Cluster, job: Job, parallelism: Parallelism) -> str | None:
    if cluster.is_mixed:
        if parallelism.mesh_order is not None:
            return (
                f"mesh_order = {list(parallelism.mesh_order)}: on a mixed cluster the devices of a stage of a replica lie together, "
                "the stages outermost (valid: null)"
            )
        return illegal_placement(cluster, job, parallelism)
    if parallelism.stages is not None:
        named = [stage.group for stage in parallelism.stages]
        return f"stages = {named}: the cluster has one group, so none is named (valid: null; layers_per_stage cuts the layers)"
    group = cluster.groups[0]
    if parallelism.world_size != cluster.num_devices:
        return (
            f"parallelism: its degrees multiply to {parallelism.world_size} "
            f"(replicate {parallelism.data_parallel_replicate_degree} x shard {parallelism.data_parallel_shard_degree} "
            f"x tensor {parallelism.tensor_parallel_degree} x pipeline {parallelism.pipeline_parallel_degree} "
            f"x context {parallelism.context_parallel_degree}), the cluster has {number_of(cluster.num_devices, 'device')} "
            f"(valid: a product of {cluster.num_devices})"
        )
    if (reason := precision(job, group.device)) is not None:
        return reason
    if group.nodes > 1 and group.inter_node is None:
        return "cluster.inter_node_gbps = None: a cluster of several nodes needs the bandwidth between them (Gb/s of one node)"
    return None


def precision(job: Job, device: Device) -> str | None:
    """Checks that the device computes in the job's precision."""
    valid = sorted(device.peak_flops_per_s)
    return None if job.precision in valid else no_units(job, device, valid)


def batch(job: Job, parallelism: Parallelism) -> str | None:
    """Checks that the replicas' micro-batches add up to the global batch."""
    replicas, size = parallelism.data_parallel_degree, parallelism.micro_batch_size
    whole = job.global_batch_size
    if parallelism.micro_batches_per_replica is not None:
        return _uneven_batch(whole, parallelism)
    if whole % replicas:
        return _broken(_data_key(parallelism), replicas, f"does not divide global_batch_size {whole}", divisors(whole))
    if whole // replicas % size:
        rule = f"does not divide the {number_of(whole // replicas, 'sequence')} of each of {number_of(replicas, 'replica')} (global_batch_size {whole})"
        return _broken("micro_batch_size", size, rule, divisors(whole // replicas))
    return None


def _uneven_batch(whole: int, parallelism: Parallelism) -> str | None:
    given, shard = list(parallelism.micro_batches_per_replica or ()), parallelism.data_parallel_shard_degree
    size = parallelism.micro_batch_size
    found = sum(given) * shard * size
    if found == whole:
        return None
    rest = whole % (shard * size)
    should = f"they must sum to {whole // (shard * size)}" if not rest else f"{shard * size} does not divide that"
    return (
        f"micro_batches_per_replica = {given}: {sum(given)} x data_parallel_shard_degree {shard} x micro_batch_size {size} = "
        f"{found} sequences, global_batch_size is {whole}; {should}"
    )


def _data_key(parallelism: Parallelism) -> str:
    """The key or keys whose product is the number of replicas that see different sequences."""
    degrees = {
        "data_parallel_replicate_degree": parallelism.data_parallel_replicate_degree,
        "data_parallel_shard_degree": parallelism.data_parallel_shard_degree,
    }
    return " x ".join(key for key, degree in degrees.items() if degree > 1)


def tensor(graph: ModelGraph, job: Job, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Checks that tensor_parallel_degree divides the model; no other degree matters."""
    degree = parallelism.tensor_parallel_degree
    if degree == 1:
        return None
    facts = {key: graph.config[key] for key in TENSOR_PARALLEL_FACTS if isinstance(graph.config.get(key), int)}
    if any(keys := [block.keys.heads for block in graph.blocks]):
        facts[KEY_HEADS] = min(filter(None, keys))
    few = traits_of(job, parallelism, engine).tensor.few_keys != "refused"

    def divides(key: str, degree: int) -> bool:
        return facts[key] % degree == 0 or (few and key == KEY_HEADS and degree % facts[key] == 0)

    key = next((key for key in facts if not divides(key, degree)), None)
    if key is None:
        return None
    rule = f"neither divides {key} {facts[key]} nor is a multiple of it" if few and key == KEY_HEADS else None
    most = min(2 * degree, MOST_TRIED)
    common = math.gcd(*(size for name, size in facts.items() if name != KEY_HEADS))
    tried = divisors(common) if common else range(1, most + 1)  # what divides all facts divides their gcd
    valid = [d for d in tried if d <= most and all(divides(name, d) for name in facts)]
    return _broken("tensor_parallel_degree", degree, rule or f"does not divide {key} {facts[key]}", valid)


def whole_attention(graph: ModelGraph, job: Job, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Refuses sequence parallelism, which cuts the sequence, where every tensor-parallel rank computes attention whole."""
    degree = parallelism.tensor_parallel_degree
    if degree == 1 or not parallelism.enable_sequence_parallel:
        return None
    few = traits_of(job, parallelism, engine).tensor.few_keys
    if any(way_of_keys(block, degree, few) == "whole attention" for block in graph.blocks):
        rule = f"with tensor_parallel_degree {degree} every rank computes attention whole, because its keys have fewer heads"
        return _broken("enable_sequence_parallel", True, rule, [False])
    return None


def asynchronous(parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Checks that asynchronous tensor parallelism has the collectives of sequence parallelism, which it sends in pieces."""
    if not engine.enable_async_tensor_parallel or parallelism.tensor_parallel_degree == 1:
        return None
    rule = "with it the collectives of sequence parallelism travel in pieces (engine.enable_async_tensor_parallel)"
    return None if parallelism.enable_sequence_parallel else _broken("enable_sequence_parallel", False, rule, [True])


def products(graph: ModelGraph, job: Job, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Checks that ahp's own runtime can compute the linear layers of blocks in 8 bits, whole and in parts (runtime/compute/fp8.py), and
    that no rank would hold a part of a block of 8-bit moments (runtime/optimizer/eight_bit.py)."""
    if job.optimizer.name == "adamw8bit" and engine.name == "ahp" and (reason := _moments(graph, job, parallelism)):
        return reason
    if job.precision != "fp8" or engine.name != "ahp":
        return None
    few = traits_of(job, parallelism, engine).tensor.few_keys
    layers = _layers_in_8_bits(graph, parallelism.tensor_parallel_degree, few)
    if not layers:
        rule = f"the blocks have no linear layer whose dims are multiples of {FP8_MULTIPLE}"
        return _broken("precision", job.precision, rule, ["bf16", "fp32"])
    degree = parallelism.tensor_parallel_degree

    def can(degree: int) -> bool:
        sizes = {size for _, size in _layers_in_8_bits(graph, degree, few) if size is not None}
        return all(size % (degree * FP8_MULTIPLE) == 0 for size in sizes)

    if degree == 1 or can(degree):
        return None
    name, size = next((name, size) for name, size in layers if size is not None and size % (degree * FP8_MULTIPLE))
    rule = (
        f"would cut the {size} of {name} into parts of {size / degree:g}, and with precision fp8 they must be multiples of "
        f"{FP8_MULTIPLE}"
    )
    tried = range(1, min(2 * degree, MOST_TRIED) + 1)
    valid = [d for d in tried if can(d) and not tensor(graph, job, _cut(d), engine)]
    return _broken("tensor_parallel_degree", degree, rule, valid)


def _moments(graph: ModelGraph, job: Job, parallelism: Parallelism) -> str | None:
    """Checks that tensor-parallel ranks can hold moments in blocks."""
    degree = parallelism.tensor_parallel_degree
    cut = [] if degree == 1 else [found for block in graph.blocks for found in _cut_columns(block, degree)]
    bad = next(((name, size) for name, size in cut if size % (degree * BLOCK_OF_8_BITS)), None)
    if bad is None:
        return None
    name, size = bad
    rule = (
        f"would cut the {size} columns of {name} into parts of {size / degree:g}, and job.optimizer.name adamw8bit holds its moments "
        f"in blocks of {BLOCK_OF_8_BITS}"
    )
    can = [d for d in range(1, 2 * degree + 1) if all(columns % (d * BLOCK_OF_8_BITS) == 0 for _, columns in cut)]
    return _broken(
        "tensor_parallel_degree", degree, rule, [d for d in can if not tensor(graph, job, _cut(d), EngineChoice())]
    )


def _cut_columns(block: Segment, degree: int) -> list[tuple[str, int]]:
    """Trained weights with moments in 8 bits whose last dim ``degree`` ranks divide, and the size of that dim. If a square weight is
    divided, its last dim counts as the divided one."""
    shapes = {p.name: p.shape for p in block.parameters if p.trainable and held_in_8_bits(p.shape)}
    parts = split(block, "block", way_of_keys=way_of_keys(block, degree, "whole"))
    found = []
    for op in block.phase("forward"):
        for name in op.parameters if op.index in parts.column | parts.row else ():
            *_, rows, columns = shapes.get(name, (0, 0))
            outputs = op.outputs[0].shape[-1]
            if columns and columns == (outputs if op.index in parts.column else rows * columns // outputs):
                found.append((name, columns))
    return found


def _layers_in_8_bits(graph: ModelGraph, degree: int, few: FewKeys) -> list[tuple[str, int | None]]:
    experts = graph.config.get("num_experts")
    return [layer for block in graph.blocks for layer in in_8_bits(block, experts, way_of_keys(block, degree, few))]


def _cut(degree: int) -> Parallelism:
    return Parallelism(tensor_parallel_degree=degree)


def sequence(graph: ModelGraph | Job, parallelism: Parallelism) -> str | None:
    """Checks that a sequence divides over tensor ranks with sequence parallelism, and into two parts for each context rank."""
    length = graph.sequence_length
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    if parallelism.enable_sequence_parallel and length % tensor:
        rule = f"does not divide sequence_length {length}, which enable_sequence_parallel cuts"
        return _broken("tensor_parallel_degree", tensor, rule, divisors(length))
    if context > 1 and length % (2 * context):
        # With a causal mask the first part has little work and the last part much: each rank takes one from either end.
        rule = f"sequence_length {length} must divide into two parts for each rank"
        return _broken("context_parallel_degree", context, rule, [d for d in divisors(length) if length % (2 * d) == 0])
    return None


def context(graph: ModelGraph, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Checks that ahp's own runtime can divide the model's sequences over context ranks: only with fused attention, and by all-to-all
    only where the heads divide."""
    degree, method = parallelism.context_parallel_degree, parallelism.context_parallel_method
    if degree == 1 or engine.name != "ahp":
        return None
    heads = [attention_heads(block) for block in graph.blocks]
    if not all(heads):
        rule = "some blocks of the model have no fused attention, which alone may read tokens of other ranks"
        return _broken("context_parallel_degree", degree, rule, [1])
    if attention_heads(graph.head):
        rule = "attention runs after the model's blocks, where a rank would see its own tokens alone"
        return _broken("context_parallel_degree", degree, rule, [1])
    ranks = degree * parallelism.tensor_parallel_degree
    if any(count % ranks for count in heads):
        rule = (
            f"context_parallel_degree x tensor_parallel_degree = {ranks} does not divide {min(heads)} attention heads"
        )
        if method == "all-to-all":
            return _broken("context_parallel_method", method, rule, ["ring"])
        if needs_one_graph(parallelism, engine):  # only all-to-all fits into one graph, the ring does not
            kind = parallelism.activation_checkpoint
            return _broken("activation_checkpoint", kind, f"with engine.compile = True {rule}", ["none", "full"])
    return None


def experts(graph: ModelGraph, job: Job, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Checks that expert_parallel_degree divides the experts and the ranks that share them."""
    degree, experts = parallelism.expert_parallel_degree, graph.config.get("num_experts")
    if not isinstance(experts, int):
        return _without_experts(parallelism, engine)
    if degree == 1:
        return None
    if experts % degree:
        return _broken("expert_parallel_degree", degree, f"does not divide num_experts {experts}", divisors(experts))
    folded = traits_of(job, parallelism, engine).experts.folded
    ranks = num_expert_ranks(parallelism, folded)
    if ranks % degree:
        axes = "data, context and tensor" if folded else "data and context"
        rule = f"does not divide the {ranks} ranks of the {axes} axes, which share the experts"
        return _broken("expert_parallel_degree", degree, rule, [d for d in divisors(ranks) if experts % d == 0])
    if not any(map(expert_parameters, graph.blocks)):
        rule = "no block of the model multiplies tokens with stacked experts chosen for them, which ranks could share"
        return _broken("expert_parallel_degree", degree, rule, [1])
    return None


def _without_experts(parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Refuses keys about experts, for a model that has none."""
    graphs = engine.cuda_graph_modules or ()
    rest = [part for part in graphs if part != "moe_router"] or "null"
    for key, value, valid in (
        ("expert_tensor_parallel_degree", parallelism.expert_tensor_parallel_degree, (None, 1)),
        ("expert_parallel_degree", parallelism.expert_parallel_degree, (1,)),
        ("engine.moe_token_dispatcher_type", engine.moe_token_dispatcher_type, (None,)),
        ("engine.overlap_moe_expert_parallel_comm", engine.overlap_moe_expert_parallel_comm or None, (None,)),
        ("engine.cuda_graph_modules", None if rest == [*graphs] else list(graphs) or None, (None, rest)),
    ):
        if value not in valid:
            return _broken(key, value, "the model has no experts", ["null" if one is None else one for one in valid])
    return None


def stages(graph: ModelGraph, job: Job, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Checks that there are enough layers for the stages."""
    layers, p, v = graph.num_layers, parallelism.pipeline_parallel_degree, parallelism.virtual_stages_per_rank
    given = parallelism.given_layers
    if given is not None and sum(given) != layers:
        key = "layers_per_stage" if parallelism.stages is None else "stages.layers"
        return f"{key} = {list(given)}: sums to {sum(given)}, the model has {layers} layers"
    most = layers + 2 * (traits_of(job, parallelism, engine).pipeline.ends != "hold_layers")
    if p * v > 1 and p * v > most:
        rule = f"x virtual_stages_per_rank {v} = {p * v} stages, but the model has {layers} layers and each stage needs one"
        return _broken("pipeline_parallel_degree", p, rule, [d for d in range(1, layers + 1) if d * v <= layers])
    return recomputed(layers, job, parallelism, engine)


def recomputed(num_layers: int, job: Job, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    """Checks that every stage has as many layers as it is to recompute; there are enough layers for the stages."""
    some = parallelism.recomputed_layers_per_stage
    if some is None:
        return None
    ends = traits_of(job, parallelism, engine).pipeline.ends
    there = layers_of_stages(parallelism, num_layers, ends=ends)
    if all(count <= most for count, most in zip(some, there, strict=True)):
        return None
    return f"recomputed_layers_per_stage = {list(some)}: the stages have {list(there)} layers (valid: as many at most)"


def _schedule(job: Job, parallelism: Parallelism, engine: EngineChoice) -> str | None:
    torch_orders = traits_of(job, parallelism, engine).pipeline.torch_orders
    return schedules(job, parallelism, in_torch=torch_orders) or _order(parallelism)


def _order(parallelism: Parallelism) -> str | None:
    """Refuses orders that the forecast cannot price: it finds stages by their rank, with equally many on each."""
    order, p = given_order(parallelism), parallelism.pipeline_parallel_degree
    if order is None or (order.stage_rank[:p] == tuple(range(p)) and len(set(Counter(order.stage_rank).values())) == 1):
        return None
    return (
        f"pipeline_parallel_order: stages lie on ranks {list(order.stage_rank)}; the forecast needs as many on each rank, the "
        f"first {p} on ranks 0 to {p - 1} (valid: looped, or on a V)"
    )


def schedules(job: Job, parallelism: Parallelism, *, in_torch: bool) -> str | None:
    """Checks that every replica's pipeline can run its micro-batches."""
    p, v = parallelism.pipeline_parallel_degree, parallelism.virtual_stages_per_rank
    name = parallelism.pipeline_parallel_schedule
    counts = parallelism.micro_batches(job)
    if parallelism.pipeline_parallel_order is not None and p > 1:
        return illegal_order(parallelism, counts)
    for micro_batches in sorted(set(counts)):
        if reason := schedule(name, p, v, micro_batches, in_torch=in_torch):
            given = parallelism.micro_batches_per_replica
            return reason if given is None else f"micro_batches_per_replica = {list(given)}: {reason}"
    return None


def schedule(name: str, p: int, v: int, m: int, *, in_torch: bool) -> str | None:
    """Checks that p ranks with v stages each can run m micro-batches with the schedule; ``in_torch``: in the order of torch's classes."""
    if p == 1:
        return _broken("virtual_stages_per_rank", v, "needs a pipeline_parallel_degree above 1", [1]) if v > 1 else None
    return illegal_pattern(name, p, v, m, in_torch=in_torch)


def _broken(key: str, value: object, rule: str, valid: Iterable[object]) -> str:
    return str(bad_input(key, value, rule, valid))
