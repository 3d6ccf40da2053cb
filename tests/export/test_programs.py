"""Files of programs that AHP has no engine of, and scripts that start a program with a configuration: what layout is read from them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ahp.cli.check import run
from ahp.cluster.model import Cluster
from ahp.errors import BadInput, NotExpressible
from ahp.export import maxtext, nanotron, nemo
from ahp.export.engine_target import EngineTarget, Format, Options
from ahp.export.reading import Foreign, read_foreign
from ahp.export.table import Subject, nested, plan_of
from ahp.export.target import Source
from ahp.plan import EngineChoice, Plan

NANOTRON = """
general: {project: debug, run: mine, seed: 7}
model:
  dtype: bfloat16
  model_config: {is_llama_config: true, hidden_size: 1024, intermediate_size: 4096, num_attention_heads: 16, num_hidden_layers: 8,
                 num_key_value_heads: 4, vocab_size: 32000, tie_word_embeddings: false, z_loss_enabled: true}
optimizer:
  zero_stage: 1
  weight_decay: 0.01
  clip_grad: null
  learning_rate_scheduler: {learning_rate: 3.0e-4, lr_warmup_steps: 5, lr_decay_style: cosine}
  optimizer_factory: {name: adamW, adam_beta1: 0.9, adam_beta2: 0.99, adam_eps: 1.0e-08}
parallelism: {dp: 2, pp: 2, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, recompute_layer: true}
tokens: {sequence_length: 2048, train_steps: 100, micro_batch_size: 3, batch_accumulation_per_replica: 4}
"""
MAXTEXT = """
base_config: "base.yml"
model_name: "llama2-7b"
per_device_batch_size: 4
max_target_length: 4096
remat_policy: "minimal_flash"
ici_tensor_parallelism: 2
quirk: 3
"""
NEMO = """
trainer: {devices: 8, num_nodes: 2, precision: bf16, max_steps: 50, gradient_clip_val: 1.0}
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 4
  sequence_parallel: true
  micro_batch_size: 1
  global_batch_size: 64
  encoder_seq_length: 4096
  num_layers: 32
  data: {seq_length: "${model.encoder_seq_length}"}
  activations_checkpoint_granularity: full
  activations_checkpoint_method: uniform
  activations_checkpoint_num_layers: 1
  optim: {name: mcore_distributed_optim, lr: 2e-4, betas: [0.9, 0.98]}
"""
BRIDGE = """
model: {seq_length: 8192, tensor_model_parallel_size: 4, sequence_parallel: true}
train: {train_iters: 10, global_batch_size: 16, micro_batch_size: 1}
"""


def foreign(tmp_path: Path, name: str, text: str, devices: int = 8, per_node: int | None = 8) -> Foreign:
    (tmp_path / name).write_text(text)
    return read_foreign(str(tmp_path / name), None, None, devices, per_node)


def layout(found: Foreign, model: Any = "llama2-7b") -> Plan:
    return plan_of(found.form.dialect, found.read.fields, model, None)


def test_a_nanotron_file_says_layout_job_and_model(tmp_path: Path) -> None:
    found = foreign(tmp_path, "mine.yaml", NANOTRON)
    assert (found.form.dialect.name, found.form.dialect.engine) == ("nanotron", "torchtitan")
    plan = layout(found, found.model)
    assert plan.parallelism.short() == "dp1x2 zero1 tp2+sp pp2(1F1B) mb3 full"
    assert (plan.job.global_batch_size, plan.job.sequence_length, plan.job.seed) == (2 * 3 * 4, 2048, 7)
    assert (plan.job.optimizer.betas, plan.job.optimizer.schedule, plan.engine.compile) == (
        (0.9, 0.99),
        "cosine",
        False,
    )
    assert isinstance(found.model, dict)
    assert (found.model["model_type"], found.model["num_key_value_heads"]) == ("llama", 4)
    assert found.read.not_understood == ("model.model_config.z_loss_enabled = True: not understood",)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("zero_stage: 1", "zero_stage: 2", r"optimizer.zero_stage = 2: .*\(valid: 0, 1\)"),
        ("tp: 2,", "tp: 2, expert_parallel_size: 2,", "expert_parallel_size = 2: its expert ranks"),
        ("tp: 2,", "tp: 2, context_parallel_size: 2,", "shards states over data-parallel ranks alone"),
        ("1f1b", "zero_bubble", "parallelism.pp_engine = 'zero_bubble': AHP knows 1f1b, afab"),
        ("REDUCE_SCATTER", "SOME", "parallelism.tp_mode = 'SOME'"),
        ("dp: 2", "dp: two", "parallelism.dp = 'two': must be a whole number from 1 on"),
    ],
)
def test_what_no_layout_has_is_told(old: str, new: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(NANOTRON.replace(old, new))
    with pytest.raises(BadInput, match=why):
        run([str(tmp_path / "mine.yaml"), "--cluster", "1x8xH100-SXM-80GB"])


def test_a_maxtext_file_takes_open_axes_from_the_cluster(tmp_path: Path) -> None:
    found = foreign(tmp_path, "mine.yml", MAXTEXT, devices=16)
    plan = layout(found, found.model)
    assert plan.parallelism.short() == "dp2x4 zero3 tp2+sp mb8 selective"
    assert (plan.job.global_batch_size, found.model, plan.engine.compile) == (64, "llama2-7b", True)
    assert found.read.not_understood == ("quirk = 3: not understood",)
    with pytest.raises(BadInput, match="ici_fsdp_parallelism = -1: the other ici axes make 3, which does not divide 8"):
        foreign(tmp_path, "odd.yml", MAXTEXT.replace("ici_tensor_parallelism: 2", "ici_tensor_parallelism: 3"))
    odd = foreign(tmp_path, "pipe.yml", MAXTEXT + "ici_pipeline_parallelism: 2\n").read
    assert any("pipeline_parallelism = 2: no layout of AHP has this axis" in line for line in odd.not_understood)


@pytest.mark.parametrize(
    ("lines", "means"),
    [
        ("remat_policy: full", "full"),
        ("remat_policy: none", "none"),
        ("remat_policy: minimal_with_context_and_quantization", "selective"),
        ("remat_policy: custom", "full"),
        ("remat_policy: custom\ncontext: device\nout_proj: device\nmlpwo: device\nqkv_proj: device\nmlpwi: device", "selective"),
        ("remat_policy: custom\ncontext: device\nout_proj: device", r"custom' with context, out_proj on the device: it keeps a part .*\(valid: all, or none\)"),
        ("remat_policy: custom\nmlpwo: offload", "custom' with mlpwo = 'offload': AHP knows remat and device"),
        ("remat_policy: save_qkv_proj", r"'save_qkv_proj': it keeps queries, keys and values alone; .*\(valid: full, minimal_with_context, none\)"),
        ("remat_policy: minimal", "'minimal': it keeps the results of products, and recomputes attention"),
        ("remat_policy: minimal_with_context_and_quantization\nquantization: fp8", "it keeps what was quantized, too"),
        ("remat_policy: most", "'most': MaxText has no such policy"),
    ],
)  # fmt: skip
def test_maxtexts_policies_are_known_by_name(lines: str, means: str, tmp_path: Path) -> None:
    read = foreign(tmp_path, "mine.yml", MAXTEXT.replace('remat_policy: "minimal_flash"', lines)).read
    found = read.fields.get("parallelism.activation_checkpoint")
    if found is not None:
        assert (found, read.not_understood) == (means, ("quirk = 3: not understood",))
        return
    (why,) = [why for why, names in read.unread if "parallelism.activation_checkpoint" in names]
    assert re.search(means, why)


def test_a_maxtext_script_says_more_than_the_yaml_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "configs" / "gpu").mkdir(parents=True)
    (tmp_path / "configs" / "gpu" / "mine.yml").write_text(MAXTEXT)
    line = 'python3 -m maxtext.train "${ROOT}/configs"/gpu/mine.yml run_name=$RUN \\\n  dcn_data_parallelism=1 dcn_fsdp_parallelism=2 per_device_batch_size=1\n'
    found = foreign(tmp_path, "go.sh", line, devices=16)
    plan = layout(found, found.model)
    assert plan.parallelism.short() == "dp1x8 zero3 tp2+sp mb2 selective"
    with pytest.raises(BadInput, match=r"it starts what '.*none.yml' says, and no such file"):
        foreign(tmp_path, "no.sh", "python3 -m maxtext.train configs/none.yml steps=3")


def test_nemo_and_bridge_are_megatron_under_other_names(tmp_path: Path) -> None:
    found = foreign(tmp_path, "nemo.yaml", NEMO)
    plan = layout(found)
    assert plan.parallelism.short() == "dp1x4 zero1 tp2+sp pp2x4(Interleaved1F1B) mb1 full"
    assert (plan.job.sequence_length, plan.job.precision, plan.job.optimizer.betas) == (4096, "bf16", (0.9, 0.98))
    assert found.read.not_understood == ()
    found = foreign(tmp_path, "bridge.yaml", BRIDGE, devices=16)
    assert found.read.missing == ()  # arguments of Megatron-LM's command line, which this program sets by itself
    plan = layout(found)
    assert (found.form.dialect.name, plan.engine.name) == ("bridge", "megatron")
    assert (plan.parallelism.short(), plan.job.sequence_length) == ("dp1x4 zero1 tp4+sp mb1", 8192)


@pytest.mark.parametrize(
    ("dialect", "layout", "said"),
    [
        (nanotron.DIALECT, {"data_parallel_shard_degree": 8, "zero_stage": 3}, None),
        (nanotron.DIALECT, {"data_parallel_replicate_degree": 8, "activation_checkpoint": "selective"}, None),
        (nanotron.DIALECT, {"data_parallel_shard_degree": 8, "zero_stage": 1}, {"optimizer.zero_stage": 1, "parallelism.dp": 8}),
        (maxtext.DIALECT, {"data_parallel_shard_degree": 8, "zero_stage": 2}, None),
        (maxtext.DIALECT, {"data_parallel_shard_degree": 16, "zero_stage": 3}, {"ici_fsdp_parallelism": 8, "dcn_fsdp_parallelism": 2}),
        (nemo.DIALECT, {"data_parallel_shard_degree": 16, "zero_stage": 1}, {"model.optim.name": "mcore_distributed_optim"}),
        (nemo.DIALECT, {"data_parallel_shard_degree": 16, "zero_stage": 3}, None),
        (nemo.BRIDGE_DIALECT, {"data_parallel_shard_degree": 16, "zero_stage": 1}, {"ddp.use_distributed_optimizer": True}),
    ],
)  # fmt: skip
def test_a_change_is_said_in_the_programs_own_keys(dialect: Any, layout: Any, said: Any) -> None:
    from ahp.cluster.model import Cluster

    plan = plan_of(dialect, {f"parallelism.{key}": value for key, value in layout.items()}, "llama2-7b",
                   Cluster.resolve("2x8xH100-SXM-80GB").plain())  # fmt: skip
    subject = Subject(plan.model_copy(update={"job": plan.job.model_copy(update={"global_batch_size": 64})}), 32, "")
    if said is None:
        with pytest.raises(NotExpressible, match=r"zero_stage|activation_checkpoint|--use-megatron-fsdp"):
            dialect.settings(subject)
        return
    keys = dialect.settings(subject)[0]
    assert {key: keys[key] for key in said} == said


MEGATRON = " pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 32 --seq-length 1024 --bf16"


@pytest.mark.parametrize(
    ("script", "sizes"),
    [
        ("torchrun --nproc_per_node=4 --nnodes 2" + MEGATRON, ("2", "4")),
        ("#SBATCH --nodes=4\n#SBATCH --ntasks-per-node 8\nsrun python" + MEGATRON, ("4", "8")),
        ("#SBATCH -N 3\n#SBATCH --gres=gpu:h100:8\nsrun python" + MEGATRON, ("3", "8")),
        ("srun -N 2 --gpus-per-node=8 --ntasks-per-node=1 python" + MEGATRON, ("2", "8")),
        ("#SBATCH --nodes=4\ntorchrun --nnodes $SLURM_NNODES --nproc-per-node 8" + MEGATRON, ("4", "8")),
        ("#SBATCH --nodes=4\ntorchrun --nnodes $OUTSIDE --nproc-per-node 8" + MEGATRON, ("4", "8")),
        ("deepspeed --num_nodes 2 --num_gpus 8" + MEGATRON, ("2", "8")),
        ("accelerate launch --num_machines 2 --num_processes 8" + MEGATRON, ("2", 4)),
    ],
)
def test_a_launcher_says_the_sizes(script: str, sizes: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "go.sh").write_text(script)
    found = read_foreign(str(tmp_path / "go.sh"), "megatron", None, 8)
    assert (found.settings["--nnodes"], found.settings["--nproc-per-node"]) == sizes


def test_a_script_that_starts_another_program_is_read_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 2}}
        )
    )
    found = foreign(
        tmp_path, "go.sh", "deepspeed --num_nodes 2 --num_gpus 8 train.py --deepspeed --deepspeed_config ds.json"
    )
    plan = layout(found)
    assert (found.form.dialect.name, plan.parallelism.short(), plan.job.global_batch_size) == (
        "deepspeed",
        "dp1x16 zero2 mb2",
        96,
    )
    (tmp_path / "f.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 2\n")
    line = "accelerate launch --config_file f.yaml --num_processes 16 --num_machines 2 --mixed_precision bf16 train.py"
    assert layout(foreign(tmp_path, "acc.sh", line)).parallelism.short() == "dp1x16 zero3 mb1"
    (tmp_path / "t.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n')
    line = "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file t.toml --parallelism.tensor_parallel_degree 4"
    found = foreign(tmp_path, "titan.sh", line)
    assert (found.model, layout(found).parallelism.short()) == ("llama3-8b", "dp1x2 zero3 tp4+sp mb1")
    (tmp_path / "n.yaml").write_text(NANOTRON)
    found = foreign(tmp_path, "nano.sh", "torchrun --nproc_per_node=8 run_train.py --config-file n.yaml")
    assert found.form.dialect.name == "nanotron"


PLUGGED = """
distributed_type: MEGATRON_LM
mixed_precision: bf16
num_machines: 2
num_processes: 16
megatron_lm_config:
  megatron_lm_tp_degree: 2
  megatron_lm_pp_degree: 2
  megatron_lm_sequence_parallelism: true
  megatron_lm_use_distributed_optimizer: true
  megatron_lm_gradient_clipping: 0.5
  megatron_lm_num_micro_batches: 4
  megatron_lm_recompute_activations: true
"""


def test_accelerate_with_megatrons_plugin_is_megatrons_arguments(tmp_path: Path) -> None:
    found = foreign(tmp_path, "acc.yaml", PLUGGED)
    plan = layout(found)
    assert (found.form.dialect.name, plan.engine.name) == ("accelerate-megatron", "megatron")
    assert plan.parallelism.short() == "dp1x2 zero1 tp2+sp pp2(1F1B) cp2 mb1 full"  # the plugin's own cp 2 and full
    assert (plan.job.precision, plan.job.optimizer.grad_clip) == ("bf16", 0.5)
    assert [line.partition(":")[0] for line in found.read.not_understood] == [
        "megatron_lm_config.megatron_lm_num_micro_batches = 4",
        "megatron_lm_config.megatron_lm_recompute_activations = True",
    ]
    own = "  megatron_lm_context_parallel_size: 1\n  megatron_lm_recompute_granularity: "
    assert (
        layout(foreign(tmp_path, "own.yaml", PLUGGED + own + "full\n"))
        .parallelism.short()
        .startswith("dp1x4 zero1 tp2+sp pp2")
    )
    (why,) = [
        why
        for why, names in foreign(tmp_path, "own.yaml", PLUGGED + own + "selective\n").read.unread
        if names == ("parallelism.activation_checkpoint",)
    ]
    assert "recompute_granularity = 'selective'" in why
    line = "accelerate launch --use_megatron_lm --num_processes 8 --megatron_lm_tp_degree 4 --megatron_lm_context_parallel_size 1 x.py\n"
    assert layout(foreign(tmp_path, "go.sh", line)).parallelism.short() == "dp2x1 zero0 tp4 mb1 full"


def test_megatrons_plugin_is_told_what_it_can_say() -> None:
    from ahp.cluster.model import Cluster
    from ahp.export.accelerate_megatron import DIALECT, PLUGIN

    def said(**keys: Any) -> dict[str, Any]:
        plan = Plan(
            model="llama2-7b",
            cluster=Cluster.resolve("2x8xH100-SXM-80GB").plain(),
            job={"global_batch_size": 64},
            parallelism=keys,
        )  # type: ignore[arg-type]
        return DIALECT.settings(Subject(plan, 32, ""))[0]

    keys = {"data_parallel_shard_degree": 4, "zero_stage": 1, "tensor_parallel_degree": 4, "micro_batch_size": 2}
    found = said(**keys, activation_checkpoint="full")
    assert (
        found[PLUGIN + "tp_degree"],
        found[PLUGIN + "context_parallel_size"],
        found[PLUGIN + "num_micro_batches"],
    ) == (4, 1, 8)
    with pytest.raises(NotExpressible, match=r"activation_checkpoint = 'none': the plugin always .*\(valid: full\)"):
        said(**keys, activation_checkpoint="none")


def test_accelerate_with_deepspeeds_plugin_is_deepspeeds_json(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}')
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 8\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    found = foreign(tmp_path, "a.yaml", text)
    plan = layout(found)
    assert (found.form.dialect.name, plan.parallelism.short(), plan.job.precision) == (
        "deepspeed",
        "dp1x8 zero3 mb2",
        "bf16",
    )
    with pytest.raises(BadInput, match=r"it starts what 'no.json' says, and no such file"):
        foreign(tmp_path, "b.yaml", text.replace("ds.json", "no.json"))
    own = text.replace("{deepspeed_config_file: ds.json}", "{zero_stage: 2, offload_optimizer_device: cpu}")
    told = foreign(tmp_path, "c.yaml", own).read.not_understood
    assert "deepspeed_config.offload_optimizer_device = 'cpu': not understood" in told
    assert any("train_micro_batch_size_per_gpu = 'missing'" in line for line in told)


def test_options_that_another_script_reads_are_read(tmp_path: Path) -> None:
    text = 'GPUS=8\nOPTIONS="--micro-batch-size 2 \\\n --bf16"\ncmd="deepspeed --num_gpus $GPUS x.py $OPTIONS --seq-length 64"\neval $cmd\n'
    (tmp_path / "go.sh").write_text(text)
    settings = read_foreign(str(tmp_path / "go.sh"), None, None, 8).settings
    assert {
        "--micro-batch-size": "2",
        "--bf16": True,
        "--seq-length": "64",
        "--nproc-per-node": "8",
    }.items() <= settings.items()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, (64, 2, 4)),
        ({"train_batch_size": 64}, (64, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, (16, 2, 1)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, (64, 2, 4)),
    ],
)
def test_deepspeeds_missing_batch_follows_from_the_devices(given: Any, said: Any, tmp_path: Path) -> None:
    found = foreign(tmp_path, "ds.json", json.dumps(given)).settings
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert tuple(found[name] for name in names) == said


@pytest.mark.slow
def test_another_programs_file_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yml").write_text(MAXTEXT)
    assert run([str(tmp_path / "mine.yml"), "--cluster", "1x8xH100-SXM-80GB"]) == 0
    shown = capsys.readouterr().out
    assert "Forecast as ahp: AHP has no engine of it" in shown
    assert "Change   ici_tensor_parallelism: 2 -> not there" in shown


ON_H100 = Cluster.resolve("1x8xH100").plain()


@pytest.mark.parametrize(("name", "text", "precision"), [("a.yaml", NANOTRON, "fp8"), ("a.yml", MAXTEXT, "fp16")])
def test_a_precision_that_a_program_lacks_is_refused(tmp_path: Path, name: str, text: str, precision: str) -> None:
    found = foreign(tmp_path, name, text)
    plan = plan_of(found.form.dialect, found.read.fields | {"job.precision": precision}, found.model or "", ON_H100)
    with pytest.raises(NotExpressible, match=rf"job.precision = '{precision}': .* \(valid: bf16, "):
        found.form.dialect.settings(Subject(plan, 32, ""))


def test_a_program_without_an_engine_can_be_a_target(tmp_path: Path) -> None:
    """It is priced as torchtitan, so the plan is exported as one of torchtitan, whatever engine it was made for."""
    found = foreign(tmp_path, "mine.yaml", NANOTRON)
    mine = layout(found, found.model)
    plan = mine.model_copy(update={"engine": EngineChoice(), "cluster": ON_H100})
    form = Format(nanotron.DIALECT, lambda kept, *_: yaml.safe_dump(nested(kept)), nanotron.parse, lambda shape: ("",))
    target = EngineTarget("nanotron", "nanotron's YAML", ".yaml", {"0.5": form})
    written = target.write(Source(tmp_path / "plan.yaml", plan), Options())
    assert nanotron.DIALECT.read(nanotron.parse(written.text)).fields.items() >= found.read.fields.items()
    assert "the layout was chosen for ahp; for torchtitan: ahp plan --engine.name torchtitan" in written.notices[0]
    with pytest.raises(BadInput, match=r"a config has no layout yet.* --engine.name torchtitan"):
        target.write(Source(tmp_path / "config.yaml"), Options())
