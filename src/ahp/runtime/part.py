"""The input of a step, refused at once if it is not what ``Parallel.shard`` gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ahp.errors import bad_input, whole_number
from ahp.job import Job
from ahp.plan import Parallelism
from ahp.runtime.compute.loss import PendingCount


def keys_of_part(job: Job) -> list[str]:
    """The keys that a part of a batch has."""
    return ["input_ids", "labels", *(["position_ids"] if job.document_mask else [])]


def check_batch(batch: Any, job: Job) -> None:
    """Raises BadInput if a global batch is no dict of tensors with ``input_ids``."""
    wanted = keys_of_part(job)
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        given = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise bad_input("global_batch", given, f"must be a dict of {' and '.join(wanted)}")
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            valid = [f"torch.as_tensor({key})"]
            raise bad_input(f"global_batch[{key!r}]", type(value).__name__, "must be a tensor of int64", valid)


def check_part(part: dict[str, Any], job: Job, micro_batch_size: int) -> None:
    """Raises BadInput if the keys, types or shapes are not those that a step takes."""
    wanted = keys_of_part(job)
    if not isinstance(part, Mapping):
        words = f"must be a dict of {' and '.join(wanted)}"
        raise bad_input("part", type(part).__name__, words, ["parallel.shard(batch)"])
    missing, unused = sorted(set(wanted) - set(part)), sorted(set(part) - set(wanted))
    if missing or unused:
        rule = f"with job.document_mask {job.document_mask} its keys must be {', '.join(wanted[:-1])} and {wanted[-1]}"
        fault = f"{', '.join(missing)} is missing" if missing else f"{', '.join(unused)} would not be used"
        raise bad_input("part", sorted(part), f"{rule}; {fault}")
    for key in wanted:
        value = part[key]
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        if kind is not torch.int64:
            raise bad_input(
                f"part[{key!r}]", f"{kind}", "must be a tensor of int64", [f"torch.as_tensor({key}).long()"]
            )
    shapes = {tuple(part[key].shape) for key in wanted}
    rows, *rest = next(iter(shapes)) or (0,)
    if len(shapes) > 1 or len(rest) != 1 or rows % micro_batch_size or not rows:
        raise bad_input(
            "part",
            ", ".join(f"{key} {list(part[key].shape)}" for key in wanted),
            f"all must be [rows, sequence] with rows a multiple of micro_batch_size {micro_batch_size}; did you call parallel.shard(batch)?",
        )


class RowsOfRanks:
    """Which rows of a global batch this rank has. Refuses parts of which some ranks have more micro-batches than others: they would wait for
    each other in the collectives of a layout that has some in each micro-batch."""

    def __init__(self, layout: Parallelism, replica: int, shard: int) -> None:
        self.layout, self.replica, self.shard = layout, replica, shard
        self.counts = layout.micro_batches_per_replica or (1,) * layout.data_parallel_replicate_degree
        self.checked: int | None = None

    def of(self, num_rows: int) -> range:
        """This rank's rows of a global batch of ``num_rows``. Raises BadInput if the ranks cannot share them."""
        num_rows = whole_number("num_rows", num_rows, 0)
        p, replica = self.layout, self.replica
        shards = p.data_parallel_shard_degree
        share = sum(self.counts) * shards
        if num_rows % (share * p.micro_batch_size):
            named = f"data_parallel degree {share}"
            if p.micro_batches_per_replica is not None:
                named = f"micro_batches_per_replica {list(self.counts)} x data_parallel_shard_degree {shards}"
            rule = f"its rows must be a multiple of {named} x micro_batch_size {p.micro_batch_size}"
            raise bad_input("global_batch", num_rows, rule)
        each = num_rows // share
        start = (sum(self.counts[:replica]) * shards + self.counts[replica] * self.shard) * each
        return range(start, start + self.counts[replica] * each)

    def share(self, rows: int) -> int:
        """A number that is the same for the rows of every replica and shard."""
        return rows * (math.lcm(*self.counts) // self.counts[self.replica])

    def micro_batches(self, rows: int) -> int:
        """How many micro-batches the global batch has over all replicas and shards, if this rank has so many rows."""
        p = self.layout
        return rows // p.micro_batch_size * sum(self.counts) * p.data_parallel_shard_degree // self.counts[self.replica]

    def check(self, rows: int, count: PendingCount, device: torch.device) -> None:
        """Raises BadInput on every rank if ``count`` was given other shares elsewhere. A GPU's host asks only where its own rows are others
        than before, because it would wait for the device."""
        if device.type != "cpu" and rows == self.checked:
            return
        if not count.are_shares_alike():
            rule = "other ranks have another number, and a rank must have as many as parallel.rows(rows of the global batch) says"
            raise bad_input("part: rows", rows, rule)
        self.checked = rows
