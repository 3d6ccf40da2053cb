"""The data files are read alike by libyaml and by PyYAML's own parser."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import ahp
from ahp.shipped import shipped

PACKAGE = Path(ahp.__file__).parent
FILES = sorted(PACKAGE.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_file_reads_the_same_without_libyaml(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ".".join(("ahp", *path.parent.relative_to(PACKAGE).parts))
    fast = shipped(package, path.name)
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert shipped(package, path.name) == fast
    assert fast
