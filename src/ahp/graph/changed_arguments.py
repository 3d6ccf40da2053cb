"""What blocks change in the arguments that the model passes to them: neither a block's graph nor a stand-in for it does that."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from ahp.graph.effects import PLAIN
from ahp.graph.flow import Flow
from ahp.graph.likeness import Values
from ahp.graph.torch_compat import pytree


class ChangedArguments:
    """Notes the arguments that each block changes. A mapping that is only given results of the block (Gemma 4 notes keys and values there, for another
    model) counts as changed only if a part of the model reads such a result."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._given: list[tuple[Any, Any, dict[Any, Any]]] = []
        """Of the block that runs: each argument that is no plain value with its content before, and a mapping's items before."""
        self._changed: str | None = None
        self._results_left: str | None = None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = (
            leaf
            for leaf in pytree.tree_leaves((args, kwargs))
            if not isinstance(leaf, (*PLAIN, torch.dtype, torch.device))
        )
        self._given = [
            (leaf, _content(leaf), dict(leaf) if isinstance(leaf, MutableMapping) else {}) for leaf in leaves
        ]

    def leave(self, block: int, path: str, hidden: torch.Tensor) -> None:
        """``block`` of those at ``path`` has returned these hidden states."""
        for given, before, items in self._given:
            if _content(given) == before:
                continue
            what = "a tensor" if isinstance(given, torch.Tensor) else f"the {type(given).__name__}"
            words = f"block {block} of {path} changes {what} that it is given, which only its own forward does"
            results = self._results(given, items, block) if isinstance(given, MutableMapping) else None
            if results is None:
                self._changed = words
            else:
                self._results_left = words
                self._flow.watch(results, beside=hidden)

    def _results(
        self, given: MutableMapping[Any, Any], before: dict[Any, Any], block: int
    ) -> list[torch.Tensor] | None:
        """The tensors that the block has added to a mapping; None if it changed more than that."""
        if before.keys() - given.keys():
            return None
        new = [value for key, value in given.items() if key not in before or before[key] is not value]
        leaves = pytree.tree_leaves(new)
        if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        return leaves if all(self._flow.of([leaf]) == {block} for leaf in leaves) else None

    @property
    def reason(self) -> str | None:
        """A change that no graph of a block makes, or None."""
        flow = self._flow
        is_read = flow.reads_other is not None or flow.reads_unseen is not None or flow.reads_watched
        return self._changed or (self._results_left if is_read else None)


def _content(leaf: Any) -> Any:
    """Other after a change; of a tensor, how often it has been written in place."""
    return leaf._version if isinstance(leaf, torch.Tensor) else Values().of(leaf)
