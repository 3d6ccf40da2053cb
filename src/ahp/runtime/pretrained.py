"""Given weights (``init_from``): a folder of safetensors, of which every rank reads the parts that it holds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ahp.errors import BadInput, bad_input
from ahp.runtime.layout import Ranges, ranges_of
from ahp.runtime.torch_compat import local_tensor

if TYPE_CHECKING:
    from ahp.runtime.parallelize import Parallel


class Pretrained:
    """The tensors in a folder of Hugging Face weights, by name. Only headers are read until a part is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.bytes_read = 0
        """Of tensors, by this process."""
        self.files = self._index()

    def _index(self) -> dict[str, Path]:
        from safetensors import SafetensorError, safe_open

        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            what = "it holds no *.safetensors" if self.folder.is_dir() else "no such folder"
            raise bad_input("init_from", str(self.folder), f"{what}; give a folder as save_pretrained writes it")
        index: dict[str, Path] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    index.update(dict.fromkeys(file.keys(), path))
            except SafetensorError as error:
                raise bad_input("init_from", str(self.folder), f"{path.name} cannot be read ({error})") from None
        return index

    def check(self, module: nn.Module) -> dict[str, str]:
        """The folder's name of each of a module's tensors that is in it. Raises BadInput unless it is this module's.

        A tied parameter is found under any of its names; a name may lack or have the prefix of the base model.
        """
        prefix = getattr(module, "base_model_prefix", "") or ""
        found: dict[str, str] = {}
        missing: list[str] = []
        for names in _aliases(module):
            stored = next((s for name in names for s in _spellings(name, prefix) if s in self.files), None)
            if stored is None:
                missing.append(names[0])
            else:
                found[names[0]] = stored
        buffers = {s: n for n, _ in module.named_buffers() for s in _spellings(n, prefix) if s in self.files}
        known = {s for names in _aliases(module) for name in names for s in _spellings(name, prefix)} | set(buffers)
        passed_over = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
        unknown = [s for s in self.files if s not in known and not any(re.search(p, s) for p in passed_over)]
        if missing or unknown:
            told = [f"{what}: {', '.join(sorted(names)[:3])} ({len(names)} in all)"
                    for what, names in (("missing", missing), ("unknown", unknown)) if names]  # fmt: skip
            raise bad_input("init_from", str(self.folder), f"not the weights of this model; {'; '.join(told)}")
        found.update({name: stored for stored, name in buffers.items()})
        self._check_shapes(module, found)
        return found

    def _check_shapes(self, module: nn.Module, found: dict[str, str]) -> None:
        tensors: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, stored in found.items():
            with self._open(stored) as file:
                shape = tuple(file.get_slice(stored).get_shape())
            if shape != tuple(tensors[name].shape):
                raise bad_input(
                    "init_from",
                    str(self.folder),
                    f"{stored} has the shape {list(shape)}, the model's has {list(tensors[name].shape)}; the model's "
                    "config must be that of the weights",
                )

    def part(self, stored: str, ranges: dict[int, Ranges], ndim: int) -> torch.Tensor:
        """Of a tensor, what ``ranges`` says of each dim; a dim that is not named is taken whole."""
        with self._open(stored) as file:
            piece = file.get_slice(stored)
            if ndim == 0:
                read: Any = file.get_tensor(stored)
            else:
                read = _join(piece, ranges, ndim)
        self.bytes_read += read.numel() * read.element_size()
        return read

    def _open(self, stored: str) -> Any:
        from safetensors import safe_open

        return safe_open(self.files[stored], framework="pt")


def _join(piece: Any, ranges: dict[int, Ranges], ndim: int) -> torch.Tensor:
    """Read every combination of the ranges and put them together, one dim after the other."""
    dims = sorted(ranges)
    shape = piece.get_shape()
    parts: dict[tuple[int, ...], torch.Tensor] = {}
    for choice in itertools.product(*(range(len(ranges[d])) for d in dims)):
        chosen = {d: ranges[d][i] for d, i in zip(dims, choice, strict=True)}
        index = tuple(slice(*chosen.get(d, (0, shape[d]))) for d in range(ndim))
        parts[choice] = piece[index]
    for depth in reversed(range(len(dims))):
        joined: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for choice, tensor in parts.items():
            joined.setdefault(choice[:depth], []).append(tensor)
        parts = {key: torch.cat(group, dims[depth]) if len(group) > 1 else group[0] for key, group in joined.items()}
    return parts[()]


def _aliases(module: nn.Module) -> list[list[str]]:
    """The names of each parameter, the first one first."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return list(by_id.values())


def _spellings(name: str, prefix: str) -> Iterator[str]:
    yield name
    if prefix:
        yield name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"


def fill(parallel: Parallel, source: Pretrained, stored: dict[str, str]) -> None:
    """Copy this rank's parts into its parameters and buffers. No collective: every rank reads for itself."""
    with torch.no_grad():
        for name, parameter in parallel.parameters.items():
            local = local_tensor(parameter)
            if local.numel() > 0:
                local.copy_(source.part(stored[name], ranges_of(parallel, name), parameter.ndim))
        for stage in parallel.stages.values():
            for name, buffer in stage.model.named_buffers():
                if name in stored:
                    buffer.copy_(source.part(stored[name], {}, buffer.ndim))
    parallel.held.refresh_twins()


def check_folder(folder: str | Path, module: nn.Module) -> Path:
    """Look, before a worker starts, whether a folder is there and holds this model's weights. Returns its tokenizer.json.

    Raises BadInput.
    """
    source = Pretrained(folder)
    source.check(module)
    tokenizer = source.folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise BadInput(
            f"init_from = {str(folder)!r}: it holds no tokenizer.json, and the weights mean the tokens of their own tokenizer "
            "alone; save it there with AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    return tokenizer
