"""The balance loss of a mixture of experts, if the model's config asks for it (``output_router_logits``).

transformers adds ``router_aux_loss_coef`` times experts x sum over experts of (share of the tokens that chose it) x (mean
probability that the router gave it) to the loss of a call; both are means over all tokens and all layers of that call (Switch
Transformer, arXiv 2101.03961, equations 4 to 6). Here a call is a micro-batch: each has its own, and the step's is their mean.

Both means come from sums over layers, [2, experts] numbers, which go from stage to stage of a pipeline with the hidden states;
the gradient of the second comes back the same way. So the product is over all layers, as on one device.

Ranks that share sequences each see some tokens of a call. The loss is linear in the probabilities, so each rank computes its own
share with the counts of all ranks: one all-reduce of [experts] numbers, and no gradient to send.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ahp.errors import BadInput
from ahp.runtime.experts.router_outputs import RouterOutputsTaken, WithRouterOutputs
from ahp.runtime.tensor.slice import SlicedForward


@dataclass(frozen=True)
class Balance:
    """The balance loss of one model."""

    coefficient: float
    num_experts: int
    num_chosen: int
    """How many experts a token chooses."""

    def sums(self, logits: torch.Tensor) -> torch.Tensor:
        """From a layer's router logits [T, E]: how many tokens chose each expert, and the sum of its probabilities; fp32
        [2, E]. The counts have no gradient."""
        probabilities = logits.softmax(dim=-1)
        chosen = probabilities.detach().topk(self.num_chosen, dim=-1).indices
        # bincount would make the host wait for the largest number
        counts = probabilities.new_zeros(self.num_experts, dtype=torch.float32)
        counts = counts.scatter_add(0, chosen.reshape(-1), counts.new_ones(()).expand(chosen.numel()))
        return torch.stack((counts, probabilities.float().sum(dim=0)))

    def nothing(self, device: torch.device) -> torch.Tensor:
        """The sums before the first layer: zeros, trainable because torch's pipeline sends gradients back for every input."""
        return torch.zeros((2, self.num_experts), dtype=torch.float32, device=device, requires_grad=True)

    def loss(self, sums: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The weighted balance loss of a micro-batch, from the sums over its layers. If the ranks of ``group`` each have a part of
        its tokens, this rank's share."""
        counts, probabilities = sums[0].detach(), sums[1]
        if group is not None:
            counts = counts.clone()
            dist.all_reduce(counts, group=group)
        rows = counts.sum() / self.num_chosen  # tokens x layers
        return self.coefficient * self.num_experts * (counts / rows * (probabilities / rows)).sum()


class Routers:
    """Adds up what the routers of one stage return during a forward pass."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module], balance: Balance) -> None:
        """``blocks``: of the stage's ``model``, already sliced if they are to be, but not yet compiled or made to recompute."""
        self.balance = balance
        self._found: list[torch.Tensor] | None = None
        routers = {id(router): index for router, index in _routers(model)}
        for block in blocks:
            outputs = {path: routers.pop(id(module)) for path, module in block.named_modules() if id(module) in routers}
            if not outputs:
                continue
            if isinstance(block.forward, SlicedForward):
                block.forward.collect_router_outputs(outputs, self._collect)
            else:
                block.forward = RouterOutputsTaken(WithRouterOutputs(block, outputs), self._collect)  # type: ignore[method-assign]
        assert not routers, "a router outside of the blocks would be left out"

    def _collect(self, logits: torch.Tensor) -> None:
        if self._found is not None:  # not when a block runs again for its backward
            self._found.append(logits)

    def begin(self) -> None:
        """Start collecting, before a forward pass."""
        self._found = []

    def end(self, earlier: torch.Tensor) -> torch.Tensor:
        """Stop collecting. Returns the sums [2, E] over this stage and the ``earlier`` ones."""
        found, self._found = self._found or [], None
        return torch.stack([earlier, *(self.balance.sums(logits) for logits in found)]).sum(dim=0)


def balance_of(module: nn.Module) -> Balance | None:
    """The balance loss that a model's config asks for, None if it asks for none.

    Raises BadInput if the model's own is not the one described above.
    """
    config, coefficient = getattr(module, "config", None), getattr(module, "router_aux_loss_coef", None)
    if not getattr(config, "output_router_logits", False) or not coefficient:
        return None
    experts, chosen = (getattr(module, name, None) for name in ("num_experts", "num_experts_per_tok"))
    own = getattr(sys.modules[type(module).__module__], "load_balancing_loss_func", None)
    routers = list(_routers(module))
    if not routers or own is None or not isinstance(experts, int) or not isinstance(chosen, int):
        raise _unknown(module)
    found = Balance(float(coefficient), experts, chosen)
    # Model families copy the function and change it: two layers of a few tokens show whether it is still the one above.
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn((5, experts), generator=generator) for _ in range(2))
    expected = found.coefficient * own(logits, experts, chosen)
    if not torch.allclose(found.loss(sum(map(found.sums, logits), torch.zeros(2, experts))), expected):
        raise _unknown(module)
    return found


def _unknown(module: nn.Module) -> BadInput:
    return BadInput(
        f"output_router_logits = True: the balance loss of {type(module).__name__} is not known here, and training would leave "
        "it out (valid: output_router_logits false in the model's config)"
    )


def _routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The routers of a model, and which of their outputs are the logits, as the model itself declares to transformers."""
    specs = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    wanted = next((spec["router_logits"] for spec in specs if "router_logits" in spec), None)
    kind, index = getattr(wanted, "target_class", wanted), getattr(wanted, "index", 0)
    if not isinstance(kind, type):
        return []
    return [(module, index) for module in model.modules() if isinstance(module, kind)]
