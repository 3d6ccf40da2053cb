"""What releases of engines differ in: which day a name means, and what the program of that day has."""

import datetime
import re

import pytest

from ahp.engines import releases
from ahp.engines.registry import get, names
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

JOB = Job(sequence_length=128, global_batch_size=8, precision="bf16")


def test_names_and_days() -> None:
    torchtitan, megatron = releases.releases()["torchtitan"], releases.releases()["megatron"]
    assert torchtitan.day("0.2.1") == datetime.date(2025, 12, 26)
    assert torchtitan.day("v0.2.1") == torchtitan.day("2025-12-26")
    assert torchtitan.day("0.1.7") == torchtitan.day("0.1.0")  # a number between two known ones
    assert torchtitan.day("0.9") is None  # newer than all that is known
    assert megatron.day("26.04.01") == megatron.day("26.04") == datetime.date(2026, 4, 1)
    assert megatron.day("26.08.02") == megatron.day("26.08")


def test_the_newest_has_what_has_no_end() -> None:
    for engine, found in releases.releases().items():
        for name, feature in found.features.items():
            lasts = bool(feature.spans) and feature.spans[-1][1] is None
            assert releases.has(engine, name, None) == (lasts and not feature.in_recipes)
            assert releases.has(engine, name, "2099-01") == lasts
            assert feature.source
            assert all(after is None or first < after for first, after in feature.spans)


@pytest.mark.parametrize(("version", "has"), [("2024-11", True), ("2024-12-20", False), ("0.1.0", True), (None, True)])
def test_a_feature_that_was_taken_back(version: str | None, has: bool) -> None:
    assert releases.has("torchtitan", "compiled_loss", version) == has


@pytest.mark.parametrize(
    ("engine", "version", "words"),
    [
        ("torchtitan", "main", r"engine.version = 'main': is no known release of torchtitan .* \(valid: .*0.2.2"),
        ("torchtitan", "0.0.1", "is no known release"),
        ("torchtitan", "2025-13", "is no known release"),
        ("megatron", "23.04", "is no known release of megatron"),
        ("ahp", "1.0", r"the forecast of ahp is the same for all releases \(valid: null\)"),
        ("accelerate", "1.0", "is the same for all releases"),
    ],
)
def test_unknown_versions_are_refused(engine: str, version: str, words: str) -> None:
    reason = get(engine).refuses(JOB, Parallelism(), EngineChoice(name=engine, version=version))  # type: ignore[arg-type]
    assert reason is not None
    assert re.search(words, reason), reason


def test_every_engine_takes_none() -> None:
    for name in names():
        assert get(name).refuses(JOB, Parallelism(), EngineChoice(name=name)) is None  # type: ignore[arg-type]


def test_compiled_accelerate_takes_cudnn_with_todays_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash2_on(*, compiled: bool) -> tuple[str, ...]:
        choice = EngineChoice(name="accelerate", compile=compiled)
        return get("accelerate").traits(JOB, Parallelism(), choice).kernels.flash2_on

    assert flash2_on(compiled=True) == flash2_on(compiled=False) == ()
    monkeypatch.setattr(releases, "has", lambda engine, feature, version: False)  # a program of 2024
    assert (flash2_on(compiled=True), flash2_on(compiled=False)) == (("hopper", "blackwell"), ())


def test_torchtitan_by_day() -> None:
    def traits(version: str | None, *, compiled: bool = True):
        choice = EngineChoice(name="torchtitan", version=version, compile=compiled)
        return get("torchtitan").traits(JOB, Parallelism(), choice)

    old, between, new = traits("2024-12-31"), traits("0.2.0"), traits(None)
    assert (old.kernels.fused_loss, between.kernels.fused_loss, new.kernels.fused_loss) == (False, True, True)
    assert (old.kernels.flash2_on, between.kernels.flash2_on) == (("hopper", "blackwell"), ())
    assert traits("0.1.0").kernels.flash2_on == ("hopper",)
    assert (between.recompute.keeps_cudnn_attention, new.recompute.keeps_cudnn_attention) == (False, True)
    assert [traits(day).recompute.keeps_arrived for day in ("2025-09-05", "2025-09-06", None)] == [False, True, True]
    assert [traits(day).kernels.loss_chunks for day in ("2026-04-26", "2026-04-27", None)] == [1, 8, 1]
    assert [traits(day, compiled=False).kernels.fusion for day in ("0.1.0", "2025-08")] == ["eager", "modules"]
    assert all(one.kernels.complex_positions for one in (old, between, new))
    assert [traits(day).tensor.gathers_normed for day in ("2025-10-13", "2025-10-14", None)] == [True, False, False]
    assert [traits(day).kernels.repeated_keys for day in ("2024-12-31", "0.2.1", "0.2.2", None)] == [
        True,
        True,
        False,
        False,
    ]


def test_a_run_may_compile_the_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels():
        return get("torchtitan").traits(JOB, Parallelism(), EngineChoice(name="torchtitan", compile=False)).kernels

    before, has = kernels(), releases.has
    monkeypatch.setattr(releases, "has", lambda *asked: asked[1] == "compiled_loss_alone" or has(*asked))
    assert kernels() == before._replace(fused_loss=True)


@pytest.mark.parametrize(
    ("version", "fused", "in_fp32"),
    [
        ("2021-03", False, False),
        ("2024-06", False, False),
        ("2024-07", True, True),
        ("24.07", False, False),
        ("24.09", True, True),
        ("24.12", True, True),
        ("26.04", True, False),
        (None, True, True),
    ],
)
def test_megatrons_loss_by_day(version: str | None, fused: bool, in_fp32: bool) -> None:
    traits = get("megatron").traits(JOB, Parallelism(), EngineChoice(name="megatron", version=version))
    assert (traits.kernels.fused_loss, traits.kernels.loss_keeps_fp32) == (fused, in_fp32)


@pytest.mark.parametrize(
    ("version", "recent"), [("26.02.01", False), ("26.04", True), ("2026-03", False), (None, True)]
)
def test_megatrons_cudnn_by_container(version: str | None, recent: bool) -> None:
    traits = get("megatron").traits(JOB, Parallelism(), EngineChoice(name="megatron", version=version))
    assert traits.kernels.recent_cudnn is recent


@pytest.mark.parametrize(
    ("version", "kernel"),
    [
        ("2023-10", "flash2"),
        ("2024-05", None),
        ("24.03.01", "flash2"),
        ("24.07", "flash2"),
        ("24.09", None),
        (None, None),
    ],
)
def test_megatrons_attention_by_release(version: str | None, kernel: str | None) -> None:
    """Transformer Engine's own choice since release 1.2, but not in containers whose recipes set NVTE_FUSED_ATTN to 0."""
    traits = get("megatron").traits(JOB, Parallelism(), EngineChoice(name="megatron", version=version))
    assert traits.kernels.attention == kernel


@pytest.mark.parametrize(("version", "fused"), [("2025-02-09", False), ("25.02", False), ("25.04", True), (None, True)])
def test_megatrons_order_of_tokens_by_day(version: str | None, fused: bool) -> None:
    traits = get("megatron").traits(JOB, Parallelism(), EngineChoice(name="megatron", version=version))
    assert traits.experts.fused_permutation is fused


def test_megatron_of_early_2021() -> None:
    """8aa4619f: gradients flattened, divided and copied back; an all-reduce that products wait for; apex's own kernel for weights of
    norms; every tensor-parallel rank sends all of a stage's output."""

    def traits(version: str | None, ranks: int, *, bf16: bool = False):
        layout = Parallelism(data_parallel_replicate_degree=ranks, tensor_parallel_degree=2)
        job = JOB if bf16 else Job(sequence_length=128, global_batch_size=8, precision="fp16")
        return get("megatron").traits(job, layout, EngineChoice(name="megatron", version=version))

    old, new = traits("2021-03-22", 4), traits(None, 4)
    assert (old.gradients.passes, old.gradients.adds_first) == (6, False)
    assert (new.gradients.passes, new.gradients.adds_first) == (3, True)
    assert traits("2021-03-22", 1).gradients.passes == 0  # zero_grad sets gradients to None
    in_fp32 = traits("2021-03-22", 4, bf16=True).gradients  # which needs the buffer
    assert (in_fp32.passes, in_fp32.adds_first) == (3, True)
    assert (old.tensor.overlap_backward, new.tensor.overlap_backward) == (0.0, 1.0)
    assert (old.kernels.norm_weights_apart, new.kernels.norm_weights_apart) == (True, False)
    assert (old.pipeline.sends_split_by_tensor, new.pipeline.sends_split_by_tensor) == (False, True)


@pytest.mark.parametrize(
    ("version", "gate_apart", "positions_apart"),
    [
        ("2023-10", True, True),
        ("2024-04-05", False, False),
        ("24.01", True, True),
        ("24.03.01", True, False),
        ("24.05", False, False),
        (None, False, False),
    ],
)
def test_megatrons_gates_and_positions_by_day_and_recipe(
    version: str | None, gate_apart: bool, positions_apart: bool
) -> None:
    kernels = get("megatron").traits(JOB, Parallelism(), EngineChoice(name="megatron", version=version)).kernels
    assert (kernels.gate_apart, kernels.positions_apart) == (gate_apart, positions_apart)


@pytest.mark.parametrize(("version", "one_after_another"), [("2024-01-09", True), ("2024-04-05", False), (None, False)])
def test_megatrons_experts_by_day(version: str | None, one_after_another: bool) -> None:
    traits = get("megatron").traits(JOB, Parallelism(), EngineChoice(name="megatron", version=version))
    assert traits.experts.one_after_another is one_after_another


def test_deepspeed_has_features_but_no_releases() -> None:
    """Megatron-DeepSpeed 4efb479d: torch's kernels turn queries and keys, and compute gates."""
    kernels = get("deepspeed").traits(JOB, Parallelism(), EngineChoice(name="deepspeed")).kernels
    assert (kernels.gate_apart, kernels.positions_apart, kernels.attention) == (True, True, None)
    assert "the same for all releases" in (releases.refuses("deepspeed", "2024-12") or "")


def test_a_program_priced_as_deepspeed_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """InternLM of 2023 had FlashAttention's first generation; BLOOM's script set CUDA_LAUNCH_BLOCKING."""
    monkeypatch.setattr(releases, "has", lambda engine, feature, version: feature == "waiting_host")
    traits = get("deepspeed").traits(JOB, Parallelism(), EngineChoice(name="deepspeed"))
    assert traits.kernels.attention == "flash1"
    assert traits.host.waits
