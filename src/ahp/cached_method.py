"""A method that keeps its results in its object."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def cached_method(method: Method) -> Method:
    """``functools.cached_property`` for a method with hashable arguments: each object keeps its own results, and they go with it.

    ``functools.cache`` on a method keeps one dictionary for all objects, and with it every object for as long as the class lives.
    """
    return cast(Method, _Cached(method))


class _Cached:
    def __init__(self, method: Any) -> None:
        self._method, self.__doc__ = method, method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._method
        # Later calls find the cache in the object's dictionary, and do not come here.
        found = instance.__dict__[self._name] = cache(self._method.__get__(instance, owner))
        return found
