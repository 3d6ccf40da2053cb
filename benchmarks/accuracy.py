"""How right the forecast is: measured training runs, priced one by one through ``ahp.simulate``.

    python benchmarks/accuracy.py ROWS/*.json                              the tables
    python benchmarks/accuracy.py ROWS/*.json --leave-one-out              each source with constants fitted without it
    python benchmarks/accuracy.py ROWS/*.json --derive                     the constants of engines/steps.yaml again
    python benchmarks/accuracy.py ROWS/*.json --markdown docs/accuracy.md  all of it, written into the page
    python benchmarks/accuracy.py ROWS/*.json --json                       every row, as JSON

Each file is one source; accuracy_rows.py says what stands in a row, so that anyone can add some. Files of kernels and
collectives may be among them: they are counted and left alone. The rows of unseen/ are judged apart, and no
constant is ever fitted to them. accuracy_notes.yaml holds the words: why rows are far
off, what other tools publish. Pricing takes some minutes, fitting as long again; no time of this machine enters but
that of a call. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import accuracy_choice
import accuracy_pairs
import accuracy_reach
import accuracy_tables as tables
import page
import yaml
from accuracy_judge import Fit, Judged, Simulate, judge_all, leave_one_out
from accuracy_rows import read

from ahp.engines import steps

NOTES = Path(__file__).parent / "accuracy_notes.yaml"
UNSEEN = Path(__file__).parent / "unseen"
"""Rows that no constant was derived from, and that none may be."""
TITLES = {
    "reach": "What was asked for",
    "sources": "Step time",
    "unseen": "Runs that nothing was derived from",
    "devices": "The same by the number of devices",
    "ranking": "Ranking",
    "pairs": "What the order can tell apart",
    "choice": "Choosing",
    "memory": "Memory",
    "bands": "Bands",
    "constants": "Constants from whole steps",
    "far_off": "Rows far off",
    "not_priced": "Not priced, not judged",
    "published": "What other tools publish",
}
"""The sections of the page by their marker, and what they are called on a terminal."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="measured runs, one JSON list a source")
    parser.add_argument("--leave-one-out", action="store_true", help="judge each source by constants fitted without it")
    parser.add_argument("--derive", action="store_true", help="fit the step constants again and print them")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="write all tables between this page's markers")
    parser.add_argument("--json", action="store_true", help="print every row as JSON instead of tables")
    options = parser.parse_args(arguments)
    if missing := [path for path in options.files if not path.is_file()]:
        parser.error(f"no such file: {', '.join(map(str, missing))}")
    if options.markdown:
        for marker in TITLES:
            page.require(options.markdown, marker)
    return options


def sections(
    judged: Sequence[Judged],
    unseen: Sequence[Judged],
    left_out: Mapping[str, str],
    notes: Mapping[str, Any],
    fit: Fit | None,
    simulate: Simulate,
) -> dict[str, str]:
    """The text of every section; without a fit, the columns and the section of fitted constants are not there."""
    apart: list[Judged] = []
    fitted = ""
    if fit is not None:
        apart, without = leave_one_out(judged, fit, simulate)
        fitted = tables.constants(fit.values(), without)
    return {
        "reach": accuracy_reach.section(judged, unseen, notes),
        "sources": tables.sources(judged, apart, notes),
        "unseen": tables.unseen(unseen, notes),
        "devices": tables.by_devices(unseen),
        "ranking": tables.ranking(judged),
        "pairs": accuracy_pairs.section([*judged, *unseen]),
        "choice": accuracy_choice.section(judged, notes, simulate),
        "memory": tables.memory(judged),
        "bands": tables.bands(judged, apart, notes),
        **({"constants": fitted} if fit is not None else {}),
        "far_off": tables.far_off(judged, notes),
        "not_priced": tables.not_priced(judged, left_out),
        "published": tables.published(notes),
    }


def plain(one: Judged) -> dict[str, Any]:
    """One row for other programs."""
    return {
        "source": one.run.source, "id": one.run.id, "failure": one.failure, "measured_s": one.run.measured_s,
        "predicted_s": one.predicted_s, "error": one.error, "inside_band": one.inside,
        "allocated_error": one.allocated_error, "reserved_error": one.reserved_error,
        "fit_probability": one.fit_probability, "ran": one.run.ran, "fit_mistaken": one.fit_mistaken,
    }  # fmt: skip


def derived_lines(values: Mapping[str, float]) -> str:
    """What stands in engines/steps.yaml beside what the rows say now."""
    rows = {
        name: {"ships": constant.value, "derived": values[name], "from": list(constant.derived_from)}
        for name, constant in steps.constants().items()
    }
    return yaml.safe_dump(rows, sort_keys=False, default_flow_style=None)


def main(arguments: Sequence[str] | None = None, simulate: Simulate | None = None) -> int:
    """The script; ``simulate`` takes the place of ``ahp.simulate``."""
    options = parse(arguments)
    if simulate is None:
        from ahp import simulate
    notes = yaml.safe_load(NOTES.read_text(encoding="utf-8"))
    runs, left_out = read(options.files)
    if not runs:
        print("no training run in these files", file=sys.stderr)
        return 2
    fit = Fit(runs, simulate) if options.derive or options.leave_one_out or options.markdown else None
    if options.derive and fit is not None:
        print(derived_lines(fit.values()))
        return 0
    judged = judge_all(runs, simulate)
    if all(one.failure for one in judged):
        print(f"no run could be priced; the first: {judged[0].failure}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([plain(one) for one in judged], indent=1))
        return 0
    unseen = judge_all(read(sorted(UNSEEN.glob("*.json")))[0], simulate, "pricing runs that nothing was derived from")
    found = sections(judged, unseen, left_out, notes, fit, simulate)
    for marker, text in found.items():
        print(f"## {TITLES[marker]}\n\n{text}\n")
    if options.markdown:
        today = datetime.date.today().isoformat()
        found["sources"] = f"{len(judged)} runs, {today}; errors in %.\n\n{found['sources']}"
        for marker, text in found.items():
            page.write(options.markdown, marker, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
