"""Low-rank adapters (LoRA) for a model's linear layers, by peft: the adapted model is just another module for the rest of AHP.

peft replaces each linear layer by a layer of its own: the original layer (``base_layer``), and two small matrices whose product is added
to it. Nothing else is trained.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ahp.about import install_extra
from ahp.errors import BadInput, bad_input, nearest
from ahp.job import Lora

if TYPE_CHECKING:
    import torch
    from torch import nn

ADAPTER = "default"
"""peft's name for the one adapter of a model, a part of the names of its matrices."""


def peft_version() -> str:
    """The version of the installed peft. Raises BadInput if none is installed."""
    from importlib import metadata

    try:
        return metadata.version("peft")
    except metadata.PackageNotFoundError:
        raise BadInput(f"job.lora: peft is not installed; {install_extra('lora')}") from None


def key_of(lora: Lora | None) -> dict[str, Any]:
    """Plain data that a graph with adapters depends on in addition. Raises BadInput if peft is not installed."""
    return {} if lora is None else {"lora": lora.model_dump(mode="json"), "peft": peft_version()}


def with_adapters(module: nn.Module, lora: Lora | None, *, seed: int = 0) -> nn.Module:
    """Add peft's adapters to the module where ``lora`` asks for them, in place, and freeze everything else; None: nothing changes.

    On real tensors the adapters are initialized from ``seed`` as peft does, on the meta device they have no values. Raises BadInput if
    peft is not installed, finds nothing to adapt, or adapts what AHP cannot split, or if the module has adapters already.
    """
    if lora is None:
        return module
    peft_version()
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    if layers_of(module):
        raise BadInput("job.lora: the module has adapters already (valid: null, which trains these)")
    targets: Any = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    keys = {"r", "lora_alpha", "lora_dropout", "use_rslora"}
    config = LoraConfig(target_modules=targets, **lora.model_dump(include=keys))
    _refuse_rank(lora.r, module)  # peft fills the adapters' memory at once
    linear, usable = _linear_names(module), _usable_names(module)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # about weights that are stored transposed: peft finds that out by itself
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, module)
        except ValueError as error:
            problem = re.sub(r"\(\n.*?\n\)", "", str(error), count=1, flags=re.DOTALL).splitlines()[
                0
            ]  # without a module's repr
            wrong = next((name for name in targets if name not in linear), "") if isinstance(targets, list) else ""
            valid = nearest(wrong, linear) if wrong else linear
            raise bad_input("job.lora.target_modules", targets, problem, valid) from None
    _refuse_what_is_not_split(module, targets, linear, usable)
    return module


def adapted_copy(module: nn.Module, lora: Lora | None) -> nn.Module:
    """Like ``with_adapters``, on a copy without memory; the module itself is left as it is."""
    if lora is None:
        return module
    from ahp.graph.copies import copy_without_memory  # needs torch

    return with_adapters(copy_without_memory(module), lora)


def layers_of(module: nn.Module) -> dict[str, Any]:
    """The layers of a module that have adapters (peft's ``LoraLayer``), keyed by path."""
    import sys

    if "peft" not in sys.modules:  # whoever added adapters has imported it
        return {}
    from peft.tuners.lora.layer import LoraLayer

    return {path: part for path, part in module.named_modules() if isinstance(part, LoraLayer)}


@dataclass(frozen=True)
class Adapted:
    """A weight that an adapter changes; names are those of the module's parameters."""

    weight: str
    a: str
    """[r, inputs]"""
    b: str
    """[outputs, r]"""
    scaling: float
    transposed: bool
    """Whether the weight is stored as [inputs, outputs]."""

    def merged(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The weight with its adapter added, in fp32."""
        change = (b.float() @ a.float()) * self.scaling
        return weight.float() + (change.T if self.transposed else change)


def adapted_weights(module: nn.Module) -> list[Adapted]:
    """Every weight of a module that has an adapter."""
    return [
        Adapted(
            f"{path}.base_layer.weight",
            f"{path}.lora_A.{ADAPTER}.weight",
            f"{path}.lora_B.{ADAPTER}.weight",
            float(layer.scaling[ADAPTER]),
            bool(layer.fan_in_fan_out),
        )
        for path, layer in layers_of(module).items()
    ]


@contextmanager
def base_alone(module: nn.Module) -> Iterator[None]:
    """Make the module as it was without adapters, with the same parameters under their original names; undone at the end."""
    layers = layers_of(module)
    for path, layer in layers.items():
        module.set_submodule(path, layer.base_layer)
    try:
        yield
    finally:
        for path, layer in layers.items():
            module.set_submodule(path, layer)


def base_name(name: str) -> str:
    """The name of a frozen parameter in the model without adapters."""
    return name.replace(".base_layer.", ".")


def initialize_adapters(module: nn.Module) -> None:
    """Initialize every adapter as peft does: the first matrix at random, the second with zeros."""
    for layer in layers_of(module).values():
        layer.reset_lora_parameters(ADAPTER, True)


def is_adapter(name: str) -> bool:
    """Whether a parameter of a module with adapters belongs to an adapter."""
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def adapted_layer(path: str) -> str | None:
    """The path of the layer whose adapter a module is a part of; None for other modules."""
    for part in (f".lora_A.{ADAPTER}", f".lora_B.{ADAPTER}", f".lora_dropout.{ADAPTER}"):
        if path.endswith(part):
            return path.removesuffix(part)
    return None


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each linear layer with its path."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return ((path, part) for path, part in module.named_modules() if isinstance(part, (nn.Linear, Conv1D)))


def _linear_names(module: nn.Module) -> list[str]:
    """Names that ``target_modules`` can have: the last parts of the paths of linear layers."""
    return sorted({path.rpartition(".")[2] for path, _ in _linear_layers(module)})


def _refuse_rank(rank: int, module: nn.Module) -> None:
    """Raises BadInput for a rank that no weight of the linear layers can have."""
    most = max((min(part.weight.shape) for _, part in _linear_layers(module)), default=rank)
    if rank > most:
        rule = "a change of a weight has no higher rank than the weight has rows and columns"
        raise bad_input("job.lora.r", rank, rule, [f"1 to {most}"])


def _usable_names(module: nn.Module) -> list[str]:
    """A list that works as ``target_modules``, as a user writes it: linear layers that every block has, in parts without stacked weights (of
    experts), because peft treats some names of those in its own way. Empty if there is no such list."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from ahp.graph.blocks import NoBlocks, find_blocks

    def names(block: nn.Module) -> dict[str, None]:
        parts = [(n, part) for n, part in block.named_children() if all(p.dim() <= 2 for p in part.parameters())]
        found = (one for name, part in parts for one in part.named_modules(prefix=name))
        return {path.rpartition(".")[2]: None for path, one in found if isinstance(one, (nn.Linear, Conv1D))}

    try:
        first, *others = map(names, find_blocks(module).blocks)
    except NoBlocks:
        return []
    common = [name for name in first if all(name in other for other in others)]
    return [f"[{', '.join(common)}]"] if common else []


def _refuse_what_is_not_split(module: nn.Module, targets: Any, linear: list[str], usable: list[str]) -> None:
    """Raises BadInput unless adapters are on linear layers only, on no weight that is used elsewhere too, and in every block: a pipeline
    stage without any would have no gradient to send."""
    from peft.tuners.lora.layer import Linear

    from ahp.graph.blocks import NoBlocks, find_blocks

    key = "job.lora.target_modules"
    layers = layers_of(module)
    for name in (
        () if isinstance(targets, str) else targets
    ):  # peft ignores a name that it does not find, next to others
        if not any(f".{path}".endswith(f".{name}") for path in layers):
            raise bad_input(key, targets, f"no layer is called {name}", nearest(name, linear))
    counts: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    for path, layer in layers.items():
        if type(layer) is not Linear:
            kind = type(layer.get_base_layer()).__name__
            raise bad_input(key, targets, f"{path} is of {kind}, and AHP adapts linear layers alone", usable or linear)
        number = counts.get(id(layer.base_layer.weight), 0)
        if number != 1:
            others = (
                "is tied to another one, which an adapter would change too" if number else "is computed from others"
            )
            rule = f"the weight of {path} {others}"
            raise bad_input(key, targets, rule, [name for name in linear if name != path.rpartition(".")[2]])
    try:
        blocks = find_blocks(module)
    except NoBlocks:
        return
    for number, block in enumerate(blocks.blocks):
        if not layers_of(block):
            rule = f"block {number} of {blocks.path} has no such layer, and every block must have an adapter"
            raise bad_input(key, targets, rule, usable or ["all-linear"])
