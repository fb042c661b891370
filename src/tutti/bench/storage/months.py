"""Young's interval against the best one, in months of failures that are simulated by a seed.

The best interval of one month knows when its failures come; no formula can. So single months also
hold the interval that is best over all of them: what it loses there is chance, not the formula's.
"""

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
    """The formula beside the best of 400 intervals: over all months as one, and month by month."""

    case: str
    months: int
    formula_s: float
    best_s: float  # over all months
    excess: float  # how much more the formula loses than that, over all months
    single_mean: float  # and than each month's own best: mean, 95 of 100, worst
    single_p95: float
    single_worst: float
    chance_mean: float  # the same of the interval that is best over all months
    chance_p95: float
    chance_worst: float
    best_low_s: float  # where 9 of 10 months have their own best
    best_high_s: float


def month_rows(seed: int, months: int) -> Iterator[MonthRow]:
    """Yield each case over so many months."""
    for name, facts in CASES.items():
        drawn = [month_of_failures(facts, one) for one in range(seed, seed + months)]
        everything = np.concatenate(drawn)
        formula, best = best_interval(facts).interval_s, best_simulated(facts, everything)
        own = [best_simulated(facts, gaps) for gaps in drawn]
        ours, chance = (
            np.array([
                simulated_share(facts, interval, gaps) / one.lost_share - 1.0
                for gaps, one in zip(drawn, own, strict=True)
            ])
            for interval in (formula, best.interval_s)
        )  # fmt: skip
        low, high = np.percentile([one.interval_s for one in own], (5, 95))
        yield MonthRow(
            case=name, months=months, formula_s=formula, best_s=best.interval_s,
            excess=simulated_share(facts, formula, everything) / best.lost_share - 1.0,
            single_mean=float(ours.mean()), single_p95=float(np.percentile(ours, 95)),
            single_worst=float(ours.max()), chance_mean=float(chance.mean()),
            chance_p95=float(np.percentile(chance, 95)), chance_worst=float(chance.max()),
            best_low_s=float(low), best_high_s=float(high),
        )  # fmt: skip
