"""Private PyTorch is used in four files alone, so that a new release of torch breaks these (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "ahp"
ALLOWED = {PACKAGE / room / "torch_compat.py" for room in ("graph", "runtime", "runtime/pipeline", "runtime/ranks")}
OPERATORS = ("torch.ops", "torch._ops")
"""What a graph consists of, and its type: without a public name, and as stable as saved graphs must be."""


def private_names(source: str) -> set[str]:
    """Modules, functions and classes of torch's with a private part in their name that a file imports or reaches from what it imports."""
    names: dict[str, str] = {}
    found: list[str] = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                found.append(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.append(f"{node.module}.{alias.name}")
    found += (name for node in ast.walk(tree) for name in _reached(node, names))
    return {name for name in found if _is_private(name)}


def _reached(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """The whole name of an attribute of something imported."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if parts and isinstance(node, ast.Name) and node.id in names:
        yield ".".join([names[node.id], *reversed(parts)])


def _is_private(name: str) -> bool:
    first, *others = name.split(".")
    return (
        first == "torch"
        and any(part.startswith("_") and not part.startswith("__") for part in others)
        and not any(name == prefix or name.startswith(f"{prefix}.") for prefix in OPERATORS)
    )


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path not in ALLOWED)


def test_private_torch_is_in_four_files() -> None:
    """What other files use needs a name in torch_compat.py."""
    assert len(FILES) > 100
    sources = {path: path.read_text() for path in FILES}
    found = {path: private_names(source) for path, source in sources.items() if "torch" in source}
    assert {str(path): names for path, names in found.items() if names} == {}


def test_the_reader_sees_every_form() -> None:
    source = """
import torch, torch._dynamo
import torch.utils._pytree as trees
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
def f(module):
    from torch.optim._muon import EPS
    torch._foreach_norm([]); dist.distributed_c10d._get_default_store(); trees.tree_leaves(1)
    torch.nn.init.__doc__; torch.ops.aten._softmax; module._buffers; torch._ops.OpOverload
"""
    assert private_names(source) == {
        "torch._dynamo",
        "torch.utils._pytree",
        "torch.utils._pytree.tree_leaves",
        "torch._subclasses.FakeTensorMode",
        "torch.optim._muon.EPS",
        "torch._foreach_norm",
        "torch.distributed.distributed_c10d._get_default_store",
    }


def test_the_four_files_are_where_it_is() -> None:
    assert all(private_names(path.read_text()) for path in ALLOWED)


def test_what_launchers_import_leaves_fsdp_and_dtensor_alone() -> None:
    """A second of processor time at each start of ``ahp train``, and no launcher holds a parameter."""
    heavy = ("torch.distributed.fsdp", "torch.distributed.tensor", "ahp.runtime.torch_compat", "ahp.runtime.parallel")
    for path in sorted((PACKAGE / "runtime" / "ranks").glob("*.py")):
        modules = [node.module or "" for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        assert not [module for module in modules if module.startswith(heavy)], path.name
