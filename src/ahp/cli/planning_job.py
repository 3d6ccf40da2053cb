"""Chooses the job of ``ahp plan`` if the user gives none: as large models are pre-trained, and printed for the user to see."""

from __future__ import annotations

import sys
from typing import Any

from ahp.cluster.model import Cluster, Device
from ahp.config import Config, read_yaml, set_dotted
from ahp.engines.registry import get
from ahp.errors import bad_input
from ahp.forecast.efficiency import is_cpu
from ahp.job import Job, Precision
from ahp.plan import EngineChoice, Parallelism, Plan, validated
from ahp.words import flops_per_s

LONGEST_DEFAULT_SEQUENCE = 8192
"""Tokens; the pre-training context of Llama 3 (arXiv 2407.21783, section 3.4.1)."""

TOKENS_PER_STEP = ((1.0e9, 2**19), (float("inf"), 2**22))
"""(parameters below, tokens per step): 0.5 Mi up to a billion parameters (GPT-3, arXiv 2005.14165, table 2.1), 4 Mi
above (Llama 2, arXiv 2307.09288, section 2.2; Llama 3 begins with it)."""

NOT_READ = ("model", "init_from", "cluster", "parallelism", "engine")
"""Keys of a config besides its job; ``ahp plan`` has its own options for them."""

UNKNOWN_CONTEXT = 1024
"""Tokens of a sequence if the model does not state how long its context is."""


def given_job(overrides: dict[str, Any]) -> dict[str, Any]:
    """The job's keys that the user gave: a file after ``--job``, then ``--job.key value``.

    Raises BadInput when the file is missing or holds no job.
    """
    job: dict[str, Any] = {}
    file = overrides.pop("job", None)
    if file is not None:
        if not isinstance(file, str):
            raise bad_input("--job", file, "must be a file that holds a job, or use --job.KEY VALUE")
        data = read_yaml(file)
        is_whole = not Config.model_fields.keys().isdisjoint(data)
        if isinstance(data.get("job"), dict):
            job = dict(data["job"])
        elif is_whole:  # a config: its job has the defaults, wrong keys are refused
            job = validated(Config, data, file).job.model_dump(exclude_unset=True)
        else:
            job = data
        # what is not a key of a config or a plan is reported, too
        named = [key for key in data if (data[key] if key in NOT_READ else key not in Plan.model_fields)]
        if is_whole and (others := [key for key in named if key not in ("job", "run")]):
            print(f"note: only job is read from {file}, not {', '.join(others)}", file=sys.stderr)
    for key in [key for key in overrides if key.startswith("job.")]:
        whole = {"job": job}
        set_dotted(whole, key, overrides.pop(key))
        job = whole["job"]
    return job


def with_sequence(given: dict[str, Any], model: Any, cluster: Cluster, engine: EngineChoice | None = None) -> Job:
    """The job with sequence length and precision chosen if they are not given; the batch is still to be chosen.

    ``engine`` is what will run it; None = the default engine.
    """
    chosen = dict(given)
    if model != "tiny" and "sequence_length" not in chosen:
        from ahp.graph.kept import context_of

        chosen["sequence_length"] = min(context_of(model) or UNKNOWN_CONTEXT, LONGEST_DEFAULT_SEQUENCE)
    in_bf16 = chosen.get("dtype") == "bf16"  # such weights compute in no other type
    chosen.setdefault("precision", "bf16" if in_bf16 else precision_for(cluster, engine or EngineChoice())[0])
    return validated(Job, chosen, "job", Config)


def with_batch(job: Job, given: dict[str, Any], model: Any, num_parameters: int, num_devices: int) -> Job:
    """The job with a batch of about ``TOKENS_PER_STEP`` if none is given: a multiple of the number of devices if it is larger than that."""
    if "global_batch_size" in given or model == "tiny":
        return job
    tokens = next(tokens for below, tokens in TOKENS_PER_STEP if num_parameters < below)
    sequences = max(tokens // job.sequence_length, 1)
    if sequences > num_devices:
        sequences = round(sequences / num_devices) * num_devices
    return job.model_copy(update={"global_batch_size": sequences})


def _fast_in_bf16(device: Device) -> bool:
    peaks = device.peak_flops_per_s
    return "bf16" in peaks and peaks["bf16"] >= peaks.get("fp32", 0.0)


def precision_for(cluster: Cluster, engine: EngineChoice) -> tuple[Precision, str]:
    """The fastest precision that trains well on every device and that the engine computes in, and why if it is not bf16.

    bf16 has the range of fp32 and needs nothing else; fp16 has a smaller range, so the loss is scaled
    (torch.amp.GradScaler; Micikevicius et al., arXiv 1710.03740). On a CPU fp16 is no faster, and bf16 is slower than fp32 where the cores have
    no instructions for it.
    """
    devices = [group.device for group in cluster.groups]

    def refusal(precision: Precision) -> str | None:
        return get(engine.name).refuses(Job(precision=precision), Parallelism(), engine)

    def runs(precision: Precision) -> bool:
        can = all(precision in device.peak_flops_per_s for device in devices)
        # What is refused in fp32 too, such as a key of another engine, is not about the precision, and is told where layouts are searched.
        return can and refusal(precision) in (None, refusal("fp32"))

    without = [device for device in devices if not _fast_in_bf16(device)]
    if runs("bf16") and not without:
        return "bf16", ""
    names = " and ".join(dict.fromkeys(device.name for device in without))
    if (cpu := next(filter(is_cpu, without), None)) is not None:
        peaks = ", ".join(f"{name} {flops_per_s(peak)}" for name, peak in cpu.peak_flops_per_s.items())
        return "fp32", f"{names} has no units for bf16 ({peaks})"
    reason = f"{names} computes no bf16" if without else f"{engine.name} does not support bf16"
    if runs("fp16"):
        else_ = "fp32 needs no scale"
        if 0 < len(without) < len(devices):
            else_ += "; --job.precision bf16 plans without these devices"
        return "fp16", f"{reason}; the loss is scaled, because fp16 loses small gradients otherwise ({else_})"
    return "fp32", f"{reason}, and {'not every device' if without else engine.name} has fp16 under {engine.name}"
