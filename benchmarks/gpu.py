"""Layers of LLaMA and of Qwen3's experts on one GPU: AHP beside plain PyTorch and transformers' Trainer, and the forecast beside all of it.

    python benchmarks/gpu.py                            every size and variant, about half an hour on an H100
    python benchmarks/gpu.py --sizes 1B --only eager compile
    python benchmarks/gpu.py --quick                    a smoke run of the script itself; takes a CPU where there is no GPU

Each side of each variant runs in a fresh process, so that its memory is its own, and the sides take turns, round by round.
The weights start alike, the batches are the same, and the losses of the first steps must agree, or the row is refused: a wrong
program can be fast. MFU counts the model's FLOPs as the forecast does. transformers' Trainer needs accelerate
(pip install accelerate); without it, its rows are left out, and the output says so. stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import options
from gpu_side import Case, Side, Variant
from machine import machine
from page import require, table

MARKER = "gpu"
SIDES: tuple[Side, ...] = ("ahp", "plain", "trainer")

SIZES: dict[str, dict[str, Any]] = {
    # Widths of Llama 3.2 1B and 3B, of Llama 3 8B and of Qwen3-30B-A3B (their config.json); as many layers as leave room for fp32
    # states on 80 GB. All layers of Llama 3 8B have room only where adapters alone are trained.
    "1B": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
           "num_hidden_layers": 16},
    "3B": {"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8,
           "num_hidden_layers": 12},
    "8B": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
           "num_hidden_layers": 6},
    "8B-whole": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "num_hidden_layers": 32},
    "30B-A3B": {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
                "num_experts_per_tok": 8, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 3},
    "smoke": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
              "num_hidden_layers": 2},
}  # fmt: skip

VARIANTS = {
    "eager": Variant(),
    "compile": Variant(compile=True),
    "recompute": Variant(activation_checkpoint="full"),
    "chunked-loss": Variant(loss_chunk_tokens=2048),
    "compile-recompute": Variant(compile=True, activation_checkpoint="full"),
    "fp8": Variant(compile=True, precision="fp8"),
    "selective": Variant(activation_checkpoint="selective"),
    "compile-selective": Variant(compile=True, activation_checkpoint="selective"),
    "8-bit-moments": Variant(optimizer="adamw8bit"),
    "lora": Variant(activation_checkpoint="full", lora_rank=16),
    "compile-lora": Variant(compile=True, activation_checkpoint="full", lora_rank=16),
}
TOLERANCE = {"fp32": 1.0e-4, "bf16": 1.0e-2, "fp8": 2.0e-2}
"""Largest relative difference of the losses of the first steps (as benchmarks/side_by_side.py; fp8 as ahp verify)."""
COMPARED_STEPS = 3
"""After more steps the weights differ because of rounding."""


@dataclass(frozen=True)
class Row:
    """One side of one variant; None where the device says nothing of it."""

    size: str
    variant: str
    side: Side
    step_s: float
    mfu: float
    allocated_bytes: int | None
    reserved_bytes: int | None
    predicted_s: float | None = None
    predicted_allocated_bytes: int | None = None
    predicted_reserved_bytes: int | None = None


class SideProcess:
    """One side in a process of its own, which imports at once and waits for its turn."""

    def __init__(self, case: Case, side: Side) -> None:
        self.side = side
        command = [sys.executable, str(Path(__file__).with_name("gpu_side.py")), side, json.dumps(asdict(case))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self) -> dict[str, Any]:
        """Raises RuntimeError with the end of what it said when it fails."""
        out, said = self.process.communicate("go\n")
        if self.process.returncode:
            raise RuntimeError(f"{self.side}: {' '.join(said.strip().splitlines()[-3:])}")
        return json.loads(out.strip().splitlines()[-1])

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def agree(found: dict[Side, list[dict[str, Any]]], precision: str) -> str | None:
    """What differs between the losses of the sides, None where they agree."""
    wanted = found["ahp"][0]["losses"][:COMPARED_STEPS]
    for side, runs in found.items():
        for ours, theirs in zip(wanted, runs[0]["losses"], strict=False):
            if abs(ours - theirs) > TOLERANCE[precision] * abs(theirs):
                return f"losses differ: ahp {ours}, {side} {theirs}"
    return None


def measure(case: Case, sides: tuple[Side, ...], rounds: int, cluster: Any, names: tuple[str, str]) -> list[Row]:
    """Every side of one variant, in turns, and the forecast of it."""
    import ahp

    job = ahp.Job.model_validate(case.job())
    forecast = ahp.simulate(
        model=case.model_keys(), cluster=cluster, job=job,
        parallelism=case.parallelism(), engine={"name": "ahp", **case.engine()},
    )  # fmt: skip
    found: dict[Side, list[dict[str, Any]]] = {side: [] for side in sides}
    turns = [(turn, side) for turn in range(rounds) for side in (sides if turn % 2 == 0 else sides[::-1])]
    processes = [SideProcess(case, side) for _, side in turns]
    try:
        for (turn, side), process in zip(turns, processes, strict=True):
            found[side].append(process.run())
            took = statistics.median(found[side][-1]["step_times_s"])
            print(
                f"{' '.join(names)} {side}, round {turn + 1}/{rounds}: {1e3 * took:.1f} ms", file=sys.stderr, flush=True
            )
    finally:
        for process in processes:
            process.end()
    if fault := agree(found, case.variant.precision):
        raise RuntimeError(fault)
    rows = []
    for side, runs in found.items():
        step_s = statistics.median(time_s for run in runs for time_s in run["step_times_s"])
        predicted = (
            (forecast.step_time_s, forecast.memory_allocated_bytes, forecast.memory_reserved_bytes)
            if side == "ahp"
            else (None, None, None)
        )
        mfu = forecast.mfu * forecast.step_time_s / step_s
        rows.append(Row(*names, side, step_s, mfu, runs[0]["allocated_bytes"], runs[0]["reserved_bytes"], *predicted))
    return rows


def of_cluster(given: str) -> Any:
    import ahp

    return ahp.Cluster.load(given) if Path(given).is_file() else ahp.Cluster.parse(given)


def refused(variant: Variant, device: str) -> str | None:
    """Why a variant cannot run here."""
    if variant.precision != "fp8":
        return None
    import torch

    if device == "cpu" or torch.cuda.get_device_capability() < (8, 9):
        return "products in 8 bits need a GPU of compute capability 8.9"
    return (
        None
        if importlib.util.find_spec("torchao")
        else "torchao is not installed (pip install 'adaptive-hybrid-parallelism[fp8]')"
    )


def markdown(rows: list[Row], left_out: dict[str, str], where: str, how: str, command: str) -> str:
    head = ["size", "variant", "side", "step, ms", "of AHP's", "MFU", "allocated, GiB", "reserved, GiB",
            "predicted, ms", "predicted allocated", "predicted reserved"]  # fmt: skip
    ours = {(row.size, row.variant): row.step_s for row in rows if row.side == "ahp"}
    cells = [
        [row.size, row.variant, row.side, f"{1e3 * row.step_s:.1f}", f"{row.step_s / ours[row.size, row.variant]:.2f}",
         f"{100 * row.mfu:.1f} %", _gib(row.allocated_bytes), _gib(row.reserved_bytes),
         "" if row.predicted_s is None else f"{1e3 * row.predicted_s:.1f}",
         _gib(row.predicted_allocated_bytes), _gib(row.predicted_reserved_bytes)]
        for row in rows
    ]  # fmt: skip
    notes = [f"- Not measured: {what}: {why}" for what, why in left_out.items()]
    return "\n\n".join([f"`{command}`", how, where, table(head, cells), *(["\n".join(notes)] if notes else [])]) + "\n"


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [size for size in SIZES if size != "smoke"]
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=sizes, help="widths (default: all)")
    parser.add_argument(
        "--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="variants (default: all)"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="programs (default: all)")
    parser.add_argument("--sequence-length", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of a step (default: 4)")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="sequences at a time (default: 2)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side in a round (default: 10)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side (default: 2)")
    parser.add_argument(
        "--cluster", help="what ahp probe wrote, or a name of the catalogue (default: probe it quickly now)"
    )
    options.add_output(parser, "a model of two thin layers; on a CPU where there is no GPU")
    arguments = parser.parse_args()
    if arguments.batch_size % arguments.micro_batch_size:
        parser.error(f"--batch-size {arguments.batch_size}: must be a multiple of --micro-batch-size")
    if arguments.markdown:
        require(arguments.markdown, MARKER)
    return arguments


def main() -> int:
    import torch

    import ahp

    arguments = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.quick:
        print("benchmarks/gpu.py: torch finds no GPU here; --quick tries the script on a CPU", file=sys.stderr)
        return 2
    left_out: dict[str, str] = {}
    sides = tuple(side for side in SIDES if side in arguments.sides)
    if "trainer" in sides and importlib.util.find_spec("accelerate") is None:
        sides, left_out["trainer"] = sides[:-1], "accelerate is not installed"
    shape = (arguments.sequence_length, arguments.batch_size, arguments.micro_batch_size, arguments.steps)
    sizes, rounds = arguments.sizes, arguments.rounds
    if arguments.quick:
        shape, sizes, rounds = (64, 4, 2, 2), ["smoke"], 1
    cluster = of_cluster(arguments.cluster) if arguments.cluster else ahp.probe(quick=True, workers=1)
    rows: list[Row] = []
    for size in sizes:
        for name in arguments.only:
            variant = VARIANTS[name]
            if why := refused(variant, device):
                left_out[name] = why
                continue
            try:
                rows += measure(Case(SIZES[size], variant, device, *shape), sides, rounds, cluster, (size, name))
            except RuntimeError as error:  # out of memory on one side, say: the other rows still count
                left_out[f"{size} {name}"] = str(error)
                print(f"{size} {name}: {error}", file=sys.stderr, flush=True)
    where = torch.cuda.get_device_name() if device == "cuda" else machine(1).words()
    where += f"; torch {torch.__version__}, ahp {ahp.__version__}"
    how = (
        f"{shape[1]} sequences of {shape[0]} tokens a step, {shape[2]} at a time; medians of {rounds} rounds of {shape[3]} steps. "
        "bf16 with fp32 master weights, fused AdamW, clipping by the global norm."
    )
    text = markdown(rows, left_out, where, how, " ".join(["python", *sys.argv]))
    options.tell(arguments, MARKER, text, {"where": where, "rows": [asdict(row) for row in rows], "left_out": left_out})
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
