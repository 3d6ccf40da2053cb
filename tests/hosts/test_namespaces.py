"""The test hosts: the resources that they get, and that nothing remains afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ahp.cluster.sense import cpu_quota
from benchmarks import namespaces
from benchmarks.namespaces import Host, HostSpec, hosts

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as to:
    to.sendall(bytes(int(sys.argv[2])))
"""
RECEIVE = """
import socket, time
with socket.create_server(("", 5000)) as server:
    print("listens", flush=True)
    of, _ = server.accept()
    count, began_s = 0, time.perf_counter()
    while chunk := of.recv(1 << 20):
        count += len(chunk)
    print(count / (time.perf_counter() - began_s))
"""


def run(host: Host, *words: str) -> str:
    return subprocess.run([*host.prefix, *words], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def left() -> list[str]:
    """What is there of hosts that this process makes."""
    own = f"ahp-{os.getpid()}-"
    groups = namespaces._cpu_groups()  # pyright: ignore[reportPrivateUsage]
    folders = [Path("/run/netns"), *([groups] if groups is not None else [])]
    return [
        path.name for folder in folders if folder.exists() for path in folder.iterdir() if path.name.startswith(own)
    ]


def bytes_per_s(sender: Host, receiver: Host, count: int) -> float:
    with subprocess.Popen(
        [*receiver.prefix, sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True
    ) as waits:
        assert waits.stdout is not None
        waits.stdout.readline()
        run(sender, sys.executable, "-c", SEND, receiver.address, str(count))
        return float(waits.stdout.readline())


@pytest.mark.slow
def test_hosts_have_a_name_a_share_of_the_processor_and_a_cable_of_their_speed(two_to_one: list[HostSpec]) -> None:
    with hosts(two_to_one) as made:
        slow, fast = made
        assert [run(host, "hostname") for host in made] == [slow.name, fast.name]
        quota = "from ahp.cluster.sense import cpu_quota; print(cpu_quota())"
        assert [float(run(host, sys.executable, "-c", quota)) for host in made] == [0.4, 0.8]
        assert cpu_quota() != 0.4, "not this process's own"
        # The bucket holds back what is above its rate; on a busy machine less may come.
        for sender, receiver in ((slow, fast), (fast, slow)):
            assert 0.2 * 62.5e6 < bytes_per_s(sender, receiver, 20_000_000) < 1.1 * 62.5e6
        fast.set_link(up=False)
        with pytest.raises(subprocess.CalledProcessError):
            run(
                slow,
                sys.executable,
                "-c",
                "import socket, sys; socket.create_connection((sys.argv[1], 5000), 1)",
                fast.address,
            )
    assert not left()


def test_nothing_stays_of_hosts_and_their_processes_when_an_error_ends_them(two_to_one: list[HostSpec]) -> None:
    started = []

    def fails() -> None:
        with hosts(two_to_one) as made:
            started.append(subprocess.Popen([*made[0].prefix, "sleep", "1000"]))
            time.sleep(0.5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert started[0].wait(120) == -signal.SIGKILL
    assert not left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_of_hosts_whose_maker_is_ended(two_to_one: list[HostSpec], number: signal.Signals) -> None:
    # A program that a shell starts in the background ignores SIGINT, and what it starts does too.
    script = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom benchmarks.namespaces import *\n"
        "with hosts([HostSpec(processors=0.5)] * 2) as made:\n    print(made[0].name, flush=True)\n    time.sleep(1000)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as maker:
        assert maker.stdout is not None
        name = maker.stdout.readline().strip()
        assert Path("/run/netns", name).exists()
        maker.send_signal(number)
    if number == signal.SIGKILL:  # then the next one clears up
        with hosts([HostSpec()]):
            pass
    assert not Path("/run/netns", name).exists()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/{name}"))


def test_what_cannot_be_made_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert namespaces.why_not([HostSpec()]) == "hosts in network namespaces need root"
