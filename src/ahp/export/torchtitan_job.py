"""torchtitan's keys for the optimizer, its rate and the types of computation."""

from __future__ import annotations

import math
from typing import Any

from ahp.errors import NotExpressible
from ahp.export.table import Fields, Rule, Settings, Subject, Unreadable, same, whole

J = "job."


def _write_rate(s: Subject) -> Settings:
    o = s.job.optimizer
    shape: dict[str, Settings] = {
        "constant": {"lr_scheduler.decay_type": "linear", "lr_scheduler.min_lr_factor": 1.0},
        "wsd": {
            "lr_scheduler.decay_ratio": o.decay_share,
            "lr_scheduler.decay_type": "linear",
            "lr_scheduler.min_lr_factor": o.min_lr_factor,
        },
    }
    plain = {"lr_scheduler.decay_type": o.schedule, "lr_scheduler.min_lr_factor": o.min_lr_factor}
    return {"lr_scheduler.warmup_steps": o.warmup_steps, "lr_scheduler.decay_ratio": None} | shape.get(
        o.schedule, plain
    )


def _read_rate(settings: Settings) -> Fields:
    o = J + "optimizer."
    kind, least = (
        settings.get("lr_scheduler.decay_type", "linear"),
        float(settings.get("lr_scheduler.min_lr_factor", 0.0)),
    )
    share = settings.get("lr_scheduler.decay_ratio")
    found: Fields = {
        o + "warmup_steps": whole(settings.get("lr_scheduler.warmup_steps", 200), "lr_scheduler.warmup_steps", 0)
    }
    if least == 1.0:
        return found | {o + "schedule": "constant"}
    if not any(key in settings for key in RATE_KEYS):
        return {}
    if (share is not None and kind != "linear") or kind == "sqrt":
        raise Unreadable(
            f"lr_scheduler.decay_type = {kind!r} with decay_ratio {share}: AHP has no such schedule; it does not change the time of a step"
        )
    found[o + "min_lr_factor"] = least
    return found | ({o + "schedule": kind} if share is None else {o + "schedule": "wsd", o + "decay_share": share})


RATE_KEYS = tuple(f"lr_scheduler.{key}" for key in ("warmup_steps", "decay_type", "min_lr_factor", "decay_ratio"))
RATE = Rule(
    RATE_KEYS,
    tuple(f"job.optimizer.{f}" for f in ("warmup_steps", "schedule", "decay_share", "min_lr_factor")),
    _write_rate,
    _read_rate,
)


def _write_clip(s: Subject) -> Settings:
    clip = s.job.optimizer.grad_clip
    return {"training.max_norm": math.inf if clip is None else clip}


def _read_clip(settings: Settings) -> Fields:
    norm = float(settings.get("training.max_norm", 1.0))
    return {J + "optimizer.grad_clip": None if norm == math.inf else norm}


CLIP = Rule(("training.max_norm",), (J + "optimizer.grad_clip",), _write_clip, _read_clip)


def _write_decay(s: Subject) -> Settings:
    if not s.job.optimizer.decay_norms_and_biases:
        raise NotExpressible(
            "job.optimizer.decay_norms_and_biases = False: torchtitan has one group of all parameters (valid: True)"
        )
    return {}


DECAYS_ALL = Rule((), (J + "optimizer.decay_norms_and_biases",), _write_decay, lambda settings: {})


def _adamw(key: str, name: str, default: Any) -> Rule:
    return same(f"optimizer.{key}", f"job.optimizer.{name}", default)


def _write_betas(s: Subject) -> Settings:
    first, second = s.job.optimizer.betas
    return {"optimizer.name": "AdamW", "optimizer.beta1": first, "optimizer.beta2": second}


def _read_betas(settings: Settings) -> Fields:
    name = settings.get("optimizer.name", "AdamW")
    if name != "AdamW":
        raise Unreadable(f"optimizer.name = {name!r}: AHP knows AdamW")
    return {J + "optimizer.betas": [settings.get("optimizer.beta1", 0.9), settings.get("optimizer.beta2", 0.95)]}


ADAMW = (
    Rule(
        ("optimizer.name", "optimizer.beta1", "optimizer.beta2"),
        (J + "optimizer.betas", J + "optimizer.name"),
        _write_betas,
        _read_betas,
    ),
    _adamw("lr", "learning_rate", 8e-4),
    _adamw("eps", "eps", 1e-8),
    _adamw("weight_decay", "weight_decay", 0.1),
)


TYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""torchtitan's names of types."""


def precision(*, converters: str | None) -> Rule:
    """The types of computation. ``converters``: the key of the list that converts products to 8 bits."""
    param, reduce, own = (f"training.{key}" for key in ("mixed_precision_param", "mixed_precision_reduce", "dtype"))
    eight = "quantize.linear.float8"
    gathers = [
        f"{eight}.{key}" for key in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
    ]

    def write(s: Subject) -> Settings:
        kind = s.job.precision
        found: Settings = {own: TYPES[s.job.dtype], param: TYPES.get(kind, "bfloat16"), reduce: "float32"}
        if kind != "fp8":
            return found
        if converters is None:
            rule = "from 0.3.0 on it is a part of the model's own definition, which no key changes"
            raise NotExpressible(f"job.precision = 'fp8': {rule} (valid: bf16, fp32; or --target-version 0.2.2)")
        return found | {converters: [eight], **dict.fromkeys(gathers, True)}

    def read(settings: Settings) -> Fields:
        held = {name: kind for kind, name in TYPES.items()}.get(settings.get(own, "float32"))
        if held is None:
            raise Unreadable(f"{own} = {settings[own]!r}: AHP knows {', '.join(TYPES.values())} alone")
        used = settings.get(converters, []) if converters else []
        if used and used != [eight]:
            raise Unreadable(f"{converters} = {used}: AHP knows {eight} alone")
        plain = {name: kind for kind, name in TYPES.items()}[settings.get(param, "bfloat16")]
        return {J + "precision": "fp8" if used else plain, J + "dtype": held}

    keys = (own, param, reduce, *((converters, *gathers) if converters else ()))
    return Rule(keys, (J + "precision", J + "dtype"), write, read)


RULES = (RATE, CLIP, DECAYS_ALL, *ADAMW)
