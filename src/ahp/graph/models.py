"""From a description of a model to a transformers config and a module.

A description is a catalogue name, a path to a Hugging Face ``config.json`` or to a folder that holds one, a dict of
config keys, an ``nn.Module``, or ``"pkg.mod:factory"``, a callable without arguments that returns an ``nn.Module``.
Nothing here uses the network.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import sys
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ahp.errors import BadInput, bad_input, nearest
from ahp.graph.catalogue import CATALOGUE

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

ENGINE = "engine"
"""One operator that knows windows and sinks, as Megatron's and torchtitan's kernels (``ahp.graph.engine_attention``)."""

ATTENTION = {"flash": "sdpa", "math": "eager", "sdpa": "sdpa", "eager": "eager", ENGINE: ENGINE}
"""An attention kernel by AHP's name or by transformers' name -> transformers' name."""

EARLIER_KEYS = {
    "model_type", "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor", "layer_types", "is_causal",
    "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "tie_word_embeddings", "is_decoder", "auto_map",
}  # fmt: skip
"""Keys that every model type takes although its class does not list them (transformers converts the older ones)."""

POSITIVE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "num_local_experts", "num_experts_per_tok")  # fmt: skip

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
"""Keys that name an activation function; each family uses its own."""

LARGEST_SIZE = 1_000_000_000
"""The largest value of a key in ``POSITIVE``: far above any model, and the product of two still fits in torch's 64 bits."""

MASKED = ("ForMaskedLM", "WithLMHeadModel", "ForConditionalGeneration")
"""How the names of transformers' masked language models end, and those of some others: tests/graph/test_models.py."""

MISSPELT = 0.9
"""Likeness (difflib) from which a key is one that was spelt wrong: hidden_sizes has 0.96; layer_norm_eps, another family's layer_norm_epsilon, 0.88."""

MOST_LAYERS = 10_000
"""All layers are built before equal ones are recognized; published models have at most 1,000 (DeepNet, arXiv 2203.00555)."""


def load_config(model: Any) -> PretrainedConfig | None:
    """The transformers config of a description; None for a module or a factory. Raises BadInput, naming the key."""
    if not isinstance(model, (str, Path, dict)):
        return model if is_transformers(model, "PretrainedConfig") else None  # type: ignore[return-value]
    if isinstance(model, dict):
        return _from_keys(model, known_only=True)
    name = str(model)
    if name in CATALOGUE:
        return _from_keys(CATALOGUE[name].config, known_only=True)
    path = Path(name).expanduser()
    if path.exists():
        return _from_keys(read_keys(path), known_only=False)
    if is_factory(model):
        return None
    if Path(f"{name}.py").is_file():
        raise BadInput(f"model = {name!r}: add the function of {name}.py that makes the module, as in {name}:factory")
    if name.lstrip().startswith("{"):
        raise BadInput(f"model = {name!r}: write these keys into a config.json, and give its path")
    raise BadInput(
        f"model = {name!r}: neither a name of the catalogue nor a path nor pkg.mod:factory "
        f"(nearest names: {', '.join(nearest(name, list(CATALOGUE)))})"
    )


def is_factory(model: Any) -> bool:
    """Whether a description has the form ``pkg.mod:factory``."""
    if not isinstance(model, str) or model in CATALOGUE or Path(model).expanduser().exists():
        return False
    module, colon, function = model.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def build_model(
    model: Any, *, dtype: torch.dtype | None = None, device: Any = "meta", attention: str = "sdpa"
) -> nn.Module:
    """Build the module: a causal language model, or a masked one for models such as BERT.

    ``dtype`` is that of the floating parameters, None = float32. On a real ``device`` the model initializes its own
    weights (seed torch first); on ``meta`` they take no memory. A live module is returned as it is.
    ``attention`` is ``sdpa`` (alias ``flash``), ``eager`` (alias ``math``), or ``engine``; a model without sdpa gets eager.
    Raises BadInput.
    """
    import torch
    from torch import nn

    if isinstance(model, nn.Module):
        return with_shapes(model)
    if attention not in ATTENTION:
        raise bad_input("attention", attention, "unknown kernel", ATTENTION)
    dtype = dtype or torch.float32
    config = load_config(model)
    if config is None:
        return _from_factory(model, dtype, device)
    config.use_cache = False
    family = _auto_class(config)
    implementation = ATTENTION[attention]
    with torch.device(device):
        try:
            return family.from_config(config, dtype=dtype, attn_implementation=implementation)
        except Exception as error:
            if implementation != "sdpa" or "scaled_dot_product_attention" not in str(error):
                problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                raise BadInput(f"model = {describe(model)!r}: transformers cannot build it: {problem}") from error
            return family.from_config(config, dtype=dtype, attn_implementation="eager")


def plain(model: Any) -> str | dict[str, Any] | None:
    """The form of a description that a plan stores: a string or a dict; None for a live module."""
    if isinstance(model, (str, Path)):
        return str(model)
    if isinstance(model, dict):
        return dict(model)
    config = load_config(model)
    return None if config is None else config.to_diff_dict()


def describe(model: Any) -> str:
    """A short name for tables and logs."""
    if isinstance(model, dict):
        config = load_config(model)
        assert config is not None
        layers, hidden = getattr(config, "num_hidden_layers", "?"), getattr(config, "hidden_size", "?")
        return f"{config.model_type}-{layers}x{hidden}"
    if isinstance(model, (str, Path)):
        name = str(model)
        if name in CATALOGUE:
            return name
        if is_factory(model):
            return name.partition(":")[2]
        path = Path(name).expanduser().resolve()
        return path.parent.name if path.name == "config.json" else path.stem
    return str(getattr(model, "model_type", type(model).__name__))


def is_transformers(value: Any, name: str) -> bool:
    """Whether a value is of a class that transformers exports. Where nobody has imported transformers it is not, and the import, which takes
    longer than torch's, is spared."""
    if "transformers" not in sys.modules:
        return False
    return isinstance(value, getattr(importlib.import_module("transformers"), name))


def is_masked(module: nn.Module) -> bool:
    """Whether a module is a masked language model of transformers: its labels are not shifted."""
    names = [kind.__name__ for kind in type(module).__mro__ if kind.__name__.endswith(MASKED)]
    if not names:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return any(name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() for name in names)


def names_of_parameters(module: nn.Module) -> list[list[str]]:
    """All names of each parameter, its first name first: several if it is tied."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return list(by_id.values())


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a config.json, or of the one in a folder. Raises BadInput."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise BadInput(f"model = {str(path)!r}: the folder holds no config.json")
    if file.suffix == ".py":
        raise BadInput(f"model = {str(path)!r}: name the function that makes the module, as in {file.stem}:factory")
    if file.suffix in (".yaml", ".yml"):
        rule = f"a model is a config.json; of a config.yaml ahp plan takes the job, as --job {path}, and ahp train takes it whole"
        raise BadInput(f"model = {str(path)!r}: {rule}")
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"model = {str(file)!r}: not a JSON file ({error})") from None
    if not isinstance(keys, dict):
        raise BadInput(f"model = {str(file)!r}: a JSON object was expected")
    return keys


def _from_keys(keys: dict[str, Any], *, known_only: bool) -> PretrainedConfig:
    """Build and check a config. ``known_only`` refuses unknown keys; the hub's own files carry many historical ones."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    model_type = keys.get("model_type")
    if "model_type" not in keys:
        raise BadInput("model_type: missing from the model's keys; it is the family of the model, such as llama")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise bad_input("model_type", model_type, "transformers has no such model type", list(CONFIG_MAPPING.keys()))
    kind = CONFIG_MAPPING[model_type]
    known = _known_keys(kind)
    if not known_only:
        _warn_of_misspelt(keys, known, model_type)
    else:
        for key in keys:
            if key not in known and key not in _keys_asked_for(kind):
                raise BadInput(
                    f"{key}: unknown key for model_type {model_type} (did you mean: {', '.join(nearest(key, sorted(known), 3))}?)"
                )
    for key, value in _numbers(keys):
        if not math.isfinite(value):
            raise bad_input(key, value, "a finite number was expected")
    rest = {key: value for key, value in keys.items() if key != "model_type"}
    _check_sizes(rest, kind.attribute_map)
    _check_values(rest)
    try:
        config = kind(**rest)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        named = [key for key in rest if f"'{key}'" in str(error)]
        shown = ", ".join(f"{key} = {rest[key]!r}" for key in named) or f"model_type = {model_type!r}"
        problem = re.sub(r"^\w+Error: (Field '\w+' )?", "", str(error).strip().splitlines()[-1].strip())
        raise BadInput(f"{shown}: {problem}") from None
    _check_experts(config)
    return config


def _warn_of_misspelt(keys: dict[str, Any], known: set[str], model_type: str) -> None:
    """Warn of keys that nearly are keys of the model type which the file lacks: these have their defaults, and the model is another one."""
    for key in keys.keys() - known:
        if near := get_close_matches(key, sorted(known - keys.keys()), n=1, cutoff=MISSPELT):
            problem = f"unknown key for model_type {model_type} (did you mean: {near[0]}?)"
            warnings.warn(f"{key}: {problem}; {near[0]} has its default", stacklevel=2)


def _known_keys(kind: type[PretrainedConfig]) -> set[str]:
    import dataclasses

    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    try:
        own = set(kind().to_dict())
    except Exception:  # a few types have no valid default; their fields are enough
        own = set()
    return fields | set(kind.attribute_map) | EARLIER_KEYS | own


def _keys_asked_for(kind: type[PretrainedConfig]) -> set[str]:
    """Optional config keys that the family's own module reads, such as the ``head_dim`` of Qwen3's experts."""
    try:
        module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
        source = inspect.getsource(module)
    except (ImportError, OSError, TypeError):
        return set()
    return set(re.findall(r"""getattr\(\s*(?:self\.)?config,\s*["'](\w+)["']""", source))


def _numbers(keys: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in keys.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield f"{prefix}{key}", value


def _check_sizes(keys: dict[str, Any], aliases: dict[str, str]) -> None:
    """Refuse sizes below 1 or absurdly large, and heads that do not divide; ``aliases`` maps a common name to the model type's own (n_embd)."""
    own = {name: next((k for k in (name, aliases.get(name, name)) if k in keys), None) for name in POSITIVE}
    for key in own.values():
        value = keys.get(key) if key else None
        if value is not None and (isinstance(value, bool) or (isinstance(value, int) and value < 1)):
            raise bad_input(str(key), value, "a whole number of at least 1 was expected")
    for name, key in own.items():
        most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST_SIZE
        value = keys.get(key) if key else None
        if isinstance(value, int) and value > most:
            raise bad_input(str(key), value, f"at most {most:,} was expected")
    _check_divides(keys, own["hidden_size"], own["num_attention_heads"], unless=own["head_dim"])
    _check_divides(keys, own["num_attention_heads"], own["num_key_value_heads"])


def _check_values(keys: dict[str, Any]) -> None:
    """Refuse values that transformers accepts unchecked, and fails on later with an error that names no key."""
    from transformers.activations import ACT2FN

    for key in ACTIVATIONS:
        if isinstance(keys.get(key), str) and keys[key] not in ACT2FN:
            raise bad_input(key, keys[key], "transformers has no such activation", sorted(ACT2FN))
    if isinstance(theta := keys.get("rope_theta"), str):
        raise bad_input("rope_theta", theta, "a number was expected")


def _check_experts(config: PretrainedConfig) -> None:
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", None))
    if isinstance(chosen, int) and isinstance(experts, int) and chosen > experts > 0:
        raise bad_input("num_experts_per_tok", chosen, f"there are {experts} experts (valid: up to {experts})")


def _check_divides(keys: dict[str, Any], whole: str | None, part: str | None, unless: str | None = None) -> None:
    if whole is None or part is None or (unless is not None and keys[unless] is not None):
        return
    size, count = keys[whole], keys[part]
    if isinstance(size, int) and isinstance(count, int) and size % count:
        divisors = [n for n in range(1, min(size, 4 * count) + 1) if size % n == 0]
        raise bad_input(part, count, f"must divide {whole} = {size}", divisors)


def _auto_class(config: PretrainedConfig) -> Any:
    """The family of language-model heads: masked where transformers has one and the config is not a decoder."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise bad_input("model_type", kind, "an encoder-decoder; AHP takes causal and masked language models")
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        return AutoModelForMaskedLM
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    raise bad_input("model_type", kind, "transformers has neither a causal nor a masked language model of this type")


def _from_factory(model: Any, dtype: torch.dtype, device: Any) -> nn.Module:
    import torch
    from torch import nn

    if not is_factory(model):
        raise bad_input("model", model, "expected a name, a path, a dict of config keys, a module or pkg.mod:factory")
    path, _, function = str(model).partition(":")
    if path.split(".")[0] in sys.stdlib_module_names:
        raise bad_input("model", model, "a module of Python's standard library makes no model")
    try:
        factory = getattr(importlib.import_module(path), function)
    except ModuleNotFoundError as error:
        found_in = "it must lie in the folder that the command starts in, be installed, or be on PYTHONPATH"
        if path.endswith(".py"):
            found_in = f"a module is named without .py: {path.removesuffix('.py')}:{function}"
        rule = f"{error}; {found_in}" if error.name == path.split(".")[0] or path.endswith(".py") else str(error)
        raise BadInput(f"model = {model!r}: {rule}") from error
    except (ImportError, AttributeError) as error:
        raise BadInput(f"model = {model!r}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        raise BadInput(f"model = {model!r}: importing {path} raised {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise BadInput(
            f"model = {model!r}: not a function that makes an nn.Module, but of type {type(factory).__name__}"
        )
    try:
        with torch.device(device):
            module = factory()
    except (Exception, SystemExit) as error:
        raise BadInput(f"model = {model!r}: the factory raised {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise BadInput(f"model = {model!r}: the factory returned {type(module).__name__}, not an nn.Module")
    return with_shapes(module).to(dtype)


NOTHING_TRAINED = "none of its parameters has requires_grad, so a step would train nothing"
"""Why a module is refused whose parameters are all frozen."""


def with_shapes(module: nn.Module, key: str = "model") -> nn.Module:
    """The module, an argument named ``key``. Raises BadInput if a parameter has no shape yet (``nn.LazyLinear``)."""
    from torch.nn.parameter import UninitializedParameter

    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise bad_input(key, name, "has no shape before its lazy module ran", ["call the module once before"])
    return module
