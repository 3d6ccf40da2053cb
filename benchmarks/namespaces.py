"""Hosts on one machine: network namespaces with a switch between, each with a name, cores, a share of their time, and a cable of its own speed.

Everything lies in namespaces and control groups of the process that makes it, so that several may do so at once, and goes with it; what a process
that was killed has left is removed by the next one. Needs root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "ahp"
NETWORK = "10.77.0"
INTERFACE = "net0"
"""The network interface of every host, which gloo uses."""
PROGRAMS = ("ip", "nsenter", "unshare", "hostname", "taskset")
QUOTA_PERIOD_US = 10_000
"""The kernel's default of 100 ms would stop a slow host for most of a step, and let it run through the next. Shares of a tenth stay above the kernel's least, 1 ms."""
TBF_BURST_S, TBF_QUEUE = 0.002, "20ms"
"""A token bucket sends so much at once, and holds back for so long before it drops: tc-tbf(8) asks for a burst of rate / HZ at least, and one that is
large beside a message hides the rate from it."""
LEAST_BURST_BYTES = 20_000
"""Above one packet as the kernel hands it over: veth pairs pass 64 KiB at once by default, see ``_cable``."""
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostSpec:
    """What a host is to have."""

    cores: Sequence[int] = ()
    """Logical processors that it runs on; none = all."""
    processors: float | None = None
    """Processors' worth of time that it gets; None = all of its cores."""
    gbps: float | None = None
    """Of its cable, each way; None = as fast as the kernel copies."""
    latency_ms: float = 0.0
    """That its cable adds on the way out."""


@dataclass(frozen=True)
class Host:
    """A host that is there."""

    name: str
    address: str
    spec: HostSpec
    group: Path | None = field(default=None)
    """Of control, where its processor time is limited."""

    @property
    def environment(self) -> dict[str, str]:
        """For its processes: which network they take."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE}

    @property
    def prefix(self) -> list[str]:
        """Before a command that is to run there."""
        # `ip netns exec` would hide the control groups, by which a process learns its share of the processor.
        inner = f'hostname {self.name} && exec "$@"'
        words = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "sh", "-c", inner, self.name]
        if self.spec.cores:
            words += ["taskset", "--cpu-list", ",".join(map(str, self.spec.cores))]
        if self.group is not None:
            words = ["sh", "-c", f'echo $$ > {self.group}/cgroup.procs && exec "$@"', self.name, *words]
        return words

    def set_link(self, *, up: bool) -> None:
        """Plug its cable in, or pull it out."""
        _ip("-n", self.name, "link", "set", INTERFACE, "up" if up else "down")

    def set_processors(self, processors: float | None) -> None:
        """The processors' worth of time that it gets from now on, where it was made with a limit; None = as much as it takes."""
        if self.group is None:
            return
        quota = None if processors is None else round(processors * QUOTA_PERIOD_US)
        if (self.group / "cpu.max").exists():
            (self.group / "cpu.max").write_text(f"{'max' if quota is None else quota} {QUOTA_PERIOD_US}")
        else:
            (self.group / "cpu.cfs_period_us").write_text(str(QUOTA_PERIOD_US))
            (self.group / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))


def why_not(specs: Sequence[HostSpec]) -> str | None:
    """Why this system does not let such hosts be made, in one line; None where it does."""
    if os.geteuid():
        return "hosts in network namespaces need root"
    shaped = any(spec.gbps or spec.latency_ms for spec in specs)
    for program in (*PROGRAMS, *(["tc"] if shaped else [])):
        if shutil.which(program) is None:
            return f"hosts in network namespaces need the command {program}"
    if any(spec.processors for spec in specs) and _cpu_groups() is None:
        return "shares of a processor need a control group for cpu that can be written"
    try:
        with hosts(specs):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(map(str, error.cmd))}: {str(error.stderr).strip()}"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


@contextmanager
def hosts(specs: Sequence[HostSpec]) -> Iterator[list[Host]]:
    """Hosts on one switch, taken down at the end whatever happens; their processes are killed then. Raises CalledProcessError where the system does not let them be made."""
    _remove_left()
    own = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"  # a process may make several clusters at once
    switch = f"{own}-switch"
    made = [_host(f"{own}-{number}", number, spec) for number, spec in enumerate(specs, 1)]
    try:
        with _signals_raise():
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for number, host in enumerate(made, 1):
                _limit(host)
                _ip("netns", "add", host.name)
                _cable(host, switch, f"port{number}")
            yield made
    finally:
        for host in made:
            _remove_group(host.group)
        for name in (*(host.name for host in made), switch):
            _remove_namespace(name)


def _host(name: str, number: int, spec: HostSpec) -> Host:
    groups = _cpu_groups() if spec.processors is not None else None
    return Host(name, f"{NETWORK}.{number}", spec, groups / name if groups is not None else None)


def _cable(host: Host, switch: str, port: str) -> None:
    """From the host to the switch, shaped at both ends."""
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host.name)
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _ip("-n", host.name, "link", "set", "lo", "up")
    if host.spec.gbps is not None or host.spec.latency_ms:
        for place, end in ((host.name, INTERFACE), (switch, port)):
            # One packet of 64 KiB would be more than the bucket holds at low rates.
            _ip("-n", place, "link", "set", end, "gso_max_size", "16384", "gso_max_segs", "11")
            _shape(place, end, host.spec, out=end == INTERFACE)
    host.set_link(up=True)


def _shape(place: str, end: str, spec: HostSpec, *, out: bool) -> None:
    words = ["tc", "-n", place, "qdisc", "add", "dev", end]
    at = ["root"]
    if spec.latency_ms and out:
        _run(*words, "root", "handle", "1:", "netem", "delay", f"{spec.latency_ms}ms", "limit", "100000")
        at = ["parent", "1:1"]
    if spec.gbps is not None:
        burst = max(LEAST_BURST_BYTES, int(spec.gbps * 1e9 / 8 * TBF_BURST_S))
        _run(*words, *at, "tbf", "rate", f"{spec.gbps * 1000:g}mbit", "burst", str(burst), "latency", TBF_QUEUE)


def _cpu_groups() -> Path | None:
    """Where a control group for processor time can be made: version 2's root, else version 1's."""
    controllers = CGROUPS / "cgroup.controllers"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        with suppress(OSError):
            (CGROUPS / "cgroup.subtree_control").write_text("+cpu")
            return CGROUPS
        return None
    old = CGROUPS / "cpu"
    return old if (old / "cgroup.procs").exists() else None


def _limit(host: Host) -> None:
    if host.group is None or host.spec.processors is None:
        return
    host.group.mkdir()
    host.set_processors(host.spec.processors)


def _remove_left() -> None:
    """What processes have left that are there no more."""
    for place in (Path("/run/netns"), _cpu_groups()):
        for path in place.glob(f"{PREFIX}-*-*") if place is not None else ():
            maker = path.name.split("-")[1]
            if maker.isdigit() and not Path("/proc", maker).exists():
                if place == Path("/run/netns"):
                    _remove_namespace(path.name)
                else:
                    _remove_group(path)


def _remove_namespace(name: str) -> None:
    """Also ends the processes in it, because a namespace exists as long as a process runs in it."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    _kill(listed.stdout.split())
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _remove_group(group: Path | None) -> None:
    if group is None or not group.exists():
        return
    for _ in range(100):
        _kill((group / "cgroup.procs").read_text().split())
        try:
            group.rmdir()
            return
        except OSError:  # a process takes a moment to go
            time.sleep(0.05)
    print(f"{group}: not removed, some process in it does not end", file=sys.stderr)


def _kill(processes: Sequence[str]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM ends Python without a word to anyone; here it is an error like others, so that hosts are taken down."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: whoever has it decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
