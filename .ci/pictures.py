"""Draw what commands print in a terminal of 100 columns as the pictures of the README: docs/plan.svg, docs/simulate.svg.

Run it when what they print changes: ``.venv/bin/python .ci/pictures.py``, a few seconds. The commands really run, in an empty folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLUMNS = 100
PICTURES = {
    "plan.svg": ("ahp plan llama3-8b 8xH100", None),
    "simulate.svg": ("ahp simulate plan.yaml", "What the parts are"),
}
"""Of each picture the command, and the line before which it ends: the whole is too long to be looked at."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, (command, end) in PICTURES.items():
            (DOCS / name).write_text(drawn(command, printed(command, folder, end)), encoding="utf-8")


def printed(command: str, folder: str, end: str | None) -> str:
    """What a terminal shows, with its colours."""
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    words = [sys.executable, "-m", "ahp", *command.split()[1:]]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    return done.stdout if end is None else done.stdout.split(end)[0]


def drawn(command: str, text: str) -> str:
    """As SVG, whose font is the reader's own: rich's would come over the network."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
        console.print(Text.from_ansi(text.rstrip()))
        # unique_id: the same picture for the same text, whenever it is drawn.
        svg = console.export_svg(title=command, unique_id=command.split()[1])
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")


if __name__ == "__main__":
    main()
