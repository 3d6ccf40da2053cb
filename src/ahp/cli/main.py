"""The command line: finds the command, runs it, and turns errors into one message and an exit code."""

from __future__ import annotations

import errno
import gc
import io
import json
import logging
import os
import shlex
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import NoReturn

from ahp.cli.json_alone import json_alone
from ahp.errors import AhpError, BadInput, bad_input
from ahp.runtime.run.stop_signal import Stopped, stops_at_once
from ahp.runtime.stoppable import is_left

COMMANDS: dict[str, str] = {
    "analyze": "the compute graph of a model: operators, FLOPs, bytes, blocks",
    "probe": "sense and measure this machine or this allocation",
    "plan": "search the best layouts of a model on a cluster; writes plan.yaml",
    "simulate": "forecast and timeline of one plan",
    "compare": "two plans, runs or layouts side by side: what makes the difference",
    "explain": "where a plan's time and memory go, what binds, why no other layout",
    "train": "the main job: analyze, probe, search, run",
    "verify": "compare a plan with one process, step by step, within tolerance",
    "calibrate": "correct a cluster's forecasts by runs on it",
    "export": "a plan for Slurm, Kubernetes or another engine",
    "check": "judge another engine's configuration: cost, fit, lines to change",
    "report": "one HTML page about a run or a plan",
    "generate": "text from a run's checkpoint",
    "models": "the models that are known by name",
    "devices": "the devices that are known without measuring them",
}
"""Each command is a module of this package with ``run(argv) -> exit code``."""

FIRST: dict[str, str] = {
    "ahp plan llama3-8b 8xH100": "plan for GPUs that you need not have: a second",
    "ahp models, ahp devices": "the names that ahp plan knows",
    "ahp train": "plan and train a small model here: minutes",
}
"""Commands that show a newcomer what AHP does."""

WRONG_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Error numbers for a path that the user may not open, or that no file can have."""

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
"""Error numbers for a full or read-only disk, or a file of another user: not AHP's fault."""
INTERNAL, INTERRUPTED, BROKEN_PIPE = 1, 128 + 2, 128 + 13
"""Exit codes besides those of ``ahp.errors``; 128 + a signal's number is what shells report for a signal."""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit code; raises SystemExit(0) after --help."""
    words = list(sys.argv[1:] if argv is None else argv)
    trace = bool(words) and words[0] == "--traceback"
    if trace:
        words = words[1:]
    _quiet_libraries()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as in ahp plan >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where it is not UTF-8, a name with other characters is printed as Python escapes it.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _stoppable():
            code = _dispatch(words)
        sys.stdout.flush()
        return code
    except AhpError as error:
        if trace:
            traceback.print_exc()
        return _fail(str(error), type(error).__name__, error.exit_code, as_json="--json" in words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Stopped as stop:
        print(f"stopped by {stop}", file=sys.stderr)
        return stop.exit_code
    except BrokenPipeError:
        _drop_stdout()  # the reader is gone (ahp plan ... | head)
        return BROKEN_PIPE
    except Exception as error:
        if trace:
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno in WRONG_PATH and error.filename is not None:
            refusal = bad_input("path", str(error.filename), str(error.strerror).lower())
            return _fail(str(refusal), type(refusal).__name__, refusal.exit_code, as_json="--json" in words)
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            message = f"{error.filename or 'a file'}: {error.strerror}"
            return _fail(message, type(error).__name__, INTERNAL, as_json="--json" in words)
        message = f"internal error{_place(error)}: {type(error).__name__}: {error}"
        if not trace:
            message += f"\nthe whole trace: ahp --traceback {shlex.join(words)}"
        return _fail(message, type(error).__name__, INTERNAL, as_json="--json" in words)


NEW_OBJECTS = 50_000
"""Number of new objects after which Python looks for garbage, instead of 700. [Empirical] The imports and objects of ``ahp train`` cost its
launcher 5.7 s of processor time, 1.1 s of it in garbage collection that found nothing; ``ahp plan`` 0.2 of 1.9 s. The peak of memory is 1 % higher."""

ON_ONE_CORE = ("plan", "simulate", "compare", "explain", "export", "check")
"""Commands that start no worker, except ``plan --measure``. numpy's other threads have nothing to do there, but waiting takes 0.12 of 1.7 s of
processor time [Empirical]. pydantic would look through all that is installed for plugins, and none is needed."""


def program() -> NoReturn:
    """The ``ahp`` program. A worker that failed ends at once: one of its threads may wait for a host that is gone (a checkpoint's collective), and
    Python would wait for the thread, while the launcher waits for the worker. Commands of ``ON_ONE_CORE`` end at once too, since freeing their
    objects takes 5 % of their time; except under profilers, which write at the end. So does a command that a signal stopped inside compiled code."""
    gc.set_threshold(NEW_OBJECTS)
    on_one_core = len(sys.argv) > 1 and sys.argv[1] in ON_ONE_CORE
    if on_one_core:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    code = main()
    watched = sys.getprofile() is not None or sys.gettrace() is not None
    if (on_one_core and not watched) or (code and ("RANK" in os.environ or is_left())):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        import ahp

        print(f"ahp {ahp.__version__}")
        return 0
    if words[0] not in COMMANDS:
        known = ("--help", "--version", "--traceback") if words[0].startswith("-") else COMMANDS
        raise bad_input("command", words[0], "no such command; ahp --help lists them", known)
    _find_users_modules()
    data_alone = "--json" in words and not {"-h", "--help"} & {*words}
    with _short_warnings(), json_alone() if data_alone else nullcontext():
        return import_module(f"ahp.cli.{words[0]}").run(words[1:])


def _stoppable() -> AbstractContextManager[None]:
    """Signals to stop raise, so that what a command has started and written aside is cleaned up. Training sets its own handlers."""
    return stops_at_once() if threading.current_thread() is threading.main_thread() else nullcontext()


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Inside the block, AHP's own warnings are one line for the user, without the line of code that they came from."""
    before = warnings.formatwarning

    def shown(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        ours = os.path.abspath(filename).startswith(_package())
        return f"warning: {message}\n" if ours else before(message, category, filename, lineno, line)

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = before


def _find_users_modules() -> None:
    """Search the folder that the command starts in for ``pkg.mod:factory``, as ``python -m`` does, and so do the workers, which are started
    that way. It comes last, so that a user's file with the name of a library replaces nothing."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise BadInput("the folder in which the command was started is gone; go to another one (cd)") from None
    if not sys.flags.safe_path and not {"", folder} & set(sys.path):
        sys.path.append(folder)


def _quiet_libraries() -> None:
    """Silence warnings about torchao's kernels: transformers imports it in every command that builds a model, and AHP does not use these kernels."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _help() -> str:
    width, longest = max(map(len, COMMANDS)), max(map(len, FIRST))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: ahp COMMAND [ARGUMENTS]    ahp COMMAND --help says more about a command",
            "",
            "Plans and runs distributed training of large language models on stock PyTorch.",
            "",
            "start here:",
            *(f"  {command:<{longest}}  {what}" for command, what in FIRST.items()),
            "",
            "commands:",
            *lines,
            "",
            "options before the command: --help, --version, --traceback (of an error)",
            "exit codes: 0 done, 1 internal, 2 bad input, 3 nothing fits,",
            "            4 other hardware than planned for, 5 the engine cannot express it",
        ]
    )


def _fail(message: str, kind: str, code: int, *, as_json: bool) -> int:
    print(f"error: {message}", file=sys.stderr)
    if as_json:
        try:
            print(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}), flush=True)
        except OSError:  # stdout takes nothing, which may be the error
            _drop_stdout()
    return code


def _drop_stdout() -> None:
    """Let what is still to be printed go nowhere: else the interpreter complains again while it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _place(error: BaseException) -> str:
    """The last line of AHP's own code that the error passed through, as ``, ranking.py:41``."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_package())]
    return f", {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""


def _package() -> str:
    """The folder of AHP's own code."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


if __name__ == "__main__":
    raise SystemExit(main())
