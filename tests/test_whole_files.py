"""Files are whole or absent, and what cannot be written is told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ahp.cli.writable import require_writable
from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.plan import Plan
from ahp.runtime.run.folder import RunFolder
from ahp.whole_files import save, unwritable, write_aside

SAVES = [Plan().save, Cluster.parse("8xH100").save]


@pytest.mark.parametrize("save", SAVES)
def test_where_nothing_can_be_written_is_told(
    save: Callable[[str | Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for path, rule in (
        (".", "is a folder; give a file in it"),
        ("", "is a folder; give a file in it"),
        ("file/plan.yaml", "cannot be written"),
        ("file/folder/plan.yaml", "cannot be written"),
        ("/proc/there/is/none", "cannot be written"),
    ):
        with pytest.raises(BadInput, match=rule):
            save(path)
    assert os.listdir() == ["file"]
    save("new/folder/it.yaml")
    assert os.listdir("new/folder") == ["it.yaml"]


def test_what_is_no_file_takes_what_is_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        save(pipe, "text")
        assert (os.read(reader, 10), pipe.is_fifo()) == (b"text", True)
    finally:
        os.close(reader)


def test_a_file_in_a_folder_that_takes_none_is_refused_before_the_work() -> None:
    with pytest.raises(BadInput, match=r"--out = '/proc/self/comm': cannot be written \(/proc/.*give another --out"):
        require_writable("/proc/self/comm", "--out")
    require_writable("/dev/null")


def test_a_name_that_the_next_command_cannot_be_given_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ahp plan -o - wrote a file of that name, while ahp export -o - prints."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        BadInput, match="--out = '-': stdout has the answer for people, or with --json the data; give a file"
    ):
        require_writable("-", "--out")
    with pytest.raises(
        BadInput, match=r"-o = '-x.yaml': the next command would take it for an option \(valid: ./-x.yaml\)"
    ):
        require_writable("-x.yaml")
    require_writable("./-x.yaml")


def test_a_link_stays_one(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for text in ("one", "two"):
        write_aside(link, text)
        assert (link.is_symlink(), file.read_text()) == (True, text)
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_left_beside_a_file_that_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_aside(tmp_path / "folder", "text")
    assert os.listdir(tmp_path) == ["folder"]


def test_a_folder_that_cannot_be_written_has_one_answer_whoever_asks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "there"

    def answer(key: str, ask: Callable[[], Any]) -> str:
        with pytest.raises(BadInput) as refusal:
            ask()
        assert str(refusal.value).startswith(f"{key} = '{path}': cannot be written ("), refusal.value
        return str(refusal.value).replace(key, "KEY")

    told = [
        answer("path", lambda: save(path, "text")),
        answer("run.folder", RunFolder(path).create),
        answer("--out", lambda: require_writable(path, "--out")),
    ]
    assert {one.rpartition("; ")[2] for one in told} == {"give another KEY"}
    full = unwritable("run.folder", path, OSError(errno.ENOSPC, "No space left on device"))
    assert str(full).endswith("(No space left on device); make room there, or give another run.folder")


def test_a_name_that_is_not_utf8_is_written_as_the_system_has_it(tmp_path: Path) -> None:
    """ahp report and ahp export slurm ended in an internal error for a plan with such a name."""
    save(tmp_path / "page.html", os.fsdecode(b"caf\xe9.yaml, caf\xc3\xa9"))
    assert (tmp_path / "page.html").read_bytes() == b"caf\xe9.yaml, caf\xc3\xa9"
