"""Lets the workers of a launcher agree before any process group is made.

The first worker probes, searches and tokenizes for all, for minutes or hours. In a collective the others would wait for it no longer than the
time limit; here they wait on a key of the launcher's store for as long as it is alive, which it shows by counting up another key.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter

from ahp.config import COLLECTIVE_TIMEOUT_S
from ahp.errors import AhpError, first_line
from ahp.runtime.ranks.beside import looking
from ahp.runtime.ranks.meeting import NoAnswer
from ahp.runtime.ranks.torch_compat import default_store, launchers_store

Result = TypeVar("Result")
READ_S = 10.0
"""[Empirical] Workers that wait for a key see it within a second."""
HEARTBEAT_S = 5.0
SILENT_S = 120.0
"""[Empirical] A worker that has not counted up for this long has ended. The thread that counts needs the interpreter now and then, which
a worker's compiled code can hold for seconds."""


class Preparation:
    """One start of this worker among the others. All workers call every method."""

    def __init__(
        self,
        place: tuple[dist.Store, int, int] | None = None,
        *,
        what: str = "prepared the run",
        heartbeat_s: float = HEARTBEAT_S,
        silent_s: float = SILENT_S,
    ) -> None:
        """``place``: a store that all workers share, this worker's number and the number of workers; None = from the process group or the
        launcher. ``what``: what workers do in the meantime, in words."""
        if place is None and dist.is_initialized():
            place = default_store(), dist.get_rank(), dist.get_world_size()
        with _answering():
            self.store, self.rank, self.size = place or launchers_store()
            # A process can prepare more than once, all workers equally often.
            turn = self.store.add(f"ahp/preparation/{self.rank}", 1)
        self.heartbeat_s, self.silent_s = heartbeat_s, silent_s
        self.what = what
        self.name = f"ahp/preparation/{turn}"
        self.num_settled = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def decided_by_first(self, decide: Callable[[], Result], kind: Any = None) -> Result:
        """Let the first worker decide, however long it takes, and return the decision on every worker.

        ``kind``: the type of the decision, made of dataclasses and pydantic models; None = nothing. It goes through the store as JSON,
        because anyone who reaches a store can write to it, and unpickling that would run their code.

        If this ends in an error, the first worker raises it, and the others end with its exit code: the user sees it once. Raises NoAnswer
        if the first worker ends without a result.
        """
        key = self._next()
        if self.is_first:
            try:
                result = self._alive(key, decide)
            except BaseException:
                self._until_read(key)
                raise
            self._leave(key, TypeAdapter(kind).dump_json(result).decode())
            return result
        result, exit_code = self._left(0, key)
        with _answering():
            self.store.add(f"{key}/read", 1)
        if exit_code:
            raise SystemExit(exit_code)
        return TypeAdapter(kind).validate_json(result)

    def done_by_all(self, work: Callable[[], Result]) -> Result:
        """Let every worker work, however long it takes; none goes on before all are done. Errors end as in ``decided_by_first``."""
        key = self._next()

        results: list[Result] = []

        def until_all_are_done() -> None:
            results.append(work())
            for rank in range(1, self.size):
                said, exit_code = self._left(rank, f"{key}/{rank}")
                if exit_code:
                    why = NoAnswer(f"worker {rank} ended while it {self.what}: {said or 'its log says why'}")
                    why.exit_code = exit_code
                    raise why

        if self.is_first:
            self.decided_by_first(until_all_are_done)
            return results[0]
        try:
            result = self._alive(f"{key}/{self.rank}", work)
        except BaseException:
            with suppress(RuntimeError):
                self.store.add(f"{self._next()}/read", 1)  # this worker does not wait for the first one's decision
            raise
        self._leave(f"{key}/{self.rank}")
        self.decided_by_first(lambda: None)
        return result

    def _next(self) -> str:
        self.num_settled += 1
        return f"{self.name}/{self.num_settled}"

    def _leave(self, key: str, result: str = "", exit_code: int = 0) -> None:
        with _answering():
            self.store.set(key, json.dumps([result, exit_code]))

    def _left(self, rank: int, key: str) -> tuple[str, int]:
        result, exit_code = json.loads(self._await(rank, key))
        return result, exit_code

    def _until_read(self, key: str) -> None:
        """Wait for the others to read the cause, before this worker ends, and with it the store if no launcher keeps one."""
        began_s = time.monotonic()
        with suppress(RuntimeError):  # the store is gone: nobody reads
            while self.store.add(f"{key}/read", 0) < self.size - 1 and time.monotonic() - began_s < READ_S:
                time.sleep(0.05)

    def _alive(self, key: str, work: Callable[[], Result]) -> Result:
        """Work while a thread shows that this worker lives. The exit code of an error is stored under the key."""
        with self._heartbeats():
            try:
                return work()
            except BaseException as error:
                code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)
                with suppress(NoAnswer):  # its own error says more
                    said = str(error) if isinstance(error, AhpError) else ""
                    self._leave(key, said, exit_code=code if isinstance(code, int) and code else 1)
                raise

    @contextmanager
    def _heartbeats(self) -> Iterator[None]:
        with _answering():
            self.store.set(f"{self.name}/host/{self.rank}", socket.gethostname())
            self._count(self.rank, 1)

        def count() -> bool:
            with suppress(RuntimeError):
                self._count(self.rank, 1)
                return False
            return True  # the store is gone: nobody listens

        with looking(count, every_s=self.heartbeat_s):
            yield

    def _count(self, rank: int, more: int) -> int:
        return self.store.add(f"{self.name}/alive/{rank}", more)

    def _await(self, rank: int, key: str) -> bytes:
        """The value that a worker leaves under the key, however late, as long as that worker lives."""
        beats, heard_s = 0, time.monotonic()
        while True:
            try:
                self.store.wait([key], timedelta(seconds=2 * self.heartbeat_s))
                return self.store.get(key)
            except RuntimeError:  # not there yet; or the store itself is gone, which the next line finds out
                found = self._heard(rank)
            if found != beats:
                beats, heard_s = found, time.monotonic()
            # A worker that has not begun may still be loading its libraries.
            elif time.monotonic() - heard_s > (self.silent_s if beats else COLLECTIVE_TIMEOUT_S):
                host = self.store.get(f"{self.name}/host/{rank}").decode() if beats else "an unknown host"
                raise NoAnswer(
                    f"worker {rank} on {host} was not heard of for {time.monotonic() - heard_s:.0f} s while it {self.what}; its "
                    "log says where it hangs or why it ended"
                )

    def _heard(self, rank: int) -> int:
        with _answering():
            return self._count(rank, 0)


@contextmanager
def _answering() -> Iterator[None]:
    """Raises NoAnswer if the store no longer answers inside the block."""
    try:
        yield
    except RuntimeError as error:
        raise NoAnswer(
            f"the store that workers find each other by is gone, and so is the process that kept it: {first_line(error)}"
        ) from None
