"""Small graphs for the forecast's tests: one written by hand, one traced."""

import pytest

from ahp.cluster.model import Cluster, Device, Link, NodeGroup
from ahp.graph.operators import ModelGraph, Operator, Parameter, Segment, TensorSpec
from ahp.job import Job


def spec(*shape, dtype="bfloat16"):
    return TensorSpec(shape, dtype)


def op(index, name, inputs, outputs, depends_on=(), *, parameters=(), flops=0, saved=0, module="", phase="forward"):
    """An operator that reads its inputs and writes its outputs once; a name ending in ``view`` moves nothing."""
    view = name.endswith("view")
    return Operator(
        index=index,
        name=name,
        module=module,
        phase=phase,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        depends_on=tuple(depends_on),
        parameters=tuple(parameters),
        flops=flops,
        bytes_read=0 if view else sum(s.bytes for s in inputs),
        bytes_written=0 if view else sum(s.bytes for s in outputs),
        saved_bytes=saved,
    )


def product(index, m, n, k, depends_on=(), **kwargs):
    return op(index, "aten.mm", [spec(m, k), spec(k, n)], [spec(m, n)], depends_on, flops=2 * m * n * k, **kwargs)


@pytest.fixture
def mlp_block():
    """norm -> up (product) -> act -> down (product) -> residual add, and its backward; S 64, H 32, F 128."""
    s, h, f = 64, 32, 128
    x, wide = spec(s, h), spec(s, f)
    operators = (
        op(0, "aten.norm", [x], [x], module="norm", parameters=["norm.weight"], saved=x.bytes),
        product(1, s, f, h, [0], module="up", parameters=["up.weight"], saved=wide.bytes),
        op(2, "aten.relu", [wide], [wide], [1], module="act", saved=wide.bytes),
        product(3, s, h, f, [2], module="down", parameters=["down.weight"]),
        op(4, "aten.add", [x, x], [x], [3]),
        product(5, s, f, h, [], module="down", parameters=["down.weight"], phase="backward"),
        product(6, h, f, s, [2], module="down", phase="backward"),
        op(7, "aten.relu_backward", [wide, wide], [wide], [5, 2], module="act", phase="backward"),
        product(8, s, h, f, [7], module="up", parameters=["up.weight"], phase="backward"),
        product(9, f, h, s, [7, 0], module="up", phase="backward"),
        op(10, "aten.norm_backward", [x, x], [x], [8, 0], module="norm", phase="backward"),
    )
    parameters = (Parameter("norm.weight", (h,)), Parameter("up.weight", (f, h)), Parameter("down.weight", (h, f)))
    return Segment("block", operators, parameters, x)


@pytest.fixture
def hand_graph(mlp_block):
    """Four equal blocks between an embedding of 100 words and a head."""
    table = Parameter("embed.weight", (100, 32))
    embedding = Segment(
        "embedding",
        (
            op(
                0,
                "aten.embedding",
                [spec(100, 32), spec(64, dtype="int64")],
                [spec(64, 32)],
                parameters=["embed.weight"],
            ),
        ),
        (table,),
        spec(64, 32),
    )
    logits = spec(64, 100)
    head = Segment(
        "head",
        (
            product(0, 64, 100, 32, [], module="lm_head", parameters=["lm_head.weight"], saved=logits.bytes),
            op(1, "aten.loss", [logits], [spec(dtype="float32")], [0], module="loss"),
            op(2, "aten.loss_backward", [logits], [logits], [0], module="loss", phase="backward"),
            product(3, 64, 32, 100, [2], module="lm_head", parameters=["lm_head.weight"], phase="backward"),
            product(4, 100, 32, 64, [2], module="lm_head", phase="backward"),
        ),
        (Parameter("lm_head.weight", (100, 32)),),
        None,
    )
    return ModelGraph(
        name="hand",
        model=None,
        micro_batch_size=1,
        sequence_length=64,
        dtype="bfloat16",
        embedding=embedding,
        blocks=(mlp_block,),
        layers=(0, 0, 0, 0),
        head=head,
        config={"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128},
    )


def make_cluster(
    nodes=1, per_node=8, *, name="toy", memory_bytes=80 * 2**30, measured=None, launch_s=0.0, network=True
):
    device = Device(
        name=name,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"bf16": 1e14, "fp32": 2e13},
        num_sms=100,
        kernel_launch_s=launch_s,
    )
    return Cluster(
        groups=(
            NodeGroup(
                nodes=nodes,
                devices_per_node=per_node,
                device=device,
                intra_node=Link(bandwidth_bytes_per_s=4e11, latency_s=2e-6),
                inter_node=Link(bandwidth_bytes_per_s=4e11, latency_s=4e-6) if network else None,
                measured=measured,
            ),
        )
    )


@pytest.fixture(scope="session")
def tiny():
    """The catalogue's tiny LLaMA, traced once."""
    from ahp.graph.kept import analyze

    return analyze("tiny", Job(sequence_length=128))
