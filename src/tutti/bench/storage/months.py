"""Young's interval against the best one, in months of failures that are simulated by a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tutti.cost.storage.failures import (
    FailureFacts,
    best_interval,
    best_simulated,
    month_of_failures,
    simulated_share,
)

HOUR = 3600.0
CASES = {
    "16,384 chips, as Llama 3 failed": FailureFacts(
        mean_time_s=54 * 24 * HOUR / 419, stall_s=10.0, safe_s=30.0, restart_s=600.0
    ),
    "1,024 chips": FailureFacts(mean_time_s=24 * HOUR, stall_s=20.0, safe_s=120.0, restart_s=300.0),
    "slow storage": FailureFacts(mean_time_s=6 * HOUR, stall_s=60.0, safe_s=400.0, restart_s=900.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthRow:
    """The formula beside the best of 400 intervals, for the same failures."""

    case: str
    months: int
    formula_s: float
    best_s: float
    formula_hours: float  # lost per day, simulated
    best_hours: float

    @property
    def excess(self) -> float:
        """How much more the formula's interval loses than the best one."""
        return self.formula_hours / self.best_hours - 1.0


def month_rows(seed: int, months: int) -> Iterator[MonthRow]:
    """Yield the comparison for one month, and for many."""
    for name, facts in CASES.items():
        for count in (1, months):
            seeds = range(seed, seed + count)
            gaps = np.concatenate([month_of_failures(facts, one) for one in seeds])
            ours, best = best_interval(facts), best_simulated(facts, gaps)
            yield MonthRow(
                case=name,
                months=count,
                formula_s=ours.interval_s,
                best_s=best.interval_s,
                formula_hours=24.0 * simulated_share(facts, ours.interval_s, gaps),
                best_hours=best.hours_lost_per_day,
            )
