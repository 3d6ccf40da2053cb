"""A Slurm cluster on this machine: controller, munge and node daemons of their own in a folder, which go with it.

Debian has all of it: ``apt-get install slurm-wlm munge``. Nodes share the machine's address and differ in their ports.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.runtime.workers import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo")
UP_S = 60
CONFIGURATION = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=sched_interval=1,bf_interval=1
"""


def why_not() -> str | None:
    """Why there can be no such cluster here; None where there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons want root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)" if missing else None


@dataclass(frozen=True)
class SlurmCluster:
    folder: Path
    nodes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            words, env=self.environment, cwd=cwd or self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, NodeList, Restarts, ExitCode ..."""
        text = self.run("scontrol", "show", "job", number, "--oneliner")
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def until(self, number: str, state: str, within_s: float) -> dict[str, str]:
        """Wait for a job to be in a state."""
        end_s = time.monotonic() + within_s
        while (job := self.job(number))["JobState"] != state:
            assert time.monotonic() < end_s, f"job {number} is {job['JobState']} ({job.get('Reason')}), not {state}"
            time.sleep(0.2)
        return job


@contextmanager
def slurm_cluster(folder: Path, *, nodes: int = 2, cores: int = 1) -> Iterator[SlurmCluster]:
    """Two nodes or more of so many cores. Raises AssertionError, with the daemons' logs, where they do not come up."""
    names = tuple(f"ahp-node{i}" for i in range(1, nodes + 1))
    cluster = SlurmCluster(folder, names)
    (folder / "munge").mkdir(mode=0o700)
    (folder / "state").mkdir()
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    text = CONFIGURATION.format(host=socket.gethostname(), port=free_port(), folder=folder)
    for name in names:
        text += (
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()} CPUs={cores}\n"
        )
    text += f"PartitionName=main Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP\n"
    (folder / "slurm.conf").write_text(text)
    try:
        munge = folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        cluster.run("munged", "--force", *(f"--{option}={munge / file}" for option, file in files.items()))
        cluster.run("slurmctld", "-c")
        for name in names:
            cluster.run("slurmd", "-N", name)
        end_s = time.monotonic() + UP_S
        while cluster.run("sinfo", "--noheader", "--states", "idle", "--format", "%D").strip() != str(nodes):
            assert time.monotonic() < end_s, _logs(folder)
            time.sleep(0.2)
        yield cluster
    finally:
        _end(folder)


def _end(folder: Path) -> None:
    """End the daemons by the ids that they left, and what they started by Slurm's own means."""
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with suppress(subprocess.SubprocessError, OSError):
        command = ["scancel", "--signal=KILL", "--full", "--user=root"]
        subprocess.run(command, env=environment, timeout=20, check=False, capture_output=True)
    for file in (*folder.glob("ahp-node*.pid"), folder / "controller.pid", folder / "munge" / "pid"):
        with suppress(OSError, ValueError):
            number = int(file.read_text())
            os.kill(number, signal.SIGTERM)
            end_s = time.monotonic() + 10
            while Path(f"/proc/{number}").exists() and time.monotonic() < end_s:
                time.sleep(0.1)
            os.kill(number, signal.SIGKILL)  # a node daemon waits for its steps; one that has ended is no error


def _logs(folder: Path) -> str:
    return "\n".join(f"{file}:\n{file.read_text()[-2000:]}" for file in sorted(folder.glob("*.log")))
