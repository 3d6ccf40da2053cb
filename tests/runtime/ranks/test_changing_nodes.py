"""What launchers of changing nodes read of each other, and which launcher keeps the store."""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.utils.store import barrier

from ahp.errors import BadInput
from ahp.runtime.ranks import changing_nodes, shared_state, store_place
from ahp.runtime.ranks.changing_nodes import ENDED, KEEP_ALIVE_S, MOST_MISSED, ChangingNodes, JobEnded, StoreLost
from ahp.runtime.ranks.shared_state import CheckedState
from ahp.runtime.ranks.store_place import Address, is_here
from ahp.runtime.ranks.torch_compat import nodes_heard_of, rendezvous_names, stop_heartbeats
from ahp.runtime.ranks.watch import Watch
from tests.runtime.workers import free_port, listened_on


def meeting(port: int, least: int = 1, most: int = 2, **given: Any) -> ChangingNodes:
    place = f"127.0.0.1:{port}"
    return ChangingNodes(RendezvousParameters("ahp", place, "ahp", least, most, local_addr="127.0.0.1", **given))


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def test_a_state_that_would_run_code_is_refused(tmp_path: Path) -> None:
    store = dist.HashStore()
    backend = CheckedState(store, "ahp", 2)
    assert backend.get_state() is None
    store.set("torch.rendezvous.ahp", b64encode(pickle.dumps(Touch(tmp_path / "ran"))).decode())
    with pytest.raises(RendezvousStateError, match="which could run when it is read"):
        backend.get_state()
    assert not (tmp_path / "ran").exists()


def test_the_state_of_a_meeting_is_read() -> None:
    state_class, node_class = rendezvous_names()
    state, node = state_class(), node_class("host", 1, 0)
    state.participants, state.deadline = {node: 0}, datetime.now(UTC) + timedelta(seconds=3)
    state.wait_list.add(node)
    backend = CheckedState(dist.HashStore(), "ahp", 2)
    assert backend.set_state(pickle.dumps(state)) is not None
    found = backend.get_state()
    assert found is not None
    assert pickle.loads(found[0]).participants == {node: 0}


def test_a_node_with_another_clock_is_there_while_its_heartbeats_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's handler drops a node whose last heartbeat is older than the limit, by the reader's own clock."""
    state_class, node_class = rendezvous_names()
    here, behind = node_class("here", 1, 0), node_class("behind", 2, 0)
    hour, limit = timedelta(hours=1), timedelta(seconds=KEEP_ALIVE_S * MOST_MISSED)
    store, passed_s = dist.HashStore(), [0.0]
    monkeypatch.setattr(shared_state, "time", SimpleNamespace(monotonic=lambda: passed_s[0]))
    reader, writer = CheckedState(store, "ahp", 2), CheckedState(store, "ahp", 2)

    def beats() -> None:
        state = state_class()
        if (found := writer.get_state()) is not None:
            state = pickle.loads(found[0])
        state.last_heartbeats[behind] = datetime.now(UTC) - hour
        assert writer.set_state(pickle.dumps(state), None if found is None else found[1])

    def is_there() -> bool:
        found = reader.get_state()
        assert found is not None
        state, token = pickle.loads(found[0]), found[1]
        there = state.last_heartbeats[behind] >= datetime.now(UTC) - limit
        state.last_heartbeats[here] = datetime.now(UTC)  # what it writes says nothing new of the other node
        assert reader.set_state(pickle.dumps(state), token)
        return there

    for _ in range(3):
        beats()
        passed_s[0] += KEEP_ALIVE_S
        assert is_there()
    passed_s[0] += KEEP_ALIVE_S * MOST_MISSED - 2
    assert is_there()
    passed_s[0] += 3
    assert not is_there(), "no heartbeat for longer than the limit"
    beats()
    assert is_there()


@pytest.mark.parametrize("list_of", ["wait_list", "redundancy_list"])
def test_a_round_does_not_begin_without_a_node_that_waits_for_it(list_of: str) -> None:
    """A busy machine may wake it only after the last call; the others would start once more for it."""
    state_class, node_class = rendezvous_names()
    here, late = node_class("here", 1, 0), node_class("late", 2, 0)
    backend = CheckedState(dist.HashStore(), "ahp", 2)
    state = state_class()
    state.participants[here] = 0
    getattr(state, list_of).add(late)
    before = backend.set_state(pickle.dumps(state))
    assert before is not None
    state.complete = True
    found = backend.set_state(pickle.dumps(state), before[1])
    assert found is not None
    open_yet = pickle.loads(found[0])
    assert (found[2], open_yet.complete, open_yet.deadline > datetime.now(UTC)) == (True, False, True)
    getattr(state, list_of).clear()
    state.participants[late] = 1
    begun = backend.set_state(pickle.dumps(state), found[1])
    assert begun is not None
    assert pickle.loads(begun[0]).complete
    state.participants.popitem()
    getattr(state, list_of).add(late)  # comes while the round runs
    later = backend.set_state(pickle.dumps(state), begun[1])
    assert later is not None
    assert pickle.loads(later[0]).complete


@pytest.mark.slow
def test_two_launchers_meet_at_one_address_and_rounds_are_counted_alike() -> None:
    port, before = free_port(), listened_on()
    both = [meeting(port, least=2) for _ in range(2)]
    assert [one.is_host for one in both] == [True, False]
    for turn in (1, 2):
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(ChangingNodes.next_rendezvous, both))
        assert {info.rank for info in found} == {0, 1}
        assert [one.get_run_id() for one in both] == [f"ahp-round-{turn}"] * 2
        assert listened_on() - before == {f"127.0.0.1:{port}"}
    both[1].store.set(ENDED, "5")
    for one in both:
        with pytest.raises(JobEnded) as ended:
            one.next_rendezvous()
        assert ended.value.exit_code == 5
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ChangingNodes.shutdown, both))


@pytest.mark.slow
def test_a_store_that_is_gone_is_told_apart_from_a_job_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_place, "CALL_S", 1.0)
    port = free_port()
    host = meeting(port)
    host.next_rendezvous()
    other = meeting(port)
    assert not other.is_host
    del host.torchs, host.store  # as when its process ends
    with pytest.raises(StoreLost, match=f"the launcher that kept the store at 127.0.0.1:{port} is gone"):
        other.next_rendezvous()
    with pytest.raises(StoreLost):
        other.num_nodes_waiting()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "words"), [(2, ""), (0, "the run is done")])
def test_a_store_that_goes_after_the_job_has_ended_is_not_looked_for(
    monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    """Its node has read the end, and left; this one's worker may still be at work."""
    node = meeting(free_port(), most=1)
    node.next_rendezvous()
    node.store.set(ENDED, str(code))
    node.num_nodes_waiting()

    def unreachable() -> int:
        raise RendezvousConnectionError("the store is gone")

    monkeypatch.setattr(node.torchs, "num_nodes_waiting", unreachable)
    with pytest.raises(JobEnded, match=f"^{words}$") as ended:
        node._waiting()
    assert ended.value.exit_code == code


@pytest.mark.slow
def test_a_launcher_whose_network_was_away_does_not_end_the_job_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    host, other = (meeting(port, least=2) for _ in range(2))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ChangingNodes.next_rendezvous, (host, other)))

    def unreachable() -> int:
        raise RendezvousConnectionError("the network is away")

    monkeypatch.setattr(other.torchs, "num_nodes_waiting", unreachable)
    with pytest.raises(StoreLost):
        other.num_nodes_waiting()
    assert other.shutdown()  # the network is back
    assert not host.is_closed()
    back = meeting(port, least=2)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(ChangingNodes.next_rendezvous, (host, back)))
    assert {info.rank for info in found} == {0, 1}
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ChangingNodes.shutdown, (host, back)))
    assert host.is_closed()


@pytest.mark.slow
def test_a_node_that_falls_silent_is_gone_and_the_workers_that_wait_for_it_are_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(changing_nodes, "KEEP_ALIVE_S", 0.5)
    monkeypatch.setattr(changing_nodes, "MOST_MISSED", 6)
    monkeypatch.setattr(changing_nodes, "LAST_CALL_S", 30)  # for so long another would be waited for
    monkeypatch.setattr(changing_nodes, "workers_of", lambda module: [psutil.Process(worker.pid)])
    said: list[str] = []
    port = free_port()
    host, other = meeting(port, report=said.append), meeting(port, report=said.append, workers=2)
    with subprocess.Popen(["sleep", "60"]) as worker, ThreadPoolExecutor(2) as threads:
        try:
            list(threads.map(ChangingNodes.next_rendezvous, (host, other)))
            time.sleep(5.0)  # longer than a node may be silent
            assert host.num_nodes_waiting() == 0
            assert (worker.poll(), said) == (None, [])
            stop_heartbeats(other.torchs)
            began_s = time.monotonic()
            while not host.num_nodes_waiting():
                assert time.monotonic() - began_s < 120
                time.sleep(0.1)
            assert worker.wait(120) == -signal.SIGKILL
            assert said == ["a node of the run (127.0.0.1, ranks 1, 2) has not been heard of for 3 s"]
            began_s = time.monotonic()
            assert host.next_rendezvous().world_size == 1
            assert time.monotonic() - began_s < changing_nodes.LAST_CALL_S, "nobody else is waited for"
            monkeypatch.setattr(changing_nodes, "workers_of", lambda module: [])
            assert other.num_nodes_waiting(), "it starts again, too"
            assert len(said) == 1, "what the others record is theirs"
            assert capsys.readouterr().err.startswith(
                "this node has not been heard of for 3 s (stopped, or cut off), and"
            )
        finally:
            worker.kill()
    assert host.shutdown()


@pytest.mark.slow
def test_the_workers_beside_a_node_that_starts_again_are_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be saving, for a third node that wants to join."""
    monkeypatch.setattr(changing_nodes, "workers_of", lambda module: [psutil.Process(worker.pid)])
    said: list[str] = []
    port = free_port()
    # Both are needed: where one is enough, a busy machine may let the other begin alone.
    host, other = meeting(port, least=2, report=said.append), meeting(port, least=2)
    with subprocess.Popen(["sleep", "60"]) as worker, ThreadPoolExecutor(2) as threads:
        try:
            list(threads.map(ChangingNodes.next_rendezvous, (host, other)))
            again = threads.submit(other.next_rendezvous)
            began_s = time.monotonic()
            while not host.num_nodes_waiting():
                assert time.monotonic() - began_s < 120
                time.sleep(0.1)
            assert (worker.poll(), said) == (None, [])
            assert host.next_rendezvous().world_size == again.result().world_size == 2
        finally:
            worker.kill()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ChangingNodes.shutdown, (host, other)))


SAVING = """
import pathlib, signal, sys, time

def save(number, frame):
    time.sleep(3)
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_workers_have_saved_before_a_launcher_makes_room_for_another_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch's launcher would kill them 30 s after it has asked."""
    port, saved = free_port(), tmp_path / "saved"
    host, other = meeting(port), meeting(port)
    command = [sys.executable, "-c", SAVING, str(saved)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker, ThreadPoolExecutor(2) as threads:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            monkeypatch.setattr(changing_nodes, "workers_of", lambda module: [psutil.Process(worker.pid)])
            host.next_rendezvous()
            for name in ("LAST_CALL_S", "KNOWN_CALL_S"):  # on a busy machine neither begins the next round alone
                monkeypatch.setattr(changing_nodes, name, 60)
            joins = threads.submit(other.next_rendezvous)
            began_s = time.monotonic()
            while not host.num_nodes_waiting():
                assert time.monotonic() - began_s < 120
                time.sleep(0.1)
            assert (saved.read_text(), worker.wait(120)) == ("saved", 143)
            assert host.next_rendezvous().world_size == joins.result().world_size == 2
        finally:
            worker.kill()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ChangingNodes.shutdown, (host, other)))


@pytest.mark.slow
def test_nodes_that_leave_after_the_end_are_not_missed() -> None:
    port = free_port()
    host, other = (meeting(port) for _ in range(2))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ChangingNodes.next_rendezvous, (host, other)))
    other.set_closed()
    host.members["another one"] = 2, "127.0.0.1"
    time.sleep(1.1)  # torch keeps what it has read for a second
    assert host.is_closed()
    assert host.num_nodes_waiting() == 0


@pytest.mark.slow
def test_a_node_to_spare_takes_the_place_of_one_that_falls_silent_and_is_let_go_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More nodes than the run takes: the others wait, for as long as it lasts."""
    monkeypatch.setattr(changing_nodes, "workers_of", lambda module: [])
    port = free_port()
    host, other = (meeting(port, least=2) for _ in range(2))
    spare, late = (meeting(port, least=2) for _ in range(2))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ChangingNodes.next_rendezvous, (host, other)))
        first = threads.submit(spare.next_rendezvous)  # one alone: two might join before the host does
        time.sleep(3.0)
        assert host.num_nodes_waiting() == 0, "nobody starts again for a node that finds no place"
        stop_heartbeats(other.torchs)
        began_s = time.monotonic()
        while not host.num_nodes_waiting():
            assert time.monotonic() - began_s < 120
            time.sleep(0.1)
        assert host.next_rendezvous().world_size == 2
        assert first.result(120).world_size == 2
        assert spare.round == host.round == 2
        waits = threads.submit(late.next_rendezvous)
        time.sleep(3.0)
        assert not waits.done()
        ends = [threads.submit(one.shutdown) for one in (host, spare)]
        with pytest.raises(JobEnded, match="the launcher of another node has ended the job"):
            waits.result(120)
        assert not ends[0].done(), "it keeps the store until all have seen the end"
        late.shutdown()
        assert [end.result(120) for end in ends] == [True, True]


@pytest.mark.parametrize(("left", "wait_s"), [(None, 5), (1, 2), (2, 5)])
def test_the_least_number_of_nodes_waits_only_where_more_may_come(left: int | None, wait_s: int) -> None:
    first = meeting(free_port(), least=1, most=4, left=left)
    assert first.waits.last_call.total_seconds() == wait_s


def test_a_host_that_refuses_is_told_from_one_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_place.Address("127.0.0.1", free_port()).refuses()
    with socket.create_server(("127.0.0.1", 0)) as there:
        assert not store_place.Address("127.0.0.1", there.getsockname()[1]).refuses()

    def silent(*given: Any, **options: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    assert not store_place.Address("127.0.0.1", 29500).refuses()


def test_which_addresses_are_here() -> None:
    assert is_here(socket.AF_INET, "127.0.0.1")
    assert not is_here(socket.AF_INET, "192.0.2.1")  # of TEST-NET-1, which nobody has


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("0.0.0.0", "it stands for every address of the node"),
        ("localhost", "the name stands for .* on this node, which others do not reach"),
        ("no-such-host.invalid", "no host of this name is known here"),
    ],
)
def test_an_address_that_cannot_be_is_refused_at_once(host: str, words: str) -> None:
    with pytest.raises(BadInput, match=f"--rendezvous = '{host}': {words}"):
        ChangingNodes(RendezvousParameters("ahp", f"{host}:{free_port()}", "ahp", 1, 2))


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(BadInput, match=r"--rendezvous = '127\.0\.0\.1:99999': "):
        ChangingNodes(RendezvousParameters("ahp", "127.0.0.1:99999", "ahp", 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("over", [0, 1], ids=["the store's", "the other"])
def test_a_launcher_whose_workers_have_ended_well_is_still_heard_of(monkeypatch: pytest.MonkeyPatch, over: int) -> None:
    """The other's worker is still at work: the first worker reports on the run at its end."""
    limit_s = _short_limits(monkeypatch)
    said: list[str] = []
    both = _both(least=2, report=said.append)
    still, info = both[1 - over]
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(barrier, both[over][1].store, 2, "end")
        try:
            began_s = time.monotonic()
            while time.monotonic() - began_s < 2 * limit_s:
                assert (still.num_nodes_waiting(), said) == (0, [])
                time.sleep(0.1)
            assert len(nodes_heard_of(still.torchs) or ()) == 2
            assert not waits.done()
        finally:
            barrier(info.store, 2, "end")
        waits.result()


@pytest.mark.slow
def test_a_node_that_is_lost_after_the_last_step_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while the first worker reports on the run, nor after."""
    limit_s = _short_limits(monkeypatch)
    said: list[str] = []
    (first, info), (lost, _) = _both(least=2, report=said.append)
    monkeypatch.setenv("MASTER_ADDR", first.address.host)
    monkeypatch.setenv("MASTER_PORT", str(first.address.port))
    changing_nodes.end_for_all(0)
    stop_heartbeats(lost.torchs)
    began_s = time.monotonic()
    while time.monotonic() - began_s < 2 * limit_s:
        assert (first.num_nodes_waiting(), said) == (0, [])
        time.sleep(0.1)
    barrier(info.store, 2, "end", barrier_timeout=5 * limit_s)
    assert time.monotonic() - began_s < 4 * limit_s
    with pytest.raises(JobEnded, match="the run is done") as ended:
        first.next_rendezvous()  # as if its worker had been killed while it reported
    assert ended.value.exit_code == 0


@pytest.mark.slow
def test_too_few_nodes_are_no_damaged_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(changing_nodes, "JOIN_S", 2)
    watch = Watch(tmp_path / "metrics.jsonl", 60.0)
    node = changing_nodes.Node(2, 2, f"127.0.0.1:{free_port()}", 1, 0, tmp_path, watch)
    with pytest.raises(JobEnded, match=r"fewer than 2 nodes \(--nodes\) came within 2 s; start the same") as ended:
        changing_nodes.launch(["never"], node)
    assert (ended.value.exit_code, "damaged" in str(ended.value)) == (1, False)


@pytest.mark.slow
def test_a_node_whose_starts_are_used_up_says_so(tmp_path: Path) -> None:
    node = changing_nodes.Node(
        1, 1, f"127.0.0.1:{free_port()}", 1, 0, tmp_path, Watch(tmp_path / "metrics.jsonl", 60.0)
    )
    told = r"workers of this node failed \(they have said why\), and are not started again: run\.elastic\.max_restarts = 0; start the same"
    with pytest.raises(JobEnded, match=told) as ended:
        changing_nodes.launch(["no-such-command"], node)
    assert (ended.value.exit_code, ended.value.elsewhere) == (2, False)


def test_a_node_that_is_stopped_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(config: Any, program: str) -> Any:
        raise SignalException("stopped", sigval=signal.SIGTERM)

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", stopped)
    node = changing_nodes.Node(
        1, 1, f"127.0.0.1:{free_port()}", 1, 0, tmp_path, Watch(tmp_path / "metrics.jsonl", 60.0)
    )
    assert changing_nodes.launch(["train"], node) == 143
    assert capsys.readouterr().err == "SIGTERM: this node has left the run\n"


def _short_limits(monkeypatch: pytest.MonkeyPatch) -> float:
    """Launchers count as lost after fewer seconds. Returns how many."""
    monkeypatch.setattr(changing_nodes, "KEEP_ALIVE_S", 0.5)
    monkeypatch.setattr(changing_nodes, "MOST_MISSED", 6)
    return 3.0


def _both(**given: Any) -> list[tuple[ChangingNodes, RendezvousInfo]]:
    """Two launchers that have met, the store's first, and what torch's launcher gets of each."""
    port = free_port()
    found = [meeting(port, **given) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        return list(zip(found, threads.map(ChangingNodes.next_rendezvous, found), strict=True))


@pytest.mark.slow
def test_two_launchers_that_wait_at_two_addresses_meet_at_the_first() -> None:
    """A network was cut for ten seconds: each kept a store of its own, and waited there for the other's node until both gave up."""
    first, second = free_port(), free_port()
    place = f"127.0.0.1:{first},127.0.0.1:{second}"
    gone = (Address("127.0.0.1", first),)
    cut_off = ChangingNodes(RendezvousParameters("ahp", place, "ahp", 2, 2, local_addr="127.0.0.1", gone=gone))
    assert (cut_off.is_host, cut_off.address.port) == (True, second)
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(cut_off.next_rendezvous)
        time.sleep(1.0)
        assert not waits.done()
        host = meeting(first, least=2)  # as if the network to it were back
        with pytest.raises(StoreLost, match=f"keeps the store at 127.0.0.1:{first} is there again") as lost:
            waits.result(120)
        assert (lost.value.address, lost.value.left) == (cut_off.address, None)
        assert cut_off.shutdown()
        again = meeting(first, least=2)  # on one machine, all addresses are this node's
        assert [found.world_size for found in threads.map(ChangingNodes.next_rendezvous, (host, again))] == [2, 2]
