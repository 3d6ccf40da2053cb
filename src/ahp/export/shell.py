"""Words of a shell script, with the variables and lists that it sets filled in. Nothing of it is run."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile

from ahp.errors import BadInput
from ahp.export.table import Settings

MOST_WORDS = 100_000
"""Most words of a script that is read; longer ones are not launch scripts."""
LIST = re.compile(r"^[ \t]*(\w+)\+?=\((.*?)\)[ \t]*$", re.M | re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:SBATCH|PBS)[ \t]+(.*)$", re.M)
SEVERAL = ("--cuda-graph-modules", "--cuda-graph-scope")
"""Arguments with several values."""
NODES_OF_SLURM = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def words(text: str) -> list[str]:
    """Words of a script's lines, then those of its lists. Raises BadInput if it is too long to be a launch script."""
    nodes = next((value for key, value in directives(text).items() if key in ("--nodes", "-N")), None)
    outside: dict[str, str] = {} if nodes is None else {name: str(nodes) for name in NODES_OF_SLURM}
    text = re.sub(r"\\\n", " ", text)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    known, lists = _assignments(text, outside)
    rest = re.sub(LIST, "", text)
    found: list[str] = []
    for word in [*_cut(rest), *(word for many in lists.values() for word in many)]:
        filled = _filled(word, known).strip()
        found += _apart(filled)
        if len(found) > MOST_WORDS:
            raise BadInput("the script is too long to be a launch script")
    return found


def _apart(word: str) -> list[str]:
    """Arguments in one word: a variable's value, or ``OPTIONS="--lr 1e-4 ..."`` for a script that reads this one."""
    name, _, value = word.partition("=")
    if name.isidentifier() and (" --" in value or value.lstrip().startswith("--")):
        return [f"{name}=", *value.split()]
    return word.split() if word.startswith("--") else [word]


def arguments(found: list[str]) -> Settings:
    """Words that begin with --, each with what follows it: a value, or True; all values of ``SEVERAL``, with spaces between them."""
    settings: Settings = {}
    for at, word in enumerate(found):
        if not word.startswith("--") or len(word) == 2:
            continue
        key, equals, value = word.partition("=")
        following = found[at + 1] if at + 1 < len(found) else "--"
        name = key.replace("_", "-")
        if name in SEVERAL and not equals:
            following = " ".join(takewhile(lambda word: not _ends(word), found[at + 1 :])) or "--"
        settings[name] = value if equals else True if _ends(following) else following
    return settings


def directives(text: str) -> Settings:
    """The arguments in lines like ``#SBATCH --nodes=2`` or ``#SBATCH -N 2``."""
    found: Settings = {}
    for line in DIRECTIVE.findall(text):
        parts = _cut(line)
        for at, word in enumerate(parts):
            if word.startswith("-"):
                key, equals, value = word.partition("=")
                found[key] = value if equals else parts[at + 1] if at + 1 < len(parts) else True
    return found


def _assignments(text: str, outside: dict[str, str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Variables and lists of words that a script sets; ``outside``: variables set before it."""
    lists: dict[str, list[str]] = {}
    for name, body in LIST.findall(text):
        lists.setdefault(name, []).extend(_cut(body))
    plain = re.findall(r"^\s*(?:export\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|[^\s();]+)", text, re.M)
    known = dict(outside)
    for name, value in plain:
        known[name] = _filled(value.strip("\"'"), known)
    return known, lists


def _cut(text: str) -> list[str]:
    """Words as a shell splits them; if quotes never end, line by line, and a line with such quotes at spaces."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        lines = text.splitlines()
        return [word for line in lines for word in _cut(line)] if len(lines) > 1 else text.split()


def _filled(word: str, known: dict[str, str]) -> str:
    """A word with ``$NAME``, ``${NAME}``, ``${NAME:-default}`` and ``${NAME:=default}`` replaced where they are known."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        return known.get(name, default if default is not None else found[0])

    return re.sub(r"\$\{(\w+)(?::?[-=]([^}]*))?\}|\$(\w+)", value, word).strip("\"'")


def _ends(word: str) -> bool:
    """Whether a word cannot be the value of the argument before it."""
    return word.startswith("--") or "[@]" in word or word.endswith((".py", ";", "|", "&&"))
