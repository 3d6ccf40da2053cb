"""Steps 3 and 4: which plan is best, and how each layer is sliced.

``ahp.search`` is this package and a verb at once: ``ahp.search(graph, cluster, job)`` calls
``ahp.search.ranking.search``. A package becomes callable through its module's class
(docs.python.org/3/reference/datamodel.html, "Customizing module attribute access").
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Search for the best plans; see ``ahp.search.ranking.search``."""
        from ahp.search.ranking import search

        return search(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
