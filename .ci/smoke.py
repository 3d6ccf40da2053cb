"""A wheel of this tree, in an environment that has nothing else, runs every command: ``make smoke``.

    python .ci/smoke.py [--keep FOLDER]

Needs the package index, or what pip is told to look at instead. Some minutes where torch has to be fetched.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLAN = "plan.yaml"
COMMANDS = (
    "--help",
    "--version",
    "models",
    "devices",
    "analyze tiny",
    f"plan tiny 8xH100 -o {PLAN}",
    f"simulate {PLAN}",
    f"explain {PLAN}",
    f"compare {PLAN} dp_shard=8",
    f"export slurm {PLAN} -o job.sh",
    "plan llama3-8b 8xH100 --engine.name torchtitan --parallelism.zero-stage 3 -o titan.yaml",
    "export torchtitan titan.yaml -o titan.py",
    "check titan.py --model llama3-8b --cluster 8xH100",
    "probe --quick -o cluster.yaml",
    "train --job.steps 12 --job.optimizer.warmup-steps 2 --run.checkpoint-every 6 --run.folder run",
    "verify run --steps 2",
    "generate run --max-new-tokens 8",
    "calibrate run",
    f"report {PLAN}",
    "report run",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the environment is made, and stays")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory(prefix="ahp-smoke-") as folder:
        place = keep or Path(folder)
        python = installed(place)
        failed = [words for words in COMMANDS if not runs(python, words, place)]
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(COMMANDS)} commands run")
    return 1 if failed else 0


def installed(place: Path) -> Path:
    """The Python of a new environment with the wheel of this tree."""
    environment = place / "environment"
    venv.create(environment, with_pip=True, clear=True)
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", place / "wheels", ROOT], check=True)
    [wheel] = (place / "wheels").glob("*.whl")
    subprocess.run([*pip, "install", wheel], check=True)
    return python


def ahp(python: Path, words: str, place: Path) -> subprocess.CompletedProcess[str]:
    """The installed command, where nothing of this tree is."""
    (place / "work").mkdir(exist_ok=True)
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AHP_"))}
    given |= {"AHP_CACHE": str(place / "cache"), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    command = [python.parent / "ahp", *words.split()]
    return subprocess.run(command, cwd=place / "work", env=given, capture_output=True, text=True, timeout=600)


def runs(python: Path, words: str, place: Path) -> bool:
    began_s = time.monotonic()
    done = ahp(python, words, place)
    print(f"{time.monotonic() - began_s:6.1f} s  ahp {words}", flush=True)
    if done.returncode:
        print(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
