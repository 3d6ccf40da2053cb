"""Finds out which program a configuration file belongs to, and reads the fields of a plan from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ahp.errors import BadInput, bad_input
from ahp.export import accelerate, accelerate_megatron, deepspeed, maxtext, megatron, nanotron, nemo, torchtitan
from ahp.export.accelerate import KIND
from ahp.export.launch_line import EACH, NODES, launched, sizes
from ahp.export.megatron_model import config_of
from ahp.export.shell import arguments, words
from ahp.export.table import Dialect, Read, Settings, Unreadable, whole
from ahp.export.torchtitan_keys import with_rest

Model = str | dict[str, Any] | None
"""The model that a file names, if AHP knows it."""


@dataclass(frozen=True)
class Reader:
    """How a program's file is read."""

    dialect: Dialect
    parse: Callable[[str], Settings]
    """The settings of a text. Raises BadInput for text of another form."""
    model: Callable[[Settings], Model] = lambda settings: None
    fill: Callable[[Settings, int, int], Settings] = lambda settings, nodes, per_node: settings
    """Fills in what the file leaves open, from the nodes and the devices of each. Raises Unreadable if they do not divide."""


def _titan_model(settings: Settings) -> Model:
    named = f"{settings.get('model.name')}/{settings.get('model.flavor')}"
    return next((name for name, known in torchtitan.MODELS.items() if named in known), None)


PLUGGED = accelerate_megatron.DIALECT.name
READERS: dict[str, dict[str, Reader]] = {
    "torchtitan": {
        name: Reader(form.dialect, form.parse, _titan_model, with_rest) for name, form in torchtitan.FORMATS.items()
    },
    "megatron": {name: Reader(form.dialect, form.parse, config_of) for name, form in megatron.FORMATS.items()},
    "deepspeed": {
        name: Reader(form.dialect, form.parse, fill=deepspeed.with_batch) for name, form in deepspeed.FORMATS.items()
    },
    "accelerate": {name: Reader(form.dialect, form.parse) for name, form in accelerate.FORMATS.items()},
    PLUGGED: {
        accelerate.DIALECT.version: Reader(
            accelerate_megatron.DIALECT, accelerate.parse, fill=accelerate_megatron.filled
        )
    },
    "nanotron": {nanotron.DIALECT.version: Reader(nanotron.DIALECT, nanotron.parse, nanotron.config_of)},
    "maxtext": {maxtext.DIALECT.version: Reader(maxtext.DIALECT, maxtext.parse, maxtext.model_of, maxtext.filled)},
    "nemo": {nemo.DIALECT.version: Reader(nemo.DIALECT, nemo.parse)},
    "bridge": {nemo.BRIDGE_DIALECT.version: Reader(nemo.BRIDGE_DIALECT, nemo.parse, fill=nemo.filled)},
}
"""Keyed by program and release; the first release is the default."""
BY_END = {
    ".toml": "torchtitan",
    ".py": "torchtitan",
    ".json": "deepspeed",
    ".yaml": "accelerate",
    ".yml": "accelerate",
    ".sh": "megatron",
    ".sbatch": "megatron",
    ".slurm": "megatron",
}
"""The program that a file is of by its ending, unless its keys mark it as another's (``BY_KEYS``)."""
OWN_DEFAULTS = "base.yml"
"""MaxText's file of all its defaults, which the rules already have."""
MAINS = ("num_tokens_per_microbatch_per_dp_rank", "num_pp_microbatches", "max_context_length")
"""Keys that mark a Python file as one of torchtitan's main."""
BY_KEYS = (
    ("nanotron", ("parallelism.dp", "model.model_config.hidden_size")),
    ("maxtext", ("base_config", "per_device_batch_size", "ici_fsdp_parallelism", "ici_tensor_parallelism", "base_emb_dim")),
    ("nemo", ("trainer.devices", "trainer.num_nodes", "model.encoder_seq_length")),
    ("bridge", ("train.train_iters", "train.global_batch_size", "model.tensor_model_parallel_size")),
)  # fmt: skip
"""Programs whose files are YAML, as accelerate's are, and keys that mark a file as theirs."""
MEGATRONS = {
    *(f"--{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "expert-model", "context")),
    *("--num-layers", "--use-distributed-optimizer"),
}
"""Arguments that only Megatron has. A script that gives one of these and DeepSpeed's JSON starts Megatron-DeepSpeed, which takes both."""
KEYS_OF = {
    "torchtitan": "parallelism.tensor_parallel_degree",
    "megatron": "--tensor-model-parallel-size",
    "deepspeed": "train_micro_batch_size_per_gpu",
}
"""A key of each program whose files are recognized by their ending alone."""


@dataclass(frozen=True)
class Foreign:
    """A file of another program, as AHP understands it."""

    form: Reader
    settings: Settings
    read: Read
    model: Model


def read_foreign(
    path: str, engine: str | None, version: str | None, devices: int, per_node: int | None = None
) -> Foreign:
    """Read a file, recognized by its ending and keys unless ``engine`` names its program, for ``devices`` on nodes of ``per_node``. Raises
    BadInput for a file that cannot be read or belongs to no known program."""
    file, each = Path(path), per_node or devices
    text = _text(file, path)
    try:
        name, settings, shape = _settings(file, text, engine, version, (devices // each, each))
        reader = _reader(name, version, file, text)
        settings = reader.fill(settings, *shape)
    except Unreadable as error:
        raise BadInput(f"file = {path!r}: {error}") from None
    return Foreign(reader, settings, reader.dialect.read(settings), reader.model(settings))


def _settings(
    file: Path, text: str, engine: str | None, version: str | None, shape: tuple[int, int]
) -> tuple[str, Settings, tuple[int, int]]:
    """The program, its file's settings, and the nodes and workers of each: the script's, if it has them."""
    try:
        script = BY_END.get(file.suffix.lower()) == "megatron" and engine in (None, *READERS)
        found = words(text) if script else []
        line = launched(text, found) if engine != "megatron" else None
        if not script or line is None or engine not in (None, line.program):
            name = _named(file, text, engine)
            reader = _reader(name, version, file, text)
            settings = reader.parse(text)
            _refuse_anothers(name, reader, settings, text, asked=engine is not None)
            return _plugged(name, file, settings, shape)
        if line.program == "deepspeed" and engine is None and arguments(found).keys() & MEGATRONS:
            raise BadInput(
                "it starts Megatron-DeepSpeed, whose arguments and JSON are one configuration that AHP does not read; "
                "--engine megatron judges the arguments alone, --engine deepspeed the JSON"
            )
        sized, inner = sizes(text, found), {}
        if line.file is not None and Path(line.file).name != OWN_DEFAULTS:
            beside = _beside(file, line.file)
            inner = _reader(line.program, version, beside, "").parse(_text(beside, str(beside)))
    except BadInput as error:
        raise BadInput(f"file = {str(file)!r}: {error}") from None
    numbers = [str(sized.get(key, own)) for key, own in zip((NODES, EACH), shape, strict=True)]
    nodes, each = (int(word) if word.isdigit() and int(word) else own for word, own in zip(numbers, shape, strict=True))
    settings = inner | line.settings
    return _plugged(line.program, file, settings, (nodes, each))


def _refuse_anothers(name: str, reader: Reader, settings: Settings, text: str, *, asked: bool) -> None:
    """Raise BadInput for a file that has no key of its program and does not name it: its missing keys would count as that program's
    defaults. A YAML file was recognized by its keys already."""
    known = {key for rule in reader.dialect.rules for key in rule.keys if key not in (NODES, EACH)}
    words = (name,)
    if name == "megatron" and not asked:  # scripts of all programs have --bf16 and --lr
        known, words = {*MEGATRONS, "--micro-batch-size", "--global-batch-size"}, (name, "pretrain_")
    if name in KEYS_OF and not any(word in text.lower() for word in words) and not settings.keys() & known:
        raise BadInput(
            f"no key of {name} is in it, such as {KEYS_OF[name]}; give the file's program with --engine NAME"
        )


def _plugged(
    name: str, file: Path, settings: Settings, shape: tuple[int, int]
) -> tuple[str, Settings, tuple[int, int]]:
    """The program that is named, or the one that accelerate's plugin runs."""
    if settings.get(KIND) == "MEGATRON_LM":
        return PLUGGED, settings, shape
    return _deepspeed(file, settings, shape) if settings.get(KIND) == "DEEPSPEED" else (name, settings, shape)


def _deepspeed(file: Path, settings: Settings, shape: tuple[int, int]) -> tuple[str, Settings, tuple[int, int]]:
    """accelerate with DeepSpeed's plugin (utils/dataclasses.py): DeepSpeed's JSON, which the YAML names or replaces."""
    plugin = "deepspeed_config."
    own = {key.removeprefix(plugin): value for key, value in settings.items() if key.startswith(plugin)}
    named = own.pop("deepspeed_config_file", None)
    if named is not None:
        beside = _beside(file, str(named))
        found = _reader("deepspeed", None, beside, "").parse(_text(beside, str(beside)))
    else:
        names = {
            "zero_stage": deepspeed.STAGE,
            "gradient_accumulation_steps": deepspeed.ACCUMULATION,
            "gradient_clipping": deepspeed.CLIP,
        }
        found = {names.get(key, plugin + key): value for key, value in own.items() if value not in ("none", False)}
    kind = settings.get("mixed_precision")
    found |= {f"{kind}.enabled": True} if kind in ("bf16", "fp16") else {}
    ranks, hosts = (whole(settings.get(key, 1), key) for key in ("num_processes", "num_machines"))
    if ranks % hosts:
        raise BadInput(f"num_processes = {ranks}: num_machines {hosts} does not divide it")
    return "deepspeed", found, (hosts, ranks // hosts) if "num_processes" in settings else shape


def _reader(name: str, version: str | None, file: Path, text: str) -> Reader:
    releases = READERS[name]
    if version is not None and version not in releases:
        raise bad_input("--target-version", version, f"AHP knows no keys of this release of {name}", releases)
    if version is None and name == "torchtitan":
        version = _titans_release(file, text)
    return releases[version or next(iter(releases))]


def _titans_release(file: Path, text: str) -> str | None:
    """torchtitan's release by the form of a file: TOML, or Python with the keys of main; None = neither."""
    if file.suffix.lower() == ".toml":
        return "0.2.2"
    return "main" if file.suffix.lower() == ".py" and any(key in text for key in MAINS) else None


def _named(file: Path, text: str, engine: str | None) -> str:
    """The program that is asked for, else the one that the file's ending and keys indicate."""
    if engine is not None and engine not in READERS:
        raise bad_input("--engine", engine, "AHP reads no configuration of it", READERS)
    if engine is not None:
        return engine
    if file.suffix.lower() not in BY_END:
        raise BadInput(f"not known by its ending (valid: {', '.join(BY_END)}; or --engine NAME)")
    name = BY_END[file.suffix.lower()]
    if name != "accelerate":
        return name
    keys = _reader(name, None, file, text).parse(text)
    if (found := next((one for one, own in BY_KEYS if any(key in keys for key in own)), None)) is not None:
        return found
    if "schema_version" in keys and any(key.split(".")[0] == "parallelism" for key in keys):
        raise BadInput("this is a plan of AHP, which ahp simulate and ahp explain judge")
    if not any(
        key in keys for key in ("compute_environment", *(key for rule in accelerate.DIALECT.rules for key in rule.keys))
    ):
        raise BadInput(
            f"no key of a program whose YAML AHP reads is in it (valid: {', '.join((name, *dict(BY_KEYS)))}; --engine NAME says which)"
        )
    return name


def _beside(script: Path, named: str) -> Path:
    """The file that a script names, in the script's own folder or one above. Raises BadInput if there is none."""
    parts = [part for part in Path(named).parts if "$" not in part and part not in ("/", "..", ".")]
    for folder in (script.parent, *list(script.resolve().parents)[:8]):
        for start in range(len(parts)):
            if (found := folder.joinpath(*parts[start:])).is_file():
                return found
    raise BadInput(f"it starts what {named!r} says, and no such file is beside it or above; check that file")


def _text(file: Path, path: str) -> str:
    if not path:  # an empty word of a command line, which Path takes for the current folder
        raise BadInput("file = '': must be a configuration, or the script that starts it")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise BadInput(f"file = {path!r}: cannot be read ({getattr(error, 'strerror', None) or 'not text'})") from None
