"""Write a plan, or a config, as what another program starts.

  ahp export slurm PLAN|CONFIG
      {slurm}
  ahp export kubernetes PLAN|CONFIG
      {kubernetes}
  ahp export torchtitan PLAN
      {torchtitan}
  ahp export megatron PLAN
      {megatron}
  ahp export deepspeed PLAN
      {deepspeed}
  ahp export accelerate PLAN
      {accelerate}

slurm and kubernetes run a plan as it is, on as many nodes as it was made for. A config is planned when it starts, for the nodes that are there:
after a node was drained, for those that are left. The others are engines: a layout that their file cannot express is refused (exit code 5), parts
of the job that it cannot express are listed. --target-version names the release. A file that has other content is replaced only with --force.
ahp export TARGET --help lists the options of one target.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ahp.cli.following import next_words
from ahp.cli.json_alone import print_alone
from ahp.cli.options import in_columns, options_of
from ahp.cli.writable import require_writable
from ahp.errors import bad_input
from ahp.optional import Flag, OptionalText
from ahp.report.tables import console
from ahp.whole_files import save

if TYPE_CHECKING:
    from ahp.export.target import Exported, Source, Target


@dataclass(frozen=True)
class Arguments:
    plan: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PLAN|CONFIG")]
    """A plan.yaml, a run's folder, or a config.yaml."""
    out: Annotated[OptionalText, tyro.conf.arg(name="out", aliases=["-o"])] = None
    """The file; without it the plan's name with another suffix; - for stdout."""
    force: Flag = False
    """Replace a file that has other content, such as one that you have changed."""
    json: Flag = False
    """Print what was written as one JSON object."""


def run(argv: list[str]) -> int:
    """``ahp export TARGET PLAN``. Returns the exit code; raises AhpError."""
    from ahp.export.registry import TARGETS, get

    if not argv or argv[0] in ("-h", "--help"):
        about = (__doc__ or "").format(**{name: target.what for name, target in TARGETS.items()})
        print(in_columns(about, console().width))
        return 0
    if argv[0] not in TARGETS and argv[1:] and argv[1] in TARGETS:
        raise bad_input("target", argv[0], "the target comes first: ahp export TARGET PLAN", [argv[1]])
    target = get(argv[0])
    arguments, options = _parsed(target, argv[1:])
    source = read(arguments.plan)
    exported = target.write(source, options)
    if arguments.out == "-":
        following = [command.replace("{file}", "FILE") for command in exported.next]
        if arguments.json:
            print_alone(
                json.dumps(
                    {"target": target.name, "text": exported.text, "not_in_file": exported.notices, "next": following}
                )
            )
        else:
            _refuse_other_characters(exported.text)
            print(exported.text, end="")
            _tell_left(exported)
            print(next_words(following, console(sys.stderr).width), file=sys.stderr)
        return 0
    path = (
        _beside(Path(arguments.plan), exported.suffix or target.suffix)
        if arguments.out is None
        else Path(arguments.out)
    )
    require_writable(path, "--out")
    if path.is_file() and not arguments.force and path.read_bytes() != exported.text.encode():
        raise bad_input(
            "--out",
            str(path),
            "exists with other content, perhaps your own changes; give another -o, or --force to replace it",
        )
    save(path, exported.text)
    following = [command.replace("{file}", shlex.quote(str(path))) for command in exported.next]
    if arguments.json:
        print_alone(
            json.dumps({"target": target.name, "wrote": str(path), "not_in_file": exported.notices, "next": following})
        )
    else:
        _tell_left(exported)
        print(f"Wrote {path}\n{next_words(following, console().width)}")
    return 0


def _refuse_other_characters(text: str) -> None:
    """Raises BadInput if stdout would not take the text as it is: a path in it would be another one."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError as error:
        rule = f"stdout is {encoding}, and the text has {text[error.start]!a}; give a file, or set PYTHONUTF8=1"
        raise bad_input("--out", "-", rule) from None


def _tell_left(exported: Exported) -> None:
    """Print on stderr what the file cannot express."""
    for notice in exported.notices:
        print(f"Not in this file: {notice}", file=sys.stderr)


def _parsed(target: Target, words: list[str]) -> tuple[Arguments, Any]:
    """The command's own arguments and those of the target, from one line."""
    both = dataclasses.make_dataclass("Both", [], bases=(target.options, Arguments), kw_only=True, frozen=True)
    found = options_of(both, words, f"ahp export {target.name}", f"{target.what}.")
    own = {name: getattr(found, name) for name in (f.name for f in dataclasses.fields(Arguments))}
    theirs = {f.name: getattr(found, f.name) for f in dataclasses.fields(target.options)}
    return Arguments(**own), target.options(**theirs)


def read(path: str) -> Source:
    """The plan or the config in a file. Raises BadInput if there is neither."""
    from ahp.config import load_config, read_yaml
    from ahp.export.target import Source
    from ahp.plan import Plan

    file = Path(path)
    if not file.is_file() or "schema_version" in read_yaml(path):
        return Source(file / "plan.yaml" if file.is_dir() else file, plan=Plan.load(path))
    return Source(file, config=load_config(path, {}))


def _beside(file: Path, suffix: str) -> Path:
    return file / f"plan{suffix}" if file.is_dir() else file.with_name(file.stem + suffix)
