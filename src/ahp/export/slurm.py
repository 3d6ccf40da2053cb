"""``ahp export slurm``: a batch script that a person can read and change."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from ahp.errors import HardwareMismatch, bad_input
from ahp.export.target import UNKNOWN, Exported, Shape, Source, shape_of
from ahp.optional import Flag, OptionalNumber, OptionalText

GRACE_S = 300
"""[Empirical] Enough to finish a step and write a checkpoint; for large models on a slow file system it takes longer."""
LONGEST_GRACE_S = 65_535
"""The most that sbatch takes after the @ of --signal."""


@dataclass(frozen=True)
class Options:
    nodes: Annotated[OptionalText, tyro.conf.arg(metavar="N|MIN:MAX")] = None
    """Nodes to ask for, with a config.yaml; a plan says how many it is for. MIN:MAX: Slurm gives what it has, and ahp train plans for that."""
    workers_per_node: OptionalNumber = None
    """With a config.yaml whose cluster is slurm or local: GPUs to ask for on each node, one for each worker."""
    cpu: Flag = False
    """Workers compute on cores: ask for no GPUs. Needed where the config's cluster is slurm or local."""
    time: OptionalText = None
    """Time limit as Slurm writes it: 2-00:00:00. Without it the partition's own."""
    partition: OptionalText = None
    """Partition; without it the cluster's default."""
    account: OptionalText = None
    """Account that the time is charged to."""
    grace_s: int = GRACE_S
    """Seconds before the limit at which Slurm tells the run to save and leave."""
    ahp: str = "ahp"
    """The program on the nodes, such as /shared/venv/bin/ahp."""


class Slurm:
    """A batch script that starts one launcher on each node; the launchers find each other by srun's variables."""

    name = "slurm"
    what = "an sbatch script: one launcher on each node, requeued after the signal to save and stop"
    suffix = ".sbatch"
    options = Options

    def write(self, source: Source, options: Options) -> Exported:
        """The script with its command. Raises BadInput for invalid options, NotExpressible for a mixed cluster."""
        if not 1 <= options.grace_s <= LONGEST_GRACE_S:
            raise bad_input(
                "--grace-s", options.grace_s, f"must be 1 to {LONGEST_GRACE_S}, what --signal of sbatch takes"
            )
        if not options.ahp.strip():
            raise bad_input("--ahp", options.ahp, "must be a program on the nodes", ["ahp"])
        if options.time is not None and not re.fullmatch(r"\d+(-\d+)?(:\d+){0,2}", options.time):
            raise bad_input(
                "--time", options.time, "must be a time in Slurm's format", ["120", "12:00:00", "2-00:00:00"]
            )
        if options.time is not None and 0 < (limit_s := time_s(options.time)) <= options.grace_s:
            rule = f"must be less than --time {options.time}, which is {limit_s:,} s"
            raise bad_input("--grace-s", options.grace_s, rule)
        for key in ("partition", "account"):
            value = getattr(options, key)
            if value is not None and not re.fullmatch(r"[\w.,@+-]+", value):
                raise bad_input(f"--{key}", value, "must be a name in Slurm")
        shape = shape_of(source, options.nodes, options.workers_per_node, self.name)
        if options.cpu and shape.gpus and shape.device != UNKNOWN:
            raise HardwareMismatch(
                f"--cpu: {source.file} is for {shape.device}; plan again for cores: ahp plan MODEL NODESxCORESxcpu@GBPS"
            )
        return Exported(script(source, options, shape), ("sbatch {file}",))


def time_s(said: str) -> int:
    """Seconds of a limit as Slurm writes it: MINUTES[:SECONDS], HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]; 0 is no limit."""
    days, dash, rest = said.rpartition("-")
    parts = [int(word) for word in rest.split(":")]
    first = 0 if dash or len(parts) == 3 else 1  # hours first, or minutes
    units = (3600, 60, 1)[first : first + len(parts)]
    return int(days or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units, strict=True))


def script(source: Source, options: Options, shape: Shape) -> str:
    """The script's text."""
    on_gpus = shape.gpus > 0 and not options.cpu
    name = re.sub(r"[^\w.-]+", "-", source.file.stem) or "run"
    asked: list[tuple[str, Any, str]] = [
        ("job-name", f"ahp-{name}", ""),
        ("nodes", shape.nodes, ""),
        ("gpus-per-node", shape.gpus if on_gpus else None, ""),
        ("cpus-per-task", None if on_gpus else shape.workers, "a core for each worker"),
        ("exclusive", True if on_gpus else None, "the launcher divides all cores of the node among its workers"),
        ("time", options.time, ""),
        ("partition", options.partition, ""),
        ("account", options.account, ""),
        ("signal", f"USR1@{options.grace_s}", f"{options.grace_s} s before the limit: save and leave"),
        ("requeue", True, "Slurm starts the job again when a node is lost or the job is preempted"),
        ("open-mode", "append", "one log for all starts"),
        ("output", f"ahp-{name}-%j.log", ""),
    ]
    lines = []
    for key, value, why in asked:
        if value is not None:
            word = f"#SBATCH --{key}" + ("" if value is True else f"={value}")
            lines.append(f"{word:<42} # {why}" if why else word)
    train = [options.ahp, "train", str(source.file), "--workers-per-node", str(shape.workers)]
    # For srun alone: with --ntasks-per-node for sbatch, Slurm 22.05 gives a job of 1 to 2 nodes one. And srun ignores sbatch's --cpus-per-task since.
    cores = "--cpu-bind=none" if on_gpus else f"--cpus-per-task={shape.workers}"
    return TEXT.format(
        cores=cores,
        workers=shape.workers,
        source=source.file,
        shape=_words(shape, on_gpus),
        asked="\n".join(lines),
        train=shlex.join(train),
    )


def _words(shape: Shape, on_gpus: bool) -> str:
    count = f"{shape.nodes} node{'s' * (shape.most > 1)}"
    return f"{count} of {shape.workers} {f'x {shape.device}' if on_gpus else 'workers on cores'}"


TEXT = """\
#!/bin/bash
# Trains {source} on {shape}. Written by ahp export slurm; yours to change.
# The run's folder must be on storage that all nodes share. The same script again continues the run.
{asked}

# One launcher on each node, which starts that node's workers ({workers}) on all cores of the job there. It takes its place, and the address
# where all meet, from srun's variables. When one launcher fails for good, the others end too.
srun --ntasks-per-node=1 {cores} --kill-on-bad-exit=1 {train}
code=$?

case $code in
  138 | 143) # SIGUSR1 or SIGTERM: saved, with steps left
    echo "saved after a signal (exit code $code); job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID" ;;
  0) echo "done" ;;
  2 | 3 | 4 | 5) echo "refused (exit code $code); the reason is above, and another start would meet it again" ;;
  *) echo "failed (exit code $code); the cause is above and in status.json in the run's folder" ;;
esac
exit $code
"""
