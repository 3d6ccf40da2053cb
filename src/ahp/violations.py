"""How a user's data breaks a record's rules, in the user's words: the key, its value, the rule, what would be valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ahp.errors import nearest
from ahp.words import OTHER_NAMES

MOST_SHOWN = 80
"""Characters of a value that is repeated in an error; a longer one is cut."""

MOST_MEANT = 3
"""The most keys that are suggested for a wrong one."""
ALIKE = 0.45
"""A key is suggested if this share of the letters of both is in the same order: ``batch`` and ``global_batch_size``."""
MOST_TOLD = 10
"""The most violations of one file that are reported; a list of a wrong type has one for each of its values."""
LONGEST = 600
"""The most characters of one violation: rules of records repeat a value as it is."""


WHOLE_NUMBER, NUMBER, TRUTH = "must be a whole number", "must be a number", "must be true or false"
RULES = {
    "int_type": WHOLE_NUMBER, "int_parsing": WHOLE_NUMBER, "int_parsing_size": WHOLE_NUMBER, "int_from_float": WHOLE_NUMBER,
    "float_type": NUMBER, "float_parsing": NUMBER, "finite_number": "must be a finite number",
    "bool_type": TRUTH, "bool_parsing": TRUTH, "string_type": "must be text", "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys",
    "greater_than": "must be above {gt}", "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}", "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length}", "too_long": "must have at most {max_length}",
}  # fmt: skip
"""The rule that a violation breaks, keyed by pydantic's name for it; braces are filled with pydantic's context."""


def broken_rules(
    error: ValidationError, kind: type[BaseModel], where: str, within: type[BaseModel] | None = None
) -> Iterator[str]:
    """One line for each violation that pydantic found in data for ``kind``; ``where`` is the name of the data as a whole, ``within`` a record that
    has it as a part."""
    found = list(_at_the_innermost(error.errors()))
    for item, place in _of_the_form_meant([(item, _place(kind, item["loc"])) for item in found]):
        key = ".".join(place.keys) or where
        match item["type"]:
            case "extra_forbidden":
                yield f"{key}: unknown key ({_meant(place.keys[-1], list(place.record.model_fields), kind, within or kind)})"
            case "invalid_key":  # a number, or a word that YAML takes for another value, such as on or null
                names = list(place.record.model_fields)
                yield f"{'.'.join([*place.keys[:-1], shortened(item['input'])])}: a key must be a word, such as {', '.join(names[:3])}"
            case "missing":
                yield f"{key}: missing, and it has no default"
            case "model_type" | "model_attributes_type":
                names = list(place.record.model_fields)
                yield f"{key} = {shortened(item['input'])}: must be a mapping of keys, such as {', '.join(names[:3])}"
            case "literal_error":
                yield f"{key} = {shortened(item['input'])}: there is no such value (valid: {', '.join(_choices(item))})"
            case rule if rule in RULES:
                yield f"{key} = {shortened(item['input'])}: {RULES[rule].format(**item.get('ctx', {}))}"
            case "value_error":
                yield " ".join(str(item.get("ctx", {}).get("error", item["msg"])).split())
            case _:
                yield f"{key} = {shortened(item['input'])}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _meant(key: str, names: list[str], kind: type[BaseModel], within: type[BaseModel]) -> str:
    """The keys that a wrong one may mean: by the name that others give it, by its place, by its spelling, or else some of the valid ones.

    ``names``: the keys that are valid there; ``kind``: of the whole data, in which the key may have another place; ``within``: the record that has
    this data as a part, where the key may be one of another part.
    """
    meant = OTHER_NAMES.get(key, key)
    if meant in names:
        return f"did you mean: {meant}?"
    elsewhere = [*_paths_to(meant, kind)] or [*_paths_to(meant, within)]
    if elsewhere:
        return f"did you mean: {', '.join(sorted(elsewhere, key=lambda path: path.count('.'))[:MOST_MEANT])}?"
    near = nearest(key[:MOST_SHOWN], names, MOST_MEANT)
    if len(names) > MOST_MEANT:
        near = [name for name in near if name.startswith(key) or SequenceMatcher(None, key, name).ratio() > ALIKE]
    if not near:
        return f"valid: {', '.join(names[:MOST_TOLD])}{', ...' if len(names) > MOST_TOLD else ''}"
    return f"did you mean: {', '.join(near)}?"


def taken_for_numbers(given: Any, found: Any, key: str = "") -> Iterator[str]:
    """Values that pydantic took for numbers although the user did not write numbers: yes is not 1, and "8" is not 8.

    Text for a float stays allowed: a program that reads YAML 1.1 by other means gets 1e-3 as text.
    """
    if type(found) is int:
        if isinstance(given, (bool, str)):
            what = "true or false" if isinstance(given, bool) else "text"
            yield f"{key} = {shortened(given)}: must be a whole number, not {what}"
    elif type(found) is float:
        if isinstance(given, bool):
            yield f"{key} = {shortened(given)}: must be a number, not true or false"
    elif isinstance(found, tuple):
        # No record has tuples in a tuple: if the types are equal, nothing was converted.
        alike = not isinstance(given, (list, tuple)) or [*map(type, given)] == [*map(type, found)]
        if not alike and len(given) == len(found):
            for i, (one, read) in enumerate(zip(given, found, strict=True)):
                yield from taken_for_numbers(one, read, f"{key}.{i}")
    elif isinstance(found, BaseModel):
        if isinstance(given, Mapping):
            for name in (one for one in given if one in found.model_fields_set):
                yield from taken_for_numbers(given[name], getattr(found, name), f"{key}.{name}" if key else name)
    elif isinstance(found, Mapping) and isinstance(given, Mapping):
        for name in (one for one in given if one in found):
            yield from taken_for_numbers(given[name], found[name], f"{key}.{name}")


def first_few(words: Iterable[str]) -> str:
    """Violations in one line: the first ones, and how many more there are."""
    found = iter(words)
    shown = [f"{one[:LONGEST]}..." if len(one) > LONGEST else one for one in islice(found, MOST_TOLD)]
    left = sum(1 for _ in found)
    return "; ".join([*shown, *([f"and {left} more"] if left else [])])


def shortened(value: Any) -> str:
    """``repr`` of a value, cut to ``MOST_SHOWN`` characters and never built much longer: ten aliases in a file make a value whose ``repr``
    has no end."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > MOST_SHOWN:
            return f"{text[: MOST_SHOWN - 3]}..."
    return text


def _pieces(value: Any) -> Iterator[str]:
    match value:
        case dict():
            yield "{"
            for number, (key, one) in enumerate(value.items()):
                yield ", " if number else ""
                yield from _pieces(key)
                yield ": "
                yield from _pieces(one)
            yield "}"
        case list() | tuple():
            yield "[" if isinstance(value, list) else "("
            for number, one in enumerate(value):
                yield ", " if number else ""
                yield from _pieces(one)
            yield "]" if isinstance(value, list) else ",)" if len(value) == 1 else ")"
        case set() | frozenset():
            yield f"{type(value).__name__} "
            yield from _pieces(list(value))
        case str() | bytes():
            yield repr(value[: MOST_SHOWN + 1])
        case int() if value.bit_length() > 4 * MOST_SHOWN:
            yield f"a number of {value.bit_length()} bits"
        case _:
            yield repr(value)


def _choices(item: ErrorDetails) -> list[str]:
    """The values that a key takes, out of pydantic's ``'a', 'b' or 'c'``."""
    expected: str = item.get("ctx", {})["expected"]
    return [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]


@dataclass(frozen=True)
class _Place:
    """Where in a user's data a rule is broken."""

    keys: tuple[str, ...]
    """Without the names that pydantic puts in for the forms that a value can have, ``str`` or ``tuple[WeightedData, ...]``."""
    record: type[BaseModel]
    """The record that has the last key, or is its value."""
    forms: int | None
    """Index of such a name in pydantic's own path; None = there is none."""


def _place(kind: type[BaseModel], loc: tuple[int | str, ...]) -> _Place:
    keys, record, forms = [], kind, None
    for at, part in enumerate(loc):
        if forms == at:
            continue
        keys.append(str(part))
        if isinstance(part, str) and part in record.model_fields:
            found = record.model_fields[part].annotation
            record = next(_records(found), record)
            if get_origin(found) in (Union, UnionType) and sum(one is not NoneType for one in get_args(found)) > 1:
                forms = at + 1
    return _Place(tuple(keys), record, forms)


def _records(annotation: Any, *, in_lists: bool = True) -> Iterator[type[BaseModel]]:
    """The record types that a field can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    if in_lists or get_origin(annotation) is not tuple:
        for one in get_args(annotation):
            yield from _records(one, in_lists=in_lists)


def _paths_to(key: str, kind: type[BaseModel], above: tuple[type[BaseModel], ...] = ()) -> Iterator[str]:
    """The dotted paths of a key in the records that ``kind`` holds, not in lists. ``above``: the records that hold this one."""
    if key in kind.model_fields:
        yield key
    for name, field in kind.model_fields.items():
        for record in dict.fromkeys(_records(field.annotation, in_lists=False)):
            if record not in (kind, *above):
                yield from (f"{name}.{path}" for path in _paths_to(key, record, (kind, *above)))


def _at_the_innermost(found: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """The violations, without "list too short" if some values of the list are wrong: pydantic does not count these."""
    places = {item["loc"][:end] for item in found for end in range(len(item["loc"]))}
    return (item for item in found if item["type"] != "too_short" or item["loc"] not in places)


def _of_the_form_meant(found: list[tuple[ErrorDetails, _Place]]) -> Iterator[tuple[ErrorDetails, _Place]]:
    """The violations, without "the value does not have this form" if those of another form are about something inside the value."""
    inside = {item["loc"][: place.forms] for item, place in found if place.forms and len(item["loc"]) > place.forms + 1}
    for item, place in found:
        at_top = place.forms is not None and len(item["loc"]) == place.forms + 1
        if not (at_top and item["loc"][: place.forms] in inside):
            yield item, place
