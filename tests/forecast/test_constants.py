"""Constants lie in data files with their provenance, and each is used."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import ahp
from ahp.engines import host
from ahp.forecast import constants

SOURCE = "".join(path.read_text() for path in Path(ahp.__path__[0]).glob("[ef]*/*.py"))  # engines, forecast


@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where in (constants, host) for name in where.constants()]
)
def test_every_constant_has_a_unit_a_meaning_and_a_derivation(where: ModuleType, name: str) -> None:
    constant = where.constants()[name]
    assert constant.unit
    assert len(constant.meaning) > 10
    assert len(constant.derivation) > 20
    named = name.replace("_fp32", "_{name}").replace("_bf16", "_{name}")
    module = where.__name__.rsplit(".", 1)[-1]
    assert f'{module}.value("{name}")' in SOURCE or f'{module}.value(f"{named}")' in SOURCE, "nothing uses it"
