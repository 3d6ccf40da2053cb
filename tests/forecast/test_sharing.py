"""What a stage waits for its weights and gradients, on a network that takes one second for each byte."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from ahp.cluster.model import Cluster
from ahp.engines.registry import get
from ahp.forecast.assembly import passes_behind
from ahp.forecast.axes import ALONE, axes_of
from ahp.forecast.communication import Network
from ahp.forecast.data_parallel import CommUnit, DataParallel
from ahp.forecast.group import Group
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.sharing import SharedWeights, StageUnits, WeightCommunication, outside_blocks
from ahp.forecast.stage_table import StageTable
from ahp.forecast.step import price
from ahp.forecast.units import UnitPricer
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster

RANKS = Group(8, 1, 8)
BLOCK = CommUnit(10)


def changed(traits, **given):
    """With other figures, by ``group_name``."""
    groups = {}
    for key, value in given.items():
        group, name = key.split("_", 1)
        groups.setdefault(group, {})[name] = value
    return replace(traits, **{group: getattr(traits, group)._replace(**own) for group, own in groups.items()})


FOR_ONE_BYTE = {
    "states_master_weight_bytes": 1, "states_compute_weight_bytes": 0, "reduce_element_bytes": 1, "reduce_copies": False,
}  # fmt: skip


@dataclass
class OneByteASecond:
    """Twice that for an all-reduce, and a second to begin."""

    def time_s(self, kind, num_bytes, group):
        if group.size == 1 or num_bytes == 0:
            return 0.0
        return (2 if kind == "all_reduce" else 1) * num_bytes + 1.0


def sharing(before=0, after=0, *, block=BLOCK, first=True, windows=(100.0, 100.0, 100.0), **traits):
    given = get("ahp").traits(
        Job(precision="fp32"), Parallelism(data_parallel_shard_degree=8, zero_stage=3), EngineChoice()
    )
    data = DataParallel(RANKS, ALONE, changed(given, **FOR_ONE_BYTE, **traits), 1, 1.0)
    table = StageTable.of([0, 0, 0], 1, [(0, 3, first, True)])
    units = StageUnits(table, (block,), np.array([before]), np.array([after]))
    shared = SharedWeights.of(units, data, OneByteASecond())
    return WeightCommunication(shared, np.array([windows]), np.array([[windows]]), data)


def gathered(stage):
    forward = {}
    stage.add_gathers(forward, {}, {}, 1.0)
    return forward["weight_gather"].item()


def reduced(stage, passes=0):
    backward, last = {}, {}
    stage.add_reductions(backward, last, 1.0, passes)
    return (backward.get("gradient_reduce", 0.0) + last["gradient_reduce"]).item()


def test_the_head_is_gathered_behind_the_last_block_and_sent_behind_all():
    # The embedding, the first block; behind blocks: two more, and the head.
    assert gathered(sharing(5, 20)) == pytest.approx(6 + 11 + CONTENTION * (2 * 11 + 21))
    assert gathered(sharing(25)) == pytest.approx(26 + 11 + CONTENTION * 2 * 11)
    # The lowest block and the embedding are sent when there is nothing to compute any more.
    assert reduced(sharing(5, 20, gather_backward="never")) == pytest.approx(11 + 6 + CONTENTION * (21 + 2 * 11))
    assert reduced(sharing(25, gather_backward="never")) == pytest.approx(11 + 26 + CONTENTION * 2 * 11)


def test_blocks_of_the_first_bucket_are_gathered_before_any_computes():
    bucket = 1 / 20 + 1  # seconds of an element, where twenty are gathered at once
    assert gathered(sharing(gather_bucket_elements=20)) == pytest.approx(bucket * (20 + CONTENTION * 10))
    assert gathered(sharing(gather_bucket_elements=9)) == gathered(sharing())


def test_weights_of_blocks_may_be_gathered_in_8_bits():
    network, traits = OneByteASecond(), get("megatron").traits
    layout, choice = Parallelism(data_parallel_shard_degree=8, zero_stage=1), EngineChoice(name="megatron")
    for precision, block_bytes in (("bf16", 2), ("fp8", 1)):
        given = changed(traits(Job(precision=precision), layout, choice), gather_bucket_elements=0)
        data = DataParallel(RANKS, ALONE, given, 1, 1.0)
        assert data.gather_s(CommUnit(100), network) == 2 * 100 + 1
        assert data.gather_s(CommUnit(100, in_block=True), network) == block_bytes * 100 + 1


def test_gradients_wait_until_a_bucket_is_full():
    own = {"gather_backward": "never"}
    assert reduced(sharing(**own)) == pytest.approx(11 + CONTENTION * 22)
    # Twenty, then the ten that are left.
    assert reduced(sharing(**own, reduce_bucket_elements=20)) == pytest.approx(10.5 + CONTENTION * 21)
    assert reduced(sharing(**own, reduce_bucket_elements=30)) == pytest.approx(31)
    # No more than the stage has.
    assert reduced(sharing(**own, reduce_bucket_elements=1000)) == pytest.approx(31)


def test_a_block_that_fills_buckets_is_sent_in_pieces_while_it_computes():
    block = CommUnit(24, tensors=(8, 8, 8))
    own = {"gather_backward": "never", "block": block}
    # Three pieces of nine seconds each; the last one of the last block has nothing to compute beside it.
    assert reduced(sharing(**own, reduce_bucket_elements=8)) == pytest.approx(9 + CONTENTION * (3 * 27 - 9))
    # Two weights fill a bucket of sixteen, the third is sent with them: one piece.
    assert reduced(sharing(**own, reduce_bucket_elements=16)) == pytest.approx(25 + CONTENTION * 2 * 25)
    # Of blocks that compute three seconds, the first piece is ready after one second; then the network is never idle.
    short = sharing(**own, reduce_bucket_elements=8, windows=(3.0, 3.0, 3.0))
    tail_s = 1 + 3 * 27 - 9
    assert reduced(short) == pytest.approx(tail_s + CONTENTION * (3 * 27 - tail_s))


def test_other_stages_than_the_first_send_all_at_once():
    own = {"gather_backward": "never", "reduce_bucket_elements": 20, "reduce_buckets_on_first_stage_alone": True}
    assert reduced(sharing(**own)) == pytest.approx(10.5 + CONTENTION * 21)
    assert reduced(sharing(**own, first=False)) == pytest.approx(31)


def test_what_is_summed_whole_takes_an_all_reduce():
    own = {"gather_backward": "never", "reduce_overlap": 0.0}
    assert reduced(sharing(**own)) == pytest.approx(33)
    assert reduced(sharing(**own, reduce_to_all=True)) == pytest.approx(63)


def test_passes_of_other_stages_hide_what_is_still_sent():
    stage = sharing(windows=(2.0, 2.0, 2.0), gather_backward="never", reduce_bucket_elements=30)
    assert reduced(stage) == pytest.approx(31)
    assert reduced(stage, passes=3) == pytest.approx(31 - 18 + CONTENTION * 18)
    assert reduced(stage, passes=9) == pytest.approx(CONTENTION * 31)


@pytest.mark.parametrize(
    ("schedule", "virtual", "passes"),
    [
        ("1F1B", 1, [0, 0, 0, 0]),
        ("Interleaved1F1B", 2, [0, 0, 0, 0, 3, 3, 3, 3]),
        ("InterleavedZeroBubble", 2, [0] * 8),
        ("ZBVZeroBubble", 2, [0] * 8),
    ],
)
def test_passes_that_come_after_the_last_of_a_stage(schedule, virtual, passes):
    layout = Parallelism(
        pipeline_parallel_degree=4, pipeline_parallel_schedule=schedule, virtual_stages_per_rank=virtual
    )
    assert [passes_behind(layout, stage) for stage in range(4 * virtual)] == passes


def test_tied_weights_are_one_unit_where_one_stage_has_both_ends(hand_graph):
    nodes = make_cluster(per_node=1).groups[0]
    apart = get("ahp").traits(Job(), Parallelism(), EngineChoice())
    one = replace(apart, gather=apart.gather._replace(ends_apart=False))
    pricer = UnitPricer(hand_graph, nodes, Network(nodes), "bf16")
    units = replace(pricer.units(1, axes_of(Parallelism(), 1), one), tied_parameters=0)
    embedding, head = units.embedding.weights.parameters, units.head.weights.parameters
    assert outside_blocks(units, apart, first=True, last=True) == (embedding, head)
    assert outside_blocks(units, one, first=True, last=True) == (embedding + head, 0)
    tied = replace(units, tied_parameters=7)
    assert outside_blocks(tied, apart, first=True, last=True) == (embedding + head, 0)
    assert outside_blocks(tied, apart, first=False, last=True) == (0, head + 7)
    assert outside_blocks(tied, apart, first=False, last=False) == (0, 0)


def test_virtual_stages_do_not_wait_for_each_others_gradients(hand_graph):
    """Of Megatron's, which hide gradients in a pipeline too: of a chunk before the last all but what contention costs."""
    [nodes] = make_cluster(nodes=2, per_node=2).groups
    slow = nodes.device.model_copy(update={"peak_flops_per_s": {"bf16": 1e10, "fp32": 1e10}})
    cluster = Cluster(groups=(nodes.model_copy(update={"device": slow}),))
    job = Job(sequence_length=hand_graph.sequence_length, global_batch_size=16, precision="bf16")
    layout = Parallelism(
        data_parallel_shard_degree=2, zero_stage=1, pipeline_parallel_degree=2, virtual_stages_per_rank=2,
        pipeline_parallel_schedule="Interleaved1F1B",
    )  # fmt: skip
    stages = price(hand_graph, cluster, job, layout, EngineChoice(name="megatron")).stages
    shown = [cost.last_backward["gradient_reduce"] for cost in stages]
    assert shown[1] == pytest.approx(shown[2] / CONTENTION)  # a block each, on the last rank and the first
    assert shown[0] > shown[3] > 0.0  # with the embedding, with the head
