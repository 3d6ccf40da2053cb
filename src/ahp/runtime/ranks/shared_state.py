"""The state that the launchers of changing nodes share through their store: torch's rendezvous keeps it there as a pickle."""

from __future__ import annotations

import pickle
import time
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from io import BytesIO
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token

from ahp.runtime.ranks.torch_compat import rendezvous_names

Found = TypeVar("Found", bound=tuple | None)
JOIN_SOON_S = 1
"""How long a round waits, again and again, for nodes that are on a list to join it: torch's handlers look once a second."""


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a node, as it is in the store and as torch's handler on this node gets it."""

    written: datetime
    """By the clock of that node."""
    read_as: datetime
    """By the clock of this one."""
    at_s: float
    """When this node first read it (``time.monotonic``)."""


class CheckedState(C10dRendezvousBackend):
    """A state whose pickle may name only the classes of such a state, and that begins no round without the nodes that wait for it.

    torch compares a heartbeat, by the clock of the node that wrote it, with the clock of the node that reads it: of two nodes whose clocks
    differ by more than a heartbeat may be late, each would be gone for the other. Here a reader gets the time at which it first read a heartbeat,
    by its own clock, and the store keeps what the writer wrote.
    """

    def __init__(self, store: dist.Store, run_id: str, most: int, look: Callable[[], None] = lambda: None) -> None:
        """``most``: how many nodes a round takes; ``look``: called before each use of the state, may raise."""
        super().__init__(store, run_id)
        self.most, self.look = most, look
        self._heartbeats: dict[Any, Heartbeat] = {}

    def get_state(self) -> tuple[bytes, Token] | None:
        self.look()
        return self._by_own_clock(_checked(super().get_state()))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        self.look()
        written = self._as_written(self._with_those_that_wait(state, token))
        return self._by_own_clock(_checked(super().set_state(written, token)))

    def _by_own_clock(self, found: Found) -> Found:
        """What was read, with heartbeats by this node's clock."""
        if found is None:
            return found
        state, now, now_s = _loaded(found[0]), datetime.now(UTC), time.monotonic()
        heartbeats = {}
        for node, written in state.last_heartbeats.items():
            before = self._heartbeats.get(node)
            at_s = before.at_s if before is not None and before.written == written else now_s
            heartbeats[node] = Heartbeat(written, now - timedelta(seconds=now_s - at_s), at_s)
        self._heartbeats = heartbeats
        state.last_heartbeats = {node: one.read_as for node, one in heartbeats.items()}
        return (pickle.dumps(state), *found[1:])  # type: ignore[return-value]

    def _as_written(self, state: bytes) -> bytes:
        """``state``, with the heartbeats that this node has only read as their nodes wrote them."""
        after = _loaded(state)
        for node, one in self._heartbeats.items():
            if after.last_heartbeats.get(node) == one.read_as:
                after.last_heartbeats[node] = one.written
        return pickle.dumps(after)

    def _with_those_that_wait(self, state: bytes, token: Token | None) -> bytes:
        """``state``, which would replace the one in ``token``; if that would begin a round without nodes that wait for a place, while there
        are places, the round stays open. On a busy machine they may look for it only after its last call. torch takes nodes that are not
        heard of from its lists."""
        after = _loaded(state)
        if not after.complete or len(after.participants) >= self.most or not after.wait_list | after.redundancy_list:
            return state
        if token is not None and _loaded(b64decode(token)).complete:
            return state  # it had begun before they came
        after.complete, after.deadline = False, datetime.now(UTC) + timedelta(seconds=JOIN_SOON_S)
        return pickle.dumps(after)


def _checked(found: Found) -> Found:
    if found is not None:
        try:
            _loaded(found[0])
        except pickle.UnpicklingError as error:
            raise RendezvousStateError(str(error)) from error
    return found


def _loaded(state: bytes) -> Any:
    return _StateOnly(BytesIO(state)).load()


class _StateOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        known = {
            (cls.__module__, cls.__qualname__): cls for cls in (*rendezvous_names(), datetime, timedelta, timezone)
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(
                f"the state of the rendezvous names {module}.{name}, which could run when it is read"
            )
        return known[module, name]
