"""Imported by the server of forks: what every worker would find out again is found out once, before it is forked.

The outline of a model is the same on each rank and under each layout, and a run on fake tensors costs most of what setting up
a small layout does. So is how its blocks run on parts of a sequence. Workers keep both by all that they depend on; those of the
three models of the equality tests, and torch's own caches that tracing fills, come with the fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx._graph_pickler import GraphPickler, Options

from ahp.graph.call import Documents
from ahp.graph.outline import Outline
from ahp.graph.torch_compat import FakeTensorMode
from ahp.job import Job
from ahp.runtime import inside
from ahp.runtime.sequence import own_tokens
from ahp.runtime.weights.hub_names import in_files
from ahp.search.slicing.model import slice_outline
from ahp.search.slicing.token_parts import TokenParts
from tests.runtime.models import MODELS, SEQUENCE

FOUND = Path(os.environ["AHP_TESTS_FOUND"])
"""A folder of this run of the tests (tests/conftest.py)."""
ANY_OPERATOR = Options(ops_filter=None)
_kept: dict[Any, Outline] = {}
_kept_parts: dict[Any, tuple[TokenParts, ...]] = {}
outline, _parts_of_kinds = inside.outline, own_tokens._parts_of_kinds


def kept_outline(
    module: nn.Module,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: torch.dtype | None = None,
    documents: Documents | None = None,
) -> Outline:
    """``outline``, found once for modules that are alike: by one rank for all ranks, too."""
    asked = {"batch_size": batch_size, "sequence_length": sequence_length, "dtype": dtype, "documents": documents}
    key = _likeness(module), tuple(asked.items())
    if key not in _kept:
        _kept[key] = by_one_rank(module, f"outline {key}", lambda: outline(module, **asked))
    return _kept[key]


def kept_parts(module: nn.Module, found: Outline, job: Job, documents: Documents | None) -> tuple[TokenParts, ...]:
    """``_parts_of_kinds``, found once for modules that are alike, whose outlines in one dtype are alike too: by one rank for all ranks, too."""
    key = _likeness(module), found.hidden.dtype, job.sequence_length, documents
    if key not in _kept_parts:
        _kept_parts[key] = by_one_rank(module, f"parts {key}", lambda: _parts_of_kinds(module, found, job, documents))
    return _kept_parts[key]


def by_one_rank(module: nn.Module, key: str, find: Callable[[], Any]) -> Any:
    """What the first rank finds while the others wait for it, as long as the module's class is the same in all processes. A graph that
    torch cannot write down each rank finds itself."""
    kind = type(module)
    same = getattr(sys.modules[kind.__module__], kind.__qualname__, None) is kind and " at 0x" not in key
    if not (same and kind.__module__.startswith(("tests.", "transformers."))):
        return find()
    with (FOUND / hashlib.sha256(key.encode()).hexdigest()).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if content := file.read():
            return GraphPickler.loads(content, FakeTensorMode(allow_non_fake_inputs=True))
        value = find()
        with contextlib.suppress(NotImplementedError, pickle.PicklingError, AttributeError, TypeError):
            file.write(GraphPickler.dumps(value, ANY_OPERATOR))
        return value


def _likeness(module: nn.Module) -> Any:
    """All that a module's trace may depend on but its code: its config, tensors, and each part's plain settings and hooks."""
    config = getattr(module, "config", None)
    settings = [
        (name, type(part).__qualname__, *sorted((k, v) for k, v in vars(part).items() if _is_plain(v)))
        for name, part in module.named_modules()
    ]
    tensors = [
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    ]
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    hooks = [
        (name, *map(repr, getattr(part, kind).values())) for name, part in module.named_modules() for kind in kinds
    ]
    return type(module), str(config), repr(settings), repr(tensors), repr(hooks)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


inside.outline = kept_outline
own_tokens._parts_of_kinds = kept_parts
torch.set_num_threads(1)  # a process with threads of its own must not be forked
for build in MODELS.values():
    for micro_batch_size in (1, 2, 4):
        model = build()
        found = kept_outline(model, batch_size=micro_batch_size, sequence_length=SEQUENCE, dtype=torch.float32)
    slice_outline(found, 2)
    kept_parts(model, found, Job(sequence_length=SEQUENCE), None)
    in_files(model)
gc.collect()
gc.freeze()
