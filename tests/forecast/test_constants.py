"""Constants lie in data files with their provenance, and each is used."""

from __future__ import annotations

from pathlib import Path

import pytest

import ahp
from ahp.engines.host import host
from ahp.forecast.constants import constants

SOURCE = "".join(path.read_text() for path in Path(ahp.__path__[0]).glob("[ef]*/*.py"))  # engines, forecast


FILES = {"constants": constants, "host": host}


@pytest.mark.parametrize(("called", "name"), [(called, name) for called in FILES for name in FILES[called].all])
def test_every_constant_has_a_unit_a_meaning_and_a_derivation(called: str, name: str) -> None:
    constant = FILES[called].all[name]
    assert constant.unit
    assert len(constant.meaning) > 10
    assert len(constant.derivation) > 20
    named = name.replace("_fp32", "_{name}").replace("_bf16", "_{name}")
    assert f'{called}.value("{name}")' in SOURCE or f'{called}.value(f"{named}")' in SOURCE, "nothing uses it"
