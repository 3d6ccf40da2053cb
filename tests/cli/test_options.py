"""The help of every command fits the terminal, and says nothing of Python's None."""

from __future__ import annotations

from contextlib import suppress

import pytest

from ahp.cli.main import COMMANDS, main
from ahp.cli.options import in_columns


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", [*COMMANDS, "export slurm", "export torchtitan"])
def test_help_fits_the_terminal(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with suppress(SystemExit):
        assert main([*command.split(), "--help"]) == 0
    told = capsys.readouterr().out
    assert max(len(line) for line in told.splitlines() if not line.startswith("usage:")) <= columns
    assert "{None}" not in told
    assert "default: None" not in told
    assert "--no-" not in told


def test_paragraphs_stay_apart_and_lists_keep_their_lines() -> None:
    text = """One two three
    four.

    Keys:
      model = tiny
          a name that goes on
    """
    assert in_columns(text, 18) == "One two three\n  four.\n\nKeys:\n  model = tiny\n      a name that\n      goes on"
