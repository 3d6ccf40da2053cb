"""Which tokens of a sequence each rank of the context axis holds, and how tensors are cut to those tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ahp.plan import ContextMethod
from ahp.runtime.torch_compat import gather_rows


@dataclass(frozen=True)
class Context:
    """The ranks that share each sequence. All have parts of equal size, which they keep from block to block."""

    group: dist.ProcessGroup
    method: ContextMethod
    """``ring``: rank r of n has the chunks r and 2n - 1 - r of 2n, as far from the start as from the end, so that a causal
    mask gives each rank the same work. ``all-to-all``: chunk r of n, so that the joined parts of all ranks are in order."""

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def own(self, whole: torch.Tensor, dim: int, rank: int | None = None) -> torch.Tensor:
        """A rank's tokens, by default this rank's, of a tensor whose ``dim`` is the whole sequence."""
        rank = self.rank if rank is None else rank
        if self.method == "all-to-all":
            return whole.chunk(self.size, dim)[rank]
        chunks = whole.chunk(2 * self.size, dim)
        return torch.cat((chunks[rank], chunks[-1 - rank]), dim)

    def joined(self, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        """The inverse of ``own``, from the parts of all ranks."""
        if self.method == "all-to-all":
            return torch.cat(parts, dim)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)

    def gathered(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole tensor from the ranks' parts; no gradient goes through. Collective."""
        rows = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        gather_rows(rows, part.contiguous(), group=self.group)
        return self.joined(list(rows.chunk(self.size)), dim)

    def neighbours(self) -> tuple[int, int]:
        """The job's ranks that are next and previous on the ring."""
        ranks = dist.get_process_group_ranks(self.group)
        return ranks[(self.rank + 1) % self.size], ranks[self.rank - 1]
