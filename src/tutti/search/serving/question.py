"""What is asked of the planner of deployments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tutti.cost.serving.engine_prices import MeasuredPools
from tutti.cost.serving.stage_prices import Formats
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.plan.serving import Service

Objective = Literal["rate", "cost", "chips"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpace:
    """What the planner may use."""

    pools: tuple[str, ...] = ()  # empty: all
    separate: bool = True  # prefill and decode may be on different engines
    mix: bool = True  # stages of one engine may be on unlike chips
    tp_max: int | None = None
    max_stages: int | None = None
    weights: Dtype | None = None  # fp8 or int8, on chips that multiply in it
    chunk: int = 2048
    most_slots: int = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServeProblem:
    """One model, one cluster, one workload."""

    model: ModelSpec
    cluster: Cluster
    service: Service
    space: ServeSpace = ServeSpace()
    objective: Objective = "rate"
    measured: MeasuredPools | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, whole pages."""
        return -(-self.service.traffic.longest // 16) * 16

    def formats(self, pool: str) -> Formats:
        """Return in which numbers a pool's engines hold weights."""
        wanted = self.space.weights
        chip = self.cluster.pool(pool).chip
        return Formats(weights=wanted if wanted is not None and chip.supports(wanted) else None)

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that may be used."""
        return self.space.pools or tuple(pool.name for pool in self.cluster.pools)
