"""A start from random weights: every layout begins with the very values of one process, and no rank makes what it does not hold."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.runtime.shard.parameter_layout import part_of
from ahp.runtime.torch_compat import local_tensor
from ahp.runtime.weights import counter_random, elementwise, initial
from ahp.runtime.weights.allocate import initial_weights, materialize
from tests.runtime.models import JOB, MODELS, batch
from tests.runtime.test_equality import world_size
from tests.runtime.weights.test_checkpoint import PLANS
from tests.runtime.workers import Pool

SEED = 5
CASES = [
    ("1f1b", "gpt2"),
    ("zero3-x-tp", "gpt2"),
    ("zero3-x-tp-x-pp", "llama"),
    ("interleaved", "gpt2"),
    ("zero0", "llama"),
]


def on_meta(model: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[model]()


@cache
def alone(model: str) -> dict[str, torch.Tensor]:
    module = on_meta(model)
    materialize(module, seed=SEED)
    return {name: p.detach() for name, p in module.named_parameters()}


class Drawing:
    """Counts, while it is on, the random numbers that are drawn by their place, and names the parameters that are made whole."""

    def __init__(self) -> None:
        self.numbers = 0
        self.whole: list[str] = []

    def __enter__(self) -> Drawing:
        symmetric, values = counter_random._symmetric, initial.Part.values

        def counted(index: torch.Tensor, key: int) -> torch.Tensor:
            self.numbers += index.numel()
            return symmetric(index, key)

        def noted(part: Any, seed: int) -> dict[str, torch.Tensor]:
            self.whole.extend(part.parameters)
            return values(part, seed)

        self.patches = ExitStack()
        self.patches.enter_context(mock.patch.object(counter_random, "_symmetric", counted))
        self.patches.enter_context(mock.patch.object(initial.Part, "values", noted))
        return self

    def __exit__(self, *error: object) -> None:
        self.patches.close()


def start(rank: int, world: int, model: str, layout: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int, int]:
    """The weights that this rank's group begins with, and how many random numbers this rank drew and should have drawn."""
    from ahp.runtime.parallel import parallelize

    torch.manual_seed(rank)  # what the ranks drew before must not matter
    with Drawing() as drawing:
        parallel = parallelize(on_meta(model), {"job": {**JOB, "seed": SEED}, "parallelism": layout})
    assert not drawing.whole
    draws = num_draws(model)
    needed = sum(local_tensor(p).numel() * draws[name] for name, p in parallel.parameters.items())
    weights = {name: parallel.state.layout.whole(name, p.detach()) for name, p in sorted(parallel.parameters.items())}
    return weights, drawing.numbers, needed


def num_draws(model: str) -> dict[str, int]:
    """How often the model's own initialisation draws each parameter."""
    parts = initial_weights(on_meta(model), seed=SEED).parts
    return {
        name: sum(torch.Tag.nondeterministic_seeded in call.func.tags for call in part.calls)
        for part in parts
        for name in part.parameters
    }


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_values_are_those_of_one_process_and_only_ones_own_are_made(pool: Pool, layout: str, model: str) -> None:
    expected = alone(model)
    results = pool.run(start, world_size(PLANS[layout]), model, PLANS[layout])
    assert set().union(*(weights for weights, _, _ in results)) == set(expected)
    for weights, drawn, needed in results:
        assert drawn == needed > 0
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name


def without_values(rank: int, world: int, model: str, layout: dict[str, Any], folder: str) -> int:
    """How many random numbers a start draws that reads a checkpoint next."""
    from ahp.runtime.parallel import parallelize

    plan = {"job": {**JOB, "seed": SEED}, "parallelism": layout}
    saved = parallelize(on_meta(model), plan)
    saved.save(folder)
    with Drawing() as drawing:
        parallel = parallelize(on_meta(model), plan, initialize=False)
        with pytest.raises(BadInput, match="initialize = False left the weights without values; call load"):
            parallel.step(parallel.shard(batch(0)))
        parallel.load(folder)
    for name, parameter in parallel.parameters.items():
        assert torch.equal(local_tensor(parameter), local_tensor(saved.parameters[name])), name
    again, first = (one.step(one.shard(batch(0))) for one in (parallel, saved))
    assert (again.loss, again.grad_norm) == (first.loss, first.grad_norm)
    return drawing.numbers + len(drawing.whole)


@pytest.mark.parametrize("layout", ["zero1", pytest.param("zero3-x-tp-x-pp", marks=pytest.mark.slow)])
def test_nothing_is_drawn_where_a_checkpoint_is_read_next(pool: Pool, layout: str, tmp_path: Path) -> None:
    layout_ = PLANS[layout]
    assert pool.run(without_values, world_size(layout_), "gpt2", layout_, str(tmp_path)) == [0] * world_size(layout_)


def test_values_follow_the_models_own_rules() -> None:
    """GPT-2 draws its matrices twice: each alone, then those before residual sums again, with another spread."""
    found = alone("gpt2")
    for name, weight in found.items():
        if weight.ndim == 1:
            assert torch.equal(
                weight, torch.ones_like(weight) if ".ln_" in f".{name}" and "weight" in name else 0 * weight
            )
            continue
        spread = 0.02 / math.sqrt(2 * 5) if "c_proj" in name else 0.02
        assert weight.std().item() == pytest.approx(spread, rel=0.1), name
    assert not torch.equal(found["transformer.h.0.mlp.c_fc.weight"], found["transformer.h.1.mlp.c_fc.weight"])
    other = on_meta("gpt2")
    materialize(other, seed=SEED + 1)
    assert not torch.equal(other.get_parameter("transformer.wte.weight"), found["transformer.wte.weight"])
    llama = alone("llama")["model.embed_tokens.weight"]
    assert not llama[3].any()  # the row of the padding is zero, all others drawn
    assert llama[[2, 4]].std().item() == pytest.approx(0.02, rel=0.3)


class Leaves(nn.Module):
    """Its own parameter has no value after ``reset_parameters``."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.scale, self.shift, self.reads = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3)), reads

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        if self.reads and self.scale[0].item() > 0:
            nn.init.zeros_(self.shift)


@pytest.mark.parametrize(("reads", "told"), [(False, "leaves out shift"), (True, "cannot run on the meta device")])
def test_what_has_no_values_is_refused(reads: bool, told: str) -> None:
    with torch.device("meta"):
        module = Leaves(reads=reads)
    with pytest.raises(BadInput, match=f"module: its initialisation {told}"):
        initial_weights(module, seed=0)


def test_parameters_that_are_made_together_are_kept_together() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.other = (nn.Parameter(torch.empty(4)) for _ in range(3))

        def reset_parameters(self) -> None:
            nn.init.normal_(self.one)
            nn.init.normal_(self.other)
            with torch.no_grad():
                self.two.copy_(2 * self.one)

    with torch.device("meta"):
        module = Shares()
    found = initial_weights(module, seed=0)
    assert sorted(sorted(part.parameters) for part in found.parts) == [["one", "two"], ["other"]]
    values = {name: torch.empty(4) for name in ("one", "two", "other")}
    found.fill(values, lambda name: {})
    assert torch.equal(values["two"], 2 * values["one"])
    assert not torch.equal(values["other"], values["one"])
    half = torch.empty(2)
    found.fill({"two": half}, lambda name: {0: [(1, 3)]})
    assert torch.equal(half, values["two"][1:3])


class Cut(nn.Module):
    """Not by ``normal_`` alone: cut off, scaled, a row and a column set apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.plain = nn.Parameter(torch.empty(300, 40)), nn.Parameter(torch.empty(300, 40))

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, mean=1.0, std=2.0, a=-1.0, b=2.0)
        nn.init.xavier_uniform_(self.plain)
        with torch.no_grad():
            self.plain[3:5].mul_(10)
            self.plain[7].zero_()


def test_what_torch_draws_again_on_real_memory_is_drawn_once() -> None:
    with torch.device("meta"):
        module = Cut()
    with Drawing() as drawing:
        materialize(module, seed=0)
    assert (drawing.numbers, drawing.whole) == (2 * 300 * 40, [])
    weight, reference = module.weight.detach(), torch.empty(300, 40)
    nn.init.trunc_normal_(reference, mean=1.0, std=2.0, a=-1.0, b=2.0)
    assert -1 <= weight.min() < -0.99
    assert 1.99 < weight.max() <= 2
    for moment in (1, 2, 3):
        assert (weight**moment).mean().item() == pytest.approx((reference**moment).mean().item(), abs=0.07)
    plain, bound = module.plain.detach(), math.sqrt(6 / 340)
    assert not plain[7].any()
    assert plain[[0, 1, 2, 5, 6]].abs().max() < bound < plain[3:5].abs().max() < 10 * bound


class Table(nn.Module):
    """Filled from values that lie in memory, and by a column."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.column = nn.Parameter(torch.empty(4, 3)), nn.Parameter(torch.empty(4, 3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scaled.fill_(2).mul_(torch.tensor([1.0, 2.0, 3.0], device="cpu"))
            self.column.fill_(2)[:, 1].zero_()


def test_what_cannot_be_made_in_parts_is_made_whole() -> None:
    with torch.device("meta"):
        module = Table()
    found = initial_weights(module, seed=0)
    parts = {"scaled": torch.empty(4, 2), "column": torch.empty(4, 2)}
    with Drawing() as drawing:
        found.fill(parts, lambda name: {1: [(1, 3)]})
    assert drawing.whole == ["scaled", "column"]
    assert parts["scaled"].tolist() == [[4, 6]] * 4
    assert parts["column"].tolist() == [[0, 2]] * 4


SHAPES: list[tuple[tuple[int, ...], dict[int, list[tuple[int, int]]]]] = [
    ((300, 40), {0: [(2, 9)]}),
    ((300, 40), {1: [(4, 8), (30, 37)]}),
    ((300, 40), {0: [(1, 4), (299, 300)], 1: [(39, 40)]}),
    ((7, 11, 13), {0: [(2, 4)], 2: [(1, 3), (5, 13)]}),
    ((1000,), {0: [(999, 1000)]}),
    ((3, 1000), {1: [(5, 995)]}),
    ((), {}),
]


@pytest.mark.parametrize(("shape", "ranges"), SHAPES)
@pytest.mark.parametrize("chunk", [7, 64, 1 << 15])
def test_a_part_has_the_values_that_it_has_in_the_whole(
    shape: tuple[int, ...], ranges: dict[int, list[tuple[int, int]]], chunk: int
) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(shape))

        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight, 1, 2)
            with torch.no_grad():
                if shape:
                    self.weight[-1].fill_(5)
                self.weight.clamp_(min=0)

    with torch.device("meta"):
        module = One()
    found = initial_weights(module, seed=3)
    whole = torch.empty(shape)
    found.fill({"weight": whole}, lambda name: {})
    expected = part_of(whole, ranges)
    part = torch.empty(expected.shape)
    with mock.patch.dict(elementwise.CHUNK_ELEMENTS, cpu=chunk), Drawing() as drawing:
        found.fill({"weight": part}, lambda name: ranges)
    assert torch.equal(part, expected)
    assert (drawing.numbers, drawing.whole) == (part.numel(), [])
    strided = torch.empty(expected.shape[::-1]).permute(list(range(expected.dim()))[::-1])
    found.fill({"weight": strided}, lambda name: ranges)
    assert torch.equal(strided, expected)


@pytest.mark.parametrize("draw", ["normal", "uniform"])
def test_numbers_have_their_distribution_and_do_not_depend_on_their_neighbours(draw: str) -> None:
    count = 1 << 20
    index = torch.arange(count)
    numbers = getattr(counter_random, draw)(index, 12345)
    share = torch.special.ndtr(numbers) if draw == "normal" else numbers
    distance = (share.sort().values - (index + 0.5) / count).abs().max().item()
    assert distance < 1.63 / math.sqrt(
        count
    )  # Kolmogorov and Smirnov, one in a hundred; the numbers are always the same
    others = getattr(counter_random, draw)(index, 12346)
    for step in (1, 2, 64, 4096):
        pairs = torch.corrcoef(torch.stack([numbers[step:], numbers[:-step], others[step:]]))
        assert (pairs - torch.eye(3)).abs().max() < 5 / math.sqrt(count), step
    if draw == "normal":
        assert numbers.pow(4).mean().item() == pytest.approx(3, abs=0.03)
        assert 4.5 < numbers.abs().max().item() < 6.5


def test_the_bits_are_splitmix64s() -> None:
    """First output for the seed 1234567, as in Vigna's reference (prng.di.unimi.it/splitmix64.c, Rosetta Code's vector)."""
    (bits,) = counter_random._bits(torch.tensor([1]), 1234567).tolist()
    assert bits % 2**64 == 6457827717110365317
