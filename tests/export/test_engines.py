"""``ahp export ENGINE``: what is written is read back as the same plan, and what a file cannot say is refused or listed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ahp.cli.export import run
from ahp.cluster.model import Cluster
from ahp.engines import registry as engines
from ahp.errors import BadInput, NotExpressible
from ahp.export import accelerate, deepspeed, megatron, torchtitan
from ahp.export.engine_target import Format
from ahp.export.megatron_keys import BESIDE_RULE, DATA, EXPERTS, GRAPH_RULE, LOSS_RULE, RECIPE_RULE
from ahp.export.table import Subject, Unreadable, plan_of
from ahp.export.target import Shape
from ahp.job import Job, Optimizer
from ahp.plan import EngineChoice, Parallelism, Plan
from ahp.schedule.stages import layers_of_stages
from tests.search.small import cpu_workers

LAYERS = 8
MODEL = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
         "num_key_value_heads": 8, "max_position_embeddings": 4096}  # fmt: skip
FORMATS: dict[str, dict[str, Format]] = {
    "torchtitan": torchtitan.FORMATS,
    "megatron": megatron.FORMATS,
    "deepspeed": deepspeed.FORMATS,
    "accelerate": accelerate.FORMATS,
}
EACH = [
    pytest.param(engine, version, id=f"{engine}-{version}")
    for engine, formats in FORMATS.items()
    for version in formats
]
CUTS = {"torchtitan": "count_as_layers", "megatron": "may_be_empty"}
FORECAST_FOR = {"job.data", "job.data_field"}


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Keys of a layout for up to 64 ranks, legal or not."""
    degrees = st.sampled_from([1, 1, 2, 4])
    shard, virtual = draw(degrees), draw(st.sampled_from([1, 1, 2]))
    pipeline = draw(degrees)
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": draw(st.sampled_from([1, 1, 2])),
        "data_parallel_shard_degree": shard,
        "zero_stage": draw(st.sampled_from([1, 2, 3])) if shard > 1 else draw(st.sampled_from([0, 0, 2, 3])),
        "tensor_parallel_degree": draw(degrees),
        "context_parallel_degree": draw(st.sampled_from([1, 1, 2])),
        "pipeline_parallel_degree": pipeline,
        "micro_batch_size": draw(st.sampled_from([1, 2])),
        "activation_checkpoint": draw(st.sampled_from(["none", "selective", "full"])),
    }
    found["enable_sequence_parallel"] = found["tensor_parallel_degree"] > 1 and draw(st.booleans())
    if pipeline > 1:
        stages = pipeline * virtual
        schedules = ["1F1B", "GPipe"] if virtual == 1 else ["Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble"]
        found |= {"virtual_stages_per_rank": virtual, "pipeline_parallel_schedule": draw(st.sampled_from(schedules))}
        if draw(st.booleans()):
            cut = sorted(draw(st.permutations(range(1, LAYERS)))[: stages - 1])
            found["layers_per_stage"] = [b - a for a, b in zip([0, *cut], [*cut, LAYERS], strict=True)]
    if found["activation_checkpoint"] == "full" and draw(st.booleans()):
        found["recomputed_layers_per_stage"] = [1] * (pipeline * found.get("virtual_stages_per_rank", 1))
    return found


JOBS = st.builds(
    lambda precision, dtype, rate, schedule, least, clip, seed, decays: Job(
        sequence_length=2048,
        global_batch_size=128,
        steps=1000,
        precision=precision,
        dtype=dtype if precision == "bf16" else "fp32",
        seed=seed,
        optimizer=Optimizer(
            learning_rate=rate,
            schedule=schedule,
            min_lr_factor=0.1 if schedule == "constant" else least,
            grad_clip=clip,
            warmup_steps=50,
            decay_norms_and_biases=decays,
        ),
    ),
    st.sampled_from(["bf16", "bf16", "fp32", "fp16", "fp8"]),
    st.sampled_from(["fp32", "fp32", "bf16"]),
    st.sampled_from([1e-3, 3e-4, 1.5e-5]),
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.sampled_from([0.1, 0.0, 0.25]),
    st.sampled_from([1.0, None, 0.5]),
    st.integers(0, 2**31),
    st.sampled_from([True, True, True, False]),
)


def written(form: Format, plan: Plan) -> tuple[str, tuple[str, ...]]:
    """The file's text, and what it does not say."""
    world = plan.parallelism.world_size
    shape = Shape(1, 1, world, world, "H100-SXM-80GB")
    subject = Subject(plan, LAYERS, {"0.2.2": "llama3/8B"}.get(form.dialect.version, "llama3/llama3_8b"))
    found, unsaid = form.dialect.settings(subject)
    return form.render(found, subject, shape, ["a plan"]), unsaid


def what_counts(engine: str, p: Parallelism) -> dict[str, Any]:
    """A layout without what makes no difference to the engine: a stage of sharding over one rank, a cut that is its own, and so on."""
    found = p.model_dump()
    found["zero_stage"] = p.zero_stage if p.weight_shards > 1 else 0
    found["layers_per_stage"] = layers_of_stages(p, LAYERS, ends=CUTS.get(engine, "hold_layers"))  # type: ignore[arg-type]
    if engine == "torchtitan" and p.pipeline_parallel_degree > 1 and found["zero_stage"] == 1:
        found["zero_stage"] = 2  # torch's pipeline reduces gradients once a step under both
    return found


@pytest.mark.parametrize(("engine", "version"), EACH)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(keys=layouts(), job=JOBS)
def test_what_is_written_is_read_as_the_same_plan(engine: str, version: str, keys: dict[str, Any], job: Job) -> None:
    form = FORMATS[engine][version]
    plan = Plan(model=MODEL, job=job, parallelism=Parallelism(**keys), engine=EngineChoice(name=engine))  # type: ignore[arg-type]
    try:
        text, unsaid = written(form, plan)
    except NotExpressible as error:
        refusal = str(error)
        assert " = " in refusal
        assert "(valid: " in refusal or "has no key for it" in refusal
        return
    assert engines.get(engine).refuses(job, plan.parallelism, plan.engine) is None
    found = form.dialect.read(form.parse(text))
    assert found.not_understood == ()
    assert found.missing == ()
    read = plan_of(form.dialect, found.fields, MODEL, None)
    before, after = what_counts(engine, plan.parallelism), what_counts(engine, read.parallelism)
    for name in form.dialect.beside:
        before.pop(name.removeprefix("parallelism."))
        after.pop(name.removeprefix("parallelism."))
    assert after == before
    for name, value in found.fields.items():
        if name.startswith("job.") and "decay" not in name:
            assert value == pytest.approx(at(plan, name)) or list(value) == list(at(plan, name)), name
    for name in Optimizer.model_fields:
        same = at(read.job, f"optimizer.{name}") == pytest.approx(at(job, f"optimizer.{name}"))
        assert same or name in " ".join(unsaid), f"job.optimizer.{name} is lost without a word"


def at(record: Plan | Job, name: str) -> Any:
    found: Any = record
    for part in name.split("."):
        found = getattr(found, part)
    return found


def a_plan(folder: Path, engine_name: str, **changes: Any) -> str:
    layout = changes.pop("parallelism", {"data_parallel_shard_degree": 16, "zero_stage": 3})
    choice = {"name": engine_name, **changes.pop("engine", {})}
    cluster = Cluster.resolve(changes.pop("cluster", "2x8xH100-SXM-80GB")).plain()
    keys = {"model": "llama3-8b", **changes}
    Plan(cluster=cluster, parallelism=layout, engine=choice, **keys).save(folder / "plan.yaml")
    return str(folder / "plan.yaml")


@pytest.mark.parametrize(
    ("engine", "layout", "job", "says"),
    [
        ("torchtitan", {"data_parallel_shard_degree": 16, "zero_stage": 1}, {}, r"zero_stage = 1: .*\(valid: 2, 3"),
        (
            "torchtitan",
            {"data_parallel_replicate_degree": 8, "tensor_parallel_degree": 2, "enable_sequence_parallel": True},
            {},
            "zero_stage = 0: nothing is sharded",
        ),
        (
            "torchtitan",
            {"data_parallel_shard_degree": 16},
            {"precision": "fp8"},
            r"job.precision = 'fp8': .*--target-version 0.2.2",
        ),
        (
            "torchtitan",
            {"context_parallel_degree": 2, "data_parallel_replicate_degree": 8},
            {},
            "zero_stage = 0: torchtitan shards weights over context",
        ),
        (
            "megatron",
            {
                "pipeline_parallel_degree": 16,
                "pipeline_parallel_schedule": "InterleavedZeroBubble",
                "virtual_stages_per_rank": 2,
            },
            {},
            "is a fork",
        ),
        (
            "megatron",
            {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 8, "zero_stage": 3},
            {},
            r"zero_stage = 3: .*\(valid: 1; or pipeline_parallel_degree 1\)",
        ),
        (
            "deepspeed",
            {"pipeline_parallel_degree": 16},
            {},
            "pipeline_parallel_degree = 16: DeepSpeed's pipeline is a PipelineModule",
        ),
        (
            "deepspeed",
            {"data_parallel_shard_degree": 8, "data_parallel_replicate_degree": 2, "zero_stage": 2},
            {},
            "data_parallel_replicate_degree = 2",
        ),
        (
            "accelerate",
            {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 8},
            {},
            "pipeline_parallel_degree = 2",
        ),
        (
            "accelerate",
            {"tensor_parallel_degree": 16},
            {},
            "zero_stage = 0: .* accelerate launch has tensor and context parallelism with FSDP alone",
        ),
        ("accelerate", {"data_parallel_shard_degree": 16, "zero_stage": 1}, {}, "zero_stage = 1"),
    ],
)
def test_what_a_file_cannot_say_is_refused(
    engine: str, layout: dict[str, Any], job: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = a_plan(tmp_path, engine, parallelism=layout, job={"global_batch_size": 64, **job})
    with pytest.raises(NotExpressible, match=says):
        run([engine, path])
    assert [file.name for file in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_refused_plan_of_another_engine_says_how_to_plan_again(tmp_path: Path) -> None:
    path = a_plan(
        tmp_path,
        "ahp",
        parallelism={"data_parallel_shard_degree": 16, "activation_checkpoint": "selective"},
        job={"global_batch_size": 64},
    )
    again = r"; the plan was made for ahp: plan again with --engine.name deepspeed$"
    with pytest.raises(NotExpressible, match=again):
        run(["deepspeed", path])


def test_releases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_plan(tmp_path, "torchtitan", engine={"version": "0.2.2"}, job={"global_batch_size": 64})
    with pytest.raises(
        BadInput,
        match=r"--target-version = '0.1.0': AHP knows no keys of this release of torchtitan .*\(valid: 0.3.0, 0.2.2, main\)",
    ):
        run(["torchtitan", path, "--target-version", "0.1.0"])
    with pytest.raises(
        BadInput, match=r"--target-version = '0.3.0': the plan is for engine.version '0.2.2' \(valid: 0.2.2\)"
    ):
        run(["torchtitan", path, "--target-version", "0.3.0"])
    assert run(["torchtitan", path]) == 0
    assert f"Wrote {tmp_path}/plan.torchtitan.toml" in capsys.readouterr().out
    old = a_plan(tmp_path, "megatron", engine={"version": "24.12"}, job={"global_batch_size": 64})
    with pytest.raises(BadInput, match=r"engine.version = '24.12': its keys are not known \(valid: 0.20"):
        run(["megatron", old])


def test_what_is_left_to_say_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_plan(tmp_path, "deepspeed", job={"global_batch_size": 64, "seed": 7})
    assert run(["deepspeed", path]) == 0
    told = capsys.readouterr().err
    assert "Not in this file: job.seed = 7: the file has no key for it" in told
    assert "job.sequence_length = 256" in told
    assert "learning_rate" not in told
    run(["accelerate", a_plan(tmp_path, "ahp", job={"global_batch_size": 64})])
    told = capsys.readouterr().err
    assert "the layout was chosen for ahp; for accelerate: ahp plan --engine.name accelerate" in told
    assert "# Not in this file: job.optimizer.betas" in (tmp_path / "plan.accelerate.yaml").read_text()


def test_configs_models_and_mixed_clusters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: tiny\n")
    with pytest.raises(BadInput, match="a config has no layout yet"):
        run(["megatron", str(tmp_path / "config.yaml")])
    path = a_plan(tmp_path, "torchtitan")
    plan = Plan.load(path)
    plan.model_copy(update={"model": "gpt2"}).save(path)
    with pytest.raises(
        NotExpressible, match=r"model = 'gpt2': torchtitan 0.3.0 runs its own models \(valid: llama3-8b, .*or --model"
    ):
        run(["torchtitan", path])
    plan.model_copy(update={"model": "bert-base"}).save(path)
    with pytest.raises(NotExpressible, match="model_type = 'bert': its arguments for Megatron-LM are not known"):
        run(["megatron", path])
    groups = [
        {"name": name, "nodes": 1, "devices_per_node": 8, "device": name} for name in ("H100-SXM-80GB", "A100-SXM-80GB")
    ]
    with pytest.raises(NotExpressible, match="groups of different nodes"):
        run(["deepspeed", a_plan(tmp_path, "deepspeed", cluster={"groups": groups})])


@pytest.mark.parametrize(
    ("version", "name", "says"),
    [
        ("0.2.2", "llama3", "must be two names, NAME/FLAVOR"),
        ("0.2.2", "a/b/c", "must be two names"),
        ("0.3.0", "llama3/8B", r"torchtitan 0.3.0 has a module and a function .*\(valid: llama3/llama3_8b"),
        ("main", "", "must be two names"),
    ],
)
def test_a_model_of_torchtitan_that_is_no_name_is_refused(version: str, name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"--model = '{name}': {says}"):
        run(["torchtitan", a_plan(tmp_path, "torchtitan"), "--target-version", version, "--model", name])


def test_accelerate_starts_one_process_on_cores(tmp_path: Path) -> None:
    path = a_plan(tmp_path, "accelerate")
    cores = cpu_workers(8, 8).plain()
    Plan.load(path).model_copy(update={"cluster": cores}).save(path)
    with pytest.raises(
        NotExpressible,
        match=r"16 workers on cores: accelerate launch starts one process .*\(valid: GPUs, or one worker\)",
    ):
        run(["accelerate", path])


def test_megatrons_script_is_one_that_bash_reads(tmp_path: Path) -> None:
    layout = {
        "pipeline_parallel_degree": 2,
        "data_parallel_shard_degree": 8,
        "zero_stage": 1,
        "layers_per_stage": [17, 15],
    }
    path = a_plan(tmp_path, "megatron", parallelism=layout, job={"global_batch_size": 64})
    assert run(["megatron", path, "-o", str(tmp_path / "s.sh")]) == 0
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "NODE_RANK": "1", "MASTER_ADDR": "host"}
    done = subprocess.run(["bash", str(tmp_path / "s.sh")], env=environment, check=True, capture_output=True, text=True)
    words = done.stdout.splitlines()
    assert words[:4] == ["--nnodes", "2", "--nproc-per-node", "8"]
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == f"E{'t' * 17}|{'t' * 15}L"
    assert {"--use-distributed-optimizer", "pretrain_gpt.py", "--mock-data"} <= set(words)


@pytest.mark.parametrize(
    ("job", "fused"),
    [({"precision": "bf16"}, True), ({"precision": "fp8"}, True), ({"precision": "fp16"}, False),
     ({"precision": "bf16", "deterministic": True}, False)],
)  # fmt: skip
def test_the_loss_is_fused_in_the_script_where_the_forecast_counts_on_it(job: dict[str, Any], fused: bool) -> None:
    plan = Plan(model=MODEL, job=Job(**job), parallelism=Parallelism(), engine=EngineChoice(name="megatron"))
    traits = engines.get("megatron").traits(plan.job, plan.parallelism, plan.engine)
    written = LOSS_RULE.write(Subject(plan, LAYERS, ""))
    assert (traits.kernels.fused_loss, bool(written.get("--cross-entropy-loss-fusion"))) == (fused, fused)
    if fused:  # without --cross-entropy-fusion-impl it is Megatron-LM's own
        assert traits.kernels.loss_keeps_fp32


@pytest.mark.parametrize(
    ("layout", "precision", "averages"),
    [
        ({"data_parallel_shard_degree": 8, "zero_stage": 1}, "bf16", True),
        ({"data_parallel_replicate_degree": 8}, "bf16", False),
        ({"data_parallel_replicate_degree": 8}, "fp8", True),
        ({"data_parallel_shard_degree": 8, "zero_stage": 3}, "bf16", False),
        ({"tensor_parallel_degree": 8}, "fp8", False),
    ],
)
def test_gradients_are_averaged_in_the_collective_where_the_forecast_counts_on_it(
    layout: dict[str, Any], precision: Any, averages: bool
) -> None:
    job, p, engine = Job(precision=precision), Parallelism(**layout), EngineChoice(name="megatron")
    written = DATA.write(Subject(Plan(model=MODEL, job=job, parallelism=p, engine=engine), LAYERS, ""))
    assert bool(written.get("--ddp-average-in-collective")) == averages
    if averages:
        assert engines.get("megatron").traits(job, p, engine).gradients.passes == 1


EIGHT_DEVICES = {"--nnodes": 1, "--nproc-per-node": 8, "--bf16": True}


@pytest.mark.parametrize("given", ["--overlap-grad-reduce", "--ddp-average-in-collective"])
def test_gradients_that_plain_data_parallelism_sums_otherwise_than_priced_are_told(given: str) -> None:
    settings = {**EIGHT_DEVICES, given: True}
    with pytest.raises(Unreadable, match=f"{given}: without --use-distributed-optimizer the forecast sums"):
        BESIDE_RULE.read(settings)
    for priced in (
        {"--use-distributed-optimizer": True},
        {"--fp8-format": "hybrid"},
        {"--tensor-model-parallel-size": 8},
    ):
        assert not BESIDE_RULE.read({**settings, **priced})


@pytest.mark.parametrize(
    ("device", "layout", "written"),
    [
        ("B200", {"zero_stage": 1}, ["--fp8-format e4m3", "--fp8-param-gather", "--fp8-recipe mxfp8", "--reuse-grad-buf-for-mxfp8-param-ag"]),
        ("B200", {"zero_stage": 3}, ["--fp8-format e4m3", "--fp8-param-gather", "--fp8-recipe mxfp8"]),
        ("H100", {"zero_stage": 1}, ["--fp8-format hybrid", "--fp8-param-gather"]),
    ],
)  # fmt: skip
def test_products_in_8_bits_are_those_of_the_devices_recipes(
    device: str, layout: dict[str, Any], written: list[str], tmp_path: Path
) -> None:
    parallelism = {"data_parallel_shard_degree": 8, **layout}
    path = a_plan(tmp_path, "megatron", parallelism=parallelism, job={"precision": "fp8"}, cluster=f"1x8x{device}")
    assert run(["megatron", path, "-o", str(tmp_path / "s.sh")]) == 0
    lines = [line.strip() for line in (tmp_path / "s.sh").read_text().splitlines()]
    assert sorted(line for line in lines if "fp8" in line and line.startswith("--")) == sorted(written)
    with pytest.raises(Unreadable, match="--fp8-recipe = 'blockwise'"):
        RECIPE_RULE.read({"--fp8-recipe": "blockwise"})


@pytest.mark.parametrize(
    ("device", "precision", "graph"), [("B200", "fp8", True), ("B200", "bf16", False), ("H100", "fp8", False)]
)
def test_a_script_of_experts_in_mxfp8_says_that_the_forecast_has_one_graph(
    device: str, precision: str, graph: bool, tmp_path: Path
) -> None:
    layout = {"data_parallel_shard_degree": 8, "zero_stage": 1, "expert_parallel_degree": 8}
    job = {"precision": precision}
    path = a_plan(tmp_path, "megatron", model="mixtral-8x7b", parallelism=layout, job=job, cluster=f"1x8x{device}")
    assert run(["megatron", path, "-o", str(tmp_path / "s.sh")]) == 0
    assert ("a step is one CUDA graph" in (tmp_path / "s.sh").read_text()) == graph


@pytest.mark.parametrize(("device", "grouped"), [("V100-SXM-32GB", False), ("A100-SXM-80GB", True)])
def test_experts_are_grouped_on_devices_that_megatron_groups_them_on(
    device: str, grouped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script ended in an assertion of Megatron-LM's."""
    layout = {"data_parallel_shard_degree": 8, "zero_stage": 1, "expert_parallel_degree": 8}
    job = {"precision": "fp16"}
    path = a_plan(tmp_path, "megatron", model="mixtral-8x7b", parallelism=layout, job=job, cluster=f"1x8x{device}")
    assert run(["megatron", path, "-o", str(tmp_path / "s.sh")]) == 0
    assert ("\n  --moe-grouped-gemm\n" in (tmp_path / "s.sh").read_text()) == grouped
    said = "--moe-grouped-gemm: Megatron-LM refuses it below compute capability 8.0" in capsys.readouterr().err
    assert said != grouped


def test_graphs_of_attention_and_router_are_written_and_read() -> None:
    choice = EngineChoice(name="megatron", cuda_graph_modules=("attn", "moe_router"))
    layout = Parallelism(data_parallel_shard_degree=8, zero_stage=1, expert_parallel_degree=8)
    plan = Plan(model=MODEL, job=Job(), parallelism=layout, engine=choice)
    written = GRAPH_RULE.write(Subject(plan, LAYERS, ""))
    assert written == {
        "--cuda-graph-impl": "transformer_engine",
        "--cuda-graph-modules": "attn moe_router moe_preprocess",
    }
    line = "torchrun pretrain_gpt.py --cuda-graph-impl transformer_engine --cuda-graph-scope moe_router moe_preprocess --bf16"
    read = megatron.parse(line)
    assert read["--cuda-graph-scope"] == "moe_router moe_preprocess"
    assert read["--bf16"] is True
    assert GRAPH_RULE.read(read) == {"engine.cuda_graph_modules": ("moe_router",)}
    assert GRAPH_RULE.read(written) == {"engine.cuda_graph_modules": ("attn", "moe_router")}
    assert GRAPH_RULE.read({}) == {}
    with pytest.raises(Unreadable, match="full_iteration"):
        GRAPH_RULE.read({"--cuda-graph-impl": "full_iteration"})


def test_a_script_has_the_parts_of_a_graph_as_words_of_their_own(tmp_path: Path) -> None:
    layout = {"data_parallel_shard_degree": 8, "zero_stage": 1, "expert_parallel_degree": 8}
    engine = {"cuda_graph_modules": ["attn", "moe_router"]}
    path = a_plan(
        tmp_path, "megatron", model="mixtral-8x7b", parallelism=layout, engine=engine, cluster="8xH100-SXM-80GB"
    )
    assert run(["megatron", path, "-o", str(tmp_path / "s.sh")]) == 0
    assert "--cuda-graph-modules attn moe_router moe_preprocess\n" in (tmp_path / "s.sh").read_text()


def test_how_megatron_sends_tokens_to_experts_is_written_and_read() -> None:
    choice = EngineChoice(name="megatron", moe_token_dispatcher_type="flex", overlap_moe_expert_parallel_comm=True)
    layout = Parallelism(data_parallel_shard_degree=8, zero_stage=1, expert_parallel_degree=8)
    written = EXPERTS.write(Subject(Plan(model=MODEL, job=Job(), parallelism=layout, engine=choice), LAYERS, ""))
    assert written["--moe-token-dispatcher-type"] == "flex"
    assert written["--overlap-moe-expert-parallel-comm"] is True
    read = EXPERTS.read(written)
    assert read["engine.moe_token_dispatcher_type"] == "flex"
    assert read["engine.overlap_moe_expert_parallel_comm"] is True
    assert "engine.moe_token_dispatcher_type" not in EXPERTS.read({"--expert-model-parallel-size": 8})


def for_torchtitan(version: str, sends: str | None, model: str) -> dict[str, Any]:
    """torchtitan's settings for a plan with eight expert ranks."""
    choice = EngineChoice(name="torchtitan", moe_token_dispatcher_type=sends)  # type: ignore[arg-type]
    layout = Parallelism(data_parallel_shard_degree=8, zero_stage=3, expert_parallel_degree=8)
    plan = Plan(model=MODEL, job=Job(global_batch_size=64), parallelism=layout, engine=choice)
    return dict(torchtitan.FORMATS[version].dialect.settings(Subject(plan, LAYERS, model))[0])


def test_how_torchtitan_sends_tokens_to_experts_is_written_and_read() -> None:
    key, ours = "parallelism.expert_parallel_comm_backend", "engine.moe_token_dispatcher_type"
    read = torchtitan.FORMATS["0.2.2"].dialect.read
    for sends, theirs in (("flex", "deepep"), ("alltoall", "standard")):
        settings = for_torchtitan("0.2.2", sends, "deepseek_v3/671B")
        assert settings[key] == theirs
        assert read(settings).fields[ours] == sends
    assert key not in for_torchtitan("0.2.2", None, "deepseek_v3/671B")
    assert ours not in read({key: "deepep"}).fields  # "No effect .. when ep = 1" (config/job_config.py)
    unread = read({key: "hybridep", "parallelism.expert_parallel_degree": 8}).unread
    assert any("AHP knows standard, deepep" in why for why, _ in unread)
    with pytest.raises(NotExpressible, match=r"DeepEP of 0.2.2 is for deepseek_v3 alone, not for qwen3/30B-A3B"):
        for_torchtitan("0.2.2", "flex", "qwen3/30B-A3B")
    with pytest.raises(NotExpressible, match=r"'flex': from 0.3.0 on .*--target-version 0.2.2"):
        for_torchtitan("0.3.0", "flex", "deepseek_v3/deepseek_v3_671b")
    assert key not in for_torchtitan("0.3.0", "alltoall", "deepseek_v3/deepseek_v3_671b")


@pytest.mark.parametrize(
    ("cluster", "engine", "said"),
    [
        ("2x8xH100-SXM-80GB", {}, True),
        ("2x8xH100-SXM-80GB", {"moe_token_dispatcher_type": "alltoall"}, True),
        (
            "2x8xH100-SXM-80GB",
            {"moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": False},
            False,
        ),
        ("1x16xH100-SXM-80GB", {}, False),
    ],
)
def test_a_script_says_how_the_forecast_sends_tokens_if_it_sends_them_otherwise(
    cluster: str, engine: dict[str, Any], said: bool, tmp_path: Path
) -> None:
    layout = {"data_parallel_shard_degree": 16, "zero_stage": 1, "expert_parallel_degree": 8}
    path = a_plan(tmp_path, "megatron", model="mixtral-8x7b", parallelism=layout, engine=engine, cluster=cluster)
    assert run(["megatron", path, "-o", str(tmp_path / "s.sh")]) == 0
    script = (tmp_path / "s.sh").read_text()
    assert "--moe-token-dispatcher-type alltoall" in script
    assert ("Where experts span nodes, the forecast takes" in script) == said
