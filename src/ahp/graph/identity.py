"""Keys of caches for objects that are compared by identity."""

from __future__ import annotations

from typing import Any


class Same:
    """Hashes an object by its identity, and keeps it alive so that the identity stays its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value
