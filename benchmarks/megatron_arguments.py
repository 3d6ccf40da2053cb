"""What Megatron-LM's own parser reads from the files of ``ahp export megatron``.

    python benchmarks/megatron_arguments.py CLONE --plans 150

CLONE is a clone of NVIDIA/Megatron-LM that has the commit of the export's keys. Layouts are drawn from all that a search offers, exported, run by
bash up to torchrun's line, and parsed by ``parse_args`` and ``validate_args``, as on Hopper GPUs. Needs triton (make exports installs it) and no GPU.
Ends with 1 where Megatron reads another layout than the plan's. stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from page import table

COMMIT = "d98e8a6"
LAYERS = 4
DENSE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
LATENT: dict[str, Any] = DENSE | ROUTED | {
    "num_key_value_heads": 8, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "head_dim": 16,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                        "original_max_position_embeddings": 4096},
}  # fmt: skip
MODELS = {
    "dense": DENSE,
    "experts": DENSE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"model_type": "gpt2", "vocab_size": 512, "n_embd": 128, "n_layer": LAYERS, "n_head": 8, "n_positions": 4096},
    "qwen3_moe": DENSE | ROUTED | {"model_type": "qwen3_moe", "num_experts": 4},
    "deepseek_v2": LATENT | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "group_limited_greedy",
                             "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "deepseek_v3": LATENT | {"model_type": "deepseek_v3"},
}  # fmt: skip
CLUSTER = "2x8xH100-SXM-80GB"
STOP = 'torchrun() { printf "%s\\0" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"; }'
"""In place of torchrun: the one variable that Megatron looks at, and the line's words."""


def drawn(count: int, seed: int) -> list[tuple[str, Any]]:
    """Plans of as many layouts, half of each model."""
    from ahp.cluster.model import Cluster
    from ahp.graph.kept import analyze
    from ahp.job import Job
    from ahp.plan import EngineChoice, Plan
    from ahp.search.problem import problem
    from ahp.search.space import build

    job, choice, cluster = (
        Job(sequence_length=256, global_batch_size=64, precision="bf16"),
        EngineChoice(name="megatron"),
        Cluster.parse(CLUSTER),
    )
    found = []
    for name, model in MODELS.items():
        space = list(build(problem(analyze(model, job), cluster, job, {}, choice)))
        some = random.Random(seed).sample(space, min(len(space), count // len(MODELS)))
        found += [
            (name, Plan(model=model, cluster=cluster.plain(), job=job, parallelism=layout, engine=choice))
            for layout in some
        ]
    return found  # fmt: skip


def started(plan: Any, folder: Path) -> dict[str, Any]:
    """The words behind pretrain_gpt.py that the exported script gives to torchrun, with its processes and that variable."""
    from ahp.cli.export import run

    plan.save(folder / "plan.yaml")
    run(["megatron", str(folder / "plan.yaml"), "-o", str(folder / "run.sh"), "--force"])
    script = re.sub(r"^#!.*", lambda _: STOP, (folder / "run.sh").read_text(encoding="utf-8"), count=1)
    env = {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "PATH": os.environ["PATH"]}
    told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=env).stdout.split(
        "\0"
    )[:-1]
    at = told.index("pretrain_gpt.py")
    return {"connections": told[0], "arguments": told[at + 1 :], "ranks": plan.parallelism.world_size}


def read(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In Megatron's tree: what its parser makes of each."""
    import typing

    import torch

    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # Python 3.11; Megatron asks for 3.12
    from megatron.training import arguments  # type: ignore[import-not-found]
    from megatron.training.argument_utils import core_transformer_config_from_args  # type: ignore[import-not-found]

    arguments.get_device_arch_version = lambda: 9
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    found = []
    for one in asked:
        os.environ |= {"WORLD_SIZE": str(one["ranks"]), "RANK": "0"}
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        if one["connections"]:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = one["connections"]
        sys.argv = ["pretrain_gpt.py", *one["arguments"]]
        try:
            args = arguments.validate_args(arguments.parse_args())
            args.apply_rope_fusion = args.moe_permute_fusion = False  # these need Transformer Engine
            core_transformer_config_from_args(args)
        except (Exception, SystemExit) as error:
            found.append({"refused": f"{type(error).__name__}: {error}"})
            continue
        found.append(
            {name: getattr(args, name, None) for name in WORDS}
            | {"strategy": str(args.data_parallel_sharding_strategy)}
        )
    return found


WORDS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "data_parallel_size", "virtual_pipeline_model_parallel_size", "micro_batch_size",
    "global_batch_size", "sequence_parallel", "recompute_granularity", "use_distributed_optimizer", "use_megatron_fsdp",
    "num_layers", "num_experts",
)  # fmt: skip
STRATEGIES = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def expected(plan: Any) -> dict[str, Any]:
    """The same figures by the plan."""
    p = plan.parallelism
    virtual = p.virtual_stages_per_rank
    return {
        "tensor_model_parallel_size": p.tensor_parallel_degree, "pipeline_model_parallel_size": p.pipeline_parallel_degree,
        "context_parallel_size": p.context_parallel_degree, "expert_model_parallel_size": p.expert_parallel_degree,
        "data_parallel_size": p.data_parallel_degree, "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "micro_batch_size": p.micro_batch_size, "global_batch_size": plan.job.global_batch_size,
        "sequence_parallel": p.enable_sequence_parallel, "num_layers": LAYERS,
        "recompute_granularity": None if p.activation_checkpoint == "none" else p.activation_checkpoint,
        "zero_stage": p.zero_stage if p.weight_shards > 1 else 0,
    }  # fmt: skip


def differences(plan: Any, found: dict[str, Any]) -> list[str]:
    """Where Megatron's layout is not the plan's."""
    if "refused" in found:
        return [found["refused"]]
    stage = 1 if found["use_distributed_optimizer"] else 0
    if found["use_megatron_fsdp"]:
        stage = STRATEGIES.get(found["strategy"], 0)
    found = found | {"zero_stage": stage}
    wanted = expected(plan)
    return [f"{name} = {found[name]!r}, not {wanted[name]!r}" for name in wanted if found[name] != wanted[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="clone of NVIDIA/Megatron-LM")
    parser.add_argument("--plans", type=int, default=150, help="layouts to draw (default: 150)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print("\n" + json.dumps(read(json.load(sys.stdin))))
        return 0
    plans = drawn(options.plans, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "megatron")
        tree.mkdir()
        packed = subprocess.run(
            ["git", "-C", str(options.clone), "archive", COMMIT, "megatron"], capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", str(tree)], input=packed.stdout, check=True)
        asked = [started(plan, Path(folder)) for _, plan in plans]
        command = [sys.executable, __file__, "--read", str(tree)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, env=env)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return 1
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = [
        (name, plan, faults)
        for (name, plan), one in zip(plans, found, strict=True)
        if (faults := differences(plan, one))
    ]
    for name, plan, faults in wrong:
        print(f"{name} {plan.parallelism.short()}: {'; '.join(faults)}", file=sys.stderr)
    rows = [
        [name, str(sum(of == name for of, _ in plans)), str(sum(of == name for of, _, _ in wrong))] for name in MODELS
    ]
    print(table(["model", "layouts", "read as another"], rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
