"""The frame of the repository: its commands, links, sizes and versions agree with each other."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import ahp
from ahp.about import DISTRIBUTION
from ahp.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "README.zh.md")
MAX_LINES = 500
MAX_README_LINES = 150
MOST_IN_A_ROW = 200
"""Characters of a table's row."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def shell_lines(path: Path) -> list[list[str]]:
    """The commands in a document's shell blocks, in words."""
    blocks = [code for language, code in FENCE.findall(path.read_text(encoding="utf-8")) if language in ("sh", "bash")]
    return [line.split() for code in blocks for line in code.splitlines() if line.strip()]


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", READMES)
def test_readme_opens_with_the_two_commands(name: str) -> None:
    assert shell_lines(ROOT / name)[:2] == [["make", "train"], ["make", "test"]]


@pytest.mark.parametrize("name", READMES)
def test_readme_is_read_in_a_minute(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@pytest.mark.slow
def test_readmes_commands_run_and_its_pictures_show_what_they_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures in a picture are those of the day that it was drawn on; its lines and columns are today's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    commands = [words for words in shell_lines(ROOT / "README.md") if words[0] == "ahp"]
    assert [words[1] for words in commands] == ["plan", "explain", "simulate"]
    for words in commands:
        assert main(words[1:]) == 0
        picture = ROOT / "docs" / f"{words[1]}.svg"
        printed = capsys.readouterr().out
        if not picture.exists():
            continue
        first, *shown = picture_lines(picture)
        assert first == f"$ {' '.join(words)}"
        leads = [re.match(r"[A-Z]\w+( \w+)?  |# .*|What binds|Why #1", line) for line in printed.splitlines()]
        wanted = [lead.group() for lead in leads if lead and not lead.group().startswith("MFU")]
        assert wanted
        assert [lead for lead in wanted if not any(line.startswith(lead.rstrip()) for line in shown)] == []


def picture_lines(path: Path) -> list[str]:
    """The lines of a terminal drawn as SVG."""
    rows: dict[str, str] = {}
    for row, text in re.findall(r'<text[^>]* clip-path="url\(#[\w-]+-line-(\d+)\)">(.*?)</text>', path.read_text()):
        rows[row] = rows.get(row, "") + html.unescape(text).replace("\N{NO-BREAK SPACE}", " ")
    return [line.rstrip() for _, line in sorted(rows.items(), key=lambda item: int(item[0]))]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documented_commands_exist(path: Path) -> None:
    for words in shell_lines(path):
        if words[0] == "make":
            assert words[1] in makefile_targets(), f"no such target: {' '.join(words)}"
        if words[0] == "ahp":
            assert words[1] in COMMANDS, f"no such command: {' '.join(words)}"


@pytest.mark.parametrize(
    "path", [*documents(), *ROOT.glob("*/README.md")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_table_rows_are_read_at_a_glance(path: Path) -> None:
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert [row for row in rows if len(row) > MOST_IN_A_ROW] == []


def test_the_house_names_what_is_there() -> None:
    package = ROOT / "src" / "ahp"
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert named
    assert [name for name in named if not ((package / name).is_file() or (ROOT / name).is_file())] == []
    top = {path.name for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    told = {*named, *re.findall(r"^\| \w+ \| `(\w+)` \|", text, re.MULTILINE)}
    assert top - {"__init__.py", "__main__.py"} <= told

    modules = {path.stem for path in package.rglob("*.py")} | {
        path.name for path in package.rglob("*") if path.is_dir()
    }
    lists = re.findall(r">([a-z_]+(?: · [a-z_]+)+)<", (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8"))
    drawn = {name for names in lists for name in names.split(" · ")} - {"metrics", "status", "checkpoints"}
    assert drawn
    assert drawn <= modules


def test_both_readmes_say_the_same() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)

    def outline(text: str) -> list[int]:
        return [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]

    def commands(text: str) -> list[str]:
        return re.findall(r"^\| (`[^`]+`)", text, re.MULTILINE)

    def shell(text: str) -> list[str]:
        return [code for language, code in FENCE.findall(text) if language in ("sh", "bash", "text")]

    assert outline(english) == outline(chinese)
    assert commands(english) == commands(chinese)
    assert {command.strip("`").split()[1] for command in commands(english)} == set(COMMANDS)
    assert shell(english) == shell(chinese)


def test_readmes_have_the_error_of_the_accuracy_page() -> None:
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    rows = page[page.index("<!-- unseen -->") : page.index("<!-- end of unseen -->")]
    sources = {
        name for name in re.findall(r"^\| ([a-z_0-9]+)(?: \(experts\))? \|", rows, re.MULTILINE) if name != "source"
    }
    [mean] = re.findall(r"^\| \*\*each source one vote\*\* \| \d+ \| \d+ \| ([\d.]+) \|", rows, re.MULTILINE)
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)
    assert f"{len(sources)} sources were never used to derive a" in english
    assert f"constant; their mean error is {mean} %" in english
    assert f"{len(sources)} 个来源从未用于标定常数,其平均误差为 {mean} %" in chinese


def test_files_hold_one_idea() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert lengths
    assert {str(path.relative_to(ROOT)): count for path, count in lengths.items() if count > MAX_LINES} == {}


def test_nothing_is_left_to_do_later_or_tied_to_one_machine() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b|/(home|root|Users)/\w|--(extra-)?index-url")
    files = [path for folder in ("src", "benchmarks", "docs", ".ci") for path in (ROOT / folder).rglob("*")]
    files += [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    texts = [
        path for path in files if path.suffix in (".py", ".md", ".toml", ".yaml", ".svg") or path.name == "Makefile"
    ]
    assert len(texts) > 10
    found = {str(path.relative_to(ROOT)): marks.search(path.read_text(encoding="utf-8")) for path in texts}
    assert {name: match.group() for name, match in found.items() if match} == {}


def test_one_version() -> None:
    assert f"## [{ahp.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_no_message_tells_to_install_another_program() -> None:
    """``ahp`` on the package index is somebody else's. The extras that messages name are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    texts = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    told = {(name, words) for name, text in texts.items() for words in re.findall(r"install '?ahp\b|'ahp\[", text)}
    assert told == set()
    named = {extra for text in texts.values() for extra in re.findall(r'install_extra\([\'"]([\w-]+)[\'"]\)', text)}
    assert named
    assert named <= set(project["optional-dependencies"])


def test_ci_script_is_a_program() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not on this machine")
@pytest.mark.parametrize("python", ["too-old", "missing"])
def test_make_refuses_an_unsuitable_python(tmp_path: Path, python: str) -> None:
    program = tmp_path / python
    if python == "too-old":
        program.write_text("#!/bin/sh\nexit 1\n")  # what `sys.exit(sys.version_info < (3, 11))` answers there
        program.chmod(0o755)
    result = subprocess.run(
        ["make", "-C", str(ROOT), "train", f"PYTHON={program}", f"VENV={tmp_path / 'venv'}"],
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert f"PYTHON = {program}" in result.stderr
    assert "3.11 or newer" in result.stderr
    assert not (tmp_path / "venv").exists()
