"""Tests on several releases of torch and Python, each pair in an environment of its own: ``make test-matrix``.

    python .ci/matrix.py                                              the oldest and the newest torch that pyproject.toml allows
    python .ci/matrix.py --torch 2.12.1 2.13.0 --python python3.11 python3.13
    python .ci/matrix.py --tests tests/search -m "not slow"           other tests; what stands behind --tests goes to pytest

A release outside pyproject.toml's range is installed all the same, to find out whether the range can grow. stdout: a line for each pair;
stderr: progress. Environments and logs stay in .venv-matrix. Needs the package index: some minutes a pair the first time, most of it torch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / ".venv-matrix"
ALONE = ("tests/graph", "tests/schedule", "tests/runtime", "tests/test_private_torch.py", "-m", "not slow and not wide")
RANKS = ("tests/runtime/test_torch_compat.py", "tests/runtime/test_equality.py", "-m", "not wide")
"""What uses torch itself: all that runs in one process, then several ranks that must equal one."""
NO_TESTS = {"ruff", "pyright", "pre-commit"}
"""Of the extra ``dev``, what tests do without."""


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ends = ends_of_range(project["dependencies"])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=ends, metavar="RELEASE", help=f"(default: {' '.join(ends)})")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PROGRAM", help="(default: this one)")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="arguments for pytest (default: what uses torch)")
    arguments = parser.parse_args()
    try:
        names = {python: name_of(python) for python in arguments.python}
    except Failed as failure:
        parser.error(f"--python: {failure}")
    failed = 0
    for python, torch in itertools.product(names, arguments.torch):
        place = PLACE / f"{names[python]}-torch{torch.replace('*', 'x')}"
        try:
            install(python, torch, project, place)
            words = tested(place, [arguments.tests] if arguments.tests else [ALONE, RANKS])
        except Failed as failure:
            failed, words = failed + 1, f"FAILED\n{failure}"
        print(f"{names[python]} torch {torch}: {words}", flush=True)
    return 1 if failed else 0


class Failed(Exception):
    """A step of a pair; the message says which, with what it said."""


def ends_of_range(dependencies: list[str]) -> list[str]:
    """The oldest release of torch that is allowed, and the newest series: ``>=2.11,<2.16`` is 2.11.0 and 2.15.*."""
    [found] = [match for one in dependencies if (match := re.fullmatch(r"torch>=(\d+\.\d+),<(\d+)\.(\d+)", one))]
    oldest, major, after = found.groups()
    return [f"{oldest}.0", f"{major}.{int(after) - 1}.*"]


def name_of(python: str) -> str:
    """``python3.11``, whatever path the interpreter has."""
    asked = "import sys; print('python%d.%d' % sys.version_info[:2])"
    return said([python, "-c", asked], "asking for its version").strip()


def install(python: str, torch: str, project: dict, place: Path) -> None:
    """Make the environment, unless it is there with the same packages."""
    dev = [one for one in project["optional-dependencies"]["dev"] if re.split(r"[\[<>=]", one)[0] not in NO_TESTS]
    wanted = [f"torch=={torch}", *(one for one in project["dependencies"] if not one.startswith("torch>")), *dev]
    stamp = place / ".installed"
    if stamp.exists() and stamp.read_text().splitlines() == wanted:
        return
    print(f"installing into {place.relative_to(ROOT)}", file=sys.stderr, flush=True)
    said([python, "-m", "venv", "--clear", str(place)], "making the environment")
    pip = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    said([*pip, *wanted], "installing")
    said([*pip, "--no-deps", "--editable", str(ROOT)], "installing")  # else pip refuses a torch out of its range
    stamp.write_text("\n".join(wanted))


def tested(place: Path, runs: list) -> str:
    """What pytest counted, in the line for the pair. Raises Failed with what did not pass."""
    began_s, log = time.monotonic(), place.with_suffix(place.suffix + ".log")
    log.unlink(missing_ok=True)
    python, counts = str(place / "bin" / "python"), []
    release = said([python, "-c", "import torch; print(torch.__version__)"], "importing torch").strip()
    for run in runs:
        print(f"pytest {shlex.join(run)} on torch {release}", file=sys.stderr, flush=True)
        with log.open("a") as file:
            command = [python, "-m", "pytest", "-q", *run]
            done = subprocess.run(command, cwd=ROOT, env=clean(), stdout=file, stderr=subprocess.STDOUT)
        lines = log.read_text().splitlines()
        if done.returncode:
            broken = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-20:]
            raise Failed("\n".join([*broken, f"({log.relative_to(ROOT)} has all)"]))
        counts.append(re.sub(r"^=+ | in .*", "", lines[-1]))
    return f"{' + '.join(counts)} on {release} in {(time.monotonic() - began_s) / 60:.0f} min"


def clean() -> dict[str, str]:
    """The environment variables without those that name another AHP."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AHP_"))}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def said(command: list[str], what: str) -> str:
    """stdout of a command. Raises Failed where it fails or does not exist."""
    try:
        done = subprocess.run(command, env=clean(), capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Failed(f"{what}: {error.filename}: no such program") from error
    if done.returncode:
        raise Failed(f"{what}: {shlex.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
