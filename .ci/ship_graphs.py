"""Trace the catalogue's models for the job that ``ahp plan`` and ``ahp analyze`` choose, into the files that the package ships.

Run it when src/ahp/graph changes, or with a newer torch or transformers: ``.venv/bin/python .ci/ship_graphs.py``, two minutes. Then with each
other release of torch, ``.venv-matrix/.../bin/python .ci/ship_graphs.py --add``: where it traces the same, the graph is shipped for both. What comes
out the same is written as the same bytes.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from ahp.cli.analyze import default_length
from ahp.cli.planning_job import with_sequence
from ahp.cluster.model import Cluster
from ahp.graph import kept
from ahp.graph.catalogue import CATALOGUE


def main(*, add: bool) -> None:
    """``add``: to what another release of torch has traced."""
    kept.SHIPPED.mkdir(exist_ok=True)
    by = kept.SHIPPED / kept.TRACED_BY
    if add and by.read_text(encoding="utf-8") != kept.code():
        raise SystemExit("src/ahp/graph has changed: first without --add")
    for old in [] if add else kept.SHIPPED.iterdir():
        old.unlink()
    for model in CATALOGUE:
        file = kept.SHIPPED / f"{model}.json.gz"
        entries = kept.unpacked(file.read_bytes()) if add else []
        for new in traced(model):
            same = next((one for one in entries if all(one[key] == new[key] for key in ("value", "warnings"))), None)
            if same is None:
                entries.append(new)
            else:
                same["keys"] = sorted({*same["keys"], *new["keys"]})
        file.write_bytes(kept.packed(entries))
        print(f"{model}: {file.stat().st_size:,} bytes, {len(entries)} graphs and other facts", flush=True)
    by.write_text(kept.code(), encoding="utf-8")


def traced(model: str) -> list[dict[str, Any]]:
    """What planning and analysing it keep, the smallest first."""
    cluster = Cluster.parse("8xH100-SXM-80GB")
    with tempfile.TemporaryDirectory() as folder:
        kept.cache_folder = lambda: kept.Path(folder)  # an empty cache, and nothing shipped: everything is traced
        kept._shipped = lambda *_: None
        kept.analyze(model, with_sequence({}, model, cluster))
        kept.analyze(model, with_sequence({"sequence_length": default_length(model)}, model, cluster))
        files = sorted((kept.Path(folder) / "graphs").iterdir(), key=lambda file: file.stat().st_size)
        found = [kept.unpacked(file.read_bytes()) for file in files]
    return [{"keys": [one["key"]], "warnings": one["warnings"], "value": one["value"]} for one in found]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", action="store_true", help="to what another release of torch has traced")
    main(add=parser.parse_args().add)
