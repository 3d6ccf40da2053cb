"""The space of layouts: every combination of the searched keys, and the rules that leave combinations out.

The table is kept as a product. A block has one value of each key that a replica's devices share (tensor, context and
expert degree, sequence parallelism, pipeline degree), one way in which these devices lie on nodes, and one micro-batch; so it
has one number of replicas and of micro-batches. Its rows are every way to shard the replicas and to lay them on nodes, with
every schedule, with every kind of recompute. A rule looks at one of these choices only, and at what a whole block shares:
so rules are masks over values, rows are counted by multiplication, and only legal rows are ever written out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from ahp.arrays import Ints
from ahp.cached_method import cached_method
from ahp.forecast.axes import Axes, axes_of
from ahp.forecast.group import Group, on_nodes
from ahp.plan import Parallelism
from ahp.search.choices import Choices, Mesh, ScheduleChoice, ShardingChoice, Shared
from ahp.search.degree_rules import Broken, broken_degrees
from ahp.search.problem import Problem


@dataclass(frozen=True)
class Rule:
    """A rule, and how many rows of the space break it (a row may break several)."""

    name: str
    says: str
    broken: int


@dataclass(frozen=True)
class Rows:
    """The legal rows of a block: every combination of split, pipe and kind of recompute, the last varying fastest."""

    splits: tuple[ShardingChoice, ...]
    pipes: tuple[ScheduleChoice, ...]
    recompute: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.splits), len(self.pipes), len(self.recompute)

    def choices(self, row: int) -> tuple[ShardingChoice, ScheduleChoice, str]:
        """The choices of one row."""
        split, pipe, recompute = np.unravel_index(row, self.shape)
        return self.splits[split], self.pipes[pipe], self.recompute[recompute]

    def __len__(self) -> int:
        return len(self.splits) * len(self.pipes) * len(self.recompute)


@dataclass(frozen=True)
class Blocks:
    """One entry for each block with a legal row."""

    mesh: Ints
    """Index into the space's meshes."""
    tensor: Ints
    context: Ints
    pipeline: Ints
    expert: Ints
    sequence_parallel: Ints
    """0 or 1."""
    data: Ints
    """Replicas that see different sequences: replicate x shard degree."""
    micro_batch: Ints
    micro_batches: Ints
    rows: Ints
    """Number of legal rows."""

    def __len__(self) -> int:
        return len(self.tensor)

    def at(self, which: Ints) -> Blocks:
        """The blocks at these indices."""
        return Blocks(*(getattr(self, field.name)[which] for field in fields(self)))


class Space:
    """The legal layouts of a problem, and a count of the others by the rule that they break."""

    def __init__(
        self, choices: Choices, meshes: list[Mesh], blocks: Blocks, size: int, broken: tuple[Rule, ...], alike: int
    ) -> None:
        self._choices, self._meshes = choices, meshes
        self.blocks = blocks
        self.size = size
        """Number of combinations whose degrees multiply to the number of devices, legal or not. Degrees that break a rule count in one order."""
        self.rules = broken
        self.num_alike = alike
        """Number of combinations that break no rule, but whose ZeRO stage the engine runs like a lower one: these are not rows."""

    @property
    def has_orders(self) -> bool:
        """Whether some layout numbers its ranks in an order other than the usual one."""
        return any(split.order is not None for mesh in self._meshes for split in mesh.splits)

    @property
    def num_legal(self) -> int:
        return int(self.blocks.rows.sum())

    def rows(self, block: int) -> Rows:
        """The legal rows of one block."""
        mesh = self.mesh(block)
        splits = self._choices.legal_splits(mesh.splits, self._choices.shared(mesh.degrees))
        return Rows(splits, self.pipes(block), self.recompute(block))

    def recompute(self, block: int) -> tuple[str, ...]:
        """The legal kinds of recompute of one block."""
        of = self.mesh(block).degrees
        return self._choices.legal_recompute(of.tensor, of.context, of.expert)

    def mesh(self, block: int) -> Mesh:
        """The mesh of one block."""
        return self._meshes[int(self.blocks.mesh[block])]

    def axes(self, block: int) -> Axes:
        """The groups of a block that divide a micro-batch."""
        of = self.mesh(block).degrees
        tensor, context, experts = self._groups(int(self.blocks.mesh[block]))
        return Axes(tensor, bool(of.sequence_parallel) and of.tensor > 1, context, experts)

    def local(self, meshes: Ints) -> Ints:
        """[meshes, 3] How many ranks of each mesh's tensor, context and expert group share a node."""
        every = (
            [group.local for group in self._groups(number)] if mesh.within.uneven else mesh.within[:3]
            for number, mesh in enumerate(self._meshes)
        )
        return np.array(list(every), dtype=np.int64).reshape(-1, 3)[meshes]

    @cached_method
    def _groups(self, number: int) -> tuple[Group, Group, Group]:
        """The tensor, context and expert group of one mesh; where an axis does not fill nodes evenly (the same for all splits of the mesh), the
        groups that lie on the most nodes."""
        mesh = self._meshes[number]
        of, split = mesh.degrees, mesh.splits[0]
        if not mesh.within.uneven:
            sizes = zip((of.tensor, of.context, of.expert), mesh.within[:3], strict=True)
            tensor, context, expert = (on_nodes(size, local) for size, local in sizes)
            return tensor, context, expert
        layout = Parallelism(
            data_parallel_replicate_degree=split.replicate,
            data_parallel_shard_degree=split.shard,
            tensor_parallel_degree=of.tensor,
            pipeline_parallel_degree=of.pipeline,
            context_parallel_degree=of.context,
            expert_parallel_degree=of.expert,
            mesh_order=split.order,
        )
        choices = self._choices
        key = of.tensor, of.expert, of.sequence_parallel, of.data * of.context
        found = axes_of(layout, choices.orders.devices_per_node, choices.folds and choices.folded(*key))
        return found.tensor, found.context, found.expert

    def folded(self, blocks: Blocks) -> Ints:
        """1 for each block whose tensor-parallel ranks hold whole experts, else 0."""
        if not self._choices.folds:
            return np.zeros(len(blocks), dtype=np.int64)
        of = blocks.tensor, blocks.expert, blocks.sequence_parallel, blocks.data * blocks.context
        return np.array(
            [self._choices.folded(*key) for key in zip(*(c.tolist() for c in of), strict=True)], dtype=np.int64
        )

    def pipes(self, block: int) -> tuple[ScheduleChoice, ...]:
        """The legal ways to run the pipelines of one block."""
        return self.legal_pipes(int(self.blocks.pipeline[block]), int(self.blocks.micro_batches[block]))

    def legal_pipes(self, pipeline: int, micro_batches: int) -> tuple[ScheduleChoice, ...]:
        """The legal ways to run a pipeline with these numbers of ranks and micro-batches."""
        return self._choices.legal_pipes(pipeline, micro_batches)

    def states(self, block: int) -> tuple[ShardingChoice, ...]:
        """The legal ways to share states in a block and in those that differ only in where ranks lie; each way in one order of ranks."""
        return self._choices.legal_states(self.mesh(block).degrees)

    def layout(self, block: int, row: int) -> Parallelism:
        """One row of one block as a layout."""
        return self.layout_of(block, *self.rows(block).choices(row))

    def layouts(
        self, block: int, splits: tuple[ShardingChoice, ...], pipe: ScheduleChoice, recompute: str
    ) -> list[Parallelism]:
        """The layouts of a block that differ in how replicas share states."""
        first = self.layout_of(block, splits[0], pipe, recompute)
        return [
            first.model_copy(
                update={
                    "data_parallel_replicate_degree": split.replicate,
                    "data_parallel_shard_degree": split.shard,
                    "zero_stage": split.zero,
                    "mesh_order": split.order,
                }
            )
            for split in splits
        ]

    def layout_of(self, block: int, split: ShardingChoice, pipe: ScheduleChoice, recompute: str) -> Parallelism:
        """The layout of a block with these choices."""
        of = self.blocks
        return Parallelism(
            data_parallel_replicate_degree=split.replicate,
            data_parallel_shard_degree=split.shard,
            zero_stage=split.zero,
            tensor_parallel_degree=int(of.tensor[block]),
            enable_sequence_parallel=bool(of.sequence_parallel[block]),
            pipeline_parallel_degree=int(of.pipeline[block]),
            pipeline_parallel_schedule=pipe.schedule,  # type: ignore[arg-type]
            virtual_stages_per_rank=pipe.virtual,
            layers_per_stage=self._choices.given.get("layers_per_stage"),
            context_parallel_degree=int(of.context[block]),
            context_parallel_method=self._choices.given.get("context_parallel_method"),
            expert_parallel_degree=int(of.expert[block]),
            expert_tensor_parallel_degree=self._choices.given.get("expert_tensor_parallel_degree"),
            micro_batch_size=int(of.micro_batch[block]),
            activation_checkpoint=recompute,  # type: ignore[arg-type]
            recomputed_layers_per_stage=self._choices.given.get("recomputed_layers_per_stage"),
            mesh_order=split.order,
        )

    def __iter__(self) -> Iterator[Parallelism]:
        """Every legal layout."""
        for block in range(len(self.blocks)):
            for row in range(int(self.blocks.rows[block])):
                yield self.layout(block, row)


def build(asked: Problem) -> Space:
    """Every combination whose degrees multiply to the number of devices, the user's constraints kept.

    Raises:
        BadInput: constraints that no number of devices, or not this one, can meet.
    """
    choices = Choices(asked)
    degrees = choices.degrees()
    broken = broken_degrees(choices, degrees)
    wrong = np.zeros(len(degrees), dtype=bool)
    for rule in broken:
        wrong |= rule.rows
    meshes, of = choices.meshes(degrees, wrong)
    table = np.array(degrees, dtype=np.int64)[of]
    micro, batch = np.array(choices.micro_batch), asked.job.global_batch_size
    per_round = table[:, [5]] * micro
    micro_batches = np.where(batch % per_round == 0, batch // per_round, 0)
    counted = _Counted(choices, meshes, table, micro_batches)
    legal = counted.legal([rule._replace(rows=rule.rows[of]) for rule in broken])
    mesh, size = np.nonzero(legal)
    columns = [mesh, *(table[mesh, i] for i in range(6)), micro[size], micro_batches[mesh, size], legal[mesh, size]]
    blocks = Blocks(*(np.ascontiguousarray(column) for column in columns))
    return Space(choices, meshes, blocks, counted.size, tuple(counted.rules()), counted.alike)


class _Counted:
    """Rows of each mesh and micro-batch, and how many break each rule. Arrays are [M, K] for M meshes and K micro-batches."""

    def __init__(self, choices: Choices, meshes: list[Mesh], table: Ints, micro_batches: Ints) -> None:
        """``table``: [M, 6] the degrees of the meshes."""
        self.choices, self.meshes, self.table, self.micro_batches = choices, meshes, table, micro_batches
        self.num_recompute = len(choices.recompute)
        self.num_splits = np.array([len(mesh.splits) for mesh in meshes])
        self.num_pipes = np.array([len(choices.pipes(mesh.degrees.pipeline)) for mesh in meshes])
        self.per_micro_batch = self.num_splits * self.num_pipes * self.num_recompute
        """[M] Rows of each mesh with one micro-batch."""
        self.size = int(self.per_micro_batch.sum()) * micro_batches.shape[1]
        self.alike = 0
        """Rows that break no rule, but that the engine runs like another row."""
        self.found: dict[str, tuple[str, int]] = {}

    def legal(self, broken: list[Broken]) -> Ints:
        """[M, K] Number of rows that break no rule; counts the others. ``broken``: rules of degrees, with the meshes [M] that break them."""
        batch = self.choices.asked.job.global_batch_size
        self._count(
            "batch",
            f"global_batch_size {batch} must be a multiple of data-parallel degree x micro_batch_size{self._nearest(batch)}",
            int(((self.micro_batches == 0) * self.per_micro_batch[:, None]).sum()),
        )
        wrong = np.zeros(len(self.meshes), dtype=bool)
        for name, says, rows in broken:
            self._count(name, says, int(self.per_micro_batch[rows].sum()) * self.micro_batches.shape[1])
            wrong |= rows
        pipes, recompute = self._good_pipes(), self._good_recompute()
        good, alike = (
            np.where(self.micro_batches > 0, (splits * ~wrong * recompute)[:, None] * pipes, 0)
            for splits in self._good_splits()
        )
        self.alike = int(alike.sum())
        return good

    def _nearest(self, batch: int) -> str:
        """Words that name the nearest batch sizes divisible by the given keys; empty if the job's own is."""
        keys = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "micro_batch_size")
        given = {key: self.choices.given[key] for key in keys if self.choices.given.get(key, 1) > 1}
        step = math.prod(given.values())
        if batch % step == 0:
            return ""
        below = batch // step * step
        valid = ", ".join(str(count) for count in (below, below + step) if count)
        return f", and so of {' x '.join(given)} = {step} (valid: global_batch_size {valid})"

    def rules(self) -> Iterator[Rule]:
        for name, (says, broken) in self.found.items():
            yield Rule(name, says, broken)

    def _count(self, name: str, says: str | None, broken: int) -> None:
        if says is not None and broken:
            before, already = self.found.get(name, (says, 0))
            self.found[name] = before, already + broken

    def _good_splits(self) -> tuple[Ints, Ints]:
        """[M] Number of ways to share states that the engine can express, each once if it runs several the same way; and the repeats."""
        each = self.num_recompute * self.micro_batches.shape[1]
        rows: dict[tuple[int, Shared], int] = {}
        first: dict[tuple[int, Shared], Mesh] = {}
        # Meshes with equal keys have everything in common that decides.
        keys = [(id(mesh.splits), self.choices.shared(mesh.degrees)) for mesh in self.meshes]
        for key, mesh, pipes in zip(keys, self.meshes, self.num_pipes.tolist(), strict=True):
            rows[key] = rows.get(key, 0) + pipes * each
            first.setdefault(key, mesh)
        found = {}
        for key, mesh in first.items():
            shared = key[1]
            good, refused = len(self.choices.legal_splits(mesh.splits, shared)), 0
            if good < len(mesh.splits):
                for text in filter(None, (self.choices.refused_split(split, shared) for split in mesh.splits)):
                    self._count(f"engine: {text.split(' = ')[0]}", text, rows[key])
                    refused += 1
            found[key] = good, len(mesh.splits) - refused - good
        good, alike = np.array([found[key] for key in keys]).T
        return good, alike

    def _good_pipes(self) -> Ints:
        """[M, K] Number of ways to run the pipeline that suit the engine, the layers and the micro-batches."""
        rows = np.broadcast_to((self.num_splits * self.num_recompute)[:, None], self.micro_batches.shape)
        pipeline, good = self.table[:, 2], np.zeros(self.micro_batches.shape, dtype=np.int64)
        for p in sorted(set(pipeline.tolist())):
            of_p = pipeline == p
            counts, at = np.unique(self.micro_batches[of_p].ravel(), return_inverse=True)
            weights = np.bincount(at, rows[of_p].ravel()).astype(np.int64).tolist()
            found = np.zeros(len(counts), dtype=np.int64)
            for pipe in self.choices.pipes(p):
                refused, stages = self.choices.refused_pipe(pipe, p), self.choices.bad_stages(pipe, p)
                self._count("engine: pipeline_parallel_schedule", refused, sum(weights))
                self._count("layers", stages, sum(weights))
                wrong = [self.choices.bad_schedule(pipe, p, m) for m in counts.tolist()]
                for text, weight in zip(wrong, weights, strict=True):
                    self._count("schedule", text, weight)
                found += np.array([not (refused or stages or text) for text in wrong], dtype=np.int64)
            good[of_p] = found[at].reshape(-1, self.micro_batches.shape[1])
        return good

    def _good_recompute(self) -> Ints:
        """[M] Number of kinds of recompute that the engine can express."""
        degrees = [(of.tensor, of.context, of.expert) for of in (mesh.degrees for mesh in self.meshes)]
        rows = dict.fromkeys(degrees, 0)
        for key, count in zip(degrees, (self.per_micro_batch // self.num_recompute).tolist(), strict=True):
            rows[key] += count * self.micro_batches.shape[1]
        for key, count in rows.items():
            for kind in self.choices.recompute:
                self._count("engine: activation_checkpoint", self.choices.bad_recompute(kind, *key), count)
        good = {key: len(self.choices.legal_recompute(*key)) for key in rows}
        return np.array([good[key] for key in degrees])
