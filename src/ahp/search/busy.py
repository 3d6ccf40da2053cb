"""How many devices a model and a batch can keep busy, without looking at layouts."""

from __future__ import annotations

from ahp.divisors import divisors
from ahp.errors import bad_input
from ahp.search.problem import Problem, with_devices

MOST_TENSOR = 1024
"""More than the attention heads of any model."""

MOST_DEVICES = 131_072
"""The most devices that are searched: 16,384 took a minute of one processor for both kinds of blocks, and the largest clusters that
train one model are of this size. A million was not done after minutes."""


def refuse_too_many(asked: Problem) -> None:
    """Raise BadInput for a cluster of more devices than are searched, with the most that the job could keep busy."""
    total = asked.cluster.num_devices
    if total <= MOST_DEVICES:
        return
    rule = f"{MOST_DEVICES:,} are searched at most"
    if not asked.cluster.is_mixed and (counts := busy_counts(asked)):
        batch, length = asked.job.global_batch_size, asked.job.sequence_length
        rule += f"; {batch} sequences of {length} tokens keep no more than {counts[0]:,} devices busy"
    raise bad_input("cluster", f"{total:,} devices", rule, [f"up to {MOST_DEVICES:,}, or ahp simulate one layout"])


def busy_counts(asked: Problem) -> list[int]:
    """Every number of devices, up to the cluster's, that can be kept busy, the largest first: equally many on each of some nodes.

    The replicas divide the batch; one replica has as many devices as heads, layers and tokens can keep busy.
    """
    total = asked.cluster.num_devices
    pipelines, data = range(1, max(asked.most_stages, 1) + 1), divisors(asked.job.global_batch_size)
    tensors = [tensor for tensor in range(1, MOST_TENSOR + 1) if asked.can_divide(tensor, 1)]
    contexts = divisors(asked.job.sequence_length)
    cells = {tensor * context for tensor in tensors for context in contexts if asked.can_divide(tensor, context)}
    replicas = {cell * pipeline for cell in cells for pipeline in pipelines if cell * pipeline <= total}
    found = {count for one in replicas for d in data if (count := one * d) <= total}
    return sorted((n for n in found if with_devices(asked.cluster, n) is not None), reverse=True)
