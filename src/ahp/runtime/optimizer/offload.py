"""AdamW's moments in the host's memory, under ``engine.offload_optimizer``: a few at a time come to the device and go back.

The update itself stays torch's fused AdamW on the device, so that it is the very same one; weights and gradients, which FSDP2
computes with, stay there too. Two of the four fp32 numbers of a parameter leave the device.
"""

from __future__ import annotations

import torch

from ahp.engines.ahp import OFFLOAD_BUCKET_BYTES
from ahp.errors import HardwareMismatch

MOMENTS = ("exp_avg", "exp_avg_sq")


def refuse_without_host(device: torch.device) -> None:
    """Raises HardwareMismatch where the device's memory is the host's."""
    if device.type == "cpu":
        raise HardwareMismatch(
            "engine.offload_optimizer = True: on a CPU the optimizer's states are in the host's memory already (valid: False)"
        )


class HostMoments:
    """Keeps the moments of an AdamW in host memory, pinned where the device is a GPU, and takes its steps."""

    def __init__(self, adamw: torch.optim.AdamW, *, bucket_bytes: int = OFFLOAD_BUCKET_BYTES) -> None:
        self.adamw = adamw
        shards: list[torch.Tensor] = [shard for group in adamw.param_groups for shard in group["params"]]
        for shard in shards:
            state = adamw.state[shard]
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            for key in MOMENTS:
                state[key] = torch.zeros(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
        self.buckets = _buckets(shards, bucket_bytes)

    def step(self) -> None:
        """As ``AdamW.step``, bucket by bucket: parameters without a gradient stay as they are. No gradient is left.

        All copies go in the order of the device's stream, so that moments may be read only after ``wait``.
        """
        gradients = {shard: shard.grad for bucket in self.buckets for shard in bucket}
        for shard in gradients:
            shard.grad = None
        for bucket in self.buckets:
            updated = [shard for shard in bucket if gradients[shard] is not None]
            kept = [{key: self.adamw.state[shard][key] for key in MOMENTS} for shard in updated]
            for shard, host in zip(updated, kept, strict=True):
                shard.grad = gradients.pop(shard)
                self.adamw.state[shard].update(
                    {key: moment.to(shard.device, non_blocking=True, copy=True) for key, moment in host.items()}
                )
            self.adamw.step()
            for shard, host in zip(updated, kept, strict=True):
                shard.grad = None
                for key, moment in host.items():
                    moment.copy_(self.adamw.state[shard][key], non_blocking=True)
                self.adamw.state[shard].update(host)

    def wait(self) -> None:
        """Until the moments in host memory are those after the last step."""
        for device in {shard.device for bucket in self.buckets for shard in bucket if shard.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _buckets(shards: list[torch.Tensor], bucket_bytes: int) -> list[list[torch.Tensor]]:
    """Neighbours together, as many as have moments of so many bytes; what is larger alone goes alone."""
    buckets: list[list[torch.Tensor]] = []
    held = 0
    for shard in shards:
        size = len(MOMENTS) * shard.numel() * shard.element_size()
        if not buckets or held + size > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(shard)
        held += size
    return buckets
