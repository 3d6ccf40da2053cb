"""Traced graphs kept as data, so that planning on them imports neither torch nor transformers.

A graph depends on the model's config, the job (sequence length, precision, document mask, adapters), the attention kernel, and the
code that traces it: torch, transformers and ``ahp.graph``. All of these are in its key, so that a graph is traced again if one of
them changes. The package ships those of the catalogue's models for the job that ``ahp plan`` chooses (made by ``.ci/ship_graphs.py``,
checked by a test); others are kept in the user's cache. Live modules and factories are traced every time: their code may have changed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ahp.cache import cache_folder
from ahp.errors import bad_input, whole_number
from ahp.graph.catalogue import CATALOGUE
from ahp.graph.export import from_plain, to_plain
from ahp.graph.lora import key_of
from ahp.graph.models import ATTENTION, describe, is_factory, read_keys
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import validated
from ahp.whole_files import write_aside

Key = dict[str, Any]

SHIPPED = Path(__file__).parent / "traced"
TRACED_BY = "code.txt"
"""File next to the shipped graphs: the digest of the code that traced them."""

MOST_KEPT = 1000
"""The most files in the user's cache, about 15 KB each; beyond that the oldest are deleted. [Empirical] To trace one again takes 0.5 to 0.9 s of
processor time; to look through a thousand when one is written, 0.01 s."""


def analyze(
    model: Any, job: Job | dict[str, Any] | None = None, *, micro_batch_size: int = 1, attention: str = "flash"
) -> ModelGraph:
    """Trace one micro-batch of ``model`` under ``job`` (its sequence length, precision, document mask and adapters are used).

    ``model`` as in ``ahp.graph.models``; a live module is run in place and left as it was. ``attention``: ``flash``
    (one fused operator), ``math`` (scores are materialized) or ``engine`` (one operator that knows windows and sinks, as the kernels of
    Megatron and torchtitan). With a document mask the graph has a second one, ``by_lengths``, if the
    model's attention can go by the lengths of documents. A model that was traced like this before is read from the cache.
    Raises BadInput when the model cannot be built, or cannot run on tensors without data.

    Example:
        >>> import ahp
        >>> graph = ahp.analyze("llama3-8b", {"sequence_length": 8192, "precision": "bf16"})
        >>> graph.num_layers, graph.num_parameters
        (32, 8030261248)
    """
    contract = validated(Job, {} if job is None else job, "job")
    micro_batch_size = whole_number("micro_batch_size", micro_batch_size, 1, "a whole number of sequences, at least 1")
    if not isinstance(attention, str) or attention not in ATTENTION:
        raise bad_input("attention", attention, "unknown kernel", ATTENTION)

    if str(model) in CATALOGUE and (Path(str(model)) / "config.json").is_file():
        warnings.warn(f"model = {str(model)!r}: the catalogue's; of the folder here it is ./{model}", stacklevel=2)

    def traced() -> ModelGraph:
        from ahp.graph import trace

        return trace.analyze(model, contract, micro_batch_size=micro_batch_size, attention=attention)

    key: Key = {
        "of": "graph",
        "sequence_length": contract.sequence_length,
        "precision": contract.precision,
        "document_mask": contract.document_mask,
        "micro_batch_size": micro_batch_size,
        "attention": ATTENTION[attention],
        **key_of(contract.lora),
    }
    if not is_description(model):
        return traced()
    graph = from_plain(kept(model, key, lambda: to_plain(traced())))
    return replace(graph, name=describe(model), model=str(model)) if isinstance(model, (str, Path)) else graph


def context_of(model: Any) -> int | None:
    """Tokens of the longest sequence that a model is made for; None if its config does not say so. Raises BadInput like ``analyze``."""

    def found() -> int | None:
        from ahp.graph import positions

        return positions.context_of(model)

    return kept(model, {"of": "context"}, found)


def kept(model: Any, key: Key, make: Callable[[], Any], *, made_by: Path | None = None) -> Any:
    """Plain data about a model: shipped or kept, else made and kept, with the warnings from making it.

    Args:
        model: any description of a model; if it is code, the data is made every time.
        key: what the data depends on besides the model, as plain data; the first entry says what the data is.
        make: makes the data.
        made_by: a folder of code that makes the data, besides ``ahp.graph``.
    """
    asked = _asked(model, key, made_by)
    if asked is None:
        return make()
    file = cache_folder() / "graphs" / f"{hashlib.sha256(f'{code()} {asked}'.encode()).hexdigest()[:32]}.json.gz"
    found = _shipped(model, asked) or _read(file, asked)
    if found is None:
        with warnings.catch_warnings(record=True) as caught:
            value = make()
        messages = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
        found = {"key": asked, "warnings": messages, "value": value}
        _write(file, found)
    for words in found["warnings"]:
        warnings.warn(words, stacklevel=3)
    return found["value"]


def is_description(model: Any) -> bool:
    """Whether a model is given as plain data that describes it fully: a name, a config, its keys."""
    return isinstance(model, dict) or (isinstance(model, (str, Path)) and not is_factory(model))


def _asked(model: Any, key: Key, made_by: Path | None) -> str | None:
    """The same text for the same key, model and code; None if the model is code, or its keys are not plain data."""
    if not is_description(model):
        return None
    whole = {"model": _facts(model), **key, "libraries": _libraries()}
    if made_by is not None:
        whole["made_by"] = code(made_by)
    try:
        return json.dumps(whole, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        return None  # transformers will raise an error that says what is wrong


def _facts(model: str | Path | dict[str, Any]) -> Key:
    """What a graph depends on in a model's description: its keys, not its name or its path."""
    if isinstance(model, dict):
        return {"keys": model}
    name = str(model)
    if name in CATALOGUE:
        return {"keys": CATALOGUE[name].config}
    path = Path(name).expanduser()
    return {"file": read_keys(path)} if path.exists() else {"unknown": name}


@cache
def _libraries() -> dict[str, str]:
    """The minor releases of the libraries that trace: a patch release fixes bugs and leaves operators as they are."""
    return {name: ".".join(metadata.version(name).split(".")[:2]) for name in ("torch", "transformers")}


@cache
def code(folder: Path = Path(__file__).parent) -> str:
    """A digest of the code in a folder, by default of the code that traces graphs."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _shipped(model: Any, asked: str) -> dict[str, Any] | None:
    """The package's data for a catalogue model under this key; library releases that trace the same share it."""
    if not isinstance(model, str) or model not in CATALOGUE:
        return None
    file = SHIPPED / f"{model}.json.gz"
    if not file.is_file() or (SHIPPED / TRACED_BY).read_text(encoding="utf-8") != code():
        return None
    found = unpacked(file.read_bytes())
    return next((one for one in found if asked in one["keys"]), None)


def _read(file: Path, asked: str) -> dict[str, Any] | None:
    """The kept data; None if the file is missing or damaged (gzip has a checksum), in which case it is written again."""
    try:
        found = unpacked(file.read_bytes())
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    return found if isinstance(found, dict) and found.get("key") == asked else None


def _write(file: Path, found: dict[str, Any]) -> None:
    """Write the data into the cache; if that fails, the next command traces again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_aside(file, packed(found))
        kept = sorted(file.parent.glob("*.json.gz"), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in kept[MOST_KEPT:]:
            old.unlink()


def packed(found: Any) -> bytes:
    """The data as compressed JSON: the same bytes for the same data, whenever it is written."""
    return gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0)


def unpacked(data: bytes) -> Any:
    return json.loads(gzip.decompress(data))
