"""Reads a layout, or some of its keys, in the words of the command line: ``tp=8 pp=1``, or as tables print it."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ahp.config import Constraints
from ahp.errors import bad_input
from ahp.plan import Parallelism, validated
from ahp.violations import MOST_SHOWN
from ahp.words import SHORT_NAMES
from ahp.yaml_text import parse_yaml

DATA = "dp"
"""Replicas, replicate x shard degree: not a key of a layout, but the product of two keys."""

_PRINTED = re.compile(
    r"dp(?P<dp>\d+(x\d+)?)|zero(?P<zero>\d)|tp(?P<tp>\d+)(?P<sp>\+sp)?|cp(?P<cp>\d+)(\((?P<cp_method>[a-z-]+)\))?|ep(?P<ep>\d+)|etp(?P<etp>\d+)|mb(?P<mb>\d+)"
    r"|pp(?P<pp>\d+)(x(?P<virtual>\d+))?(\((?P<schedule>\w+)\))?|(?P<recompute>none|selective|full)(\((?P<recomputed>(\d{1,4}x)?\d{1,6}( (\d{1,4}x)?\d{1,6})*)\))?"
    r"|order\((?P<order>[\w>]+)\)"
)
"""The words of ``Parallelism.short``; dp and pp also without what it prints after the degree."""


def is_printed(word: str) -> bool:
    """Whether it is one of the words of ``Parallelism.short``."""
    return _PRINTED.fullmatch(word) is not None


def keys_of(words: str, option: str) -> dict[str, Any]:
    """The keys that are given, with ``dp`` among them if only the product is. Raises BadInput for what is not a layout."""
    found: dict[str, Any] = {}
    for word in re.split(r"[,\s]+(?![^\[(]*[\])])", words.strip()):  # what is within brackets belongs to the value
        for key, value in _said(word, option).items():
            if key in found:
                raise bad_input(option, words, f"{word} gives {key} a second time")
            found[key] = value
    return found


def _said(word: str, option: str) -> dict[str, Any]:
    printed = _PRINTED.fullmatch(word)
    if printed is not None:
        short = {key: value for key, value in printed.groupdict().items() if value is not None}
    else:
        if word == "sp" or re.match(r"(on|m)\(", word):
            rule = "is printed of a mixed cluster's placement, of which words do not say everything; leave it out, or give a plan.yaml"
            raise bad_input(option, word, rule)
        key, equals, value = word.partition("=")
        short = {key: value}
        if not equals or (key != DATA and SHORT_NAMES.get(key, key.replace("-", "_")) not in Constraints.model_fields):
            raise bad_input(
                option,
                word,
                "must be KEY=VALUE or a word of a plan's table such as tp8, separated by spaces",
                [*SHORT_NAMES, DATA],
            )
    found: dict[str, Any] = {}
    for key, value in short.items():
        if key == DATA:
            found |= _replicas(value, option)
        elif printed is not None and key == "sp":
            found[SHORT_NAMES[key]] = True
        elif printed is not None and key == "order":
            found[SHORT_NAMES[key]] = value.split(">")
        elif printed is not None and key == "recomputed":
            found["recomputed_layers_per_stage"] = _counts(value)
        else:
            found[SHORT_NAMES.get(key, key.replace("-", "_"))] = _value(option, key, value)
    return found


def _counts(text: str) -> list[int]:
    """``3x6 2``, as ``ahp.words.counted`` prints it: 6 6 6 2."""
    runs = (word.rpartition("x") for word in text.split())
    return [int(one) for times, _, one in runs for _ in range(int(times or 1))]


def _value(option: str, key: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise bad_input(option, f"{key}={text[:MOST_SHOWN]}", f"the value is not YAML: {error}") from None


def _replicas(value: str, option: str) -> dict[str, Any]:
    """``8``, or ``2x4``: replicate x shard degree."""
    replicate, times, shard = value.partition("x")
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}(x0*[1-9][0-9]{0,8})?", value):
        raise bad_input(
            option, f"dp={value}", "must be the number of replicas, or replicate x shard degree", ["8", "2x4"]
        )
    if not times:
        return {DATA: int(replicate)}
    return {SHORT_NAMES["dp_replicate"]: int(replicate), SHORT_NAMES["dp_shard"]: int(shard)}


def constraints_of(words: str, option: str = "--why-not") -> list[Constraints]:
    """The constraints in the words: one, or one for each way to split ``dp`` into replicate x shard degree. Raises BadInput."""
    keys = keys_of(words, option)
    replicas = keys.pop(DATA, None)
    if replicas is None:
        return [validated(Constraints, keys, option)]
    replicate, shard = SHORT_NAMES["dp_replicate"], SHORT_NAMES["dp_shard"]
    if twice := [key for key in (replicate, shard) if key in keys]:
        raise bad_input(option, words, f"dp is replicate x shard degree: give dp, or {twice[0]} and the other degree")
    ways = [(replicas // s, s) for s in range(1, replicas + 1) if replicas % s == 0]
    return [validated(Constraints, {**keys, replicate: r, shard: s}, option) for r, s in ways]


def layout_of(words: str, option: str) -> Parallelism:
    """A whole layout; keys that are not given have their defaults. Raises BadInput."""
    keys = keys_of(words, option)
    if DATA in keys:
        rule = "give how the replicas shard their states: dp=REPLICATExSHARD"
        raise bad_input(option, f"dp={keys[DATA]}", rule, dict.fromkeys((f"{keys[DATA]}x1", f"1x{keys[DATA]}")))
    return validated(Parallelism, keys, option)
