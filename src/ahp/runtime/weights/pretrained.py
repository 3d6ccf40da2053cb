"""Given weights (``init_from``): a folder of safetensors, of which every rank reads the parts that it holds."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ahp.errors import BadInput, bad_input
from ahp.graph.models import names_of_parameters
from ahp.runtime.shard.parameter_layout import ParameterLayout, Ranges, cut_to
from ahp.runtime.torch_compat import local_tensor
from ahp.runtime.weights.hub_names import InFiles, Piece, as_it_is, in_files, kept_buffers

ROWS = 4096
"""How many rows of two tensors are read and compared at a time: some tens of megabytes of an embedding."""


class Pretrained:
    """The tensors in a folder of Hugging Face weights, keyed by name. Only headers are read until a part is requested."""

    def __init__(self, folder: str | Path, key: str = "init_from") -> None:
        self.folder = Path(folder).expanduser()
        self.key = key
        """The folder's name in errors."""
        self.bytes_read = 0
        """Bytes of tensors that this process has read."""
        self._opened: dict[Path, Any] = {}
        self.files = self._index()

    def _index(self) -> dict[str, Path]:
        from safetensors import SafetensorError, safe_open

        paths = self._paths()
        if not paths:
            raise bad_input(self.key, str(self.folder), self._lacks())
        index: dict[str, Path] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    index.update(dict.fromkeys(file.keys(), path))
            except (SafetensorError, OSError) as error:
                raise bad_input(self.key, str(self.folder), f"{path.name} cannot be read ({error})") from None
        return index

    def _lacks(self) -> str:
        """What a folder without weights lacks, in words."""
        if not self.folder.is_dir():
            return "no such folder; give a folder as save_pretrained writes it"
        if not any(self.folder.glob("*.bin")):
            return "it holds no *.safetensors; give a folder as save_pretrained writes it"
        return (
            "it holds *.bin and no *.safetensors; a .bin can run code when it is read, so AHP reads none: convert it with "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another), and save the tokenizer there"
        )

    def _paths(self) -> list[Path]:
        """The files that transformers reads: the whole model, else the files that its index names, else all. Folders can hold other files too:
        ``consolidated.safetensors`` from the hub, or old pieces if a folder was written twice."""
        whole, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if whole.is_file():
            return [whole]
        if not index.is_file():
            return sorted(self.folder.glob("*.safetensors"))
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            paths = [self.folder / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{index.name} cannot be read ({type(error).__name__}: {error})"
            raise bad_input(self.key, str(self.folder), problem) from None
        if missing := [path.name for path in paths if not path.is_file()]:
            raise bad_input(self.key, str(self.folder), f"{index.name} names {missing[0]}, which is not there")
        return paths

    def check(self, module: nn.Module, known: dict[str, InFiles]) -> dict[str, InFiles]:
        """Where each of a module's tensors is in the folder. Raises BadInput unless it is this module's.

        ``known``: how transformers writes its parameters (``in_files``); files may also use the names of the module. A tied
        parameter is found under any of its names; a name can lack or have the prefix of the base model.
        """
        prefix = getattr(module, "base_model_prefix", "") or ""
        found: dict[str, InFiles] = {}
        missing: list[str] = []
        for names in names_of_parameters(module):
            shape = known[names[0]].shape
            given = [self._under_its_name(as_it_is(name, shape), prefix) for name in names]
            given.append(self._under_its_name(known[names[0]], prefix))
            stored = next((one for one in given if one is not None), None)
            self._refuse_unlike([one for one in given[: len(names)] if one is not None])
            if stored is None:
                pieces = [piece.stored for piece in known[names[0]].pieces]
                lacking = [name for name in pieces if not any(s in self.files for s in _spellings(name, prefix))]
                missing += lacking if len(lacking) < len(pieces) else [names[0]]
            else:
                found[names[0]] = stored
        for name, buffer in kept_buffers(module):
            plain = as_it_is(name, tuple(buffer.shape))
            given = [self._under_its_name(form, prefix) for form in (plain, known.get(name, plain))]
            if stored := given[0] or given[1]:
                found[name] = stored
        names = {piece.stored for form in known.values() for piece in form.pieces}.union(
            *names_of_parameters(module), found
        )
        names |= {name for name, _ in module.named_buffers()}
        self._refuse_others({s for name in names for s in _spellings(name, prefix)}, missing, module)
        self._check_shapes(found)
        return found

    def _refuse_unlike(self, tied: list[InFiles]) -> None:
        """Refuse tensors with different values for one tied parameter: transformers would not tie them."""
        before = self.bytes_read
        self._check_shapes({one.pieces[0].stored: one for one in tied})
        for other in tied[1:]:
            size = tied[0].shape[0] if tied[0].shape else 1
            blocks: list[dict[int, Ranges]] = [
                {0: [(first, min(first + ROWS, size))]} for first in range(0, size, ROWS)
            ]
            if not all(self.part(tied[0], block).equal(self.part(other, block)) for block in blocks):
                names = " and ".join(one.pieces[0].stored for one in (tied[0], other))
                raise bad_input(
                    self.key,
                    str(self.folder),
                    f"{names} have different values, and the model ties them; set tie_word_embeddings to false in its config.json, or leave one "
                    "of them out",
                )
        self.bytes_read = before  # read to be compared, and again by whoever holds them

    def _under_its_name(self, wanted: InFiles, prefix: str) -> InFiles | None:
        """The same with the names that its pieces have in the folder, None if one is missing."""
        pieces = []
        for piece in wanted.pieces:
            stored = next((name for name in _spellings(piece.stored, prefix) if name in self.files), None)
            if stored is None:
                return None
            pieces.append(replace(piece, stored=stored))
        return InFiles(wanted.shape, tuple(pieces))

    def _refuse_others(self, known: set[str], missing: list[str], module: nn.Module) -> None:
        """Raises BadInput for tensors that the folder lacks, or that the model has no place for."""
        passed_over = _passed_over(module)
        unknown = [s for s in self.files if s not in known and not any(re.search(p, s) for p in passed_over)]
        if missing or unknown:
            differences = [f"{what}: {', '.join(sorted(names)[:3])} ({len(names)} in all)"
                    for what, names in (("missing", missing), ("unknown", unknown)) if names]  # fmt: skip
            raise bad_input(self.key, str(self.folder), f"not the weights of this model; {'; '.join(differences)}")

    def _check_shapes(self, found: dict[str, InFiles]) -> None:
        for piece in (piece for one in found.values() for piece in one.pieces):
            shape = tuple(self._file(piece.stored).get_slice(piece.stored).get_shape())
            if shape != piece.shape:
                raise bad_input(
                    self.key,
                    str(self.folder),
                    f"{piece.stored} has the shape {list(shape)}, the model's has {list(piece.shape)}; the model's "
                    "config must be that of the weights",
                )

    def part(self, source: InFiles, ranges: dict[int, Ranges]) -> torch.Tensor:
        """Read the part of a tensor that ``ranges`` gives for each dim; a dim that is not named is taken whole."""
        wanted = [ranges.get(dim, [(0, size)]) for dim, size in enumerate(source.shape)]
        size = [sum(end - first for first, end in of_dim) for of_dim in wanted]
        parts: list[tuple[tuple[slice, ...], torch.Tensor]] = []
        for piece in source.pieces:
            overlaps = [
                cut_to(of_dim, start, start + rows)
                for of_dim, start, rows in zip(wanted, piece.starts, piece.sizes, strict=True)
            ]
            for block in itertools.product(*overlaps):
                read = self._read(piece, tuple((first, end) for first, end, _ in block))
                parts.append((tuple(slice(at, at + end - first) for first, end, at in block), read))
        if len(parts) == 1:
            return parts[0][1]
        first = source.pieces[0]
        out = self._read(first, tuple((start, start) for start in first.starts)).new_empty(size)
        for place, read in parts:
            out[place] = read
        return out

    def _read(self, piece: Piece, block: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Read rows ``first .. end`` of each dim of the parameter, all of them in the piece."""
        file = self._file(piece.stored)
        if not piece.shape:
            read = file.get_tensor(piece.stored)
        else:
            index = [slice(0, 1)] * len(piece.shape)
            for dim, start, (first, end) in zip(piece.dims, piece.starts, block, strict=True):
                if dim is not None:
                    index[dim] = slice(first - start, end - start)
            read = file.get_slice(piece.stored)[tuple(index)]
        self.bytes_read += read.numel() * read.element_size()
        order = [dim for dim in piece.dims if dim is not None]
        others = [dim for dim in range(read.dim()) if dim not in order]
        return read.permute((*order, *others)).reshape([end - first for first, end in block])

    def _file(self, stored: str) -> Any:
        """The file that holds a tensor; it stays open, because opening it reads a header of all its tensors."""
        from safetensors import safe_open

        path = self.files[stored]
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        return self._opened[path]


def _passed_over(module: nn.Module) -> list[str]:
    """Patterns of tensors that transformers skips: those that the model's class names, and tables that older releases saved in each block and
    that today's compute (Llama 2)."""
    found: list[str] = list(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in module.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        found.append(r"rotary_emb\.inv_freq$")
    if any(name.endswith("position_ids") for name in buffers):
        found.append(r"(^|\.)position_ids$")
    return found


def _spellings(name: str, prefix: str) -> Iterator[str]:
    yield name
    if prefix:
        yield name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"


def fill(
    parameters: Mapping[str, torch.Tensor],
    layout: ParameterLayout,
    buffers: Iterable[tuple[str, torch.Tensor]],
    source: Pretrained,
    stored: dict[str, InFiles],
) -> None:
    """Copy this rank's parts into its parameters and its ``buffers``. No collective: every rank reads for itself."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            local = local_tensor(parameter)
            if local.numel() > 0:
                local.copy_(source.part(stored[name], layout.ranges(name)))
        for name, buffer in buffers:
            if name in stored:
                buffer.copy_(source.part(stored[name], {}))


def fill_whole(module: nn.Module, source: Pretrained) -> None:
    """Copy all of a folder's weights into a module that is not cut. Raises BadInput unless they are this module's."""
    stored = source.check(module, in_files(module))
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *kept_buffers(module)):
            if name in stored:
                tensor.copy_(source.part(stored[name], {}))


def check_folder(folder: str | Path, module: nn.Module) -> Path:
    """Check, before a worker starts, that a folder exists and holds this model's weights. Returns the path of its tokenizer.json.

    Raises BadInput.
    """
    source = Pretrained(folder)
    source.check(module, in_files(module))
    tokenizer = source.folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise BadInput(
            f"init_from = {str(folder)!r}: it holds no tokenizer.json, and the weights mean the tokens of their own tokenizer "
            "alone; save it there with AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    return tokenizer
