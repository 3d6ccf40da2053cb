"""Dicts of records that are not changed: a result that is computed once is shared by all who ask for it."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import AfterValidator

from ahp.errors import BadInput

Value = TypeVar("Value")


class ReadOnly(dict[str, Value]):
    """A dict that refuses changes; ``dict(it)`` is a copy that takes them."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise BadInput(
            "a record is not changed; make another from a copy: record.model_copy(update={KEY: {**dict, ...}})"
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


ReadOnlyDict = Annotated[dict[str, Value], AfterValidator(ReadOnly)]
"""A field of a record with such a dict."""
