"""The true global norm of the gradient, over every axis of the mesh, and clipping by it."""

from __future__ import annotations

import torch
import torch.distributed as dist


def weighted_square_sum(
    gradients: dict[str, torch.Tensor], copies: dict[str, int], device: torch.device
) -> torch.Tensor:
    """Sum over this rank's gradients of ``|g|^2 / copies``, float64 scalar.

    ``copies[name]``: how many ranks hold the very same elements. Added up over all ranks, every element of the model
    then counts once, however it is sharded, sliced, replicated or tied.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[torch.Tensor]] = {}
    for name, gradient in gradients.items():
        if gradient.numel() > 0:
            by_copies.setdefault(copies[name], []).append(gradient)
    for count, group in by_copies.items():
        # One tensor's norm in fp32 (as clip_grad_norm_ takes it; five times faster than in float64), their sum in float64.
        norms = torch.stack(torch._foreach_norm(group, 2.0)).double()
        total += norms.square().sum() / count
    return total


def loss_and_norm(loss: torch.Tensor, square_sum: torch.Tensor) -> tuple[float, float]:
    """Add up both over all ranks in one collective: the mean loss, the gradient norm."""
    both = torch.stack((loss.to(torch.float64), square_sum))
    dist.all_reduce(both)
    return both[0].item(), both[1].sqrt().item()


def unscale_and_clip_(gradients: dict[str, torch.Tensor], norm: float, limit: float | None, scale: float) -> None:
    """Divide gradients in place by the scale of the loss, and multiply them by ``limit / norm`` when the norm, which is that
    of the unscaled ones, is above it, as ``torch.nn.utils.clip_grad_norm_`` does."""
    factor = 1.0 if limit is None else min(1.0, limit / (norm + 1.0e-6))
    if factor / scale != 1.0:
        torch._foreach_mul_(list(gradients.values()), factor / scale)
