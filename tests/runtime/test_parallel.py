"""What ahp.parallelize refuses, and what it does beside steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import JOB, MODELS, VOCABULARY, batch
from tests.runtime.workers import Pool


def refusal(rank: int, world: int, model: str, layout: dict[str, Any], job: dict[str, Any]) -> tuple[str, str, int]:
    from ahp.errors import AhpError
    from ahp.runtime.parallel import parallelize

    try:
        parallelize(MODELS[model](), {"job": {**JOB, **job}, "parallelism": layout})
    except AhpError as error:
        return type(error).__name__, str(error), error.exit_code
    return "", "", 0


def test_a_path_is_no_plan_and_a_name_no_module() -> None:
    from ahp.errors import BadInput
    from ahp.runtime.parallel import parallelize

    with pytest.raises(BadInput, match=r"plan = 'a\.yaml': must be a Plan .*\(valid: ahp\.Plan\.load\('a\.yaml'\)\)"):
        parallelize(NoList(), "a.yaml")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"module = 'str': must be a torch\.nn\.Module"):
        parallelize("gpt2", {})  # type: ignore[arg-type]


IN_PARTS = {"tensor_parallel_degree": 2, "enable_sequence_parallel": True}


@pytest.mark.parametrize(
    ("world", "layout", "job", "kind", "words"),
    [
        (1, {"tensor_parallel_degree": 2}, {}, "HardwareMismatch", "start 2 workers"),
        (2, {"data_parallel_replicate_degree": 2, "micro_batch_size": 3}, {}, "BadInput", "global_batch_size 8"),
        (2, {"pipeline_parallel_degree": 2, "layers_per_stage": (2, 2)}, {}, "BadInput", "layers_per_stage"),
        (
            1,
            {},
            {"precision": "fp8"},
            "HardwareMismatch",
            "job.precision = 'fp8': device cpu has no products in 8 bits",
        ),
        (2, {"context_parallel_degree": 2}, {"sequence_length": 18}, "BadInput", "context_parallel_degree"),
        (2, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}, {}, "BadInput", "valid: 2"),
        (1, {"enable_sequence_parallel": True}, {}, "NotExpressible", "tensor_parallel_degree above 1"),
        (2, IN_PARTS, {"sequence_length": 15}, "BadInput", "does not divide sequence_length 15"),
        (1, {"data_parallel_shard_degree": 2, "zero_stage": 0}, {}, "BadInput", "zero_stage 0 shards nothing"),
        (1, {"tensor_paralel_degree": 2}, {}, "BadInput", "tensor_parallel_degree"),
    ],
)
def test_refuses(pool: Pool, world: int, layout: dict[str, Any], job: dict[str, Any], kind: str, words: str) -> None:
    for name, message, _ in pool.run(refusal, world, "llama", layout, job):
        assert name == kind, message
        assert words in message


class NoList(nn.Module):
    """No list of blocks: it trains under ZeRO and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(input_ids))


def without_blocks(rank: int, world: int) -> tuple[str, list[float]]:
    from ahp.errors import BadInput
    from ahp.runtime.parallel import parallelize

    message = ""
    try:
        parallelize(NoList(), {"job": JOB, "parallelism": {"tensor_parallel_degree": 2}})
    except BadInput as error:
        message = str(error)
    torch.manual_seed(0)
    parallel = parallelize(NoList(), {"job": JOB, "parallelism": {"data_parallel_shard_degree": 2}})
    return message, [parallel.step(parallel.shard(batch(0))).loss for _ in range(3)]


def test_a_module_without_blocks_trains_under_zero_only(pool: Pool) -> None:
    (message, losses), _ = pool.run(without_blocks, 2)
    assert message.startswith("tensor_parallel_degree = 2")
    assert losses[2] < losses[0]


def of_a_shape_for_itself(rank: int, world: int, kind: str, layout: dict[str, Any], precision: str) -> str:
    from ahp.errors import BadInput
    from ahp.runtime.parallel import parallelize

    module: Any = MODELS["custom"]()
    if kind == "scalar":
        module.temperature = nn.Parameter(torch.ones(()))
    elif kind == "empty":
        module.nothing = nn.Parameter(torch.ones(4, 0))
    elif kind == "shared":
        module.blocks[3].out = module.blocks[1].out
    else:
        module.norm = module.blocks[2].norm_1
    try:
        parallelize(module, {"job": {**JOB, "precision": precision}, "parallelism": layout})
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "world", "layout", "precision", "words"),
    [
        ("scalar", 2, {"data_parallel_shard_degree": 2}, "fp32", "zero_stage = 3: temperature is a scalar"),
        ("scalar", 1, {}, "bf16", "job.precision = 'bf16': temperature is a scalar"),
        ("scalar", 2, {"data_parallel_replicate_degree": 2}, "fp32", ""),
        ("empty", 2, {"data_parallel_shard_degree": 2}, "fp32", "zero_stage = 3: nothing has no elements"),
        ("empty", 1, {}, "bf16", "job.precision = 'bf16': nothing has no elements"),
        ("shared", 2, {"data_parallel_shard_degree": 2}, "fp32", "zero_stage = 3: blocks.1.out.weight is held by more than one block"),
        ("shared", 1, {}, "bf16", "job.precision = 'bf16': blocks.1.out.weight is held by more than one block"),
        ("outside", 2, {"data_parallel_shard_degree": 2}, "fp32", "zero_stage = 3: blocks.2.norm_1.weight is held by more than one block, or outside"),
        ("shared", 2, {"tensor_parallel_degree": 2}, "fp32", ""),
    ],
)  # fmt: skip
def test_what_fsdp2_does_not_take_is_refused_where_it_would(
    pool: Pool, kind: str, world: int, layout: dict[str, Any], precision: str, words: str
) -> None:
    for message in pool.run(of_a_shape_for_itself, world, kind, layout, precision):
        assert message.startswith(words)
        assert bool(message) == bool(words)


def modules_twice(rank: int, world: int, which: str, layout: dict[str, Any]) -> list[float]:
    from ahp.runtime.parallel import parallelize

    module: Any = MODELS["custom"]()
    if which == "block":
        module.blocks = nn.Sequential(*[*module.blocks[:2]] * 2)
    else:
        for block in module.blocks:
            block.norm_2 = block.norm_1
    parallel = parallelize(module, {"job": JOB, "parallelism": layout})
    return [parallel.step(parallel.shard(batch(step))).loss for step in range(3)]


@pytest.mark.parametrize("which", ["block", "norm"])
def test_a_module_that_stands_in_two_places_is_prepared_once(pool: Pool, which: str) -> None:
    """A block in the list of blocks, or a norm within a block."""
    one = pool.run(modules_twice, 1, which, {})[0]
    for layout in (
        {"data_parallel_shard_degree": 2, "micro_batch_size": 4},
        {"tensor_parallel_degree": 2, "micro_batch_size": 8},
    ):
        assert pool.run(modules_twice, 2, which, layout)[0] == pytest.approx(one, rel=1e-5)


def from_meta(rank: int, world: int, layout: dict[str, Any]) -> list[float]:
    from ahp.runtime.parallel import parallelize

    with torch.device("meta"):
        module = MODELS["gpt2"]()
    torch.manual_seed(rank)  # the initial weights come from the job's seed, whatever the ranks drew before
    parallel = parallelize(module, {"job": JOB, "parallelism": layout})
    return [parallel.step(parallel.shard(batch(step))).loss for step in range(3)]


def test_a_meta_module_starts_alike_under_every_plan(pool: Pool) -> None:
    one = pool.run(from_meta, 1, {})[0]
    for layout in ({"data_parallel_shard_degree": 2}, {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}):
        assert pool.run(from_meta, 2, layout)[0] == pytest.approx(one, rel=1e-5)


def bad_parts(rank: int, world: int) -> list[str]:
    from ahp.errors import BadInput
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS["llama"](), {"job": JOB, "parallelism": {"micro_batch_size": 2}})
    data = batch(0)
    messages = []
    parts: list[Any] = [{"input_ids": data["input_ids"]}, {k: value[:3] for k, value in data.items()}, data["labels"]]
    for part in parts:
        try:
            parallel.step(part)
        except BadInput as error:
            messages.append(str(error))
    return messages


def bad_arguments(rank: int, world: int) -> list[str]:
    from ahp.errors import BadInput
    from ahp.runtime.parallel import parallelize

    plan: Any = {"job": JOB, "parallelism": {}}
    parallel: Any = parallelize(MODELS["llama"](), plan)
    found = []
    for call in (
        lambda: parallel.skip_to(-1),
        lambda: parallel.skip_to("3"),
        lambda: parallel.rows(None),
        lambda: parallel.rows(-1),
        lambda: parallel.export_hf("exported", dtype=torch.int8),
        lambda: parallel.export_hf("exported", dtype="bf16"),
        lambda: parallelize(MODELS["llama"](), plan, device="gpu"),
    ):
        with pytest.raises(BadInput) as refused:
            call()
        found.append(str(refused.value))
    return found


def test_arguments_that_break_a_rule_are_named(pool: Pool) -> None:
    """Weights written as int8 were all 0."""
    [told] = pool.run(bad_arguments, 1)
    assert told[:4] == [
        "step = -1: must be a whole number, at least 0",
        "step = '3': must be a whole number, at least 0",
        "num_rows = None: must be a whole number, at least 0",
        "num_rows = -1: must be a whole number, at least 0",
    ]
    valid = "(valid: torch.float32, torch.bfloat16, torch.float16, torch.float64)"
    for text, dtype in zip(told[4:6], ("torch.int8", "'bf16'"), strict=True):
        assert text == f"dtype = {dtype}: weights are written as floating-point numbers of 16 bits or more {valid}"
    assert told[6] == "device = 'gpu': is no device of torch (valid: null, cpu, cuda)"


def test_bad_parts_are_named(pool: Pool) -> None:
    missing, uneven, bare = pool.run(bad_parts, 1)[0]
    assert "part = 'Tensor': must be a dict of input_ids and labels" in bare
    assert "labels is missing" in missing
    assert "multiple of micro_batch_size 2" in uneven


def steps_of_other_sizes(
    rank: int, world: int, layout: dict[str, Any], shapes: list[tuple[int, int]]
) -> list[str | float]:
    """What is said of parts of these rows and lengths, and then the loss of a usual step."""
    from ahp.errors import BadInput
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS["llama"](), {"job": JOB, "parallelism": layout})
    found: list[str | float] = []
    for rows, length in shapes:
        ids = torch.ones((rows, length), dtype=torch.int64)
        try:
            found.append(parallel.step({"input_ids": ids, "labels": ids}).loss)
        except BadInput as error:
            found.append(str(error))
    return [*found, parallel.step(parallel.shard(batch(0))).loss]


PIPED = {"pipeline_parallel_degree": 2, "micro_batch_size": 4}
IN_ROUNDS = {
    "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B", "virtual_stages_per_rank": 2, "micro_batch_size": 1
}  # fmt: skip
ORDERED = {
    "pipeline_parallel_schedule": "Synthesized",
    "pipeline_parallel_order": ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"),
}


@pytest.mark.parametrize(
    ("layout", "shape", "words"),
    [
        (PIPED, (8, 12), "part: sequence length = 12: what passes between the stages of a pipeline has the length of job.sequence_length 16"),
        (IN_ROUNDS, (5, 16), "part = 5 rows: 5 micro-batches of micro_batch_size 1; pipeline_parallel_schedule = 'Interleaved1F1B'"),
        ({**PIPED, **ORDERED}, (12, 16), "part = 12 rows: 3 micro-batches of micro_batch_size 4; pipeline_parallel_order has 2"),
        ({**IN_PARTS, "micro_batch_size": 4}, (4, 15), "part: sequence length = 15: tensor_parallel_degree = 2: does not divide"),
        ({"context_parallel_degree": 2, "micro_batch_size": 4}, (4, 18), "part: sequence length = 18: context_parallel_degree = 2"),
    ],
    ids=["length", "no whole rounds", "not those of the order", "sequence", "context"],
)  # fmt: skip
def test_a_step_of_a_size_that_the_layout_cannot_run_is_refused(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: dict[str, Any], shape: tuple[int, int], words: str
) -> None:
    """They were errors of torch's and of gloo's. A refused step changes nothing."""
    for said, loss in pool.run(steps_of_other_sizes, 2, layout, [shape]):
        assert said.startswith(words)
        assert loss == pytest.approx(plain_run("llama", 3)["losses"][0], rel=1e-5)


def recomputed_blocks(rank: int, world: int, layout: dict[str, Any]) -> list[int]:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS["llama"](), {"job": JOB, "parallelism": {"activation_checkpoint": "full", **layout}})
    (stage,) = parallel.stages.values()
    blocks = stage.model.get_submodule("model.layers").named_children()
    return [int(number) for number, block in blocks if "forward" in vars(block)]


def test_the_first_blocks_of_each_stage_are_recomputed(pool: Pool) -> None:
    def found(*some: int) -> list[list[int]]:
        layout = {"pipeline_parallel_degree": 2, "recomputed_layers_per_stage": some}
        return pool.run(recomputed_blocks, 2, layout)

    first, second = found(2, 1)
    assert first == [0, 1]
    assert len(second) == 1
    assert second[0] in (2, 3)
    assert found(0, 2) == [[], [second[0], second[0] + 1]]


def test_each_replica_recomputes_its_own_number_of_blocks(pool: Pool) -> None:
    stage = {"group": ("new", "old"), "layers": 5, "recomputed_layers": (0, 3)}
    assert pool.run(recomputed_blocks, 2, {"data_parallel_replicate_degree": 2, "stages": (stage,)}) == [[], [0, 1, 2]]


def shapes_between_blocks(rank: int, world: int) -> list[tuple[int, ...]]:
    from ahp.runtime.parallel import parallelize

    module: Any = MODELS["llama"]()
    parallel = parallelize(module, {"job": JOB, "parallelism": {**IN_PARTS, "micro_batch_size": 4}})
    found = []
    for block in module.model.layers:
        block.register_forward_pre_hook(lambda block, args: found.append(tuple(args[0].shape)))
    parallel.step(parallel.shard(batch(0)))
    return found[: len(module.model.layers)]


def test_hidden_states_between_blocks_are_parts_of_the_sequence(pool: Pool) -> None:
    for shapes in pool.run(shapes_between_blocks, 2):
        assert shapes == [(4, 16, 32)] + [(4, 8, 32)] * 4


def test_compiled_slices_are_refused_where_torch_loses_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    from ahp.errors import BadInput
    from ahp.plan import Plan
    from ahp.runtime import limits

    monkeypatch.setattr(limits, "compiles_sliced_blocks", lambda: False)
    monkeypatch.setattr(
        limits, "refuse_kernels", lambda engine, device: None
    )  # whether a compiler is here is no matter
    keys = {"job": JOB, "engine": {"compile": True}}
    alone, sliced = (Plan.model_validate({**keys, "parallelism": {"tensor_parallel_degree": n}}) for n in (1, 2))
    limits.refuse_plan(alone, torch.device("cpu"))
    with pytest.raises(BadInput, match=r"engine.compile = True: .* tensor-parallel ranks .*False"):
        limits.refuse_plan(sliced, torch.device("cpu"))


def batch_norm_in_16_bits(rank: int, world: int) -> str:
    from ahp.errors import BadInput
    from ahp.runtime.parallel import parallelize
    from tests.runtime.averages import averaging

    with pytest.raises(BadInput) as refused:
        parallelize(averaging("batch norm"), {"job": {**JOB, "precision": "bf16"}})
    return str(refused.value)


def test_a_batch_norm_in_16_bits_is_refused(pool: Pool) -> None:
    (message,) = pool.run(batch_norm_in_16_bits, 1)
    assert "job.precision = 'bf16': before.norm is a batch norm, whose averages stay in fp32" in message
