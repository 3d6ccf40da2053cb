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


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("plan llama3-8b --cluster 8xH100", "ahp plan MODEL CLUSTER"),
        ("plan --model=llama3-8b 8xH100", "ahp plan MODEL CLUSTER"),
        ("explain --plan plan.yaml", "ahp explain PLAN"),
        ("train --config config.yaml", "ahp train [CONFIG|PLAN]"),
        ("train --plan plan.yaml", "ahp train [CONFIG|PLAN]"),
        ("export slurm --plan plan.yaml", "ahp export slurm PLAN|CONFIG"),
        ("generate --run runs/demo", "ahp generate RUN"),
    ],
)
def test_the_name_of_a_positional_argument_is_refused_with_the_usage(
    words: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    name = next(word.partition("=")[0] for word in words.split() if word.startswith("--"))
    told = f"{name}: is no option; its value stands alone, without the name: {usage}"
    assert told in " ".join(capsys.readouterr().err.split())
