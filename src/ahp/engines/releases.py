"""Differences between releases of an engine, as data with its source (releases.yaml)."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from ahp.errors import nearest
from ahp.shipped import shipped

Span = tuple[datetime.date, datetime.date | None]

Has = Callable[[str], bool]
"""Whether one release has a feature."""

_DAY = re.compile(r"(20\d\d)-(\d\d)(?:-(\d\d))?")
_NUMBER = re.compile(r"v?(\d+(?:\.\d+)*)")


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature that a program has in some spans of days: from the first day to the day before the second (None = until now)."""

    spans: tuple[Span, ...]
    meaning: str
    source: str
    in_recipes: bool = False
    """Whether the feature is off by default, and turned on in the recipes of these releases."""
    not_in: tuple[str, ...] = ()
    """Releases whose recipes turn the feature off."""

    def at(self, day: datetime.date | None) -> bool:
        """Whether the program of that day has the feature; None = the newest."""
        if day is None:
            return bool(self.spans) and self.spans[-1][1] is None
        return any(first <= day and (after is None or day < after) for first, after in self.spans)


@dataclass(frozen=True)
class Releases:
    """The releases of one engine by name, oldest first, and its features. Without releases all have the same features."""

    days: Mapping[str, datetime.date]
    features: Mapping[str, Feature]

    def day(self, version: str) -> datetime.date | None:
        """The day of a release; None = the newest. Raises LookupError for an unknown name.

        A number between two known releases means the earlier one (26.04.01: 26.04), a number above the last the newest.
        """
        if _DAY.fullmatch(version):
            return _day(version)
        name = self.name(version)
        return None if name is None else self.days[name]

    def name(self, version: str) -> str | None:
        """The release that a number means; None for a day, and for a number above the last. Raises LookupError for an unknown name."""
        if _DAY.fullmatch(version):
            return None
        if not (found := _NUMBER.fullmatch(version)):
            raise LookupError(version)
        asked = _numbers(found[1])
        known = {_numbers(name): name for name in self.days}
        before = [numbers for numbers in known if numbers <= asked]
        if not before:
            raise LookupError(version)
        return None if max(known) < asked and max(known) != asked[: len(max(known))] else known[max(before)]


def has(engine: str, feature: str, version: str | None) -> bool:
    """Whether a release of an engine has a feature, by default or in its recipes; ``version`` None = the newest, by default alone. An
    unknown name is a programmer's error."""
    found = releases()[engine]
    asked = found.features[feature]
    if version is None:
        return asked.at(None) and not asked.in_recipes
    return found.name(version) not in asked.not_in and asked.at(found.day(version))


def refuses(engine: str, version: str | None) -> str | None:
    """Why nothing is known about a version, or None."""
    if version is None:
        return None
    words = f"engine.version = {version!r}"
    if engine not in releases() or not releases()[engine].days:
        return f"{words}: the forecast of {engine} is the same for all releases (valid: null)"
    try:
        releases()[engine].day(version)
    except (LookupError, ValueError):
        names = list(releases()[engine].days)
        valid = ", ".join(map(str, nearest(version, names) or names))
        return f"{words}: is no known release of {engine} and no day such as 2025-06 (valid: {valid})"
    return None


@cache
def releases() -> Mapping[str, Releases]:
    """All of releases.yaml by engine, read once."""
    return {engine: _releases(entry) for engine, entry in shipped("ahp.engines", "releases.yaml").items()}


def _releases(entry: Mapping[str, Mapping[str, object]]) -> Releases:
    days = {str(name): _day(str(day)) for name, day in entry["releases"].items()}
    assert sorted(days.values()) == list(days.values()), "oldest first"
    features = {}
    for name, given in entry["features"].items():
        assert isinstance(given, dict)
        spans = tuple(
            (_day(str(first)), None if after is None else _day(str(after))) for first, after in given["spans"]
        )
        in_recipes = given.get("in_recipes", False)
        not_in = tuple(given.get("not_in", ()))
        assert days.keys() >= set(not_in), "releases of this engine"
        features[name] = Feature(
            spans=spans, meaning=given["meaning"], source=given["source"], in_recipes=in_recipes, not_in=not_in
        )
    return Releases(days, features)


def _day(text: str) -> datetime.date:
    year, month, day = _DAY.fullmatch(text).groups()  # type: ignore[union-attr]
    return datetime.date(int(year), int(month), int(day or 1))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
