"""tutti: train and serve one large model on a cluster of mixed chips.

Four names are enough: `tutti.Cluster.load("cluster.yaml")`, `tutti.plan(model, cluster)`,
`tutti.Trainer.from_pretrained(folder, cluster=…).fit(data)` and
`tutti.Engine.from_pretrained(folder).generate(prompts)`. They are imported when first used, and
torch only when a model runs. `tutti.plan` is also the package of the Plan; it can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.hardware.cluster import Cluster
    from tutti.search.answer.result import SearchResult
    from tutti.serve.engine import Engine
    from tutti.serve.parameters import SamplingParameters
    from tutti.train.run.trainer import Trainer

__all__ = ["Cluster", "Engine", "SamplingParameters", "Trainer", "plan"]


class _PlanPackage(ModuleType):
    """The package `tutti.plan`, which is also the function of that name."""

    def __call__(self, model: Any, cluster: Any, **options: Any) -> SearchResult:
        """Search the best plan for a model on a cluster; see `tutti.search.ask_from_values.ask`."""
        from tutti.search.ask_from_values import ask

        return ask(model, cluster, **options)


class _Package(ModuleType):
    """The class of the package itself: what is imported as `tutti.plan` becomes callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "plan" and isinstance(value, ModuleType):
            value.__class__ = _PlanPackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "Cluster":
        from tutti.hardware.cluster import Cluster

        return Cluster
    if name == "Trainer":
        from tutti.train.run.trainer import Trainer

        return Trainer
    if name == "Engine":
        from tutti.serve.engine import Engine

        return Engine
    if name == "SamplingParameters":
        from tutti.serve.parameters import SamplingParameters

        return SamplingParameters
    if name == "plan":
        import importlib

        return importlib.import_module("tutti.plan")
    raise AttributeError(f"module 'tutti' has no attribute '{name}'")
