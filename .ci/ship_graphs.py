"""Trace the catalogue's models for the job that ``ahp plan`` and ``ahp analyze`` choose, into the files that the package ships.

Run it when src/ahp/graph changes, or with a newer torch or transformers: ``.venv/bin/python .ci/ship_graphs.py``, about a minute. What comes
out the same is written as the same bytes.
"""

from __future__ import annotations

import tempfile

from ahp.cli.analyze import default_length
from ahp.cli.planning_job import with_sequence
from ahp.cluster.model import Cluster
from ahp.graph import kept
from ahp.graph.catalogue import CATALOGUE


def main() -> None:
    cluster = Cluster.parse("8xH100-SXM-80GB")
    kept.SHIPPED.mkdir(exist_ok=True)
    for old in kept.SHIPPED.iterdir():
        old.unlink()
    for model in CATALOGUE:
        with tempfile.TemporaryDirectory() as folder:
            kept.cache_folder = lambda folder=folder: kept.Path(folder)  # an empty cache: everything is traced
            kept.analyze(model, with_sequence({}, model, cluster))
            kept.analyze(model, with_sequence({"sequence_length": default_length(model)}, model, cluster))
            files = sorted((kept.Path(folder) / "graphs").iterdir(), key=lambda file: file.stat().st_size)
            entries = [kept.unpacked(file.read_bytes()) for file in files]
        (kept.SHIPPED / f"{model}.json.gz").write_bytes(kept.packed(entries))
        print(f"{model}: {(kept.SHIPPED / f'{model}.json.gz').stat().st_size:,} bytes", flush=True)
    (kept.SHIPPED / kept.TRACED_BY).write_text(kept.code(), encoding="utf-8")


if __name__ == "__main__":
    main()
