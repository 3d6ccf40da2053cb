"""Nodes that come and go: torch's dynamic rendezvous over the nodes' own store, and the launcher of one node.

``ahp train CONFIG --nodes 2:4 --rendezvous HOST:PORT`` runs this on each node: torch's elastic launcher starts the same command once per
worker of the node, and its environment variables make each process a worker. If a node is lost, or another one comes, all workers are ended,
the workers that are there are counted again, and the first worker plans for that number.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from ahp.cluster.environment import COMPUTE
from ahp.cluster.most_workers import refuse_workers
from ahp.cluster.sense import physical_cores
from ahp.errors import AhpError, BadInput
from ahp.runtime.ranks import store_place
from ahp.runtime.ranks.environment import ROUND, gpu_variables
from ahp.runtime.ranks.launch import quiet_launcher, workers_of
from ahp.runtime.ranks.meeting import named
from ahp.runtime.ranks.saving_first import lives, workers_saving_first
from ahp.runtime.ranks.shared_state import CheckedState
from ahp.runtime.ranks.stopped import ending_stopped
from ahp.runtime.ranks.store_place import Address
from ahp.runtime.ranks.torch_compat import (
    nodes_heard_of,
    nodes_of_round,
    nodes_there,
    own_node,
    stop_heartbeats,
)
from ahp.runtime.ranks.watch import Watch, watching

BACKEND = "ahp-changing"
JOIN_S = 900
"""How long a node waits for the others; the same as for node 0 of a fixed number of nodes (``rendezvous.py``)."""
LAST_CALL_S = 5
"""How long the least number of nodes waits for more. Nodes that come later join too: workers save, and start again with them."""
KNOWN_CALL_S = 2
"""The same wait if all nodes that can come are known: nodes leave a round together, and check every second whether the next has begun."""
KEEP_ALIVE_S, MOST_MISSED = 1, 5
"""A launcher that misses this many intervals is gone: many short intervals reveal a dead launcher sooner than few long ones. torch has 5 s
and 3."""
LOOK_AGAIN_S = 1.1
"""Wait before a node counts as gone: a node that leaves a round is in no list until it waits for the next, and torch caches a read for 1 s."""
LEAVE_S = 10
"""How long the launcher that keeps the store waits for the others at the end."""
ENDED = "ahp/ended"
"""Key of the exit code with which all launchers are to end."""
GO_ON = "start the same command on each node again, and the run goes on from its newest checkpoint"
MONITOR_S = 0.5
"""Time between two looks of a launcher at its workers."""


class JobEnded(AhpError):
    """The job has ended, on this node or on all nodes."""

    def __init__(self, exit_code: int, message: str = "", *, elsewhere: bool = False) -> None:
        """``elsewhere``: another node's launcher knows why."""
        super().__init__(message)
        self.exit_code, self.elsewhere = exit_code, elsewhere


def end_for_all(exit_code: int) -> None:
    """Make every launcher end with this code once its workers have ended. Called by a worker whose error a new start would meet again, and
    with 0 by the first worker of a run that is done."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(ENDED, str(exit_code))


class RoundStore(dist.PrefixStore):
    """The store of one round as torch's launcher gets it, which waits in it for the other launchers once its workers have ended well.

    torch's own wait holds the connection: heartbeats would stop, and the others would count this launcher as lost. It also waits 300 s for
    a launcher that is lost, and no longer for one whose worker still reports on the run.
    """

    def __init__(self, store: dist.Store, until_all_are_over: Callable[[], None]) -> None:
        super().__init__("launchers", store)
        self._until_all_are_over = until_all_are_over

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for the others, not for torch's keys: these are set only if no launcher is lost."""
        self._until_all_are_over()


class StoreLost(Exception):
    """The store of the launchers no longer answers: its node is gone, or the network to it."""

    then = "looking for another one"

    def __init__(self, address: Address, nodes: int) -> None:
        super().__init__(f"the launcher that kept the store at {address} is gone")
        self.address = address
        self.left: int | None = nodes - 1
        """How many nodes of the last round can come to the next store; None if unknown."""


class StoreElsewhere(StoreLost):
    """Another launcher keeps a store at an earlier address: a network was cut, is back, and both would wait for the other's node."""

    then = "meeting the others there"

    def __init__(self, address: Address, earlier: Address) -> None:
        Exception.__init__(self, f"the launcher that keeps the store at {earlier} is there again")
        self.address, self.left = address, None


class LastCall(RendezvousTimeout):
    """How long the rendezvous waits for nodes."""

    def __init__(self, *, all_known: bool) -> None:
        super().__init__(join=timedelta(seconds=JOIN_S))
        self.all_known = all_known
        """Whether all nodes that can come are there, or are known."""

    @property
    def last_call(self) -> timedelta:
        return timedelta(seconds=KNOWN_CALL_S if self.all_known else LAST_CALL_S)


class ChangingNodes(RendezvousHandler):
    """torch's dynamic rendezvous over a store on only one of the endpoint's addresses; the workers use that store too.

    torch's own rendezvous listens on every address, and unpickles what anyone leaves in its store.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        gone, left = parameters.config.get("gone", ()), parameters.config.get("left")
        self.report: Callable[[str], None] = parameters.config.get("report", _nobody)
        parameters.config.get("made", []).append(self)
        addresses = store_place.parse(parameters.endpoint)
        found = store_place.find(addresses, gone)
        self.store, self.address, self.is_host = found.store, found.address, found.is_host
        self.earlier = addresses[: addresses.index(found.address)] if found.is_host else ()
        """Addresses at which another launcher's store counts more than the one that this launcher keeps."""
        self.meets = False
        """Whether it waits for the nodes of a round."""
        self.lost = False
        self.ended: int | None = None
        """The exit code that a worker has given all launchers, as last read; None if none has. With 0 the run is done: workers that are left only
        report on it, and nothing starts again."""
        self.round = self.number = self.nodes = 0
        self.members: dict[Any, tuple[int, str]] = {}
        """The nodes of this round, with their numbers and addresses."""
        self.workers: int = parameters.config.get("workers", 1)
        """Number of workers on this node."""
        self.waits = LastCall(all_known=left is not None and left <= parameters.min_nodes)
        self.torchs = DynamicRendezvousHandler.from_backend(
            parameters.run_id,
            self.store,
            CheckedState(self.store, parameters.run_id, parameters.max_nodes, self._look_for_an_earlier_store),
            parameters.min_nodes,
            parameters.max_nodes,
            parameters.local_addr,
            self.waits,
            KEEP_ALIVE_S,
            MOST_MISSED,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises JobEnded if a worker has called ``end_for_all`` or the others have left, StoreLost if the store is gone."""
        try:
            self._refuse_what_has_ended()
            self.meets = True
            try:
                with _no_store_of_torchs():
                    found = self.torchs.next_rendezvous()
            finally:
                self.meets = False
            if found.rank == 0:
                found.store.set("ahp/round", str(self.store.add("ahp/rounds", 1)))
            self.round, self.number, self.nodes = int(found.store.get("ahp/round")), found.rank, found.world_size
            self.store.set(f"ahp/workers/{self.round}/{found.rank}", str(self.workers))
            self.members, self.waits.all_known = nodes_of_round(self.torchs), True
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:  # the latter on a spare node
            self._refuse_what_has_ended()
            reason = "the launcher of another node has ended the job, and says why there"
            raise JobEnded(1, reason, elsewhere=True) from error
        except (RendezvousConnectionError, dist.DistError) as error:
            raise self._store_lost() from error
        workers = RendezvousStoreInfo(self.address.host, self.address.port)
        store = RoundStore(found.store, self._until_all_are_over)
        return RendezvousInfo(store, found.rank, found.world_size, workers)

    def _look_for_an_earlier_store(self) -> None:
        """Raises StoreElsewhere if one answers while this launcher waits for nodes with its own store."""
        if not self.meets:
            return
        for address in self.earlier:
            if address.answers():
                self.lost = True
                raise StoreElsewhere(self.address, address)

    def _refuse_what_has_ended(self) -> None:
        if self._ended() is not None:
            raise self._end()

    def _end(self) -> JobEnded:
        assert self.ended is not None
        return JobEnded(self.ended, "" if self.ended else "the run is done")

    def _ended(self) -> int | None:
        """The exit code with which all launchers are to end; None while the job goes on."""
        with suppress(RuntimeError):  # the store is gone
            if self.store.check([ENDED]):
                self.ended = int(self.store.get(ENDED))
        return self.ended

    def _until_all_are_over(self) -> None:
        """Wait until every launcher of the round is here too, or has left the round: it is lost, or its worker failed as it reported on the run."""
        self.store.compare_set(ENDED, "", "0")  # the first worker may have gone before it could
        self.store.set(f"ahp/over/{self.round}/{self.number}", "")
        while not self._all_are_over():
            time.sleep(MONITOR_S)

    def _all_are_over(self) -> bool:
        self._waiting()  # reads the state
        if nodes_heard_of(self.torchs) is None:  # one that was over has closed the job
            return True
        there = [number for number, _ in nodes_of_round(self.torchs).values()]
        return self.store.check([f"ahp/over/{self.round}/{number}" for number in there])

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        """The run's id with the round, which all launchers count alike; they differ in how often they have started workers."""
        return f"{self.torchs.get_run_id()}{ROUND}{self.round}"

    def num_nodes_waiting(self) -> int:
        """How many nodes want to join, at least 1 if a node of this round is gone: then all start again, and this node's workers, which wait for
        it in vain, are killed at once. For a node that only leaves to wait for the next round, workers end by themselves; they may have to save.
        0 once the run is done, whatever becomes of the nodes and the store."""
        if self._ended() == 0:
            return 0
        waiting = self._waiting()
        if waiting and self._is_whole():
            self._let_workers_save()
        if not self._gone():
            return waiting
        time.sleep(LOOK_AGAIN_S)
        waiting, gone = self._waiting(), self._gone()
        if not gone:
            return waiting
        silent = f"been heard of for {KEEP_ALIVE_S * MOST_MISSED:g} s"
        if self._went_on_without_us():  # their status and log are not ours to write any more
            message = f"this node has not {silent} (stopped, or cut off), and the others went on; its workers are ended, and it joins again"
            print(message, file=sys.stderr, flush=True)
        else:
            who = "; ".join(f"{address}, {self._ranks(number)}" for number, address in gone)
            self.report(
                f"{'nodes' if len(gone) > 1 else 'a node'} of the run ({who}) {'have' if len(gone) > 1 else 'has'} not {silent}"
            )
        _end_workers()
        return max(1, waiting)

    def _went_on_without_us(self) -> bool:
        """Whether other nodes are there and this one is not."""
        there = nodes_heard_of(self.torchs)
        return bool(there) and own_node(self.torchs) not in there

    def _is_whole(self) -> bool:
        """Whether no node has left this round."""
        return self.members.keys() <= nodes_of_round(self.torchs).keys()

    def _let_workers_save(self) -> None:
        """Make room for another node: ask this node's workers to save and stop, and wait until they have. torch's launcher, which asks next, would
        kill them 30 s later. Once a node has left the round, workers may wait for it in vain; they get no more than these 30 s then."""
        workers = workers_of("ahp")
        for worker in workers:
            with suppress(psutil.Error):
                worker.terminate()
        while any(lives(worker) for worker in workers) and self._is_whole():
            time.sleep(MONITOR_S)
            self._waiting()  # reads the state

    def _waiting(self) -> int:
        try:
            return self.torchs.num_nodes_waiting()
        except RendezvousConnectionError as error:
            raise self._store_lost() from error

    def _gone(self) -> list[tuple[int, str]]:
        """Numbers and addresses of the nodes of this round that are no longer there and do not wait for the next round."""
        there = nodes_heard_of(self.torchs)
        return [] if there is None else [place for node, place in self.members.items() if node not in there]

    def _ranks(self, number: int) -> str:
        """The ranks of a node, in words: torch's launchers number workers node by node."""
        try:
            counts = [int(self.store.get(f"ahp/workers/{self.round}/{before}")) for before in range(number + 1)]
        except RuntimeError:
            return "ranks unknown, it went as it came"
        return named(range(sum(counts[:-1]), sum(counts)))

    def _store_lost(self) -> StoreLost | JobEnded:
        self.lost = True
        if self.ended is not None:  # the others have read it too, and left
            return self._end()
        # If only the store's process is gone, all workers finish their step and save. If its host is lost, they wait for it in vain.
        if workers_of("ahp") and not self.address.refuses():
            _end_workers()
        return StoreLost(self.address, self.nodes)

    def is_closed(self) -> bool:
        return self.torchs.is_closed()

    def set_closed(self) -> None:
        self.torchs.set_closed()

    def shutdown(self) -> bool:
        """Leave. The launcher that keeps the store waits for the others, spare nodes too, which have to read there how the job ended.

        torch's shutdown closes the job for all. A launcher that has lost the store must not: its network may be back, and the others go on.
        """
        if self.lost:
            stop_heartbeats(self.torchs)
            return True
        self._ended()
        well = self.torchs.shutdown()
        with suppress(RuntimeError):
            left, there = self.store.add("ahp/left", 1), max(self.nodes, nodes_there(self.torchs))
            began_s = time.monotonic()
            while self.is_host and left < there and time.monotonic() - began_s < LEAVE_S:
                time.sleep(0.1)
                left = self.store.add("ahp/left", 0)
        return well


def _end_workers() -> None:
    for worker in workers_of("ahp"):
        with suppress(psutil.Error):
            worker.kill()


@contextmanager
def _no_store_of_torchs() -> Iterator[None]:
    """Inside the block, torch's handler does not open another store, which would be on every address."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _nobody(why: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Node:
    """The settings of one node's launcher."""

    least: int
    most: int
    """The least and the most nodes that the job runs on."""
    endpoint: str
    """One address, or several separated by commas, in the order in which they keep the store."""
    workers: int
    """Number of workers on this node."""
    max_restarts: int
    log_folder: Path
    """Folder for torch's own notes of errors, which would otherwise go to the system's temporary folder."""
    watch: Watch
    """Decides when this node's workers hang."""
    report: Callable[[str], None] = _nobody
    """Called with the reason why workers of this node were ended, which they cannot report themselves."""


def launch(words: Sequence[str], node: Node) -> int:
    """Run ``python -m ahp WORDS`` as every worker of this node, again whenever workers fail or nodes come and go. Returns the exit code.

    Workers write where this process does. SIGINT, SIGTERM and SIGUSR1 reach them as SIGTERM; they save for as long as that takes. If the
    store is lost, the launchers that are left meet at the next address, or at the same one if there is no other and its node comes back.
    Raises BadInput for more workers than this machine carries, or an endpoint where nobody answers.
    """
    refuse_workers(f"--workers-per-node = {node.workers}", node.workers)
    rendezvous_handler_registry.register(BACKEND, ChangingNodes)
    threads = str(max(1, physical_cores() // node.workers))
    ours = {"OMP_NUM_THREADS": threads, **COMPUTE, **gpu_variables(os.environ)}
    os.environ.update({name: value for name, value in ours.items() if name not in os.environ})
    gone: list[Address] = []
    left: int | None = None
    while True:
        try:
            return _launch(words, node, gone, left)
        except StoreLost as lost:
            if len(gone) == node.max_restarts:
                raise JobEnded(1, _without_store(node, str(lost))) from lost
            gone.append(lost.address)
            left = lost.left
            print(f"{lost}; {lost.then}", file=sys.stderr, flush=True)
        except BadInput as error:
            if not gone:
                raise
            raise JobEnded(1, _without_store(node, str(error))) from error
        except RendezvousTimeoutError as error:
            few = f"fewer than {node.least} nodes (--nodes) came within {JOIN_S} s"
            raise JobEnded(1, _without_store(node, few)) from error
        except RendezvousError as error:
            raise JobEnded(1, _without_store(node, f"what it kept is damaged: {error}")) from error


def _without_store(node: Node, why: str) -> str:
    return f"--rendezvous {node.endpoint}: {why}; {GO_ON}"


def _launch(words: Sequence[str], node: Node, gone: Sequence[Address], left: int | None) -> int:
    """Like ``launch``, until the store is lost. ``gone``: addresses where it was lost, latest last; ``left``: how many nodes can come to the
    next store, None if unknown."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    made: list[ChangingNodes] = []
    config = LaunchConfig(
        min_nodes=node.least,
        max_nodes=node.most,
        nproc_per_node=node.workers,
        run_id="ahp",
        rdzv_backend=BACKEND,
        rdzv_endpoint=node.endpoint,
        rdzv_configs={"gone": gone[-1:], "left": left, "report": node.report, "workers": node.workers, "made": made},
        max_restarts=node.max_restarts,
        monitor_interval=MONITOR_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(node.log_folder)),
        # Our handlers are set below; torch's would kill the workers 30 s after the signal, saved or not.
        signals_to_handle="SIGQUIT",
    )

    def ours() -> list[psutil.Process]:
        return workers_of("ahp")

    try:
        with (
            quiet_launcher(),
            workers_saving_first(),
            ending_stopped(ours, node.watch.stopped_s, node.report),
            watching(node.watch, ours, node.workers, node.report),
        ):
            elastic_launch(config, sys.executable)("-m", "ahp", *words)
    except JobEnded as ended:
        if str(ended):
            raise
        return ended.exit_code  # a worker has reported the cause
    except SignalException as stopped:
        print(f"{stopped.sigval.name}: this node has left the run", file=sys.stderr, flush=True)
        return 128 + signal.Signals(stopped.sigval).value
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        code = next((code for code in codes.values() if code > 0), 1)
        if any(one.ended is not None for one in made):
            return code  # a worker has reported an error that a new start would meet again
        raise JobEnded(code, _not_again(node, codes)) from None
    return 0


def _not_again(node: Node, exit_codes: dict[int, int]) -> str:
    """Why this node's workers are not started again after they ended with these codes, keyed by rank."""
    killed = [
        f"rank {rank} was ended by {signal.Signals(-code).name}"
        for rank, code in sorted(exit_codes.items())
        if code < 0
    ]
    who = f"workers of this node failed ({'; '.join(killed) or 'they have said why'})"
    return f"{who}, and are not started again: run.elastic.max_restarts = {node.max_restarts}; {GO_ON}"
