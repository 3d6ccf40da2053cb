"""Which rank holds which parameter: names, copies, and the sums that tied parameters on several stages need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from ahp.plan import Parallelism
from ahp.runtime.pipeline.schedules import stages_of_rank
from ahp.runtime.ranks.mesh import Mesh
from ahp.runtime.ranks.torch_compat import time_limit
from ahp.runtime.shard.parameter_layout import ParameterLayout, Ranges, part_of, put_part
from ahp.runtime.torch_compat import local_tensor

SUMMED_ELEMENTS = 2**24
"""Of tied weights whose parts do not line up so many are summed at once: 64 MiB, enough to fill any link, little beside the weights."""


class ParameterNames:
    """The hub's names of a model's parameters; of a tied parameter the first name stands for all."""

    def __init__(self, module: nn.Module) -> None:
        self.first: dict[int, str] = {}
        self.of: dict[str, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.of[name] = self.first.setdefault(id(parameter), name)
        self.shapes = {name: tuple(module.get_parameter(name).shape) for name in self.first.values()}

    def on(self, model: nn.Module) -> set[str]:
        """Parameters that are on a stage's cut model."""
        return {self.of[name] for name, _ in model.named_parameters()}


class LocalParameters:
    """The parameters of one rank's stages by the hub's names.

    Two stages of one rank may hold the same parameter (a bare table that every stage reads). The first is the one that
    the optimizer updates; the others, its twins, add their gradients to it and take its values over.
    """

    def __init__(self, stages: list[nn.Module], names: ParameterNames) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.twins: list[tuple[str, nn.Parameter]] = []
        for stage in stages:
            for local_name, parameter in stage.named_parameters():
                name = names.of[local_name]
                if name in self.parameters:
                    self.twins.append((name, parameter))
                else:
                    self.parameters[name] = parameter

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's part of every gradient there is, twins added up; afterwards no parameter holds one."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self._all():
            if parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                found[name] = found[name].add_(gradient) if name in found else gradient
                parameter.grad = None
        return found

    def forget_gradients(self) -> None:
        """Those that no step has taken."""
        for _, parameter in self._all():
            parameter.grad = None

    def with_gradient(self) -> str | None:
        """The first parameter that has one."""
        return next((name for name, parameter in self._all() if parameter.grad is not None), None)

    def _all(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By name, twins last."""
        return chain(self.parameters.items(), self.twins)

    def refresh_twins(self) -> None:
        """After parameters changed."""
        with torch.no_grad():
            for name, twin in self.twins:
                local_tensor(twin).copy_(local_tensor(self.parameters[name]))


class TiedParameters:
    """Parameters that several stages hold (tied embeddings): their gradients are the sum of what each stage found."""

    def __init__(self, names_of_stage: list[set[str]], mesh: Mesh, parallelism: Parallelism) -> None:
        self.holders: dict[str, tuple[int, ...]] = {}
        stages = [stages_of_rank(rank, parallelism) for rank in range(mesh.size("pp"))]
        for name in sorted(set().union(*names_of_stage)):
            self.holders[name] = tuple(
                rank for rank, held in enumerate(stages) if any(name in names_of_stage[stage] for stage in held)
            )
        self.widths = parallelism.widths
        self.groups = self._make_groups(mesh)

    def num_holders(self, name: str) -> int:
        """How many pipeline ranks hold a parameter."""
        return len(self.holders[name])

    def written_elsewhere(self, pipeline_rank: int) -> frozenset[str]:
        """Parameters of a pipeline rank that do not lie there as on the first one that holds them."""
        return frozenset(
            name
            for name, ranks in self.holders.items()
            if pipeline_rank in ranks[1:] and not self._line_up((ranks[0], pipeline_rank))
        )

    def _make_groups(self, mesh: Mesh) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """This rank's group for each set of pipeline ranks that ties something: of the ranks that hold the same part in each, or, where
        these are of unlike width, of all that hold some. Collective: every rank makes every group."""
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks in sorted({holders for holders in self.holders.values() if len(holders) > 1}):
            if self._line_up(ranks):
                columns = torch.stack([mesh.places[r].flatten() for r in ranks], dim=1).tolist()
            else:
                # A context rank that holds all weights is a replica of its own.
                by_replica = zip(*(mesh.places[r].reshape(mesh.num_replicas, -1).tolist() for r in ranks), strict=True)
                columns = [[rank for some in replica for rank in some] for replica in by_replica]
            for members in columns:
                group = dist.new_group(members, timeout=time_limit(mesh.device))
                if isinstance(group, dist.ProcessGroup) and dist.get_rank() in members:
                    mine[ranks] = group
        return mine

    def _line_up(self, ranks: tuple[int, ...]) -> bool:
        """Whether pipeline ranks hold the same parts of what they tie."""
        return len({self.widths[rank] for rank in ranks}) == 1

    def sum_(
        self, gradients: dict[str, torch.Tensor], layout: ParameterLayout, shards: dict[str, nn.Parameter]
    ) -> None:
        """Add up, in place, the gradients of tied parameters over the stages that hold them."""
        for name in sorted(shards):
            group = self.groups.get(self.holders[name])
            if group is not None:
                if name not in gradients:
                    gradients[name] = torch.zeros_like(shards[name])
                if self._line_up(self.holders[name]):
                    dist.all_reduce(gradients[name], group=group)
                else:
                    _sum_whole_(gradients[name], name, layout, group)


def _sum_whole_(gradient: torch.Tensor, name: str, layout: ParameterLayout, group: dist.ProcessGroup) -> None:
    """Add up, in place, gradients of which each rank of the group has another part, or the same as its tensor-parallel ranks: whole, some rows
    at a time, into which the first of those puts its part."""
    shape, held = layout.shapes[name], layout.ranges(name)
    own = held.pop(0, [(0, shape[0])])
    puts = name in layout.splits or layout.mesh.rank("tp") == 0
    at_a_time = max(1, SUMMED_ELEMENTS * shape[0] // math.prod(shape))
    for low in range(0, shape[0], at_a_time):
        rows = gradient.new_zeros((min(at_a_time, shape[0] - low), *shape[1:]))
        places = list(_rows_between(own, low, low + len(rows)))
        for here, there in places if puts else ():
            put_part(rows[there], held, gradient[here])
        dist.all_reduce(rows, group=group)
        for here, there in places:
            gradient[here] = part_of(rows[there], held)


def _rows_between(own: Ranges, low: int, high: int) -> Iterator[tuple[slice, slice]]:
    """Of the rows that a rank holds those between two: where they are among its own, and among these."""
    passed = 0
    for first, end in own:
        a, b = max(first, low), min(end, high)
        if a < b:
            yield slice(passed + a - first, passed + b - first), slice(a - low, b - low)
        passed += end - first
