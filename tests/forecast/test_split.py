"""Which operators tensor parallelism divides, from the graph alone."""

from ahp.forecast.split import split
from ahp.graph.operators import Parameter, Segment

from .conftest import op, product, spec


def test_a_block_by_hand(mlp_block):
    parts = split(mlp_block, "block")
    assert parts.column == {1}
    assert parts.row == {3}
    assert parts.divided == {1, 2, 3, 5, 6, 7, 8, 9}
    assert parts.contracted == {3, 8}
    assert parts.parameters == {"up.weight", "down.weight"}
    assert [s.shape for s in parts.forward_reduce] == [(64, 32)]
    assert [s.shape for s in parts.backward_reduce] == [(64, 32)]


def test_a_product_without_a_partner_stays_whole():
    x = spec(64, 32)
    segment = Segment(
        "block",
        (product(0, 64, 32, 32, [], parameters=["only.weight"]), op(1, "aten.add", [x, x], [x], [0])),
        (Parameter("only.weight", (32, 32)),),
        x,
    )
    parts = split(segment, "block")
    assert not parts.divided
    assert not parts.parameters
    assert not parts.forward_reduce


def test_llama(tiny):
    block = tiny.blocks[0]
    parts = split(block, "block")
    module = {o.index: o.module for o in block.operators}
    assert {module[i] for i in parts.column} == {f"self_attn.{x}_proj" for x in "qkv"} | {
        "mlp.gate_proj",
        "mlp.up_proj",
    }
    assert {module[i] for i in parts.row} == {"self_attn.o_proj", "mlp.down_proj"}
    assert parts.parameters == {p.name for p in block.parameters if len(p.shape) == 2}
    # Megatron's two all-reduces forward and two backward, whatever the number of column products.
    assert len(parts.forward_reduce) == len(parts.backward_reduce) == 2
    assert all(s.numel == block.output.numel for s in (*parts.forward_reduce, *parts.backward_reduce))
    divided = {module[i] for i in parts.divided if block.operators[i].bytes_written}
    assert "mlp" in divided
    assert "self_attn" in divided
    assert not any("layernorm" in m for m in divided)
    assert all(i in parts.divided for i, o in enumerate(block.operators) if o.flops)


def test_the_ends_of_llama(tiny):
    embedding, head = split(tiny.embedding, "embedding"), split(tiny.head, "head")
    assert embedding.parameters == {"model.embed_tokens.weight"}
    assert len(embedding.forward_reduce) == 1
    assert head.parameters == {"lm_head.weight"}
    assert [s.numel for s in head.backward_reduce] == [tiny.blocks[0].output.numel]
    assert all(i in head.divided for i, o in enumerate(tiny.head.operators) if o.flops)
    whole = {o.module for o in tiny.head.operators if o.index not in head.divided}
    assert "model.norm" in whole
