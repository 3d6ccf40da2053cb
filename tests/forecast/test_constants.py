"""Constants lie in data files with their provenance, and each is used."""

from __future__ import annotations

from pathlib import Path

import pytest

import ahp.forecast
from ahp.forecast.constants import constants

SOURCE = "".join(path.read_text() for path in Path(ahp.forecast.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("name", list(constants()))
def test_every_constant_has_a_unit_a_meaning_and_a_derivation(name: str) -> None:
    constant = constants()[name]
    assert constant.unit
    assert len(constant.meaning) > 10
    assert len(constant.derivation) > 20
    named = name.replace("_fp32", "_{name}").replace("_bf16", "_{name}")
    assert f'constants.value("{name}")' in SOURCE or f'constants.value(f"{named}")' in SOURCE, "nothing uses it"
