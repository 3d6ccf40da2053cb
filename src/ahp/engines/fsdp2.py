"""Shared by engines that shard weights with torch's FSDP2 and recompute with torch's checkpoint."""

from __future__ import annotations

from ahp.engines.host import host
from ahp.engines.traits import CheckpointHost, GatherTraits


def gathers(zero: int, *, pipelined: bool) -> GatherTraits:
    """How weights are gathered: one unit ahead, overlapped with the computation; in a pipeline a stage keeps them from one micro-batch to
    the next forward (torch 2.13, distributed/fsdp/_fully_shard; pipelining/stage.py, backward_maybe_with_nosync).

    ``zero``: ZeRO stage, 0 = nothing is sharded; ``pipelined``: whether there are several pipeline ranks.
    """
    return GatherTraits(
        overlap=1.0,
        forward="never" if zero == 0 else "per_micro_batch" if zero == 3 and not pipelined else "per_step",
        backward="per_micro_batch" if zero == 3 else "never",
        keeps_weights=zero < 3 or pipelined,
        ends_apart=True,
    )


def eager_checkpoint() -> CheckpointHost:
    """The host time of torch's checkpoint for blocks whose operators run one by one."""
    return CheckpointHost(
        full=(host.value("full_forward"), host.value("full_again")),
        selective=(host.value("selective_forward"), host.value("selective_again")),
    )
