"""Notices about a run's steps, printed on stderr and kept in status.json: slow ranks, with what another plan would gain, and spikes of the
loss."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from ahp.plan import Plan
from ahp.run_files import Status
from ahp.runtime.host_copy import HostCopy
from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.loss_spikes import LossSpikes
from ahp.runtime.run.slow_plan import CLUSTER, SlowPlan
from ahp.runtime.run.slow_ranks import SlowRanks


class Notices:
    """All ranks call its methods; the first rank writes."""

    def __init__(self, plan: Plan, folder: RunFolder, ranks: Ranks) -> None:
        self.plan, self.folder, self.ranks = plan, folder, ranks
        self.slow_ranks = SlowRanks(plan, ranks)
        self.spikes = LossSpikes(plan.job.optimizer.warmup_steps)
        self.searching: SlowPlan | None = None
        self.gains: dict[int, dict[str, Any]] = {}
        """What a plan that accounts for a slow rank would gain, keyed by rank."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.searching is not None:
            self.searching.close()

    def begin(self) -> None:
        """Take in the records of earlier steps from metrics.jsonl. First rank only."""
        self.spikes.read(self.folder.metrics())
        self._keep()

    def step(self, data_wait_s: float) -> AbstractContextManager[None]:
        """The context that a step runs in."""
        return self.slow_ranks.step(data_wait_s)

    def exchanged(self) -> HostCopy | None:
        """The numbers that ranks exchange after the step just taken; None if they exchange none. Collective."""
        return self.slow_ranks.exchanged()

    def after(self, record: dict[str, Any], exchanged: HostCopy | None) -> dict[str, bool]:
        """Fields to add to the record of a finished step. Collective."""
        step = record["step"]
        changed = self.slow_ranks.after(step, exchanged, self._note)
        if not self.ranks.is_first:
            return {}
        marks = self.spikes.after(record)
        if news := self.spikes.news(step):
            self._note(news)
        if self._planned() or marks or changed:
            self._keep()
            self.folder.write_status(Status("running", step))
        return marks

    def _planned(self) -> bool:
        """Search for a plan for one slow rank after the other, while training goes on. Returns whether a search has ended."""
        slow, over = self.slow_ranks.standing, False
        if self.searching is not None and (found := self.searching.read()) is not None:
            rank, over = self.searching.rank, True
            self.searching.close()
            self.searching, self.gains[rank] = None, found
            how = "" if "error" in found else f"; plan again with: --cluster {self.folder.path / CLUSTER}"
            self._note(f"rank {rank}: {found.get('words', found.get('error'))}{how}")
        if self.searching is None and self.plan.cluster is not None:
            new = [one for rank, one in sorted(slow.items()) if rank not in self.gains]
            if new:
                self.searching = SlowPlan(self.folder, new[0].rank, new[0].ratio, new[0].reason)
        return over

    def _keep(self) -> None:
        slow = [{**one, "plan": self.gains.get(one["rank"])} for one in self.slow_ranks.plain]
        self.folder.noticed = {"slow_ranks": slow, "loss_spikes": self.spikes.kept}

    def _note(self, text: str) -> None:
        if self.ranks.is_first:
            self.folder.note(text)
