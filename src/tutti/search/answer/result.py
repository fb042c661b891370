"""What a search returns: the best plan, what it is held against, and the proof of how good it is.

Values only; `explain` puts them into words, `report` into a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tutti.cost.calibration.intervals import shipped_widths
from tutti.plan.files import plan_to_document
from tutti.plan.plan import Plan
from tutti.search.pricing.money_and_energy import Spending
from tutti.simulate.estimate import Estimate


class Objective(StrEnum):
    """What a search makes best."""

    STEP_TIME = "time"
    COST = "cost"  # tokens per currency unit
    ENERGY = "energy"  # tokens per joule


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenPlan:
    """A plan that passed the checker, the static check and the event simulator."""

    plan: Plan
    estimate: Estimate
    summary: str  # its strategy in one line

    @property
    def step_seconds(self) -> float:
        """Simulated seconds of a step, the slowest node's."""
        return self.estimate.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole job."""
        return self.estimate.tokens_per_second

    def is_told_apart(self, other: ProvenPlan) -> bool:
        """Tell whether predictions say which of two plans for one job is faster."""
        width = max(self.estimate.half_width, other.estimate.half_width)
        return shipped_widths().apart(self.step_seconds, other.step_seconds, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The best plan for one pool by itself, with its share of the batch."""

    pool: str
    global_batch: int
    proven: ProvenPlan
    fits: bool = True  # False: the pool cannot hold the model; priced with unlimited memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Strategies that were never priced one by one, and why."""

    what: str  # "strategies of uneven stages", …
    by: str  # the bound or the constraint
    count: int
    bound_seconds: float | None = None  # none of them can be faster than this


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The answer of the planner."""

    best: ProvenPlan
    lower_bound_seconds: float  # no plan of the whole space is faster
    search_cpu_seconds: float
    objective: Objective = Objective.STEP_TIME
    runner_up: ProvenPlan | None = None  # the best plan of another strategy
    why_runner_up_lost: str = ""
    uniform: ProvenPlan | None = (
        None  # best Megatron-style plan; None where there is none that fits
    )
    uniform_missing: str = ""  # why there is none
    alone: Mapping[str, Alone] = field(default_factory=dict)
    alone_missing: Mapping[str, str] = field(default_factory=dict)  # pool → why there is none
    pruned: tuple[Pruned, ...] = ()
    interrupted: bool = False  # Ctrl-C: the best found so far
    value: float | None = None  # what the objective counts, per step: seconds, currency, joules
    value_bound: float | None = None  # no plan has less of it
    spending: Spending | None = None  # of a step, in money and energy
    work: Mapping[str, int] = field(default_factory=dict)  # what was counted: priced, simulated

    @property
    def gap_pct(self) -> float:
        """How far above the objective's bound the plan is, at most this far from the best."""
        value, bound = self.best.step_seconds, self.lower_bound_seconds
        if self.objective is not Objective.STEP_TIME:
            value, bound = self.value or 0.0, self.value_bound or 0.0
        return 100.0 * (value / bound - 1.0) if bound > 0 else math.inf

    @property
    def value_unit(self) -> str:
        """What `value` is counted in."""
        if self.objective is Objective.COST:
            return f"{self.spending.currency if self.spending else 'currency'} per step"
        return "J per step" if self.objective is Objective.ENERGY else "s per step"

    @property
    def mixed_efficiency_pct(self) -> float | None:
        """Throughput of the mixed job over the sum of the pools' alone (DESIGN §5)."""
        if not self.alone or self.alone_missing:
            return None
        parts = sum(one.proven.tokens_per_second for one in self.alone.values())
        return 100.0 * self.best.tokens_per_second / parts

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the best uniform plan."""
        if self.uniform is None:
            return None
        return self.uniform.step_seconds / self.best.step_seconds

    def to_document(self) -> dict[str, object]:
        """Return the result as plain values for `--json`."""
        estimate = self.best.estimate
        return {
            "plan": plan_to_document(self.best.plan),
            "summary": self.best.summary,
            "objective": self.objective.value,
            "value": self.value,
            "value_bound": self.value_bound,
            "value_unit": self.value_unit,
            "spending": self.spending.to_document() if self.spending is not None else None,
            "step_time_s": estimate.step_seconds,
            "step_time_interval_s": list(estimate.interval),
            "lower_bound_s": self.lower_bound_seconds,
            "gap_pct": self.gap_pct if math.isfinite(self.gap_pct) else None,
            "mfu": estimate.mfu,
            "tokens_per_s": estimate.tokens_per_second,
            "mixed_efficiency_pct": self.mixed_efficiency_pct,
            "basis": dict(estimate.priced.basis),
            "uniform": (
                {**_figures(self.uniform), "told_apart": self.best.is_told_apart(self.uniform)}
                if self.uniform
                else {"why": self.uniform_missing}
            ),
            "alone": {
                name: {
                    **_figures(one.proven),
                    "global_batch": one.global_batch,
                    "fits": one.fits,
                }
                for name, one in self.alone.items()
            }
            | {name: {"why": why} for name, why in self.alone_missing.items()},
            "runner_up": (
                {
                    **_figures(self.runner_up),
                    "why": self.why_runner_up_lost,
                    "told_apart": self.best.is_told_apart(self.runner_up),
                }
                if self.runner_up
                else None
            ),
            "pruned": [
                {"what": p.what, "by": p.by, "count": p.count, "bound_s": p.bound_seconds}
                for p in self.pruned
            ],
            "work": dict(self.work),
            "interrupted": self.interrupted,
            "search_cpu_s": self.search_cpu_seconds,
        }


def _figures(proven: ProvenPlan) -> dict[str, object]:
    return {
        "step_time_s": proven.step_seconds,
        "step_time_interval_s": list(proven.estimate.interval),
        "tokens_per_s": proven.tokens_per_second,
        "mfu": proven.estimate.mfu,
        "summary": proven.summary,
    }
