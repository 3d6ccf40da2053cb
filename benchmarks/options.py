"""The options that the benchmarks of runs have in common, and how they end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from page import write
from task import MODELS


def add_size(parser: argparse.ArgumentParser) -> None:
    """Of the task: ``--sequence-length`` and ``--batch-size``."""
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens (default: 256)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of the global batch (default: 8)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """``--model``, one of the benchmarks' own sizes."""
    parser.add_argument("--model", choices=list(MODELS), default="tiny", help="size of the LLaMA (default: tiny)")


def add_layouts(parser: argparse.ArgumentParser, names: Iterable[str], default: str) -> None:
    """``--engines`` and ``--only``: which layouts, beside what."""
    known = list(names)
    parser.add_argument("--engines", action="store_true", help="beside other engines instead of plain PyTorch")
    text = f"layouts to measure (default: {default}): {', '.join(known)}"
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", help=text)


def add_output(parser: argparse.ArgumentParser, quick: str) -> None:
    """``--quick``, ``--json`` and ``--markdown``."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="also write the tables between PAGE's markers")


def tell(arguments: argparse.Namespace, marker: str, text: str, data: dict[str, Any], *, complete: bool = True) -> None:
    """Print the tables, or the data as JSON; write the tables into the page, where one is given and nothing failed."""
    print(json.dumps(data, indent=1) if arguments.json else text)
    if arguments.markdown and complete:
        write(arguments.markdown, marker, text)
