"""Whatever order of actions can run, its messages can: no rank waits in a circle, and what cannot run is named."""

from collections.abc import Sequence
from random import Random

import pytest

from ahp.errors import BadInput
from ahp.schedule.actions import Action, Kind, Schedule
from ahp.schedule.legal import why_not
from ahp.schedule.messages import Message, Step, waiting, with_messages
from ahp.schedule.orders import order_text, read_order
from ahp.schedule.patterns import illegal, make
from ahp.schedule.registry import SCHEDULES

from .random_orders import random_order, random_placement


@pytest.mark.slow
def test_thousands_of_random_orders_end():
    random = Random(0)
    for _ in range(3000):
        p, m = random.randint(1, 5), random.randint(1, 6)
        placement = random_placement(random, p, random.randint(p, 3 * p))
        schedule = random_order(random, placement, m, split=random.choice((0.0, 0.5, 1.0)))
        assert why_not(schedule) is None
        steps = with_messages(schedule)
        assert why_stuck(schedule, steps) is None
        assert tuple(tuple(a for a in rank if isinstance(a, Action)) for rank in steps) == schedule.ranks


@pytest.mark.parametrize("receives_first", [False, True])
def test_ends_of_messages_stand_in_the_same_order_on_both_ranks(receives_first):
    random = Random(1)
    for _ in range(300):
        placement = random_placement(random, 3, 6)
        schedule = random_order(random, placement, 4)
        between: dict[tuple[int, int], tuple[list[Message], list[Message]]] = {}
        for rank, steps in enumerate(with_messages(schedule, receives_first=receives_first)):
            for step in steps:
                if isinstance(step, Message):
                    sends = step.kind.startswith("SEND")
                    other = placement[step.stage + (1 if step.kind in ("SEND_F", "RECV_B") else -1)]
                    pair = (rank, other) if sends else (other, rank)
                    between.setdefault(pair, ([], []))[0 if sends else 1].append(step)
        for sent, received in between.values():
            forward = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
            expected = [Message(forward[s.kind][0], s.stage + forward[s.kind][1], s.micro_batch) for s in sent]
            assert received == expected


def test_receives_come_first_and_all_else_stays_in_its_order():
    random = Random(4)
    for _ in range(100):
        schedule = random_order(random, random_placement(random, 3, 6), 4)
        for usual, early in zip(with_messages(schedule), with_messages(schedule, receives_first=True), strict=True):
            receives, others = (
                [step for step in usual if (isinstance(step, Message) and "RECV" in step.kind) is first]
                for first in (True, False)
            )
            assert early == (*receives, *others)


def test_messages_that_wait_are_those_of_the_order_that_runs():
    random, patterns = Random(7), [(name, 3, v, 6) for name in SCHEDULES for v in (1, 2)]
    orders = [random_order(random, random_placement(random, 3, 6), 4, split=split) for split in (0.0, 1.0) * 40]
    for schedule in [*orders, *(make(*pattern) for pattern in patterns if illegal(*pattern) is None)]:
        assert waiting(schedule) == tuple(map(most_asked_for, with_messages(schedule)))


def most_asked_for(steps: Sequence[Step]) -> int:
    """The most messages that a rank has asked for at once and not read yet."""
    most, waits = 0, set[tuple[bool, int, int]]()
    for step in steps:
        if isinstance(step, Action):
            waits.discard((step.kind is Kind.FORWARD, step.stage, step.micro_batch))
        elif step.kind.startswith("RECV"):
            waits.add((step.kind == "RECV_F", step.stage, step.micro_batch))
            most = max(most, len(waits))
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_fixed_patterns_end(name):
    for p, v, m in ((2, 1, 4), (4, 1, 8), (2, 2, 4), (4, 2, 8), (3, 3, 6)):
        if illegal(name, p, v, m) is None:
            schedule = make(name, p, v, m)
            assert why_not(schedule) is None
            assert why_stuck(schedule, with_messages(schedule)) is None


def test_sends_that_wait_for_each_other_are_found():
    # Two ranks that both send first: what an order of messages made for each rank by itself can do.
    schedule = make("1F1B", 2, 1, 2)
    ranks = [list(rank) for rank in with_messages(schedule)]
    first = ranks[0].index(Message("SEND_F", 0, 1))
    second = ranks[0].index(Message("RECV_B", 0, 0))
    ranks[0][first], ranks[0][second] = ranks[0][second], ranks[0][first]
    if abs(first - second) == 1:  # rank 0 would receive a gradient first, rank 1 an input
        assert "wait for each other" in str(why_stuck(schedule, ranks))
    else:
        pytest.fail(f"the messages are not neighbours: {first}, {second}")


def test_an_order_is_what_it_was_when_it_is_read():
    random = Random(2)
    for _ in range(50):
        schedule = random_order(random, random_placement(random, 3, 5), 3)
        assert read_order("random", order_text(schedule)) == schedule


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["0F0,0B0", "1F0,1X0"], "'1X0' is no action"),
        (["0F0,0B0", "1F0,0F1"], "stage 0 is on rank 0, not on 1"),
        (["0F0,0B0", "2F0,2B0"], "stage 1 has no action"),
        (["0F0,0F0,0B0", "1F0,1B0"], "0F0 comes twice"),
        (["0F0,0B0,0F1,0B1", "1F0,1B0"], "1F1 is missing"),
        (["0F0,0I0", "1F0,1B0"], "needs either B, or I and W"),
        (["0F0,0B0,0I0,0W0", "1F0,1B0"], "needs either B, or I and W"),
        (["0B0,0F0", "1F0,1B0"], "wait for each other at 0B0, 1F0"),
        (["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"], "wait for each other at 0B0, 1F1"),
        (["0F0,0W0,0I0"], "wait for each other at 0W0"),
        ([], "stage 0 has no action"),
    ],
)
def test_orders_that_cannot_run_are_refused(lines, words):
    with pytest.raises(BadInput) as refused:
        read_order("wrong", lines)
    assert words in str(refused.value)


def test_every_swap_that_breaks_an_order_is_found():
    """A swap of two neighbours breaks an order exactly where the second needs the first, or the ranks then wait in a circle."""
    random = Random(3)
    broken = 0
    for _ in range(300):
        schedule = random_order(random, random_placement(random, 2, 4), 2)
        rank = random.randrange(2)
        order = list(schedule.ranks[rank])
        at = random.randrange(len(order) - 1)
        order[at], order[at + 1] = order[at + 1], order[at]
        swapped = Schedule("swapped", 4, 2, tuple(tuple(order) if r == rank else o for r, o in enumerate(schedule.ranks)),
                           schedule.stage_rank)  # fmt: skip
        reason = why_not(swapped)
        first, second = order[at + 1], order[at]
        if first.stage == second.stage and first.micro_batch == second.micro_batch:
            assert reason is not None
        if reason is None:
            assert why_stuck(swapped, with_messages(swapped)) is None
        broken += reason is not None
    assert 10 < broken < 290


def why_stuck(schedule: Schedule, ranks: Sequence[Sequence[Step]]) -> str | None:
    """Where ranks that run these steps wait in a circle, or None: the harshest reading, each step one after the other.

    A send ends when the other rank comes to its receive. Real ranks start both and go on, which waits no more than that.
    """
    places, done = [0] * len(ranks), set[tuple[str, int, int]]()
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(ranks):
            while places[rank] < len(steps):
                step = steps[places[rank]]
                if isinstance(step, Action):
                    if not all(need in done for need in _inputs(schedule, step)):
                        break
                    done.add((str(step.kind), step.stage, step.micro_batch))
                else:
                    if step.kind.startswith("RECV"):
                        break  # its sender takes both on
                    receive = _other_end(step)
                    to = schedule.stage_rank[receive.stage]
                    if places[to] == len(ranks[to]) or ranks[to][places[to]] != receive:
                        break
                    done.add((receive.kind, receive.stage, receive.micro_batch))
                    places[to] += 1
                places[rank] += 1
                moved = True
    stuck = [str(steps[place]) for steps, place in zip(ranks, places, strict=True) if place < len(steps)]
    return f"ranks wait for each other at {', '.join(stuck)}" if stuck else None


def _other_end(send: Message) -> Message:
    forward = send.kind == "SEND_F"
    return Message("RECV_F" if forward else "RECV_B", send.stage + (1 if forward else -1), send.micro_batch)


def _inputs(schedule: Schedule, action: Action) -> list[tuple[str, int, int]]:
    """What must be done on the action's own rank before it: messages received, or actions of a neighbour that lies there too."""
    stage, i, last = action.stage, action.micro_batch, schedule.num_stages - 1
    holder = schedule.stage_rank
    if action.kind is Kind.WEIGHT_GRADIENT:
        return [("I", stage, i)]
    if action.kind is Kind.FORWARD:
        if stage == 0:
            return []
        return [("F", stage - 1, i) if holder[stage - 1] == holder[stage] else ("RECV_F", stage, i)]
    needs: list[tuple[str, int, int]] = [("F", stage, i)]
    if stage < last:
        needs.append(
            _gradient_of(schedule, stage + 1, i) if holder[stage + 1] == holder[stage] else ("RECV_B", stage, i)
        )
    return needs


def _gradient_of(schedule: Schedule, stage: int, micro_batch: int) -> tuple[str, int, int]:
    whole = Action(Kind.BACKWARD, stage, micro_batch) in schedule.ranks[schedule.stage_rank[stage]]
    return ("B" if whole else "I", stage, micro_batch)
