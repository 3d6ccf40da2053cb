"""Memory that one rank of several needs under FSDP2, measured on one GPU: the other ranks are not there.

    python benchmarks/gpu_ranks.py FILE.json                    on a GPU of 80 GB, about two minutes
    python benchmarks/gpu_ranks.py FILE.json --judge            anywhere: the forecast beside the rows of this file
    python benchmarks/gpu_ranks.py benchmarks/ranks_h100.json --judge --markdown docs/forecast/memory.md

The process group is torch's "fake" one, whose collectives do nothing. What is allocated, and on which stream, is as among real ranks;
losses and gradients mean nothing, and a step has no communication. The model is LLaMA 3 8B in transformers' own classes, its embedding,
blocks and head units of FSDP2, in bf16 with fp32 master weights, gradients in fp32, and fused AdamW. stdout: a table; stderr: progress.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from page import require, table, write

MARKER = "ranks"
DEVICE = "H100-SXM-80GB"
"""The catalogue's name of the device of the rows in ``ranks_h100.json``."""
STEPS = 4
MODEL: dict[str, Any] = {
    # meta-llama/Meta-Llama-3-8B, config.json
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What one process measures."""

    ranks: int = 8
    zero_stage: int = 3
    micro_batches: int = 1
    micro_batch_size: int = 1
    sequence_length: int = 8192
    activation_checkpoint: str = "full"
    compile: bool = False


CASES = (
    Case(),
    Case(ranks=128),
    Case(micro_batch_size=2),
    Case(zero_stage=2),
    Case(micro_batches=2),
    Case(sequence_length=4096, activation_checkpoint="none"),
    Case(sequence_length=4096, activation_checkpoint="none", compile=True),
    Case(micro_batch_size=2, compile=True),
)


def model_of(case: Case) -> Any:
    """Sharded, on the GPU, with random weights."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**MODEL, attn_implementation="sdpa", use_cache=False)  # pyright: ignore
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    blocks = model.model.layers
    for place, block in enumerate(blocks):
        if case.activation_checkpoint == "full":
            blocks[place] = checkpoint_wrapper(block, preserve_rng_state=False)
        if case.compile:
            blocks[place].compile()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how: dict[str, Any] = {"mesh": init_device_mesh("cuda", (case.ranks,)), "mp_policy": policy}
    frees = case.zero_stage == 3
    for module in (model.model.embed_tokens, *blocks):
        fully_shard(module, **how, reshard_after_forward=frees)
    fully_shard([model.model.norm, model.lm_head], **how, reshard_after_forward=False)
    fully_shard(model, **how, reshard_after_forward=frees)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.01)
        rotary: Any = model.model.rotary_emb
        powers = torch.arange(0, 128, 2, device="cuda") / 128
        rotary.inv_freq.copy_(1.0 / 500_000.0**powers)
        rotary.original_inv_freq = rotary.inv_freq.clone()
    return model


def by_stream() -> dict[str, tuple[int, int]]:
    """Bytes that the allocator holds for each stream, and those in use."""
    import torch

    found: dict[str, tuple[int, int]] = {}
    for segment in torch.cuda.memory_snapshot():
        name = str(segment["stream"])
        held, used = found.get(name, (0, 0))
        found[name] = held + segment["total_size"], used + segment["allocated_size"]
    return found


def measure(case: Case) -> dict[str, Any]:
    """Peaks of a steady step, and what the streams of gathers and reductions hold: after a backward pass only that of reductions is in use."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    model = model_of(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times_s, after_backward = [], {}
    for step in range(STEPS):
        torch.cuda.synchronize()
        if step == STEPS - 2:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(case.micro_batches):
            ids = torch.randint(0, MODEL["vocab_size"], (case.micro_batch_size, case.sequence_length), device="cuda")
            logits = model(ids).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
            del logits
            loss.backward()
        if step == STEPS - 1:
            after_backward = by_stream()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start)
    others = [held for name, held in after_backward.items() if name != "0"]
    return {
        **asdict(case),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "gathers_bytes": sum(held for held, used in others if not used),
        "reductions_bytes": sum(held for held, used in others if used),
        "step_s": round(statistics.median(times_s[1:]), 4),
    }


def forecast(row: dict[str, Any]) -> Any:
    """AHP's forecast for a rank of this row."""
    import ahp

    case = Case(**{name: row[name] for name in asdict(Case())})
    num_nodes, per_node = max(1, case.ranks // 8), min(8, case.ranks)
    return ahp.simulate(
        model={"model_type": "llama", **MODEL},
        cluster=ahp.Cluster.parse(f"{num_nodes}x{per_node}x{DEVICE}"),
        job=ahp.Job.model_validate({
            "sequence_length": case.sequence_length, "precision": "bf16",
            "global_batch_size": case.ranks * case.micro_batch_size * case.micro_batches,
        }),
        parallelism={
            "data_parallel_shard_degree": case.ranks, "zero_stage": case.zero_stage,
            "micro_batch_size": case.micro_batch_size, "activation_checkpoint": case.activation_checkpoint,
        },
        engine={"name": "ahp", "compile": case.compile},
    )  # fmt: skip


def judged(rows: list[dict[str, Any]]) -> str:
    """The table of these rows beside their forecasts."""
    head = ["ranks", "ZeRO", "micro-batches", "tokens of each", "recompute", "compiled", "allocated, GiB", "forecast, %", "reserved, GiB",
            "forecast, %", "of gathers", "of reductions"]  # fmt: skip
    cells = []
    for row in rows:
        found = forecast(row)
        errors = [
            f"{100 * (ours / row[name] - 1):+.1f}"
            for ours, name in (
                (found.memory_allocated_bytes, "allocated_bytes"),
                (found.memory_reserved_bytes, "reserved_bytes"),
            )
        ]
        gib = [
            f"{row[name] / 2**30:.2f}"
            for name in ("allocated_bytes", "reserved_bytes", "gathers_bytes", "reductions_bytes")
        ]
        tokens = f"{row['micro_batch_size']} x {row['sequence_length']}"
        cells.append([
            str(row["ranks"]), str(row["zero_stage"]), str(row["micro_batches"]), tokens, row["activation_checkpoint"],
            "yes" if row["compile"] else "no", gib[0], errors[0], gib[1], errors[1], *gib[2:],
        ])  # fmt: skip
    return table(head, cells)


def measured(file: Path) -> int:
    """Each case in a process of its own, all importing at once; returns the exit status."""
    env = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, __file__, "--case", json.dumps(asdict(case))], stdin=pipe, stdout=pipe, text=True, env=env)
        for case in CASES
    ]  # fmt: skip
    rows, failed = [], 0
    for case, process in zip(CASES, processes, strict=True):
        out, _ = process.communicate("go\n")
        if process.returncode:
            failed += 1
            print(f"{case}: failed", file=sys.stderr)
            continue
        rows.append(json.loads(out.splitlines()[-1]))
        print(f"{case}: {rows[-1]['allocated_bytes'] / 2**30:.2f} GiB", file=sys.stderr, flush=True)
        file.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n", encoding="utf-8")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="where the rows go, or stand")
    parser.add_argument(
        "--judge", action="store_true", help="measure nothing: print the forecast beside the file's rows"
    )
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="with --judge, also between PAGE's markers")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        import torch.distributed.fsdp
        import transformers.models.llama.modeling_llama  # noqa: F401

        sys.stdin.readline()
        print(json.dumps(measure(Case(**json.loads(arguments.case)))), flush=True)
        return 0
    if arguments.file is None:
        parser.error("FILE: where the rows go")
    if arguments.judge:
        if arguments.markdown:
            require(arguments.markdown, MARKER)
        text = judged(json.loads(arguments.file.read_text(encoding="utf-8")))
        print(text)
        if arguments.markdown:
            write(arguments.markdown, MARKER, text)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("benchmarks/gpu_ranks.py: torch finds no GPU here; --judge needs none", file=sys.stderr)
        return 2
    return measured(arguments.file)


if __name__ == "__main__":
    sys.exit(main())
