"""Orders of actions drawn at random that can run: on looped stages, stages on a V and any others."""

from random import Random

from ahp.schedule.actions import Action, Kind, Schedule


def random_placement(random: Random, p: int, stages: int) -> tuple[int, ...]:
    """Stages on ranks, each rank with one at least."""
    looped = tuple(s % p for s in range(stages))
    down_and_up = tuple(min(s % (2 * p), 2 * p - 1 - s % (2 * p)) for s in range(stages))
    mixed = list(range(p)) + [random.randrange(p) for _ in range(stages - p)]
    random.shuffle(mixed)
    return random.choice((looped, down_and_up, tuple(mixed)))


def random_order(random: Random, stage_rank: tuple[int, ...], m: int, *, split: float = 0.5) -> Schedule:
    """Any action that can run comes next, micro-batches in any order; a part ``split`` of the backwards is apart."""
    stages = len(stage_rank)
    ranks: list[list[Action]] = [[] for _ in range(max(stage_rank) + 1)]
    ready = [Action(Kind.FORWARD, 0, i) for i in range(m)]
    while ready:
        action = ready.pop(random.randrange(len(ready)))
        ranks[stage_rank[action.stage]].append(action)
        s, i = action.stage, action.micro_batch
        gradient = Kind.INPUT_GRADIENT if random.random() < split else Kind.BACKWARD
        if action.kind is Kind.FORWARD:
            ready.append(Action(Kind.FORWARD, s + 1, i) if s < stages - 1 else Action(gradient, s, i))
        elif action.kind is not Kind.WEIGHT_GRADIENT:
            if s:
                ready.append(Action(gradient, s - 1, i))
            if action.kind is Kind.INPUT_GRADIENT:
                ready.append(Action(Kind.WEIGHT_GRADIENT, s, i))
    return Schedule("random", stages, m, tuple(map(tuple, ranks)), stage_rank)


def with_losses_in_order(schedule: Schedule) -> Schedule:
    """The same with other numbers for its micro-batches: the last stage takes them in order, as torch asks."""
    last = schedule.num_stages - 1
    order = schedule.ranks[schedule.stage_rank[last]]
    taken = [a.micro_batch for a in order if a.kind is Kind.FORWARD and a.stage == last]
    number = {old: new for new, old in enumerate(taken)}
    ranks = tuple(tuple(Action(a.kind, a.stage, number[a.micro_batch]) for a in rank) for rank in schedule.ranks)
    return Schedule(schedule.name, schedule.num_stages, schedule.num_micro_batches, ranks, schedule.stage_rank)
