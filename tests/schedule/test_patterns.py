"""The fixed schedules equal torch's own, and what torch refuses is refused with the reason."""

from functools import cache
from typing import Any
from unittest import mock

import pytest

from ahp.errors import BadInput
from ahp.schedule.actions import Kind
from ahp.schedule.patterns import illegal, make, stage_ranks
from ahp.schedule.placement import Placement
from ahp.schedule.registry import SCHEDULES

V_SHAPED = [s.name for s in SCHEDULES.values() if s.placement is Placement.V_SHAPED]

SINGLE = [(p, 1, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 13)]
INTERLEAVED = [(p, v, m) for p in (2, 3, 4) for v in (2, 3) for m in (1, 2, 3, 4, 6, 7, 8, 9, 10, 12)]

V_LAYOUTS = [(p, 2, m) for p in (2, 3, 4, 5) for m in (1, 3, 4, 6, 7, 8, 9, 10, 12, 17)]


@cache
def torchs_stage() -> Any:
    """In the place of a stage; every use of it says anew what it is. To make one takes most of a test's time."""
    from torch.distributed.pipelining.stage import PipelineStage

    return mock.create_autospec(PipelineStage, instance=True)


def torch_single(name, p, m):
    """What torch's one-stage schedules call, in order. Their printed order is not used: in torch 2.13 that of
    1F1B's last rank starts at micro-batch 1, what runs starts at 0."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    def one_rank(rank):
        calls, stage = [], torchs_stage()
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
    try:
        if name in ("GPipe", "1F1B"):
            return torch_single(name, p, m)
        ranks = torch_multi(name, p, v, m)
    except ValueError:
        return None
    return [
        [
            (a.computation_type.value, a.stage_index, a.microbatch_index)
            for overlapped in rank
            if overlapped
            for a in (overlapped.sub_actions or (overlapped,))
        ]
        for rank in ranks
    ]


def torch_multi(name, p, v, m):
    """The order that torch's schedule of several stages per rank makes for every rank."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    stage = torchs_stage()
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, p, p * v, None
    order = get_schedule_class(name)([stage] * v, m).pipeline_order
    return [order[rank] for rank in range(p)]


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [(name, *c) for name in ("GPipe", "1F1B") for c in SINGLE]
    + [(name, *c) for name in ("Interleaved1F1B", "InterleavedZeroBubble") for c in INTERLEAVED]
    + [("InterleavedZeroBubble", *c) for c in SINGLE if c[0] > 1]
    + [(name, *c) for name in V_SHAPED for c in V_LAYOUTS],
)
def test_order_is_torchs(name, p, v, m):
    expected = torch_order(name, p, v, m)
    assert (illegal(name, p, v, m, in_torch=True) is None) == (expected is not None)
    if expected is None:
        return
    schedule = make(name, p, v, m)
    assert [[(str(a.kind), a.stage, a.micro_batch) for a in rank] for rank in schedule.ranks] == expected
    assert all(schedule.stage_rank[a.stage] == r for r, rank in enumerate(schedule.ranks) for a in rank)


@pytest.mark.parametrize("p", [2, 5])
@pytest.mark.parametrize("name", V_SHAPED)
def test_placement_of_the_v_is_torchs(name, p):
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    torchs = generate_stage_to_rank_mapping(p, 2 * p, style="v")
    assert stage_ranks(name, p, 2) == tuple(torchs[s] for s in range(2 * p))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 32)])
def test_interleaving_is_megatrons_where_rounds_are_whole(p, v, m):
    # Megatron-LM core/pipeline_parallel/schedules.py, get_schedule_table and get_pp_rank_microbatches.
    table = [(i, chunk) for low in range(0, m, p) for chunk in range(v) for i in range(low, low + p)]
    for rank, actions in enumerate(make("Interleaved1F1B", p, v, m).ranks):
        forward = [("F", chunk * p + rank, i) for i, chunk in table]
        backward = [("B", (v - 1 - chunk) * p + rank, i) for i, chunk in table]
        warmup = min((p - rank - 1) * 2 + (v - 1) * p, m * v)
        steady = [a for pair in zip(forward[warmup:], backward, strict=False) for a in pair]
        expected = forward[:warmup] + steady + backward[m * v - warmup :]
        assert [(str(a.kind), a.stage, a.micro_batch) for a in actions] == expected


@pytest.mark.parametrize("m", [1, 3, 5, 9])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_zero_bubble_at_one_stage_per_rank_needs_no_rounds(p, m):
    schedule = make("InterleavedZeroBubble", p, 1, m)
    for rank, actions in enumerate(schedule.ranks):
        # arXiv 2401.10241, section 3: p - rank forwards before the first input gradient, as in 1F1B; weight gradients
        # begin so late that each rank holds as many micro-batches as the first.
        letters = "".join(a.kind for a in actions)
        assert letters.index("I") == min(p - rank, m)
        assert letters[: letters.index("W")].count("I") == min(rank + 1, m)
        assert letters.count("F") == letters.count("I") == letters.count("W") == m


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_once(name):
    p, v, m = 4, 1 if SCHEDULES[name].most_virtual == 1 else 2, 8
    schedule = make(name, p, v, m)
    actions = [a for rank in schedule.ranks for a in rank]
    assert len(actions) == len(set(actions))
    kinds = {kind: {(a.stage, a.micro_batch) for a in actions if a.kind is kind} for kind in Kind}
    every = {(stage, i) for stage in range(p * v) for i in range(m)}
    assert kinds[Kind.FORWARD] == every
    assert kinds[Kind.BACKWARD] | kinds[Kind.INPUT_GRADIENT] == every
    assert not kinds[Kind.BACKWARD] & kinds[Kind.INPUT_GRADIENT]
    assert kinds[Kind.WEIGHT_GRADIENT] == kinds[Kind.INPUT_GRADIENT]


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "words"),
    [
        ("1F1B", 2, 2, 4, ["virtual_stages_per_rank = 2", "Interleaved1F1B"]),
        ("Interleaved1F1B", 2, 1, 4, ["virtual_stages_per_rank = 1"]),
        ("Interleaved1F1B", 1, 2, 4, ["pipeline_parallel_degree"]),
        ("Interleaved1F1B", 2, 2, 7, ["7 micro-batches", "valid micro-batches: 4, 6, 8"]),
        (
            "InterleavedZeroBubble",
            2,
            2,
            7,
            ["InterleavedZeroBubble", "7 micro-batches", "valid micro-batches: 4, 6, 8"],
        ),
        ("InterleavedZeroBubble", 1, 2, 4, ["InterleavedZeroBubble", "pipeline_parallel_degree"]),
        ("ZBVZeroBubble", 2, 3, 4, ["virtual_stages_per_rank = 3", "ZBVZeroBubble", "valid: 2"]),
        ("ZBVZeroBubble", 1, 2, 4, ["ZBVZeroBubble", "pipeline_parallel_degree"]),
        ("DualPipeV", 4, 2, 7, ["pipeline_parallel_degree = 4", "up to 3", "ZBVZeroBubble"]),
        ("Chimera", 2, 1, 4, ["Chimera", "no such schedule"]),
    ],
)
def test_refused_with_the_reason(name, p, v, m, words):
    reason = illegal(name, p, v, m)
    assert reason is not None
    assert all(word in reason for word in words), reason
    with pytest.raises(BadInput):
        make(name, p, v, m)


def test_torch_asks_1f1b_for_a_micro_batch_of_each_rank():
    reason = illegal("1F1B", 4, 1, 3, in_torch=True)
    assert all(word in str(reason) for word in ("pipeline_parallel_degree = 4", "up to 3", "GPipe"))
    assert illegal("1F1B", 4, 1, 3) is None
    assert illegal("1F1B", 4, 1, 4, in_torch=True) is None
