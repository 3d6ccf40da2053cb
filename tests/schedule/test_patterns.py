"""The fixed schedules equal torch's own, and what torch refuses is refused with the reason."""

from unittest import mock

import pytest

from ahp.errors import BadInput
from ahp.schedule.actions import Kind
from ahp.schedule.patterns import illegal, make

SINGLE = [(p, 1, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 13)]
INTERLEAVED = [(p, v, m) for p in (2, 3, 4) for v in (2, 3) for m in (1, 2, 3, 4, 6, 7, 8, 9, 10, 12)]


def torch_single(name, p, m):
    """What torch's one-stage schedules call, in order. Their printed order is not used: in torch 2.13 that of
    1F1B's last rank starts at micro-batch 1, what runs starts at 0."""
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.distributed.pipelining.stage import PipelineStage

    def one_rank(rank):
        calls = []
        stage = mock.create_autospec(PipelineStage, instance=True)
        stage.num_stages, stage.stage_index, stage.group_rank, stage.group_size = p, rank, rank, p
        stage.is_last, stage.submod = rank == p - 1, None
        stage.forward_one_chunk.side_effect = lambda i, *_, **__: calls.append(("F", rank, i))
        stage.backward_one_chunk.side_effect = lambda i, **__: calls.append(("B", rank, i))
        for recv_or_send in (
            stage.get_fwd_recv_ops,
            stage.get_fwd_send_ops,
            stage.get_bwd_recv_ops,
            stage.get_bwd_send_ops,
        ):
            recv_or_send.return_value = []
        schedule = get_schedule_class(name)(stage, m)
        with mock.patch.object(schedule, "_initialize_stage"):
            schedule._step_microbatches([()] * m, [{}] * m)
        return calls

    return [one_rank(rank) for rank in range(p)]


def torch_order(name, p, v, m):
    """Torch's compute order per rank as (letter, stage, micro-batch), or None where torch refuses it."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    try:
        if v == 1:
            return torch_single(name, p, m)
        ranks = get_schedule_ops(name, p, m, num_stages_per_rank=v)
    except ValueError:
        return None
    return [
        [
            (a.computation_type.value, a.stage_index, a.microbatch_index)
            for a in rank
            if a and a.computation_type.value in "FB"
        ]
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [("GPipe", *c) for c in SINGLE] + [("1F1B", *c) for c in SINGLE] + [("Interleaved1F1B", *c) for c in INTERLEAVED],
)
def test_order_is_torchs(name, p, v, m):
    expected = torch_order(name, p, v, m)
    if expected is None:
        assert illegal(name, p, v, m) is not None
        return
    assert illegal(name, p, v, m) is None
    schedule = make(name, p, v, m)
    assert [[(str(a.kind), a.stage, a.micro_batch) for a in rank] for rank in schedule.ranks] == expected
    assert schedule.stage_rank == tuple(s % p for s in range(p * v))


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_every_action_once(name):
    p, v, m = 4, 2 if name == "Interleaved1F1B" else 1, 8
    schedule = make(name, p, v, m)
    actions = [a for rank in schedule.ranks for a in rank]
    assert len(actions) == len(set(actions)) == 2 * p * v * m
    assert all(schedule.stage_rank[a.stage] == r for r, rank in enumerate(schedule.ranks) for a in rank)
    assert {a.kind for a in actions} == {Kind.FORWARD, Kind.BACKWARD}


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "words"),
    [
        ("1F1B", 4, 1, 3, ["pipeline_parallel_degree = 4", "up to 3", "GPipe"]),
        ("1F1B", 2, 2, 4, ["virtual_stages_per_rank = 2", "Interleaved1F1B"]),
        ("Interleaved1F1B", 2, 1, 4, ["virtual_stages_per_rank = 1"]),
        ("Interleaved1F1B", 1, 2, 4, ["pipeline_parallel_degree"]),
        ("Interleaved1F1B", 2, 2, 7, ["7 micro-batches", "valid micro-batches: 4, 6, 8"]),
        ("ZBVZeroBubble", 2, 2, 4, ["ZBVZeroBubble", "not generated", "Interleaved1F1B"]),
    ],
)
def test_refused_with_the_reason(name, p, v, m, words):
    reason = illegal(name, p, v, m)
    assert reason is not None
    assert all(word in reason for word in words), reason
    with pytest.raises(BadInput):
        make(name, p, v, m)
