"""The shortest schedule there is, of a few actions: to know how far what is found is from it."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ahp.schedule.synthesis.problem import Problem

Op = tuple[str, int, int]
"""Letter, stage and micro-batch of an action."""


def shortest_s(problem: Problem, *, split: bool, time_limit_s: float = 60.0) -> float | None:
    """Seconds of the shortest schedule whose backwards are all apart (``split``) or all whole; None where time was too short.

    An integer program (arXiv 2401.10241, appendix G): when each action starts, and of each two on a rank which is first.
    For some 30 actions. What runs beside the computation is left out, and so is what comes once a step.
    """
    program = _Program(problem, split)
    solved = milp(
        c=program.cost(),
        constraints=program.constraints(),
        integrality=np.array([0] * program.num_times + [1] * len(program.orders)),
        bounds=Bounds(0, program.most()),
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
    )
    return float(solved.fun) if solved.status == 0 else None


class _Program:
    """Variables: the start of each action, the end of all, and 1 for each pair whose first comes first."""

    def __init__(self, problem: Problem, split: bool) -> None:
        self.problem, self.split = problem, split
        self.letters = "FIW" if split else "FB"
        stages, m = range(problem.num_stages), range(problem.num_micro_batches)
        self.ops: dict[Op, int] = {}
        for op in ((letter, s, k) for s in stages for k in m for letter in self.letters):
            self.ops[op] = len(self.ops)
        self.num_times = len(self.ops) + 1
        self.horizon_s = sum(self._seconds(op) for op in self.ops) + problem.num_micro_batches * sum(
            t.send_forward_s + t.send_backward_s for t in problem.times
        )
        self.orders: dict[tuple[Op, Op], int] = {}
        for own in problem.stages_of:
            mine = [op for op in self.ops if op[1] in own]
            for number, a in enumerate(mine):
                for b in mine[number + 1 :]:
                    if not (self._always(a, b) or self._always(b, a)):
                        self.orders[a, b] = self.num_times + len(self.orders)
        self.rows: list[dict[int, float]] = []
        self.least: list[float] = []
        self._precedence()
        self._one_at_a_time()
        self._memory()

    def cost(self) -> Any:
        """The end of all."""
        cost = np.zeros(self.num_times + len(self.orders))
        cost[self.num_times - 1] = 1.0
        return cost

    def most(self) -> Any:
        """The largest value of each variable."""
        return np.array([inf] * self.num_times + [1.0] * len(self.orders))

    def constraints(self) -> LinearConstraint:
        """Rows that are at least ``least``."""
        rows = [r for r, row in enumerate(self.rows) for _ in row]
        columns = [column for row in self.rows for column in row]
        values = [value for row in self.rows for value in row.values()]
        shape = (len(self.rows), self.num_times + len(self.orders))
        least: Any = np.array(self.least)
        return LinearConstraint(csr_array((values, (rows, columns)), shape=shape), least, inf)

    def _seconds(self, op: Op) -> float:
        t = self.problem.times[op[1]]
        return {"F": t.forward_s, "B": t.backward_s, "I": t.input_gradient_s, "W": t.weight_gradient_s}[op[0]]

    def _always(self, a: Op, b: Op) -> bool:
        """Whether ``a`` comes before ``b`` in every schedule: of one stage, letters and micro-batches in order."""
        letters = self.letters
        return a != b and a[1] == b[1] and letters.index(a[0]) <= letters.index(b[0]) and a[2] <= b[2]

    def _after(
        self, a: Op, b: Op, more_s: float = 0.0, unless: dict[int, float] | None = None, slack_s: float = 0.0
    ) -> None:
        """``b`` starts when ``a`` has ended and ``more_s`` has passed."""
        self.rows.append({self.ops[b]: 1.0, self.ops[a]: -1.0} | (unless or {}))
        self.least.append(self._seconds(a) + more_s - slack_s)

    def _precedence(self) -> None:
        problem, back = self.problem, self.letters[1]
        end = self.num_times - 1
        for letter, s, k in self.ops:
            op = letter, s, k
            self.rows.append({end: 1.0, self.ops[op]: -1.0})
            self.least.append(self._seconds(op))
            if k:
                self._after((letter, s, k - 1), op)
            if letter != "F":
                self._after((self.letters[self.letters.index(letter) - 1], s, k), op)
            if letter == "F" and s:
                self._after(("F", s - 1, k), op, problem.times[s - 1].send_forward_s)
            if letter == back and s < problem.num_stages - 1:
                self._after((back, s + 1, k), op, problem.times[s + 1].send_backward_s)

    def _one_at_a_time(self) -> None:
        for (a, b), column in self.orders.items():
            self._after(a, b, unless={column: -self.horizon_s}, slack_s=self.horizon_s)
            self._after(b, a, unless={column: self.horizon_s})

    def _memory(self) -> None:
        """At each forward, what is kept of those before it and of itself is not more than there is."""
        problem = self.problem
        for own, memory in zip(problem.stages_of, problem.memory_bytes, strict=True):
            mine = [op for op in self.ops if op[1] in own]
            for b in mine:
                if b[0] != "F" or memory == inf:
                    continue
                row: dict[int, float] = {}
                free = memory * (1 + 1e-9) - problem.kept_bytes[b[1]]
                for a in mine:
                    more = self._more_bytes(a)
                    if self._always(a, b):
                        free -= more
                    elif (a, b) in self.orders:
                        row[self.orders[a, b]] = -more
                    elif (b, a) in self.orders:
                        row[self.orders[b, a]] = more
                        free -= more
                self.rows.append(row)
                self.least.append(-free)

    def _more_bytes(self, op: Op) -> float:
        kept, freed = self.problem.kept_bytes[op[1]], self.problem.freed_bytes[op[1]]
        return {"F": kept, "B": -kept, "I": -freed, "W": freed - kept}[op[0]]
