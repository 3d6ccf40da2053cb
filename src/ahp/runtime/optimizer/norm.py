"""The true global norm of the gradient, over every axis of the mesh, and clipping by it. Nothing of it leaves the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ahp.runtime.torch_compat import norms_of, scale_

ROW = 4096
"""[Empirical] So many elements torch's kernel for CPUs adds up in fp32 one after the other without a loss that shows: the norm of 4e7 random
numbers comes out 3e-9 off, with 65536 elements a row 2e-7, in one row 3e-3. All take as long."""


@dataclass
class SquareSum:
    """Sum over this rank's gradients of ``|g|^2 / copies``, and the norms that it was made from."""

    total: torch.Tensor
    """float64 scalar."""
    norms: list[tuple[list[str], torch.Tensor]] = field(default_factory=list)
    """Names of gradients, and the norm of each."""

    def not_finite(self) -> tuple[str, ...]:
        """The gradients whose norm is not finite. The host waits for the device."""
        return tuple(
            n for names, norms in self.norms for n, ok in zip(names, norms.isfinite().tolist(), strict=True) if not ok
        )


def weighted_square_sum(gradients: dict[str, torch.Tensor], copies: dict[str, int], device: torch.device) -> SquareSum:
    """``copies[name]``: how many ranks hold the same elements. When the result is summed over all ranks, every element of
    the model counts once, however it is sharded, sliced, replicated or tied.
    """
    found = SquareSum(torch.zeros((), dtype=torch.float64, device=device))
    by_copies: dict[int, list[str]] = {}
    for name, gradient in gradients.items():
        if gradient.numel() > 0:
            by_copies.setdefault(copies[name], []).append(name)
    for count, names in by_copies.items():
        # Each tensor's norm in fp32 (five times faster than in float64), the sum in float64.
        norms = torch.stack(_norms([gradients[name] for name in names])).double()
        found.total += norms.square().sum() / count
        found.norms.append((names, norms))
    return found


def _norms(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """fp32 scalars. On a CPU that of a long tensor is made of the norms of its rows, so that it does not depend on how much a rank holds."""
    long = {number for number, tensor in enumerate(tensors) if tensor.is_cpu and tensor.numel() > ROW}
    found = norms_of([tensor[:0] if number in long else tensor for number, tensor in enumerate(tensors)])
    return tuple(_norm_by_rows(tensors[number]) if number in long else norm for number, norm in enumerate(found))


def _norm_by_rows(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    rows, rest = flat.split([flat.numel() // ROW * ROW, flat.numel() % ROW])
    norms = torch.linalg.vector_norm(rows.view(-1, ROW), dim=1, dtype=torch.float32)
    both = torch.cat((norms, torch.linalg.vector_norm(rest, dtype=torch.float32)[None]))
    return torch.linalg.vector_norm(both, dtype=torch.float64).to(norms.dtype)


def loss_and_norm(
    loss: torch.Tensor, square_sum: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum all three over all ranks in one collective. Returns float64 [2], the mean loss and the gradient norm, both without the loss
    scale, and the summed ``counts``, float64 of any length."""
    summed = torch.cat((loss.to(torch.float64)[None], square_sum[None], counts))
    dist.all_reduce(summed)
    return torch.stack((summed[0], summed[1].sqrt())) / scale, summed[2:]


def unscale_and_clip_(
    gradients: dict[str, torch.Tensor], norm: torch.Tensor, limit: float | None, scale: torch.Tensor | float
) -> None:
    """Divide gradients in place by the loss scale, and multiply them by ``limit / norm`` if the norm of the unscaled
    gradients is above ``limit``, as ``torch.nn.utils.clip_grad_norm_`` does.

    ``norm``: float64 scalar on the gradients' device."""
    factor = (torch.ones_like(norm) if limit is None else (limit / (norm + 1.0e-6)).clamp(max=1.0)) / scale
    # Reading the factor is free on a CPU; on a GPU the host would wait, and one more pass over the gradients costs less.
    if gradients and not (factor.is_cpu and factor == 1):
        scale_(list(gradients.values()), factor.float())
