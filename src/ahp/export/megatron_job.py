"""Megatron-LM's arguments for the optimizer and its rate."""

from __future__ import annotations

from ahp.export.table import NOTICE, Fields, Rule, Settings, Subject, Unreadable, whole

J = "job."


def _write_rate(s: Subject) -> Settings:
    o, steps = s.job.optimizer, s.job.steps
    found: Settings = {"--lr": o.learning_rate, "--lr-warmup-iters": o.warmup_steps, "--lr-decay-iters": steps}
    if o.schedule != "constant":
        found["--min-lr"] = o.learning_rate * o.min_lr_factor
    if o.schedule != "wsd":
        return found | {"--lr-decay-style": o.schedule}
    return found | {
        "--lr-decay-style": "WSD",
        "--lr-wsd-decay-style": "linear",
        "--lr-wsd-decay-iters": round(o.decay_share * steps),
    }


def _read_rate(settings: Settings) -> Fields:
    o, style = J + "optimizer.", settings.get("--lr-decay-style", "linear")
    found: Fields = {o + "schedule": "wsd" if style == "WSD" else style}
    if style not in ("linear", "cosine", "constant", "WSD"):
        raise Unreadable(f"--lr-decay-style = {style!r}: AHP has linear, cosine, constant and WSD")
    if "--lr" in settings:
        found[o + "learning_rate"] = float(settings["--lr"])
        if style != "constant" and found[o + "learning_rate"] > 0:
            found[o + "min_lr_factor"] = _least_share(settings, found[o + "learning_rate"])
    if "--lr-warmup-iters" in settings:
        found[o + "warmup_steps"] = whole(settings["--lr-warmup-iters"], "--lr-warmup-iters", 0)
    if style == "WSD" and "--lr-wsd-decay-iters" in settings:
        found[o + "decay_share"] = whole(settings["--lr-wsd-decay-iters"], "--lr-wsd-decay-iters") / whole(
            settings["--train-iters"], "--train-iters"
        )
    return found


def _least_share(settings: Settings, rate: float) -> float:
    least = float(settings.get("--min-lr", 0.0))
    if not 0 <= least <= rate:
        raise Unreadable(f"--min-lr = {least}: must be between 0 and --lr {rate}")
    return least / rate


RATE_KEYS = (
    "--lr",
    "--lr-warmup-iters",
    "--lr-decay-iters",
    "--min-lr",
    "--lr-decay-style",
    "--lr-wsd-decay-style",
    "--lr-wsd-decay-iters",
)
RATE = Rule(
    RATE_KEYS,
    tuple(
        f"job.optimizer.{name}"
        for name in ("learning_rate", "warmup_steps", "schedule", "decay_share", "min_lr_factor")
    ),
    _write_rate,
    _read_rate,
)


def _write_adamw(s: Subject) -> Settings:
    o = s.job.optimizer
    found: Settings = {
        "--optimizer": "adam",
        "--adam-beta1": o.betas[0],
        "--adam-beta2": o.betas[1],
        "--adam-eps": o.eps,
        "--weight-decay": o.weight_decay,
        "--clip-grad": o.grad_clip or 0.0,
    }
    if o.decay_norms_and_biases:
        found[f"{NOTICE}decay"] = (
            "job.optimizer.decay_norms_and_biases = True: Megatron-LM does not decay norms and biases"
        )
    return found


def _read_adamw(settings: Settings) -> Fields:
    if (kind := settings.get("--optimizer", "adam")) != "adam":
        raise Unreadable(f"--optimizer = {kind!r}: AHP knows adam")
    defaults = {
        "--adam-beta1": 0.9,
        "--adam-beta2": 0.999,
        "--adam-eps": 1e-8,
        "--weight-decay": 0.01,
        "--clip-grad": 1.0,
    }
    first, second, eps, decay, clip = (float(settings.get(key, value)) for key, value in defaults.items())
    o = J + "optimizer."
    return {
        o + "betas": [first, second],
        o + "eps": eps,
        o + "weight_decay": decay,
        o + "grad_clip": clip or None,
        o + "decay_norms_and_biases": False,
    }


ADAM_KEYS = ("--optimizer", "--adam-beta1", "--adam-beta2", "--adam-eps", "--weight-decay", "--clip-grad")
ADAM = Rule(
    ADAM_KEYS,
    tuple(
        f"job.optimizer.{name}"
        for name in ("name", "betas", "eps", "weight_decay", "grad_clip", "decay_norms_and_biases")
    ),
    _write_adamw,
    _read_adamw,
)
RULES = (RATE, ADAM)
