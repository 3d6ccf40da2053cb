"""Which engine's configuration a file is, and the plan that it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ahp.errors import BadInput, bad_input
from ahp.export import accelerate, deepspeed, megatron, torchtitan
from ahp.export.engine_target import Format
from ahp.export.megatron_model import config_of
from ahp.export.table import Read, Settings, Unreadable
from ahp.export.torchtitan_keys import with_rest

FORMATS = {one.name: one.formats for one in (torchtitan.TARGET, megatron.TARGET, deepspeed.TARGET, accelerate.TARGET)}
BY_END = {
    ".toml": ("torchtitan", "0.2.2"),
    ".py": ("torchtitan", "0.3.0"),
    ".json": ("deepspeed", "0.19.8"),
    ".yaml": ("accelerate", "1.15.0"),
    ".yml": ("accelerate", "1.15.0"),
    ".sh": ("megatron", "0.20"),
    ".sbatch": ("megatron", "0.20"),
    ".slurm": ("megatron", "0.20"),
}
MAINS = ("num_tokens_per_microbatch_per_dp_rank", "num_pp_microbatches", "max_context_length")
"""Keys by which a Python file is of torchtitan's main."""


@dataclass(frozen=True)
class Foreign:
    """A file of another engine, as AHP understands it."""

    form: Format
    settings: Settings
    read: Read
    model: str | dict[str, Any] | None
    """The model that it names, where AHP knows it."""


def read_foreign(path: str, engine: str | None, version: str | None, devices: int) -> Foreign:
    """A file by its ending, or by the engine that is named, for so many devices. Raises BadInput for one that cannot be read or is of no engine."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"file = {path!r}: cannot be read ({getattr(error, 'strerror', None) or 'not text'})") from None
    named = BY_END.get(file.suffix.lower())
    if named == ("torchtitan", "0.3.0") and any(key in text for key in MAINS):
        named = ("torchtitan", "main")
    if engine is not None and (named is None or named[0] != engine):
        if engine not in FORMATS:
            raise bad_input("--engine", engine, "AHP reads no configuration of it", FORMATS)
        named = (engine, next(iter(FORMATS[engine])))
    if named is None:
        raise BadInput(f"file = {path!r}: not known by its ending (valid: {', '.join(BY_END)}; or --engine NAME)")
    if version is not None and version not in FORMATS[named[0]]:
        raise bad_input("--target-version", version, f"no keys of such a {named[0]} are known", FORMATS[named[0]])
    form = FORMATS[named[0]][version or named[1]]
    try:
        settings = form.parse(text)
        if form.dialect.engine == "torchtitan":
            settings = with_rest(settings, devices)
    except (BadInput, Unreadable) as error:
        raise BadInput(f"file = {path!r}: {error}") from None
    return Foreign(form, settings, form.dialect.read(settings), _model(named[0], settings))


def _model(engine: str, settings: Settings) -> str | dict[str, Any] | None:
    if engine == "megatron":
        return config_of(settings)
    named = f"{settings.get('model.name')}/{settings.get('model.flavor')}"
    return next((name for name, (old, _) in torchtitan.MODELS.items() if old == named), None)
