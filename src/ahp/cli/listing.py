"""Prints a catalogue as a table, or as JSON, and the command that takes one of its names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ahp.cli.following import show_next
from ahp.cli.json_alone import print_alone

Row = dict[str, Any]


def show_catalogue(rows: Sequence[Row], cells: Sequence[Row], beside: str, following: str, *, as_json: bool) -> None:
    """``rows`` are the data; ``cells`` are the same for people, all with the same keys, the name first."""
    if as_json:
        print_alone(json.dumps(rows))
        return
    from rich.table import Table

    from ahp.report import tables

    console = tables.console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(cells[0]):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row.values())
    console.print(tables.Unpadded(table))
    console.print()
    console.print(tables.Hanging([("", beside)], gap=0))
    show_next(console, [following])
