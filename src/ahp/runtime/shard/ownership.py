"""Which rank holds which parameter: names, copies, and the sums that tied parameters on several stages need."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ahp.errors import bad_input
from ahp.plan import Parallelism
from ahp.runtime.pipeline.schedules import stages_of_rank
from ahp.runtime.ranks.mesh import Mesh
from ahp.runtime.ranks.torch_compat import time_limit
from ahp.runtime.shard.parameter_layout import ParameterLayout, Ranges, cut_to, part_of, put_part
from ahp.runtime.torch_compat import has_gradient_hook, local_tensor, memory_of, whole_parameters

SUMMED_ELEMENTS = 2**24
"""How many elements of tied weights are summed at once if parts do not line up: 64 MiB, enough to fill any link, little next to the weights."""


class ParameterNames:
    """The hub's names of a model's parameters; a tied parameter goes by its first name."""

    def __init__(self, module: nn.Module) -> None:
        self.first: dict[int, str] = {}
        self.of: dict[str, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.of[name] = self.first.setdefault(id(parameter), name)
        self.shapes = {name: tuple(module.get_parameter(name).shape) for name in self.first.values()}
        self.given = [(name, weakref.ref(parameter)) for name, parameter in module.named_parameters()]

    def on(self, model: nn.Module) -> set[str]:
        """Names of the parameters that are on a stage's cut model."""
        return {self.of[name] for name, _ in model.named_parameters()}


class LocalParameters:
    """The parameters of one rank's stages, keyed by the hub's names.

    Several stages of one rank can hold the same parameter (a bare table that every stage reads). The optimizer updates the
    first copy; the others, its twins, add their gradients to it and take over its values.
    """

    def __init__(self, stages: list[nn.Module], names: ParameterNames, roots: Sequence[FSDPModule] = ()) -> None:
        """``roots``: what FSDP2 shards as a whole."""
        self.parameters: dict[str, nn.Parameter] = {}
        self.twins: list[tuple[str, nn.Parameter]] = []
        self.trained: set[str] = set()
        """Names of the parameters that the optimizer updates. A program may freeze some later, and unfreeze them again."""
        self.hooked: set[str] = set()
        """Names of those that had hooks on their gradients when they were given."""
        for stage in stages:
            for local_name, parameter in stage.named_parameters():
                name = names.of[local_name]
                if self.parameters.setdefault(name, parameter) is not parameter:
                    self.twins.append((name, parameter))
                if parameter.requires_grad:
                    self.trained.add(name)
                if has_gradient_hook(parameter):
                    self.hooked.add(name)
        self._memory = [memory_of(parameter) for parameter in self]
        self._roots = roots
        self._places = [
            (f"{path}.{leaf}".removeprefix("."), part, leaf, parameter)
            for stage in stages
            for path, part in stage.named_modules()
            for leaf, parameter in part._parameters.items()
            if parameter is not None
        ]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._all())

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's part of every gradient that exists, twins added up; afterwards no parameter holds a gradient."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self._all():
            if parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                found[name] = found[name].add_(gradient) if name in found else gradient
                parameter.grad = None
        return found

    def forget_gradients(self) -> None:
        """Drop all gradients."""
        for _, parameter in self._all():
            parameter.grad = None

    def with_gradient(self) -> str | None:
        """The first parameter that has a gradient."""
        return next((name for name, parameter in self._all() if parameter.grad is not None), None)

    def trains(self) -> bool:
        """Whether any parameter is trained now."""
        return any(parameter.requires_grad for _, parameter in self._all())

    def trained_since(self) -> str | None:
        """The first parameter that is trained now, and was not at first."""
        return next((name for name, p in self._all() if p.requires_grad and name not in self.trained), None)

    def hooked_since(self) -> str | None:
        """The first parameter that has a hook on its gradient now, and had none at first."""
        return next((name for name, p in self._all() if has_gradient_hook(p) and name not in self.hooked), None)

    def _all(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter), twins last."""
        return chain(self.parameters.items(), self.twins)

    def follow(self) -> None:
        """Let twins be what the parameters are, which a step, a checkpoint or the program may have changed. Raises BadInput if the program has
        put another tensor under a parameter, or another parameter into its place: the optimizer and FSDP2 would go on with the first."""
        self._refuse_replaced()
        for (name, parameter), memory in zip(self._all(), self._memory, strict=True):
            if memory_of(parameter) != memory:
                rule = "its data is another tensor now (p.data = ..), while the optimizer and ZeRO have the first"
                raise bad_input("parallel.parameters", name, rule, ["with torch.no_grad(): p.copy_(..)"])
        with torch.no_grad():
            for name, twin in self.twins:
                parameter = self.parameters[name]
                twin.requires_grad_(parameter.requires_grad)
                local_tensor(twin).copy_(local_tensor(parameter))

    def _refuse_replaced(self) -> None:
        """Raises BadInput for a parameter that is not in its module any more. Without FSDP2 it may be in a parametrization there."""
        whole: set[int] | None = None
        for path, part, leaf, parameter in self._places:
            if (now := part._parameters.get(leaf)) is parameter:
                continue
            if now is not None:
                whole = set().union(*map(whole_parameters, self._roots)) if whole is None else whole
            in_part = not isinstance(parameter, DTensor) and any(one is parameter for one in part.parameters())
            if in_part or (now is not None and whole is not None and id(now) in whole):
                continue
            rule = (
                "is another parameter now, or none (by an assignment, pruning or a parametrization), while the optimizer and ZeRO "
                "have the one that ahp.parallelize was given"
            )
            raise bad_input("module", path, rule, ["the same before ahp.parallelize", "parallel.parameters for values"])


class TiedParameters:
    """Parameters that several stages hold (tied embeddings): their gradients are summed over those stages."""

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
        """Parameters of a pipeline rank that are laid out differently on the first pipeline rank that holds them."""
        return frozenset(
            name
            for name, ranks in self.holders.items()
            if pipeline_rank in ranks[1:] and not self._line_up((ranks[0], pipeline_rank))
        )

    def _make_groups(self, mesh: Mesh) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """This rank's group for each set of pipeline ranks with tied parameters: the ranks that hold the same part, or, if the pipeline
        ranks differ in width, all that hold a part of one replica. Collective: every rank makes every group."""
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
        """Whether pipeline ranks hold the same parts of tied parameters."""
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
    """Add up, in place, gradients whose parts differ between stages of the group. Some rows of the whole are summed at a time; each rank puts its
    part there, but only the first of tensor-parallel ranks that hold the same one."""
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
    """Where the rows that a rank holds in ``low .. high`` are: among its own rows, and within ``low .. high``."""
    for first, end, at in cut_to(own, low, high):
        yield slice(at, at + end - first), slice(first - low, end - low)
