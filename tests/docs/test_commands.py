"""What the pages tell to type and to write does what they say: commands are parsed, those that only plan run, Python runs, YAML is read.

Commands that train, measure or reach other hosts are parsed by their own parser, their keys by the config's. A command runs where all
files that it reads are there: those that the page's earlier commands and blocks have written. ``tests/runtime/test_tutorial.py`` trains.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from ahp.cli.main import COMMANDS, main
from ahp.cli.overrides import split_overrides
from ahp.cluster.model import Cluster
from ahp.config import load_config
from ahp.plan import EngineChoice, validated
from ahp.search.objective import Objective
from tests.docs.pages import ROOT, Block, blocks, commands, named, pages

PLANNING = ("plan", "simulate", "explain", "export", "check", "analyze", "models", "devices")
RUN = ("docs/plan/first-plan.md", "docs/objectives.md", "docs/export.md", "docs/search.md")
"""Pages whose planning commands run, in their order; ``tests/test_repository.py`` runs the README's beside its pictures."""
OF_THIS_MACHINE = ("local", "slurm", "kubernetes", "--measure")
MOST_DEVICES = 16
"""Of a cluster for which a page's plan is searched here: on more it takes many seconds."""
WRITTEN_BY = ("-o", "--out", "--trace")
NAMED = re.compile(r"^# (\S+\.(?:yaml|py))\n")
"""A block of which the first line is a file's name is that file."""


class Parsed(BaseException):
    """A command's parser has taken all of its words."""


def words_of(line: str) -> list[str] | None:
    """The words of ``ahp`` in a line of a shell, whatever starts it; None where there are none, or where words are left out."""
    words = shlex.split(line)
    begins = [at for at, word in enumerate(words, 1) if word == "ahp" and words[at - 2 : at - 1] != ["--rdzv-backend"]]
    return words[begins[0] :] if begins and "..." not in words else None


def told(block: Block) -> list[list[str]]:
    return [words for line in commands(block) if (words := words_of(line)) is not None]


SHELL = [block for page in pages() for block in blocks(page) if block.language in ("sh", "bash") and told(block)]


def test_commands_are_in_shell_blocks() -> None:
    plain = [block for page in pages() for block in blocks(page) if block.language == ""]
    assert [str(block) for block in plain if re.search(r"^ahp ", block.code, re.MULTILINE)] == []
    assert len(SHELL) > 20


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_are_parsed(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tyro.cli

    def parse(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(tyro, "cli", parse)
    for command, *words in told(block):
        assert command in COMMANDS
        if command == "export" and words in ([], ["TARGET", "PLAN"]):
            continue
        with pytest.raises(Parsed):
            main([command, *words])
        assert_keys(words)


def assert_keys(words: list[str]) -> None:
    """Every dotted key of a command exists and takes the value that it is given."""
    roots = ("job", "parallelism", "engine", "run", "objective", "model", "init_from", "cluster")
    dotted = [word for word in words if word.startswith("--") and "." in word.partition("=")[0]]
    given, _ = split_overrides(words if dotted else [], roots)
    for key, value in given.items():
        root, _, rest = key.partition(".")
        if root == "objective":
            assert rest in Objective.model_fields or not rest, key
        elif root == "engine" and rest:
            validated(EngineChoice, {rest: value}, "engine")
        elif rest:
            load_config(None, {key: value})


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_planning_commands_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = 0
    for block in blocks(ROOT / name):
        if block.language == "yaml" and (file := NAMED.match(block.code)):
            (tmp_path / file[1]).write_text(block.code)
        for words in told(block) if block.language == "sh" else []:
            if runs_here(words, tmp_path):
                assert main(words) == 0, f"{block}: ahp {' '.join(words)}\n{capsys.readouterr().err}"
                ran += 1
    assert ran


def runs_here(words: list[str], folder: Path) -> bool:
    command, *rest = words
    if command not in PLANNING or set(rest) & set(OF_THIS_MACHINE):
        return False
    read = [word for before, word in zip(["", *rest], rest, strict=False) if before not in WRITTEN_BY]
    if not all((folder / word).exists() for word in read if re.search(r"\.(yaml|toml|sh|json|py)$", word)):
        return False
    wide = [re.fullmatch(r"(\d+)x(\d+)x[A-Z][\w-]+", word) for word in rest]
    return all(int(found[1]) * int(found[2]) <= MOST_DEVICES for found in wide if found)


def test_both_readmes_have_the_same_python() -> None:
    english, chinese = (
        [ast.dump(ast.parse(block.code)) for block in blocks(ROOT / name) if block.language == "python"]
        for name in ("README.md", "README.zh.md")
    )
    assert english == chinese


PYTHON = [
    page
    for page in pages()
    if any(block.language == "python" for block in blocks(page)) and page.name != "README.zh.md"
]


@pytest.mark.parametrize("page", PYTHON, ids=named)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page one after the other, in one namespace. What begins with a remark needs what the remark says, and is compiled alone;
    ``tests/runtime/test_own_loop.py`` runs the README's script."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for block in blocks(page):
        if block.language == "python":
            code = compile(block.code, str(block), "exec")
            if not block.code.startswith("#"):
                exec(code, space)


YAML = [block for page in pages() for block in blocks(page) if block.language == "yaml"]


@pytest.mark.parametrize("block", YAML, ids=str)
def test_yaml_is_read(block: Block, tmp_path: Path) -> None:
    data = yaml.safe_load(block.code)
    read: Callable[[], object] = (
        (lambda: Cluster.from_dict(data)) if {"groups", "nodes"} & set(data) else (lambda: load_config(file))
    )
    file = tmp_path / "config.yaml"
    file.write_text(block.code)
    assert read()
