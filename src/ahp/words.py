"""Quantities and the parts of a forecast in words, the same everywhere a person reads them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

GIB = 2**30

SHORT_NAMES: dict[str, str] = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "zero": "zero_stage",
    "tp": "tensor_parallel_degree",
    "sp": "enable_sequence_parallel",
    "pp": "pipeline_parallel_degree",
    "schedule": "pipeline_parallel_schedule",
    "virtual": "virtual_stages_per_rank",
    "layers": "layers_per_stage",
    "cp": "context_parallel_degree",
    "cp_method": "context_parallel_method",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
    "mb": "micro_batch_size",
    "recompute": "activation_checkpoint",
    "order": "mesh_order",
}
"""Short names of a layout's keys."""

OTHER_NAMES: dict[str, str] = SHORT_NAMES | {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "dtype": "precision",
    "torch_dtype": "precision",
    "ddp": "data_parallel_replicate_degree",
    "fsdp": "data_parallel_shard_degree",
    "report_to": "track",
    "save_steps": "checkpoint_every",
    "save_total_limit": "keep",
    "seq_len": "sequence_length",
    "seq_length": "sequence_length",
    "max_seq_len": "sequence_length",
    "max_length": "sequence_length",
    "block_size": "sequence_length",
    "batch_size": "global_batch_size",
    "train_batch_size": "global_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "max_steps": "steps",
    "num_steps": "steps",
    "max_grad_norm": "grad_clip",
    "gradient_checkpointing": "activation_checkpoint",
    "num_nodes": "nodes",
    "nnodes": "nodes",
    "gpus": "devices_per_node",
    "num_gpus": "devices_per_node",
    "gpus_per_node": "devices_per_node",
    "nproc_per_node": "devices_per_node",
    "gpu": "device",
    "memory_gb": "memory_bytes",
    "rank": "r",
    "lora_rank": "r",
}
"""The keys that a wrong one means although it is spelled otherwise: short names, and the names of torch and transformers."""

PARTS: dict[str, str] = {
    "bubble": "pipeline bubble",
    "tensor_parallel": "tensor-parallel collectives",
    "context_parallel": "context-parallel collectives",
    "expert_parallel": "expert-parallel collectives",
    "weight_gather": "exposed weight gathering",
    "gradient_reduce": "exposed gradient reduction",
    "casts": "casts and copies",
    "host": "waiting for the host",
    "optimizer": "optimizer and clipping",
    "offload": "optimizer states from the host and back",
    "slowest_rank": "waiting for the slowest rank",
}
"""Words for parts of ``Forecast.step`` and ``Forecast.memory`` whose key is not clear by itself."""


def part_words(part: str) -> str:
    """A part of the step or of the memory in words."""
    return PARTS.get(part, part.replace("_", " "))


def gib(count_bytes: float) -> str:
    """Bytes as GiB, or as MiB when they are few."""
    return f"{count_bytes / GIB:.1f} GiB" if abs(count_bytes) >= 0.1 * GIB else f"{count_bytes / 2**20:.0f} MiB"


def flops_per_s(rate: float) -> str:
    """FLOP/s as TFLOP/s, or as GFLOP/s when they are few."""
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


def of_gib(used_bytes: float, capacity_bytes: float) -> str:
    """``61.3 of 80.0 GiB``."""
    digits = 1 if capacity_bytes >= 10 * GIB else 2
    return f"{used_bytes / GIB:.{digits}f} of {capacity_bytes / GIB:.{digits}f} GiB"


def seconds(value_s: float) -> str:
    """Seconds with three figures, in the unit that suits."""
    size = abs(value_s)
    if size >= 999.5:
        return f"{value_s:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if size >= 0.9995 * scale:
            return f"{_three_figures(value_s / scale)} {unit}"
    return f"{_three_figures(value_s / 1e-6)} us" if value_s else "0 s"


def _three_figures(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")


def duration(value_s: float) -> str:
    """A time that people plan with: ``21.4 h``, ``18.0 min``; below two minutes as ``seconds``."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value_s >= 2 * size:
            return f"{value_s / size:,.0f} {unit}" if value_s >= 99.95 * size else f"{value_s / size:.1f} {unit}"
    return seconds(value_s)


WORTH_TELLING = 0.0005
"""A smaller share is 0.0 % in words."""


def percent(share: float) -> str:
    """``0.084`` as ``8.4 %``, without the decimal from 10 % on."""
    digits = 0 if round(abs(share), 3) >= 0.1 else 1
    return f"{100 * share:.{digits}f} %"


def compared(share: float, above: str, below: str, same: str, least: float = WORTH_TELLING) -> str:
    """``8.4 % less``: a share with ``above`` if it is more than 0, else with ``below``; ``same`` for one that is smaller than ``least``."""
    return same if abs(share) < least else f"{percent(abs(share))} {above if share > 0 else below}"


def times(ratio: float) -> str:
    """``2.4 times``: two digits, or all digits of a larger whole number."""
    return f"{ratio:.2g} times" if ratio < 99.5 else f"{ratio:,.0f} times"


def slower(ratio: float) -> str:
    """A time that is ``ratio`` times as long: ``12 % slower``, ``5.0 % faster``, or ``19 times as long`` for more than 100 % slower."""
    return (
        f"{times(ratio)} as long" if ratio > 2 else f"{percent(abs(ratio - 1))} {'slower' if ratio >= 1 else 'faster'}"
    )


def number_of(number: int, noun: str) -> str:
    """``1 worker``, ``3 workers``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def count(number: float) -> str:
    """A large count with its unit: ``8.03 B``, ``124 M``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def counted(words: Iterable[str]) -> str:
    """``6 6 6 2`` as ``3x6 2``: equal neighbors once, with their number."""
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    return " ".join(f"{count}x{word}" if count > 1 else word for word, count in runs)
