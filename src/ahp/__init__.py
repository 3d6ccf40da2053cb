"""AHP (Adaptive Hybrid Parallelism) plans and runs distributed training of large language models on stock PyTorch.

The public verbs and nouns, and nothing else. Each is imported when it is first used, so that ``import ahp`` costs
nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ahp.about import __version__ as __version__

if TYPE_CHECKING:
    from ahp import errors as errors
    from ahp.cluster.measure import probe as probe
    from ahp.cluster.model import Cluster as Cluster
    from ahp.forecast.step import simulate as simulate
    from ahp.graph.kept import analyze as analyze
    from ahp.job import Job as Job
    from ahp.plan import Forecast as Forecast
    from ahp.plan import Parallelism as Parallelism
    from ahp.plan import Plan as Plan
    from ahp.runtime.parallel import parallelize as parallelize
    from ahp.runtime.run.trainer import Trainer as Trainer
    from ahp.search.ranking import search as search
    from ahp.search.slicing.model import slicing as slicing


_HOMES = {
    "analyze": "ahp.graph.kept",
    "probe": "ahp.cluster.measure",
    "Cluster": "ahp.cluster.model",
    "simulate": "ahp.forecast.step",
    "slicing": "ahp.search.slicing.model",
    "Trainer": "ahp.runtime.run.trainer",
    "parallelize": "ahp.runtime.parallel",
    "Plan": "ahp.plan",
    "Parallelism": "ahp.plan",
    "Forecast": "ahp.plan",
    "Job": "ahp.job",
}
_MODULES = {"errors": "ahp.errors", "search": "ahp.search"}
"""``ahp.search`` is a package and a verb; the module itself can be called (see its docstring)."""

# A literal list, because the tools that read it do not run the module.
__all__ = [
    "Cluster",
    "Forecast",
    "Job",
    "Parallelism",
    "Plan",
    "Trainer",
    "__version__",
    "analyze",
    "errors",
    "parallelize",
    "probe",
    "search",
    "simulate",
    "slicing",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'ahp' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
