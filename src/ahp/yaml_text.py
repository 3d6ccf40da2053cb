"""YAML as people write it: reads config.yaml, plan.yaml, cluster.yaml and values on the command line, and writes plans and clusters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.scanner import ScannerError

from ahp.errors import BadInput

MOST_CHARACTERS = 4_000_000
"""The most characters of one file: forty times a plan for a thousand devices, and some seconds of reading."""
MOST_VALUES = 200_000
"""The most values in a file, counting those behind an alias at each use: ten aliases of ten aliases of ten ... are a few lines."""
DEEPEST = 100
"""The most lists and mappings in each other; a plan has six."""
LONGEST_NUMBER = 100
"""The most characters of a number; Python's time to read one grows with the square, and it refuses to print one of more than 4,300 digits."""


MISREAD = re.compile(r"[-+]?(?:[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?|0[0-7_]+)")
"""Numbers of base 60 and base 8 in YAML 1.1: 1:30 is ninety, 010 is eight. Users mean a time, or ten."""


class NotYaml(yaml.YAMLError):
    """Why a text cannot be read, in one line."""


def parse_yaml(text: str) -> Any:
    """YAML of words, numbers, lists and mappings, as ``yaml.safe_load`` reads it, except that 1e-3 is a number; a date, 1:30 and 010 (90 and 8
    in YAML 1.1) are text; and a key that is given twice is an error.

    Raises NotYaml for everything else, and for what would be too large when it is read.
    """
    if len(text) > MOST_CHARACTERS:
        raise NotYaml(f"{len(text):,} characters (valid: up to {MOST_CHARACTERS:,})")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_large(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        problem = _one_line(error.problem or error.context or "")
        if mark is not None and not text[mark.index :].strip():
            problem = f"it ends too early: {problem}"
        raise NotYaml(PLAINER.get(problem, problem) + place) from None
    except yaml.YAMLError as error:
        raise NotYaml(_one_line(str(error))) from None
    except ValueError as error:  # from Python's own numbers, such as !!int abc
        raise NotYaml(_one_line(str(error))) from None


def read_yaml_text(path: Path) -> Any:
    """What a file of YAML has. Raises NotYaml also for what is not UTF-8, and OSError."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise NotYaml(f"byte {error.start} ({error.object[error.start]:#04x}) is not UTF-8") from None


def read_mapping(path: Path, what: str, remedy: str = "", *, may_be_empty: bool = False) -> dict[str, Any]:
    """The keys in a file of YAML; none in an empty one, if it may be empty.

    Raises BadInput for any other file. ``what`` is the user's word for the file, ``remedy`` says how to write one where there is none.
    """
    where = f"{what} = {str(path)!r}"
    if not path.is_file():
        raise BadInput(f"{where}: {_no_file_words(path)}{remedy}")
    try:
        data = read_yaml_text(path)
    except NotYaml as error:
        raise BadInput(f"{where}: not YAML: {error}") from None
    return {} if data is None and may_be_empty else mapping(data, where)


def mapping(data: Any, where: str) -> dict[str, Any]:
    """The data parsed from a file's text. Raises BadInput, which begins with ``where``, if it is not a mapping."""
    if not isinstance(data, dict):
        found = (
            "and the file is empty" if data is None else f"not a {'list' if isinstance(data, list) else 'single value'}"
        )
        raise BadInput(f"{where}: a mapping of keys was expected, {found}")
    return data


def _no_file_words(path: Path) -> str:
    """Why a path from which a file should be read is none. Pipes are refused, since some files are read twice."""
    if path.is_dir():
        return "a folder, not a file"
    return "a pipe or a device; give a file" if path.exists() else "no such file"


def written_yaml(data: Any) -> str:
    """Plain data as YAML, in the order of its keys. Written by libyaml if PyYAML has it, seven times as fast."""
    return yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        self._refuse_deep(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        self._refuse_deep(len(self.indents))
        return super().add_indent(column)

    def _refuse_deep(self, depth: int) -> None:
        """Refuse deep nesting: PyYAML's time for each token grows with the depth."""
        if depth > DEEPEST:
            problem = f"lists and mappings that lie more than {DEEPEST} deep in each other"
            raise ScannerError(None, None, problem, self.get_mark())

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0] and MISREAD.fullmatch(value):
            return "tag:yaml.org,2002:str"
        return super().resolve(kind, value, implicit)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key must be a word, not a list or a mapping", key_node.start_mark)
            key = key_node.value
            if key in seen and key != "<<":
                raise ConstructorError(None, None, f"the key {key[:80]!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > LONGEST_NUMBER:
            problem = f"a number of {len(node.value):,} characters (valid: up to {LONGEST_NUMBER})"
            raise ConstructorError(None, None, problem, node.start_mark)
        is_whole = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)

    def construct_truth(self, node: yaml.ScalarNode) -> bool:
        if node.value.lower() not in self.bool_values:
            raise ConstructorError(None, None, f"{node.value[:80]!r} is neither true nor false", node.start_mark)
        return self.construct_yaml_bool(node)


PLAINER = {
    "found character '\\t' that cannot start any token": "a tab; YAML is indented by spaces",
    "but found another document": "a second document begins here; a file has one",
}
"""What PyYAML says of mistakes that people make, in plainer words."""
PLAIN = ("null", "str", "seq", "map")
"""The types besides numbers and booleans that a file can hold; no key takes dates, sets or bytes."""
_Loader.yaml_constructors = {
    **{f"tag:yaml.org,2002:{name}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{name}"] for name in PLAIN},
    "tag:yaml.org,2002:int": _Loader.construct_number,
    "tag:yaml.org,2002:float": _Loader.construct_number,
    "tag:yaml.org,2002:bool": _Loader.construct_truth,
    None: yaml.SafeLoader.yaml_constructors[None],
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1, which PyYAML reads, wants a dot and a signed exponent (1.0e-3); YAML 1.2 and people write 1e-3.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _refuse_large(root: yaml.Node) -> None:
    """Raises a YAML error if the text stands for more values than anybody writes, for deeper ones, or for itself."""
    known: dict[int, tuple[int, int] | None] = {}

    def measure(node: yaml.Node) -> tuple[int, int]:
        """How many values a node stands for, and how deep they lie."""
        found = known.get(id(node), (0, 0))
        if found is None:
            raise ConstructorError(None, None, "an alias of a value that contains the alias", node.start_mark)
        if found[0]:
            return found
        known[id(node)] = None
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [measure(part) for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        number, depth = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
        if number > MOST_VALUES or depth > DEEPEST + 2:
            problem = f"aliases that stand for more than {MOST_VALUES:,} values, or lie more than {DEEPEST} deep in each other"
            raise ConstructorError(None, None, problem, node.start_mark)
        known[id(node)] = number, depth
        return number, depth

    measure(root)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
