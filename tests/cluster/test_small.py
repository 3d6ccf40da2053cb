"""The smallest training step: its operators are counted as the graph counts them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ahp.cluster.small import NUM_OPERATORS, ROWS, WIDTH, SmallStep

VIEWS = {"aten.t", "aten.detach", "aten.expand", "aten.view"}


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func.overloadpacket) not in VIEWS
        return func(*args, **(kwargs or {}))


def test_the_operators_of_a_step() -> None:
    step, x = SmallStep(), torch.randn(ROWS, WIDTH, requires_grad=True)
    with Counting() as counting:
        step.run(x)
    assert counting.count == NUM_OPERATORS
    assert all(p.grad is None for p in [x, *step.parameters()])
