"""Models of the user's own in idioms that none of the families has: every layout computes what one process does, or is refused."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.forecast import rules
from ahp.graph.trace import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from tests.runtime.models import BUILDERS, VOCABULARY, Block, Custom, batch
from tests.runtime.test_equality import LAYOUTS, assert_same_curve, assert_same_weights, train, world_size
from tests.runtime.test_families import CALM, EPS
from tests.runtime.workers import Pool

STEPS, WIDTH, NUM_LAYERS = 2, 32, 4
CONTEXT = {"context_parallel_degree": 2, "micro_batch_size": 4}
MORE = {**LAYOUTS, "context": CONTEXT, "ring": {**CONTEXT, "context_parallel_method": "ring"}}


class Own(Custom):
    """Blocks of a kind that is given, each built with its number."""

    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__(WIDTH, layers=0)
        self.blocks = nn.ModuleList(kind(number) for number in range(NUM_LAYERS))  # type: ignore[assignment]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(input_ids) + self.positions[: input_ids.shape[1]]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Numbered(Block):
    """``mix`` is what a kind of block does with its input, and with what a usual one would return."""

    def __init__(self, number: int) -> None:
        super().__init__(WIDTH, 4)
        self.prepare(number)

    def prepare(self, number: int) -> None:
        pass

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.up(self.norm_2(x)))


class Counted(Numbered):
    def prepare(self, number: int) -> None:
        self.layer_idx = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y / (self.layer_idx + 1) if self.layer_idx % 2 else y


class Configured(Numbered):
    def prepare(self, number: int) -> None:
        self.settings = {"scale": 1.0 + number}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.settings["scale"])


class Closed(Numbered):
    def prepare(self, number: int) -> None:
        self._scaled = lambda x: x * (1 + number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._scaled(super().forward(x))


class HookedWithin(Numbered):
    def prepare(self, number: int) -> None:
        def scale(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
            return out * (1 + number)

        self.down.register_forward_hook(scale)


class Table(Numbered):
    def prepare(self, number: int) -> None:
        self.table = torch.linspace(0.5, 1.0 + number, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.table)


class Pruned(Numbered):
    def prepare(self, number: int) -> None:
        prune.l1_unstructured(self.up, "weight", 0.5)


class MakesMask(Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


class Scale:
    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


class InContainers(Numbered):
    """Tables in a dict, a tuple, a call that waits for its last argument, an object, and one of which only a method is kept."""

    def prepare(self, number: int) -> None:
        self.tables = {"scale": (torch.linspace(0.5, 1.0 + number, WIDTH), None)}
        self.shift = partial(torch.add, torch.linspace(-0.1, 0.1, WIDTH))
        self.notes = Notes()
        self.notes.first = torch.linspace(1.0, 0.5, WIDTH)
        self.scaled = Scale(torch.linspace(0.5, 1.5, WIDTH)).of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.tables["scale"][0]
        assert scale is not None
        assert self.notes.first is not None
        return self.scaled(super().forward(self.shift(x * scale)) * self.notes.first)


class Buffered(Numbered):
    table: torch.Tensor

    def prepare(self, number: int) -> None:
        self.register_buffer("table", torch.linspace(0.5, 1.0 + number, 2 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.down(self.inner(x) * self.table)


class GateUnseen(Numbered):
    """The first reader of the norm's result makes no gradients, the second one does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_2(x)
        with torch.no_grad():
            gate = torch.sigmoid(self.down(F.gelu(self.up(y))))
        return super().forward(x) + self.down(F.relu(self.up(y))) * gate


class WholeNumbers(Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x)
        places = (4 * F.linear(inner, self.down.weight)).to(torch.int32)
        return super().forward(x) + self.down(inner) + 0.1 * places


class TiedWithin(Numbered):
    """A split bias is a norm's that is read whole, and a split product's matrix is another one's."""

    def prepare(self, number: int) -> None:
        self.more = nn.Linear(WIDTH, WIDTH)
        self.out.weight, self.more.bias = self.more.weight, self.norm_1.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.out(F.gelu(self.more(x)))


class Vector(Numbered):
    def prepare(self, number: int) -> None:
        self.gate = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.sigmoid(F.linear(x, self.gate)).unsqueeze(-1)


class ComputedWeight(Numbered):
    """One depends on a parameter alone, the other on what the block is given too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = F.normalize(self.up.weight, dim=1)
        inner = F.linear(x, weight) * torch.sigmoid(F.linear(x, weight * (1 + x.mean((1, 2)).tanh().mean())))
        return super().forward(x) + self.down(inner)


class EveryOther(Numbered):
    """A step along columns, in a block where nothing can be split unless it is made whole again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm_1(F.relu(self.up(x))[..., ::2])


class Composed(Numbered):
    """Operators that torch composes of others, and those that move or compare features of one token."""

    order: torch.Tensor

    def prepare(self, number: int) -> None:
        self.group_norm = nn.GroupNorm(4, 2 * WIDTH)
        self.pairs = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.register_buffer("order", torch.randperm(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.einsum("btc,fc->btf", self.norm_2(x), self.up.weight).unflatten(2, (4, -1))
        first, second = inner.movedim(2, -1).tensor_split(2, dim=2)
        inner = torch.hstack((first.narrow(2, 1, 7).transpose(1, 2), second.flip(2).roll(1, 2).transpose(1, 2)))
        inner = inner.transpose(1, 2).index_select(2, self.order[:15] % 15).tile(1, 1, 2).flatten(2)[..., : 2 * WIDTH]
        inner = self.group_norm(inner.reshape(-1, 2 * WIDTH)).view(inner.shape) / inner.norm(dim=-1, keepdim=True)
        inner = inner - inner.detach().std(-1, keepdim=True) + inner.gather(2, inner.argsort(-1))
        inner = F.hardswish(inner) + F.logsigmoid(inner)
        best, places = inner.topk(40, -1)
        inner = inner + torch.zeros_like(inner).scatter(2, places, best).scatter_add_(
            2, places[..., :3], best[..., 3:6]
        )
        inner = F.pad(torch.where(inner > 1, torch.zeros_like(inner), inner)[..., 1:], (0, 1)).mT.relu().mT
        scores = torch.inner(inner.log_softmax(-1), self.down.weight)
        return super().forward(x) + self.pairs(x, torch.tensordot(scores, self.out.weight, dims=1))


class PerToken(Numbered):
    """Further operators that work on each token alone: products of other names, and those that compare, place or look up features."""

    def prepare(self, number: int) -> None:
        self.conv, self.grouped = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1, groups=4, bias=False)
        self.gate, self.prelu = nn.Parameter(torch.randn(WIDTH) / 8), nn.PReLU()
        self.table, self.classes = nn.Embedding(3, WIDTH), nn.Parameter(torch.randn(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_2(x)
        y = self.prelu(self.grouped(F.glu(self.conv(y.mT), 1)).mT) * (y @ self.gate).sigmoid().unsqueeze(-1)
        y = torch.baddbmm(y, y, self.out.weight.expand(len(y), -1, -1), beta=0.5)
        heads = y.unflatten(2, (4, 8)).transpose(1, 2) @ self.out.weight.unflatten(0, (4, 8))[..., :8]
        y = y + heads.transpose(1, 2).flatten(2) * F.cosine_similarity(x, y, dim=-1).unsqueeze(-1)
        turned = torch.polar(y.sigmoid(), x)
        y = (
            torch.where(x > 0.5, turned.real, 0.5)
            + torch.where(y > 0.2, 0.1, turned.imag)
            + (torch.complex(x, y).abs().detach() // 1)
        )
        ranked = y.take_along_dim(y.argsort(-1), -1)[..., torch.arange(WIDTH).flip(0)]
        y = y + ranked.diff(dim=-1, append=ranked[..., -1:]) / torch.std_mean(ranked, -1, keepdim=True)[0]
        y = y + F.pairwise_distance(x, y).unsqueeze(-1) + torch.linalg.vecdot(x, y).unsqueeze(-1) / WIDTH
        y = y + x.median(-1, keepdim=True)[0] + x.aminmax(dim=-1, keepdim=True)[1] + x.cummax(-1)[0]
        y = y.index_add(2, torch.arange(4), x[..., :4]).index_fill(2, torch.arange(2), 0.5)
        y = y.index_copy(2, torch.arange(4, 6), x[..., 4:6]) + x.cummin(-1)[0] + x.logcumsumexp(-1) / WIDTH
        y = y + (x.nansum(-1) + x.nanmean(-1) + x.count_nonzero(-1) + torch.trapezoid(x, dim=-1)).unsqueeze(-1) / WIDTH
        y = y + torch.where(x > 0.1, 0.2, 0.3) + torch.var_mean(x, -1, keepdim=True)[0] + (x // 0.5).detach()
        y = y.scatter_reduce(2, y.argsort(-1)[..., :5], x[..., :5], "mean")
        chosen = y[..., :3].argmax(-1)
        y = y + self.table(chosen) + F.one_hot(chosen, 3).to(y.dtype) @ self.classes + y.new_full(y.shape, 0.1)
        return super().forward(x) + y * self.out.weight.abs().mean()


class TorchsLayer(Numbered):
    """Its ``nn.MultiheadAttention`` has all tokens in a row, position by position."""

    def prepare(self, number: int) -> None:
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return super().forward(x) + self.layer(x, seen, is_causal=True)


class Beside(Numbered):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y * 2


class ReadsBeside(Own):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = beside = self.embed(input_ids)
        for block in self.blocks:
            x, beside = block(x)
        return self.head(self.norm(x) * beside.square().mean((1, 2), keepdim=True))


class WithFirst(Numbered):
    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + 0.5 * first)


class GivesFirst(Own):
    def first(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        first = self.first(x)
        for block in self.blocks:
            x = block(x, first)
        return self.head(self.norm(x))


class GivesFirstDetached(GivesFirst):
    def first(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


class EmbedsAgain(Own):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + self.tokens(input_ids).detach())


class HeadTwice(Own):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x * torch.sigmoid(self.head(x).amax(-1, keepdim=True)))


class Centred(Own):
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) - self.tokens.weight.mean(0)


class TableAfter(Own):
    """What follows the blocks reads a table that is no attribute."""

    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__(kind)
        self.tables = [torch.linspace(0.5, 1.5, WIDTH)]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.tables[0])


class InRows(Own):
    """What follows the blocks has all tokens in a row, by sizes that leave a dim open."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, (batch, length) = self.embed(input_ids), input_ids.shape
        for block in self.blocks:
            x = block(x)
        x = x.view(batch, length, 4, -1)
        x = self.norm((x - x.mean(-1, keepdim=True)).view(batch * length, -1)).unflatten(0, (batch, length))
        return self.head(x.flatten(0, 1)).view(batch, length, -1)


class LastToken(Own):
    """nanoGPT's, which is given no targets."""

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        logits = super().forward(input_ids)
        return (logits[:, [-1]] if targets is None else logits), None


class ReadsAfter(Own):
    """What follows the blocks reads the embedding's weight, with no gradient."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) - self.tokens.weight.detach().mean(0))


class GivesWeight(GivesFirst):
    """Its blocks are given a sum of the embeddings, with no gradient."""

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens.weight.detach().sum(0)


class ReadsBefore(Own):
    """What precedes the blocks reads a weight of what follows them, and a row of the table itself."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self.norm.weight + self.tokens.weight[3].detach()


class Borrowing(Numbered):
    lent: list[nn.Embedding]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.lent[0].weight.sum(0))


class Lends(Own):
    """Its blocks read a weight that they do not hold."""

    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__(kind)
        for block in self.blocks:
            block.__dict__["lent"] = [self.tokens]


class ReadsBlock(Own):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(super().forward(input_ids) @ self.head.weight)
        return self.head(x * self.blocks.get_parameter("0.out.weight").mean(0))


class LooksBack(Own):
    """What follows the blocks reads what is before them, with no gradient."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * first.detach().std(-1, keepdim=True))


class ScalesBetween(Own):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
            x *= 0.5
        return self.head(self.norm(x))


class Earlier(Numbered):
    def forward(self, x: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + earlier)


class GivesEarlier(Own):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        earlier = torch.zeros_like(x)
        for block in self.blocks:
            x, earlier = block(x, earlier), x.detach()
        return self.head(self.norm(x))


class Notes:
    """What blocks hand on to each other beside their arguments."""

    count = 0
    first: torch.Tensor | None = None


class Counting(Numbered):
    def forward(self, x: torch.Tensor, notes: Notes) -> torch.Tensor:  # type: ignore[override]
        notes.count += 1
        return super().forward(x / notes.count)


class Leaving(Numbered):
    """Leaves a result in a mapping of the model's (Gemma 4: keys and values)."""

    def prepare(self, number: int) -> None:
        self.layer_idx = number

    def forward(self, x: torch.Tensor, left: UserDict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        if self.layer_idx == 1:
            left["middle"] = self.up(x)
        return super().forward(x)


class Taking(Leaving):
    def forward(self, x: torch.Tensor, left: UserDict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x, left)
        return x + left["middle"].mean() if self.layer_idx == 2 else x


class Noting(Numbered):
    def forward(self, x: torch.Tensor, notes: Notes) -> torch.Tensor:  # type: ignore[override]
        assert notes.first is not None
        return super().forward(x + notes.first)


@torch.jit.script
def scripted_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))


class Scripted(Numbered):
    """Its function has a backward of its own once it has run some times."""

    def prepare(self, number: int) -> None:
        for _ in range(3):
            scripted_gelu(torch.ones(2, requires_grad=True)).sum().backward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.down(scripted_gelu(self.up(self.norm_2(x))))


class ChangesInput(Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= 0.9
        return super().forward(x)


class ChangesGate(Numbered):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        gate *= 0.9
        return super().forward(x * gate)


class GivesGate(GivesFirst):
    """Each block changes for the next one what all are given."""

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(x.shape[1], 1)


class WritesLogits(Own):
    """Tokens that nobody may choose."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_ids)
        logits *= 0.5
        logits[..., :5] = -9.0
        return logits


class GivesNotes(Own):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, notes = self.embed(input_ids), Notes()
        notes.first = x
        for block in self.blocks:
            x = block(x, notes)
        return self.head(self.norm(x))


class GivesMapping(Own):
    read_after = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        left: UserDict[str, torch.Tensor] = UserDict()
        for block in self.blocks:
            x = block(x, left)
        return self.head(self.norm(x + left["middle"].mean() if self.read_after else x))


class ReadsMapping(GivesMapping):
    read_after = True


class ByLength(Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (8 / x.shape[1]))


class OverRows(Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        return super().forward((rows - rows.mean(0)).view(x.shape))


class GivenMask(Numbered):
    """Hands torch's attention the mask that it is given."""

    def prepare(self, number: int) -> None:
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + self.attention(x, x, x, attn_mask=seen, need_weights=False)[0]


class GivesMask(GivesFirst):
    def first(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Transformer.generate_square_subsequent_mask(x.shape[1])


class OverAll(Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean())


class Convolves(Numbered):
    def prepare(self, number: int) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.conv(x.mT).mT)


class RollsRows(Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, WIDTH).roll(1, 0).view(x.shape))


class AddsUpRows(Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        return super().forward((rows @ (rows.t() @ rows)).view(x.shape))


class Renormed(Own):
    """Its embedding changes the rows that a rank looks up, in place."""

    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__(kind)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)


class InList(Numbered):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        return [super().forward(x)]


class TakesFirst(Own):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)[0]
        return self.head(self.norm(x))


def built(kind: type[Own], block: type[Numbered]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        module = kind(block)
        for parameter in module.parameters():  # else a norm that is forgotten, or a bias, would not show
            parameter.data += 0.05 * torch.randn_like(parameter)
        return module

    return build


EQUAL: list[tuple[type[Own], type[Numbered], str]] = [
    *((Own, kind, "tp") for kind in (Counted, Configured, Closed, HookedWithin, Table, Buffered, TiedWithin, Vector)),
    *((Own, kind, "tp") for kind in (GateUnseen, WholeNumbers, EveryOther)),
    (Own, Counted, "sequence"),
    *((Own, kind, layout) for kind in (Composed, PerToken) for layout in ("tp", "context")),
    *((Own, TorchsLayer, layout) for layout in ("tp", "ring")),
    (GivesMask, GivenMask, "context"),
    (Own, ComputedWeight, "zero-bubble"),
    (ReadsBeside, Beside, "sequence"),
    *((Own, Pruned, layout) for layout in ("tp", "1f1b", "zero3")),
    *((Own, InContainers, layout) for layout in ("tp", "1f1b", "context")),
    *((kind, Numbered, "context") for kind in (TableAfter, InRows)),
    *((kind, WithFirst, layout) for kind in (GivesFirst, GivesFirstDetached) for layout in ("1f1b", "tp")),
    (EmbedsAgain, Numbered, "1f1b"),
    (HeadTwice, Numbered, "tp"),
    (Centred, Numbered, "tp"),
    *((ReadsAfter, Numbered, layout) for layout in ("1f1b", "tp")),
    *((GivesWeight, WithFirst, layout) for layout in ("1f1b", "tp")),
    (ReadsBefore, Numbered, "1f1b"),
    (Lends, Borrowing, "1f1b"),
    (Own, Scripted, "tp"),
    *((GivesMapping, Leaving, layout) for layout in ("tp", "1f1b")),
    *((WritesLogits, Numbered, layout) for layout in ("tp", "context")),
]
ALL_TOKENS = ", and a loss needs those of every token (valid: "
REFUSED: list[tuple[type[Own], type[Numbered], str, str]] = [
    *((LastToken, Numbered, layout, ALL_TOKENS) for layout in ("tp", "1f1b")),
    (Lends, Borrowing, "tp", "block 0 of blocks reads tokens.weight, which is neither its own nor among its arguments"),
    *(
        (ReadsBlock, Numbered, layout, "the model reads blocks.0.out.weight outside of the block that holds it")
        for layout in ("1f1b", "tp", "context")
    ),
    (LooksBack, Numbered, "1f1b", "what follows blocks reads more than the output of the last block"),
    (ScalesBetween, Numbered, "1f1b", "changes the hidden states between blocks"),
    (GivesEarlier, Earlier, "1f1b", "is given more of an earlier block than its hidden states"),
    (ReadsBeside, Beside, "1f1b", "computes with what blocks return beside their hidden states"),
    (ReadsBeside, Beside, "context", "computes with what blocks return beside their hidden states"),
    (GivesNotes, Counting, "tp", "changes the Notes that it is given"),
    (GivesNotes, Counting, "1f1b", "changes the Notes that it is given"),
    *((GivesMapping, Taking, layout, "changes the UserDict that it is given") for layout in ("tp", "1f1b")),
    (ReadsMapping, Leaving, "tp", "changes the UserDict that it is given"),
    (ReadsMapping, Leaving, "1f1b", "reads more than the output of the last block"),
    (GivesNotes, Noting, "tp", "reads a tensor that was computed before it and is not among its arguments"),
    (Own, ByLength, "context", "gets a number computed from the sequence's length"),
    (Own, OverRows, "context", "aten.mean.dim reads other tokens than its own"),
    (Own, OverAll, "context", "aten.mean.default reads other tokens than its own"),
    (Own, Convolves, "context", "aten.conv1d.default reads other tokens than its own"),
    (Own, MakesMask, "context", "a block makes the mask of its attention from the sequence's length"),
    (Own, RollsRows, "context", "aten.roll.default reads other tokens than its own"),
    (Own, AddsUpRows, "context", "aten.matmul.default reads other tokens than its own"),
    *((Renormed, Numbered, layout, "tokens has a max_norm") for layout in ("zero0", "zero3")),
    (TakesFirst, InList, "tp", "its blocks return list"),
    *((Own, ChangesInput, layout, "changes a tensor that it is given") for layout in ("1f1b", "tp", "context")),
    *((GivesGate, ChangesGate, layout, "changes a tensor that it is given") for layout in ("1f1b", "tp")),
]


def name_of(kind: type[Own], block: type[Numbered]) -> str:
    return f"own models: {kind.__name__} of {block.__name__}"


BUILDERS.update({name_of(kind, block): built(kind, block) for kind, block, *_ in (*EQUAL, *REFUSED)})


def train_own(rank: int, world: int, name: str, layout: str) -> dict[str, Any]:
    """Runs in each worker, which finds the models by importing this file."""
    return train(rank, world, name, MORE[layout], STEPS, CALM)


@pytest.mark.parametrize(("kind", "block", "layout"), EQUAL)
def test_a_layout_computes_what_one_process_does(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], kind: type[Own], block: type[Numbered], layout: str
) -> None:
    # Where a block looks at all of its micro-batch, other micro-batches would be another model.
    results = pool.run(train_own, world_size(MORE[layout]), name_of(kind, block), layout)
    if block is ComputedWeight:
        expected = pool.run(train_own, 1, name_of(kind, block), "one")[0]
    else:
        expected = plain_run(name_of(kind, block), STEPS, EPS)
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


def why_refused(rank: int, world: int, name: str, layout: str) -> str:
    from ahp.runtime.parallel import parallelize

    with pytest.raises(BadInput) as refused:
        parallelize(BUILDERS[name](), {"job": CALM, "parallelism": MORE[layout]})
    return str(refused.value)


@pytest.mark.parametrize(("kind", "block", "layout", "told"), REFUSED)
def test_what_a_layout_would_compute_otherwise_is_refused(
    pool: Pool, kind: type[Own], block: type[Numbered], layout: str, told: str
) -> None:
    for message in pool.run(why_refused, world_size(MORE[layout]), name_of(kind, block), layout):
        assert told in message


def why_not_compiled(rank: int, world: int) -> str:
    from ahp.runtime.parallel import parallelize

    plan = {"job": CALM, "parallelism": CONTEXT, "engine": {"compile": True}}
    with pytest.raises(BadInput) as refused:
        parallelize(built(Own, TorchsLayer)(), plan)
    return str(refused.value)


def test_torchs_attention_is_not_compiled_where_its_kernel_would_see_a_part_of_the_tokens(pool: Pool) -> None:
    """Its loss in evaluation was another one: 5.1525 instead of 5.1483."""
    for message in pool.run(why_not_compiled, 2):
        assert message.startswith("engine.compile = True: nn.MultiheadAttention would be compiled to its kernel")
        assert message == why_not_planned({"compile": True})
    assert why_not_planned({"compile": False}) is None
    assert why_not_planned({"name": "torchtitan", "compile": True}) is None


def why_not_planned(engine: dict[str, Any]) -> str | None:
    job = Job(**CALM)
    asked = analyze(built(Own, TorchsLayer)(), job), Cluster.parse("1x2xH100-SXM-80GB"), job
    return rules.illegal(*asked, Parallelism(**CONTEXT), EngineChoice(**engine))


def first_step(rank: int, world: int, name: str) -> str:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS[name](), {"job": CALM, "parallelism": {}})
    with pytest.raises(BadInput) as refused:
        parallel.step(parallel.shard(batch(0)))
    return str(refused.value)


def test_logits_of_some_tokens_are_refused_where_no_look_at_the_model_is_needed(pool: Pool) -> None:
    (said,) = pool.run(first_step, 1, name_of(LastToken, Numbered))
    assert f"returned logits [1, 1, 128] for tokens [1, 16]{ALL_TOKENS}" in said
    with pytest.raises(BadInput, match=re.escape(ALL_TOKENS)):
        analyze(built(LastToken, Numbered)(), {"sequence_length": 16, "precision": "fp32"})


def test_vocabulary_size_divides() -> None:
    """Else heads and embeddings would stay whole, and their tests say nothing."""
    assert VOCABULARY % 2 == 0
