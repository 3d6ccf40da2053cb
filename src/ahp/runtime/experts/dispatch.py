"""Expert parallelism: each rank of the ``ep`` axis holds a part of a mixture's experts, and tokens travel to their experts.

A module of experts (``ahp.graph.experts``) keeps its own forward, which runs on the tokens that arrived, as if the rank's experts
were all experts. Around it, every copy of a token is sent to the rank of its expert, and its result is sent back. No token is
dropped, whatever the router does. In the names of tensors T are tokens, H features, K the experts of a token, E all experts.

All-to-all needs the number of rows for each rank on the host. The host waits for nothing else, once per layer and forward pass: backward
and recompute know the numbers already. The module's own forward may wait on top of that.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ahp.divisors import divisors
from ahp.errors import bad_input
from ahp.graph.experts import num_stacked
from ahp.graph.outline import Outline
from ahp.runtime.compute.recompute import known_again, saved_once
from ahp.runtime.compute.uncompiled import uncompiled
from ahp.runtime.ranks.mesh import Mesh
from ahp.runtime.tensor.collectives import exchange_rows, exchanged
from ahp.runtime.tensor.slice import local_weights, replace_parameter
from ahp.search.slicing.placement import Split


def check_experts(module: nn.Module, found: Outline | None, degree: int) -> None:
    """Raises BadInput unless the degree divides the experts of every layer that has any."""
    if degree == 1:
        return
    if found is None or not found.experts:
        rule = (
            "no module of the model's blocks is seen to hold experts: stacked weights [experts, ...], called with tokens [T, H], "
            "the chosen experts [T, K] and their weights [T, K]"
        )
        raise bad_input("expert_parallel_degree", degree, rule, [1])
    for path in found.experts:
        number = num_stacked(module.get_submodule(path)) or 0
        if number % degree:
            raise bad_input(
                "expert_parallel_degree", degree, f"does not divide the {number} experts of {path}", divisors(number)
            )


def divide_experts(model: nn.Module, found: Outline, mesh: Mesh, splits: dict[str, Split]) -> dict[str, nn.Module]:
    """Give a stage's model, in place, this rank's experts and forwards that exchange tokens.

    ``splits``: how parameters of experts are cut over the tensor-parallel ranks too, keyed by name in ``model``.
    Returns its modules of experts, keyed by path. Their parameters are DTensors on the ``ep`` axis, or on ``ep`` and ``tp``.
    """
    assert mesh.experts is not None
    here = dict(model.named_modules())
    divided = {path: here[path] for path in found.experts if path in here}  # others live on other stages
    for path, module in divided.items():
        number = num_stacked(module)
        assert number is not None
        for name, parameter in list(module.named_parameters(recurse=False)):
            split, whole_ones = splits.get(f"{path}.{name}"), Split(0, (parameter.shape[0],))
            if split is None:
                replace_parameter(module, name, (whole_ones,), mesh.experts["ep"], {})
            else:
                replace_parameter(module, name, (whole_ones, split), mesh.experts["ep", "tp"], {})
        _count_fewer(module, number, number // mesh.size("ep"))
        module.forward = DividedExperts(module, number, mesh.group("ep"))  # type: ignore[method-assign]
    return divided


def _count_fewer(module: nn.Module, number: int, here: int) -> None:
    """Change the attributes in which a module keeps its number of experts."""
    for name, value in vars(module).items():
        if "expert" in name and type(value) is int and value == number:
            setattr(module, name, here)


class Traffic:
    """How many copies of tokens this rank sends to each rank and gets from it. Copied to the host while the device goes on."""

    def __init__(self, sorted_experts: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> None:
        """``sorted_experts``: the expert of each copy, in rising order. Collective."""
        device, ranks = sorted_experts.device, group.size()
        ends_E = torch.searchsorted(sorted_experts, torch.arange(num_experts, device=device), right=True)
        to_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        self.from_E = torch.empty_like(to_E)
        """For each rank of the group, how many copies come from it for each expert of this rank."""
        dist.all_to_all_single(self.from_E, to_E, group=group)
        by_rank = torch.stack((to_E, self.from_E)).view(2, ranks, num_experts // ranks).sum(dim=2)
        self._on_host = torch.empty_like(by_rank, device="cpu", pin_memory=device.type == "cuda")
        self._on_host.copy_(by_rank, non_blocking=True)
        self._arrived = torch.get_device_module(device).Event()
        self._arrived.record()

    @cached_property
    def _each(self) -> list[list[int]]:
        self._arrived.synchronize()
        return self._on_host.tolist()  # type: ignore[no-any-return]

    @property
    def sent(self) -> list[int]:
        """Number of copies to each rank. Waits for the device."""
        return self._each[0]

    @property
    def received(self) -> list[int]:
        """Number of copies from each rank. Waits for the device."""
        return self._each[1]

    def experts(self) -> torch.Tensor:
        """The expert of each received copy, counted from this rank's first expert."""
        ranks = len(self.received)
        experts = torch.arange(self.from_E.numel() // ranks, device=self.from_E.device).repeat(ranks)
        return experts.repeat_interleave(self.from_E, output_size=sum(self.received))


class DividedExperts:
    """Runs a module's experts on the tokens of all ranks of a group that chose them. It stays outside of compiled graphs: the
    number of tokens changes at each call."""

    def __init__(self, module: nn.Module, num_experts: int, group: dist.ProcessGroup) -> None:
        self.module, self.forward, self.num_experts, self.group = module, module.forward, num_experts, group

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tokens_TH, chosen_TK, weights_TK = (*args, *kwargs.values())
        num_tokens, num_chosen = chosen_TK.shape
        chosen, order = chosen_TK.reshape(-1).sort(stable=True)  # copies of tokens by expert, and so by rank
        traffic = known_again(lambda: Traffic(chosen, self.num_experts, self.group))
        copies = tokens_TH[order // num_chosen], weights_TK.reshape(-1, 1)[order]
        sent, received = traffic.sent, traffic.received
        arrived, weights = exchange_rows(copies, sent, received, self.group, saved_once)
        experts = traffic.experts()
        if not sum(received):
            # A rank without tokens computes on one token of zeros and sends nothing back: its weights get gradients of zero, so
            # that it takes part in whatever sums them.
            arrived, weights, experts = (
                torch.cat((x, x.new_zeros(1, *x.shape[1:]))) for x in (arrived, weights, experts)
            )
        values = (arrived, experts.unsqueeze(1), weights)
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        with local_weights(self.module):
            results = self.forward(*values[: len(args)], **named)
        return _Combined.apply(results[: sum(received)], order, (num_tokens, num_chosen), traffic, self.group)  # type: ignore[no-any-return]


class _Combined(torch.autograd.Function):
    """The results that come back for each token of this rank, added up. In one node of the graph, so that selective recompute keeps
    one sum for each token, not a result for each of its experts."""

    @staticmethod
    def forward(
        ctx: Any,
        results: torch.Tensor,
        order: torch.Tensor,
        shape_TK: tuple[int, int],
        traffic: Traffic,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """``results``: [copies that this rank got, H]; ``order``: [T K] the copy that is sent at each place."""

        def combine() -> tuple[torch.Tensor]:
            back = exchanged(results, traffic.received, traffic.sent, group)
            return (back[order.argsort()].view(*shape_TK, -1).sum(dim=1),)

        (sums_TH,) = saved_once(combine)
        # Nothing is saved: where nothing later is either, a second run of the block stops before this function sends results.
        ctx.order, ctx.num_chosen, ctx.traffic, ctx.group = order, shape_TK[1], traffic, group
        return sums_TH

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        traffic: Traffic = ctx.traffic
        copies = gradients[0][ctx.order // ctx.num_chosen]
        return exchanged(copies, traffic.sent, traffic.received, ctx.group), None, None, None, None
