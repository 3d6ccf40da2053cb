"""Fused kernels keep and move what published formulas say; eager ones on a GPU what PyTorch's own kernels do."""

from dataclasses import replace
from functools import cache

import pytest

from ahp.cluster.model import Cluster
from ahp.engines.registry import get
from ahp.engines.traits import KernelTraits
from ahp.forecast.axes import axes_of
from ahp.forecast.communication import Network
from ahp.forecast.division import Division, is_weight_gradient
from ahp.forecast.joined import moved_where_joined
from ahp.forecast.kernels import kernels, owners
from ahp.forecast.split import split
from ahp.forecast.units import UnitPricer
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

NORMS = ("input_layernorm", "post_attention_layernorm")
OF_NORM = {NORMS[0]: ("self_attn.q_proj", "self_attn.k_proj"), NORMS[1]: ("mlp.gate_proj",)}
"""Modules of the products whose gradients are summed before the backward pass of a llama's norm."""
SEQUENCE, HIDDEN, HEADS, KV_HEADS, FFN = 512, 256, 8, 2, 704


@cache
def block(family, attention):
    gpt2 = {"n_embd": HIDDEN, "n_inner": 4 * HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": SEQUENCE}
    llama = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    keys = {"gpt2": gpt2, "llama": llama}[family]
    job = Job(sequence_length=SEQUENCE, precision="bf16")
    return analyze({"model_type": family, "vocab_size": 1024, **keys}, job, attention=attention).blocks[0]


def kept(segment, **axes):
    run, division = kernels(segment, KernelTraits("fused")), Division(split(segment, "block"), **axes)
    ops = segment.operators
    saved = sum(count * division.output_share(ops[i]) for i, count in run.saved_bytes.items())
    return saved + run.saved_input_bytes * division.hidden_share


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_gpt_block_keeps_korthikantis_bytes(tensor, sequence_parallel):
    # arXiv 2205.05198, equations 1 and 2: sbh (34 + 5 a s / h), of which 10 are whole without sequence parallelism.
    sbh = SEQUENCE * HIDDEN
    scores = 5 * HEADS * SEQUENCE / HIDDEN
    whole = sbh * (34 + scores) / tensor if sequence_parallel else sbh * (10 + 24 / tensor + scores / tensor)
    found = kept(block("gpt2", "math"), tensor=tensor, sequence_parallel=sequence_parallel)
    assert found == pytest.approx(whole, rel=0.005)


def test_fused_attention_keeps_no_scores():
    assert kept(block("gpt2", "flash")) == pytest.approx(34 * SEQUENCE * HIDDEN, rel=0.01)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_llama_block_keeps_the_published_bytes(tensor):
    # s b (12 h + 4 h k / a + 4 a + 6 f) / t with sequence parallelism (cost model of the reference, section 3.2).
    formula = SEQUENCE * (12 * HIDDEN + 4 * HIDDEN * KV_HEADS / HEADS + 4 * HEADS + 6 * FFN) / tensor
    assert kept(block("llama", "flash"), tensor=tensor, sequence_parallel=True) == pytest.approx(formula, rel=0.01)


def test_context_parallelism_divides_what_is_kept():
    segment = block("llama", "flash")
    assert kept(segment, context=4) == pytest.approx(kept(segment) / 4)


def test_a_mask_on_a_gpu_is_of_bytes():
    segment = block("gpt2", "flash")
    traced, eager = kernels(segment, KernelTraits("traced")), kernels(segment, KernelTraits("eager"))
    masks = [op for op in segment.operators if op.name == "aten.div_" and op.phase == "forward"]
    assert len(masks) == 2
    for mask in masks:
        assert traced.saved_bytes[mask.index] == 2 * SEQUENCE * HIDDEN
        assert eager.saved_bytes[mask.index] == SEQUENCE * HIDDEN
        assert mask.index not in eager.launched  # one kernel with the product of mask and input


@pytest.mark.parametrize(("fusion", "apart"), [("eager", False), ("modules", True), ("fused", True)])
def test_dropout_writes_its_mask_forward_and_reads_it_backward(fusion, apart):
    """torch's kernel draws the mask in registers: 2 bytes read, 2 + 1 written; backward 2 + 1 read, 2 written."""
    segment = block("gpt2", "math")
    moved = kernels(segment, KernelTraits(fusion, dropout_apart=apart)).moved_bytes
    mask = next(op for op in segment.operators if op.name == "aten.div_" and "dropout" not in op.module)
    uses = [op for op in segment.operators if op.name == "aten.mul" and mask.index in op.depends_on]
    assert [op.phase for op in uses] == ["forward", "backward"]
    forward, backward = (moved[op.index] for op in uses)
    scores = HEADS * SEQUENCE * SEQUENCE
    assert mask.outputs[0].numel == scores
    assert forward + moved.get(mask.index, 0.0) == backward == 5 * scores


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_fusion_moves_and_launches_less_and_touches_no_product(family):
    segment = block(family, "flash")
    eager, fused = kernels(segment, KernelTraits("eager")), kernels(segment, KernelTraits("fused"))
    assert len(fused.launched) < 0.75 * len(eager.launched)
    assert sum(fused.moved_bytes.values()) < sum(eager.moved_bytes.values())
    for op in segment.operators:
        if op.flops:
            assert fused.moved_bytes[op.index] == eager.moved_bytes[op.index]


def test_the_backward_pass_of_a_fused_activation_reads_two_tensors_and_writes_one():
    """As Megatron's bias_gelu_back, and a compiler's kernel: what is made from the kept input alone is made in the same kernel."""
    segment = block("gpt2", "flash")
    run = kernels(segment, KernelTraits("fused"))
    moved = sum(run.moved_bytes.get(op.index, 0.0) for op in segment.phase("backward") if op.module == "mlp.act")
    assert moved == 3 * 2 * SEQUENCE * 4 * HIDDEN
    assert len([op for op in segment.phase("backward") if op.module == "mlp.act" and op.index in run.launched]) == 1


HIDDEN_BYTES = 2 * SEQUENCE * HIDDEN


@pytest.mark.parametrize(
    ("apart", "weights_apart", "passes"),
    [
        (
            False,
            False,
            4,
        ),  # torch's compiler since mix-order reduction: gradient, input and residual's gradient in, their sum out
        (False, True, 6),  # before: the gradient and the input once more for the weight
        (True, False, 3 + 3),  # Transformer Engine, common/normalization; autograd then adds the residual's gradient
        (True, True, 5 + 3),  # apex, csrc/layer_norm_cuda_kernel.cu: cuComputePartGradGammaBeta and cuComputeGradInput
    ],
)
@pytest.mark.parametrize(("family", "norms"), [("gpt2", ("ln_1", "ln_2")), ("llama", NORMS)])
def test_the_backward_pass_of_a_norm_has_the_passes_over_memory_of_its_kernels(
    family, norms, apart, weights_apart, passes
):
    segment = block(family, "flash")
    run = kernels(segment, KernelTraits("fused", norms_apart=apart, norm_weights_apart=weights_apart))
    for norm, products in zip(norms, (3, 2), strict=True):
        # llama: queries, keys and values each give a part of the gradient, as gate and up do
        moved = _backward_bytes(segment, run, norm, *(OF_NORM[norm] if family == "llama" else ()))
        summed = products - 1 if family == "llama" else 0
        assert moved == pytest.approx((passes + summed) * HIDDEN_BYTES, rel=0.01)


@pytest.mark.parametrize(("family", "norms"), [("gpt2", ("ln_1", "ln_2")), ("llama", NORMS)])
def test_a_norm_of_torch_alone_reads_its_input_and_gradient_twice(family, norms):
    """ATen/native/cuda/layer_norm_kernel.cu: one kernel for the input's gradient, GammaBetaBackward for the weight's."""
    segment = block(family, "flash")
    run = kernels(segment, KernelTraits("modules"))
    for norm in norms:
        assert _backward_bytes(segment, run, norm) == pytest.approx((5 + 3) * HIDDEN_BYTES, rel=0.01)


def _backward_bytes(segment, run, *modules):
    return sum(
        run.moved_bytes.get(op.index, 0.0) for op in segment.phase("backward") if op.module in modules and not op.flops
    )


def test_joined_products_move_the_bytes_of_megatrons_kernels():
    """Between products, in 16 bits. Read and written: the gate's inputs and output, three tensors, and backward the gradient, both inputs and their
    two gradients; queries once more forward, as they share keys, and all gradients once more backward. The sum of gradients is one tensor."""
    segment, hidden, queries, keys = (
        block("llama", "flash"),
        2 * SEQUENCE * HIDDEN,
        2 * SEQUENCE * HIDDEN,
        2 * SEQUENCE * 64,
    )
    apart = kernels(segment, KernelTraits("fused", norms_apart=True)).moved_bytes
    joined = kernels(segment, KernelTraits("fused", norms_apart=True, joined_products=True)).moved_bytes

    def moved(found, phase, *modules):
        ops = (op for op in segment.phase(phase) if op.flops == 0 and op.module in modules)
        return sum(found.get(op.index, 0.0) for op in ops)

    gate = ("mlp", "mlp.act_fn")
    assert moved(joined, "forward", *gate) == 3 * 2 * SEQUENCE * FFN
    assert moved(joined, "backward", *gate) == 5 * 2 * SEQUENCE * FFN
    assert moved(apart, "backward", *gate) == 6 * 2 * SEQUENCE * FFN
    more = {
        phase: moved(joined, phase, "self_attn") - moved(apart, phase, "self_attn") for phase in ("forward", "backward")
    }
    assert more == {"forward": 2 * queries, "backward": 2 * (queries + 2 * keys)}
    sums = "self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"
    assert moved(apart, "backward", *sums) - moved(joined, "backward", *sums) == 3 * hidden
    untouched = [op.index for op in segment.operators if op.flops > 0 or op.module in NORMS]
    assert all(joined.get(i) == apart.get(i) for i in untouched)


def test_megatron_before_2024_turns_queries_and_computes_gates_by_torchs_kernels():
    """core_v0.4.0: rotary_pos_embedding.py, 24 and 34 bytes an element instead of 4; transformer/mlp.py, glu, 10 and 26 instead of 6 and 10."""
    segment = block("llama", "flash")
    fused, turned, gated = (
        kernels(segment, KernelTraits("fused", joined_products=True, positions_apart=positions, gate_apart=gate))
        for positions, gate in ((False, False), (True, False), (False, True))
    )

    def more(run, phase):
        ops = list(segment.phase(phase))
        return sum(run.moved_bytes.get(op.index, 0.0) - fused.moved_bytes.get(op.index, 0.0) for op in ops)

    turns, gates = SEQUENCE * HIDDEN // HEADS * (HEADS + KV_HEADS), SEQUENCE * FFN
    assert (more(turned, "forward"), more(turned, "backward")) == (20 * turns, 30 * turns)
    assert (more(gated, "forward"), more(gated, "backward")) == (4 * gates, 16 * gates)
    assert sum(gated.saved_bytes.values()) - sum(fused.saved_bytes.values()) == 2 * gates  # the activation's result
    learned = block("gpt2", "flash")  # neither turned nor gated
    plain, apart = (
        kernels(learned, KernelTraits("fused", joined_products=True, positions_apart=on, gate_apart=on))
        for on in (False, True)
    )
    assert apart == plain


@pytest.mark.parametrize(("fusion", "complex_bytes"), [("fused", 16), ("modules", 16), ("eager", 0)])
def test_torchtitan_turns_by_complex_numbers_and_copies_keys(fusion, complex_bytes):
    """torchtitan b5bcd76: models/common/rope.py, 6 + 8 + 6 bytes an element; before 2026, repeat_kv, 4 bytes for each element of queries."""
    segment = block("llama", "flash")
    plain, pairs, copied = (
        kernels(segment, KernelTraits(fusion, complex_positions=turns, repeated_keys=copies))
        for turns, copies in ((False, False), (True, False), (False, True))
    )

    def more(run, phase):
        ops = list(segment.phase(phase))
        return sum(run.moved_bytes.get(op.index, 0.0) - plain.moved_bytes.get(op.index, 0.0) for op in ops)

    queries = SEQUENCE * HIDDEN
    turned = queries + queries * KV_HEADS // HEADS
    for phase in ("forward", "backward"):
        assert more(pairs, phase) == complex_bytes * turned
        assert more(copied, phase) == 4 * queries
    addresses = sum(pairs.unvectorized.values()) - sum(plain.unvectorized.values())
    assert addresses == (turned if complex_bytes else 0)


@pytest.mark.slow
def test_torchtitan_turns_qwen3_by_cosine_and_sine():
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": 1024}
    job = Job(sequence_length=SEQUENCE, precision="bf16")
    segment = analyze({"model_type": "qwen3"} | sizes | heads, job, attention="flash").blocks[0]
    assert kernels(segment, KernelTraits("fused", complex_positions=True)) == kernels(segment, KernelTraits("fused"))
    # Without compile: ea4989e0d, experiments/qwen3/model/model.py, 20 and 30 bytes an element.
    plain, turned = (kernels(segment, KernelTraits("modules", complex_positions=own)) for own in (False, True))
    for operators, more in ((segment.phase("forward"), 16), (segment.phase("backward"), 26)):
        ops = [op.index for op in operators]
        moved = [sum(run.moved_bytes.get(i, 0.0) for i in ops) for run in (plain, turned)]
        assert moved[1] - moved[0] == more * SEQUENCE * 32 * (HEADS + KV_HEADS)


@pytest.mark.slow
def test_megatron_turns_gpt_oss_and_adds_its_experts_biases_by_torchs_kernels():
    """Two of four experts for each token. Elements of 16 bits: queries and keys, and the results of the experts' first and last product."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "num_local_experts": 4,
    }
    heads = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_experts_per_tok": 2,
        "vocab_size": 1024,
    }
    job = Job(sequence_length=SEQUENCE, precision="bf16")
    segment = analyze({"model_type": "gpt_oss"} | sizes | heads, job, attention="engine").blocks[0]
    plain = kernels(segment, KernelTraits("fused", joined_products=True), biases_apart=False)
    fused, apart = (
        kernels(segment, KernelTraits("fused", joined_products=True, scaled_apart=scaled)) for scaled in (False, True)
    )

    def moved(run, phase, module):
        ops = [op for op in segment.phase(phase) if op.module == module and op.flops == 0]
        return sum(run.moved_bytes.get(op.index, 0.0) for op in ops)

    turned, copies = SEQUENCE * 32 * (HEADS + KV_HEADS), 2 * SEQUENCE
    for phase, num_bytes in (("forward", 20), ("backward", 30)):
        assert moved(apart, phase, "self_attn") - moved(fused, phase, "self_attn") == num_bytes * turned
    added = next(
        op for op in segment.phase("forward") if op.index not in plain.unvectorized and op.index in fused.unvectorized
    )
    assert fused.moved_bytes[added.index] == 34 * copies * HIDDEN
    assert fused.unvectorized == {added.index: 3.5 * copies * HIDDEN}
    assert sum(apart.unvectorized.values()) == 3.5 * copies * HIDDEN + (4.5 + 3.5) * turned
    gates = {op.index: fused.moved_bytes[op.index] for op in segment.operators if op.module == added.module and op.flops == 0
             and op.outputs[0].numel in (copies * FFN, 2 * copies * FFN) and fused.moved_bytes.get(op.index)}  # fmt: skip
    assert sorted(gates.values()) == [6 * copies * FFN, 10 * copies * FFN]
    # An activation in a module of its own is no part of the experts' kernels; the last bias is added as before.
    named = {op.index for op in segment.operators if op.module == added.module and op.flops == 0 and not op.parameters}
    other = replace(segment, operators=tuple(
        replace(op, module="act") if op.index in named - {added.index} else op for op in segment.operators
    ))  # fmt: skip
    run = kernels(other, KernelTraits("fused", joined_products=True))
    assert run.moved_bytes[added.index] == 34 * copies * HIDDEN


def test_what_is_no_joined_product_moves_what_it_did():
    """gpt2 has one product for queries, keys and values, whose gradients it joins itself."""
    segment = block("gpt2", "flash")
    assert (
        kernels(segment, KernelTraits("fused", joined_products=True)).moved_bytes
        == kernels(segment, KernelTraits("fused")).moved_bytes
    )
    assert moved_where_joined(segment, owners(segment)) == {}


@pytest.mark.slow
def test_rows_that_are_written_out_of_order_need_zeros_in_memory_first():
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}
    config = {"model_type": "qwen3_moe", "vocab_size": 1024, "intermediate_size": FFN, **sizes, **experts}
    segment = analyze(config, Job(sequence_length=SEQUENCE, precision="bf16"), attention="flash").blocks[0]
    run = kernels(segment, KernelTraits("fused"))
    zeros = [op for op in segment.phase("backward") if op.name == "aten.new_zeros"]
    rows = max(zeros, key=lambda op: op.outputs[0].numel)
    assert rows.outputs[0].shape == (2 * SEQUENCE, HIDDEN)
    assert run.moved_bytes[rows.index] >= rows.outputs[0].bytes


def test_dropout_apart_from_the_softmax_writes_its_gradient_and_reads_it_again():
    """Megatron-LM core/transformer/dot_product_attention.py: FusedScaleMaskSoftmax, then torch.nn.Dropout."""
    segment = block("gpt2", "math")
    one, two = (kernels(segment, KernelTraits("fused", dropout_apart=apart)) for apart in (False, True))
    scores = HEADS * SEQUENCE * SEQUENCE
    assert sum(two.moved_bytes.values()) - sum(one.moved_bytes.values()) == 2 * 2 * scores
    assert len(two.launched) == len(one.launched) + 1
    assert two.saved_bytes == one.saved_bytes


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_weight_has_one_gradient_product(family):
    segment = block(family, "flash")
    matrices = [p for p in segment.parameters if len(p.shape) == 2]
    assert sum(map(is_weight_gradient, segment.operators)) == len(matrices)


def test_a_loss_that_is_not_fused_keeps_its_logits_in_fp32(tiny):
    kept = {
        fused: sum(kernels(tiny.head, KernelTraits("fused", fused_loss=fused)).saved_bytes.values())
        for fused in (True, False)
    }
    logits = next(op.outputs[0].numel for op in tiny.head.phase("forward") if op.flops > 0)
    assert kept[False] - kept[True] >= 4 * logits - 2 * logits


def test_megatrons_own_fusion_of_the_loss_keeps_the_softmax_in_fp32(tiny):
    logits = next(op.outputs[0].numel for op in tiny.head.phase("forward") if op.flops > 0)
    one, own = (
        kernels(tiny.head, KernelTraits("fused", fused_loss=True, loss_keeps_fp32=fp32)) for fp32 in (False, True)
    )
    assert sum(own.saved_bytes.values()) - sum(one.saved_bytes.values()) == (4 - 2) * logits
    # Logits are read in 2 bytes, written in 4, and changed in place twice; then the softmax is changed in place, and the gradient is written in 2.
    assert sum(own.moved_bytes.values()) - sum(one.moved_bytes.values()) == (4 + 8 + 8 + 8) * logits
    assert own.launched > one.launched


def test_eager_kernels_that_compute_addresses_are_casts_to_wider_types_and_products_with_something_repeated():
    segment = block("llama", "flash")
    run = kernels(segment, KernelTraits("eager"))
    found = {(op.name, op.module) for op in segment.phase("forward") if op.index in run.unvectorized}
    norms = {("aten._to_copy", norm) for norm in ("input_layernorm", "post_attention_layernorm")}
    norms |= {("aten.mul", norm) for _, norm in norms}  # with one number a token, and with the weight
    assert found == {*norms, ("aten.mul", "self_attn"), ("aten.cat", "self_attn")}  # rotary positions
    narrower = [op for op in segment.operators if op.name == "aten._to_copy" and op.outputs[0].dtype == "bfloat16"]
    assert narrower
    assert not run.unvectorized.keys() & {op.index for op in narrower}
    assert not kernels(segment, KernelTraits("fused")).unvectorized


@pytest.mark.parametrize("engine", ["ahp", "torchtitan"])
def test_engines_that_compile_blocks_alone_leave_embedding_norm_and_head_as_they_are(tiny, engine):
    """runtime/stage_setup.py; torchtitan 0.2.2, models/llama3/infra/parallelize.py. In torchtitan the loss has a graph of its own."""
    nodes, layout = Cluster.parse("1xH100-SXM-80GB").groups[0], Parallelism()
    prices = UnitPricer(tiny, nodes, Network(nodes), "bf16")
    eager, compiled = (
        prices.units(1, axes_of(layout, 1), get(engine).traits(Job(), layout, EngineChoice(name=engine, compile=value)))
        for value in (False, True)
    )
    assert compiled.blocks != eager.blocks
    assert compiled.embedding == eager.embedding
    if engine == "ahp":
        assert compiled.head == eager.head
    else:
        assert compiled.head.memory.saved < eager.head.memory.saved
