"""YAML as people write it: what config.yaml, plan.yaml, cluster.yaml and values on the command line are read with."""

from __future__ import annotations

import re
from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """YAML as ``yaml.safe_load`` reads it, but 1e-3 is a number and a key that stands twice is an error."""
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML reads, wants a dot and a signed exponent (1.0e-3); YAML 1.2 and people write 1e-3.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
