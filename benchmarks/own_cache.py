"""A cache of one's own for runs that are to find neither texts nor measurements of other runs."""

from __future__ import annotations

from pathlib import Path

from ahp.cache import cache_folder


def own_cache(folder: Path) -> str:
    """The value of ``AHP_CACHE`` for a folder's runs: empty but for the graphs of models, which are those of this process's own cache. A graph
    depends on its key alone; to trace one takes 3 s of processor time with the imports."""
    graphs, cache = cache_folder() / "graphs", folder / "cache"
    for made in (graphs, cache):
        made.mkdir(parents=True, exist_ok=True)
    (cache / "graphs").symlink_to(graphs.absolute())
    return str(cache)
