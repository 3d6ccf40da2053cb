"""Steps 3 and 4: which plan is best, and how each layer is sliced.

``ahp.search`` is both this package and a verb: ``ahp.search(graph, cluster, job)`` calls ``ahp.search.ranking.search`` and has its signature
and help. A package becomes callable through its module's class (docs.python.org/3/reference/datamodel.html, "Customizing module
attribute access").
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from ahp.search.ranking import search

        return search(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        from ahp.search.ranking import search

        return inspect.signature(search)

    @property
    def __doc__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What ``help(ahp.search)`` shows."""
        from ahp.search.ranking import search

        return f"ahp.search{inspect.signature(search)}\n\n{inspect.getdoc(search)}"


sys.modules[__name__].__class__ = _CallableModule
