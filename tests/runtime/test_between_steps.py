"""What a program does to its module and parameters between two steps: every layout follows, or refuses it by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from ahp.errors import BadInput
from ahp.runtime.parallel import Parallel, parallelize
from ahp.runtime.torch_compat import local_tensor, whole_parameters
from tests.marks import cases
from tests.runtime.models import JOB, Block, Custom, batch, gpt2
from tests.runtime.workers import Pool

PIPE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B", "micro_batch_size": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 2},
    "pipe": PIPE,
    "tp": {"tensor_parallel_degree": 2, "micro_batch_size": 4},
    "v-shape": {**PIPE, "pipeline_parallel_schedule": "ZBVZeroBubble", "virtual_stages_per_rank": 2, "micro_batch_size": 2},
}  # fmt: skip
LAYOUTS["context"] = {"context_parallel_degree": 2, "zero_stage": 0, "micro_batch_size": 4}
LAYOUTS["pipe-zero1"] = {**PIPE, "data_parallel_shard_degree": 2, "zero_stage": 1, "micro_batch_size": 2}
Curve = list[tuple[float, float]]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(module: nn.Module, layout: str, precision: str = "fp32") -> Parallel:
    return parallelize(module, {"job": {**JOB, "precision": precision}, "parallelism": LAYOUTS[layout]})


def custom() -> Custom:
    torch.manual_seed(0)
    return Custom()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_another_tensor_under_a_parameter_is_refused(alone: None, precision: str) -> None:
    """Without FSDP2 the optimizer updated the first tensor, with it the forward read that one."""
    parallel = made(custom(), "one", precision)
    part, head = parallel.shard(batch(0)), parallel.parameters["head.weight"]
    parallel.step(part)
    first, head.data = head.data, head.data * 0.5
    for use in (parallel.step, lambda part: parallel.evaluate([part]), lambda _: parallel.save("never")):
        with pytest.raises(BadInput, match=r"parallel\.parameters = 'head\.weight': its data is another tensor now"):
            use(part)
    head.data = first
    parallel.step(part)


def test_a_loaded_checkpoint_ends_a_halt(alone: None, tmp_path: Any) -> None:
    parallel = made(custom(), "one")
    parallel.save(tmp_path)
    parallel.halts_at_fault = True
    with torch.no_grad():
        parallel.parameters["head.weight"].fill_(torch.nan)
    assert parallel.step(parallel.shard(batch(0))).failed
    parallel.load(tmp_path)
    before = parallel.parameters["head.weight"].detach().clone()
    parallel.step(parallel.shard(batch(0)))
    assert not torch.equal(parallel.parameters["head.weight"].detach(), before)


def changed_tied(rank: int, world: int, layout: str) -> Curve:
    """Steps between which the program changes, and lets rest, a weight that two stages of a rank have in forms of their own."""
    parallel, found = made(gpt2(), layout, "bf16"), []
    tied = [p for name, p in parallel.parameters.items() if name == "transformer.wte.weight"]
    for step in range(4):
        with torch.no_grad():
            for p in tied:
                p.mul_(0.5 if step == 1 else 1.0)
                p.requires_grad_(step != 2)
        result = parallel.step(parallel.shard(batch(step)))
        found.append((result.loss, result.grad_norm))
    return [*found, (parallel.evaluate([parallel.shard(batch(4))]), 0.0)]


def test_a_weight_on_two_stages_of_a_rank_follows_the_program(pool: Pool) -> None:
    (expected,) = pool.run(changed_tied, 1, "one")
    for found in pool.run(changed_tied, 2, "v-shape"):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-3, atol=0.0)


def twice(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


CHANGES: dict[str, tuple[Callable[[Custom], Any], Callable[[Custom, Any], object]]] = {
    "blocks.1.heads": (lambda m: setattr(m.blocks[1], "heads", 2), lambda m, _: setattr(m.blocks[1], "heads", 4)),
    "blocks.1.up._forward_hooks": (
        lambda m: m.get_submodule("blocks.1.up").register_forward_hook(twice),
        lambda m, handle: handle.remove(),
    ),
    "blocks.1.norm_2": (
        lambda m: (m.blocks[1].norm_2, setattr(m.blocks[1], "norm_2", nn.Identity()))[0],
        lambda m, norm: setattr(m.blocks[1], "norm_2", norm),
    ),
}
"""What is said of a change, the change, and how it is undone."""


def changing(rank: int, world: int, layout: str) -> None:
    module = custom()
    parallel = made(module, layout)
    part = parallel.shard(batch(0))
    for name, (change, undo) in CHANGES.items():
        held = change(module)
        for use in (parallel.step, lambda part: parallel.evaluate([part])):
            with pytest.raises(BadInput, match=rf"module = '{name}': has changed since ahp\.parallelize"):
                use(part)
        undo(module, held)
        parallel.step(part)


@pytest.mark.parametrize("layout", ["pipe", "tp"])
def test_a_change_that_a_layout_would_not_follow_is_refused(pool: Pool, layout: str) -> None:
    pool.run(changing, 2, layout)


def halved(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 0.5)


REPLACED: dict[str, Callable[[nn.Linear], object]] = {
    "assigned": halved,
    "normed": lambda module: weight_norm(module),
    "parametrized": lambda module: parametrize.register_parametrization(module, "weight", nn.Identity()),
}


def replacing(rank: int, world: int, layout: dict[str, Any], precision: str) -> None:
    """Each way to put another parameter into a place of the module, inside and outside of a block, is refused at the next step."""
    for way, change in REPLACED.items():
        for path in ("blocks.1.up", "head"):
            module = custom()
            job = {**JOB, "precision": precision}
            parallel = parallelize(module, {"job": job, "parallelism": {"micro_batch_size": 2, **layout}})
            part = parallel.shard(batch(0))
            parallel.step(part)
            parallel.evaluate([part])
            parallel.step(part)
            change(module.get_submodule(path))  # pyright: ignore[reportArgumentType]
            if (way, layout, precision) == ("parametrized", {}, "fp32"):
                parallel.step(part)  # the same parameter
                continue
            with pytest.raises(
                BadInput, match=rf"module = '{path}\.\w+': (is another parameter now|has changed since)"
            ):
                parallel.step(part)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "layout",
    [{}, {"data_parallel_shard_degree": 2}, {"data_parallel_shard_degree": 2, "zero_stage": 1}, {"tensor_parallel_degree": 2}, PIPE],
    ids=["one", "zero3", "zero1", "tp", "pipe"],
)  # fmt: skip
def test_another_parameter_in_a_place_of_the_module_is_refused(
    pool: Pool, layout: dict[str, Any], precision: str
) -> None:
    """ZeRO and pipelines computed with the first, without a word; plain layouts did not train the other."""
    pool.run(replacing, 2 if layout else 1, layout, precision)


def state_of(rank: int, world: int, layout: str, precision: str) -> list[Any]:
    """The trained state, or the error, of the module and of a part of it."""
    module, found = custom(), []
    parallel = made(module, layout, precision)
    parallel.step(parallel.shard(batch(0)))
    for part, name in ((module, "head.weight"), (module.head, "weight")):
        try:
            found.append(local_tensor(part.state_dict()[name]).clone())
        except BadInput as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_state_of_a_module_in_stages_is_refused(pool: Pool, precision: str) -> None:
    """It had the first weights, of other stages in fp32 and of all in bf16."""
    first = custom().head.weight
    (one,) = pool.run(state_of, 1, "one", precision)
    assert not any(torch.equal(one_, first) for one_ in one)
    for found in pool.run(state_of, 2, "pipe", precision):
        assert [said.partition(": ")[0] for said in found] == ["module = 'Custom'", "module = 'Linear'"]
        assert all("as they were before ahp.parallelize" in said for said in found)


def around_block(rank: int, world: int, layout: str) -> Curve:
    """A hook on a block, and an attribute outside of the blocks, which other layouts than pipelines follow."""
    module, found = custom(), []
    parallel = made(module, layout)
    for step in range(2):
        result = parallel.step(parallel.shard(batch(step)))
        found.append((result.loss, result.grad_norm))
        module.blocks[1].register_forward_hook(twice)
        module.norm.eps = 0.5
    return found


def test_changes_around_sliced_blocks_are_followed(pool: Pool) -> None:
    (expected,) = pool.run(around_block, 1, "one")
    for found in pool.run(around_block, 2, "tp"):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0.0)


def weights_of_the_module(rank: int, world: int) -> None:
    module = custom()
    parallel = made(module, "pipe", "bf16")
    module.requires_grad_(False)
    with pytest.raises(
        BadInput, match=r"module = '.*(weight|positions)': has changed .* parallel\.parameters for weights"
    ):
        parallel.step(parallel.shard(batch(0)))


def test_weights_of_a_module_whose_stages_have_others_are_refused(pool: Pool) -> None:
    pool.run(weights_of_the_module, 2)


def evaluated(rank: int, world: int) -> None:
    parallel = made(custom(), "tp", "bf16")
    part = parallel.shard(batch(0))
    expected, gone = parallel.evaluate([part]), weakref.ref(nn.Parameter(torch.empty(1)))
    assert gone() is None
    whole = set().union(*map(whole_parameters, parallel.sharding.roots))
    parallel.given_module._replaced |= dict.fromkeys(whole, ("of the module as it came", gone))
    assert parallel.evaluate([part, part]) == pytest.approx(expected)


def test_gathered_weights_in_the_memory_of_weights_that_are_gone_are_not_taken_for_them(pool: Pool) -> None:
    """Python gives their ``id`` to new objects, so that one rank refused the second batch of an evaluation, for which the others waited."""
    pool.run(evaluated, 2)


class Kept(Block):
    """Its forward is a closure over the block, or goes through a weak reference: copies of it run the first block."""

    def __init__(self, weak: bool) -> None:
        super().__init__(32, 4)
        own = weakref.ref(self)
        self.mix = (lambda x: own().mixed(x)) if weak else (lambda x: self.mixed(x))  # type: ignore[union-attr]

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)


class KeptHead(Custom):
    """The first stage's copy of it runs the module's own head."""

    def __init__(self) -> None:
        super().__init__()
        self.last = lambda x: self.head(self.norm(x))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.tokens(input_ids) + self.positions[: input_ids.shape[1]]))


def keeping(weak: bool | None) -> nn.Module:
    """``weak``: by a weak reference or a closure of each block; None = by one of the model."""
    torch.manual_seed(0)
    if weak is None:
        return KeptHead()
    module = Custom(layers=0)
    module.blocks = nn.Sequential(*(Kept(weak) for _ in range(4)))
    return module


def kept(rank: int, world: int, weak: bool | None, layout: str, precision: str) -> str:
    with pytest.raises(BadInput) as raised:
        made(keeping(weak), layout, precision)
    return str(raised.value)


IN_BLOCK = (
    "blocks.0.norm_1.weight is read through a closure, a default argument or a weak reference, which keep it as it came"
)
KEEPS: list[tuple[bool | None, str, str, str]] = [
    (False, "tp", "fp32", f"tensor_parallel_degree = 2: {IN_BLOCK}"),
    (True, "pipe", "bf16", f"job.precision = 'bf16': {IN_BLOCK}"),
    (False, "pipe-zero1", "fp32", f"zero_stage = 1: {IN_BLOCK}"),
    (None, "pipe", "bf16", "job.precision = 'bf16': norm.weight is read through a closure"),
]


@pytest.mark.parametrize(("weak", "layout", "precision", "said"), cases(KEEPS, fast=[KEEPS[0], KEEPS[3]]))
def test_a_weight_that_code_keeps_as_it_came_is_refused_before_a_step(
    pool: Pool, weak: bool | None, layout: str, precision: str, said: str
) -> None:
    """Stages computed with the first weights, or ended in torch's error about types; slices were told that nothing divides."""
    for found in pool.run(kept, 4 if layout == "pipe-zero1" else 2, weak, layout, precision):
        assert found.startswith(said)


def with_kept_head(rank: int, world: int, layout: str) -> Curve:
    parallel = made(keeping(None), layout)
    results = [parallel.step(parallel.shard(batch(step))) for step in range(2)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize("layout", cases(["pipe", "tp", "context"], fast=["context"]))
def test_a_weight_that_is_the_modules_own_in_every_stage_may_be_kept(pool: Pool, layout: str) -> None:
    (expected,) = pool.run(with_kept_head, 1, "one")
    for found in pool.run(with_kept_head, 2, layout):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0.0)


def all_frozen_later(rank: int, world: int) -> str:
    parallel = made(custom(), "pipe")
    parallel.step(parallel.shard(batch(0)))
    for p in parallel.parameters.values():
        p.requires_grad_(False)
    with pytest.raises(BadInput) as raised:
        parallel.step(parallel.shard(batch(1)))
    return str(raised.value)


def test_a_pipeline_all_of_whose_weights_are_frozen_later_is_refused(pool: Pool) -> None:
    for said in pool.run(all_frozen_later, 2):
        assert said == "module: none of its parameters has requires_grad, so a step would train nothing"
