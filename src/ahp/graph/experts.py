"""Finds the modules that hold a mixture's experts, by the shapes of their parameters and by how they are called.

In transformers they all have one form: one module with stacked weights [experts, ...], called with the tokens, the experts
that the router chose for each, and their weights. No family is known by name; anyone's module of this form counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def num_stacked(module: nn.Module) -> int | None:
    """The number of experts whose weights are stacked in a module's own parameters, or None.

    Every parameter must be [experts, ...], at least one must hold matrices [experts, rows, columns], and submodules must have no parameters.
    """
    own = list(module.parameters(recurse=False))
    if not any(p.ndim == 3 for p in own) or len(own) != len(list(module.parameters())):
        return None
    sizes = {p.shape[0] for p in own}
    return sizes.pop() if len(sizes) == 1 else None


# ``custom_op`` and ``register_fake`` would search every loaded module for the source of their caller, at each start.
torch.library.define(
    "ahp::experts", "(Tensor tokens, Tensor chosen, Tensor weights, str path, bool is_summand) -> Tensor"
)


@torch.library.impl("ahp::experts", "Meta")
def _like_tokens(
    tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, path: str, is_summand: bool
) -> torch.Tensor:
    return torch.empty_like(tokens)


EXPERTS = torch.ops.ahp.experts.default
"""Replaces the call of the experts at ``path`` in a traced block, tokens [T, H] -> [T, H]; it is never run.

``is_summand``: whether a tensor-parallel rank, which has a part of each expert, gets a summand of the results.
"""


def experts(
    tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, path: str, is_summand: bool
) -> torch.Tensor:
    """Call the operator."""
    return EXPERTS(tokens, chosen, weights, path, is_summand)  # type: ignore[no-any-return]


class Watch:
    """Records, while a model runs, which candidates below ``paths`` are called like experts."""

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        self._seen: dict[str, bool] = {}
        self._handles = [
            module.register_forward_hook(self._note(f"{path}.{name}"), with_kwargs=True)
            for path in paths
            for name, module in model.get_submodule(path).named_modules()
            if name and num_stacked(module) is not None
        ]

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._seen[name] = self._seen.get(name, True) and is_experts_call((*args, *kwargs.values()), output)

        return hook

    def found(self) -> tuple[str, ...]:
        """The names, in the order of their calls; recording ends."""
        for handle in self._handles:
            handle.remove()
        return tuple(name for name, right in self._seen.items() if right)


def is_experts_call(values: tuple[Any, ...], output: Any) -> bool:
    """Whether a call was (tokens [T, H], chosen experts int [T, K], their weights [T, K]) -> [T, H]."""
    if len(values) != 3 or not all(isinstance(x, torch.Tensor) and x.ndim == 2 for x in (*values, output)):
        return False
    tokens, chosen, weights = values
    return (
        tokens.is_floating_point()
        and weights.is_floating_point()
        and not chosen.is_floating_point()
        and chosen.shape == weights.shape
        and chosen.shape[0] == tokens.shape[0]
        and output.shape == tokens.shape
    )
