"""The loss: the sum of the cross-entropy over scored tokens, divided by their number in the global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ahp.graph.call import refuse_other_tokens
from ahp.runtime.torch_compat import refuse_outside

if TYPE_CHECKING:
    from ahp.runtime.compute.chunked_loss import Tail
    from ahp.runtime.experts.balance_loss import Balance
    from ahp.runtime.sequence.context import Context

IGNORED = -100
"""Label of a token that is not scored, as in transformers."""


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Targets of a causal model: position i is scored against token i + 1, the last position against nothing.

    labels: int64 [batch, sequence]; so is the result.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def count_scored(labels: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Number of scored tokens, int64 scalar on the labels' device."""
    return ((shifted(labels) if causal else labels) != IGNORED).sum()


class Loss:
    """Callable(logits [batch, sequence, vocabulary or this rank's part], labels [batch, sequence]) -> scalar.

    With a ``tail`` it takes hidden states [batch, sequence, hidden] instead of logits, and computes the logits in chunks.
    ``total`` is set before each step: the number of scored tokens in the global batch. The losses of all ranks then add up
    to the mean, and gradients only need summing, whatever the layout.

    With a ``balance``, when gradients are computed, it also takes the sums of the balance loss, in a tuple with the logits.
    """

    def __init__(
        self, *, causal: bool, vocabulary_group: dist.ProcessGroup | None, context: Context | None = None
    ) -> None:
        self.causal, self.vocabulary_group = causal, vocabulary_group
        self.tail: Tail | None = None
        self.context = context
        """The ranks that share each sequence: logits are of this rank's tokens, labels of all tokens, because the target of
        this rank's last token is another rank's first token."""
        self.total: PendingCount | None = None
        self.balance: Balance | None = None
        self.num_micro_batches = 1
        """How many the global batch has over all replicas: balance losses are divided by it, and add up to their mean."""
        self.scale: torch.Tensor | float = 1.0
        """What each loss is multiplied by (``ahp.runtime.optimizer.loss_scale``), so that fp16 holds its gradients."""

    def __call__(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        if self.balance is None or not torch.is_grad_enabled():
            return self._of_tokens(output, labels)
        output, sums = output
        group = None if self.context is None else self.context.group
        balance = self.balance.loss(sums, group) / self.num_micro_batches * self.scale
        return self._of_tokens(output, labels) + balance

    def _of_tokens(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        targets = shifted(labels) if self.causal else labels
        if self.context is not None:
            targets = self.context.own(targets, 1)
        if self.tail is not None:
            return self.tail.loss(output, targets, self._share)
        refuse_other_tokens(output, targets)
        return self._share(output, targets)

    def _share(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The share of these tokens in the mean over the global batch; ``targets`` [batch, sequence] of the same tokens."""
        assert self.total is not None
        targets = targets.reshape(-1)
        logits = logits.reshape(-1, logits.shape[-1])
        if self.vocabulary_group is None:
            loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
        else:
            loss = _SplitCrossEntropy.apply(logits, targets, self.vocabulary_group)
        return loss / self.total.value() * self.scale


class PendingCount:
    """The number of scored tokens, summed over ranks while the forward pass already runs. Beside it goes ``share``, which must be the
    same number on all ranks: how much of the global batch this rank has."""

    def __init__(self, local: torch.Tensor, group: dist.ProcessGroup, share: int = 0) -> None:
        self._sums, self._ranks = local.new_full((3,), share), group.size()
        self._sums[0] = local
        self._sums[2] *= share
        self._work = dist.all_reduce(self._sums, group=group, async_op=True)

    def _summed(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._sums

    def number(self) -> torch.Tensor:
        return self._summed()[0]

    def are_shares_alike(self) -> bool:
        """The same answer on every rank. The host waits for the sum, unless the rank is alone."""
        if self._ranks == 1:
            return True
        _, total, squares = self._summed().tolist()
        return bool(self._ranks * squares == total**2)

    def value(self) -> torch.Tensor:
        """At least 1: a batch without a scored token has no gradient."""
        return self.number().clamp(min=1)


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross-entropy over logits whose vocabulary is split over ranks; the whole logits exist nowhere.

    Three numbers for each token cross the group: its largest logit, its sum of exponentials, its target's logit.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        rows = logits.shape[-1]
        first = group.rank() * rows
        refuse_outside(targets, group.size() * rows, IGNORED)
        largest = logits.amax(dim=-1).float()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        # One full-size temporary: whatever is not done in place here costs as much as the exponential itself.
        fresh = logits.to(torch.float32, copy=True)
        exponentials = fresh.sub_(largest.unsqueeze(-1)).exp_()
        scored = targets != IGNORED
        here = scored & (targets >= first) & (targets < first + rows)
        column = (targets - first).clamp(0, rows - 1)
        picked = (logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).float() - largest) * here
        sums = torch.stack((exponentials.sum(dim=-1), picked))
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials, sums[0], column, here, scored)
        return ((sums[0].log() - sums[1]) * scored).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        exponentials, total, column, here, scored = ctx.saved_tensors
        gradient = gradients[0]
        # In place, because the whole size counts at the peak; autograd refuses a second backward pass of the same loss.
        grad = exponentials.mul_((scored * gradient / total).unsqueeze(-1))
        grad.scatter_add_(-1, column.unsqueeze(-1), -(here * gradient).unsqueeze(-1))
        return grad, None, None
