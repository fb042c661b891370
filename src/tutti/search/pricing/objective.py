"""What a plan costs per step, in the unit of the objective: seconds, currency or joules."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tutti.errors import InputError
from tutti.search.answer.result import Objective
from tutti.search.bound.lower_bound import cheapest_work
from tutti.search.pricing.money_and_energy import cost_per_second
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.space import Problem


def rates(problem: Problem) -> dict[str, float] | None:
    """Return what a chip of each pool costs per second; None where only time counts."""
    pools = problem.pools  # an unknown name is refused whatever the objective
    if problem.objective is Objective.STEP_TIME:
        return None
    per_pool: dict[str, float] = {}
    for pool in pools:
        if problem.objective is Objective.COST:
            per_second, key = cost_per_second(pool), "price_per_chip_hour"
        else:
            per_second, key = pool.chip_watts, "watts"
        if per_second is None:
            raise InputError(
                f"--objective {problem.objective}: pool '{pool.name}' has no '{key}'; add it to "
                f"cluster '{problem.cluster.name}'"
            )
        per_pool[pool.name] = per_second
    return per_pool


def value(seconds: float, chips: Mapping[str, int], per_second: dict[str, float] | None) -> float:
    """Return what a step costs that keeps so many chips of each pool for so long."""
    if per_second is None:
        return seconds
    return seconds * sum(count * per_second[pool] for pool, count in chips.items())


def value_bound(tables: Tables, seconds_bound: float) -> float:
    """Return what no plan undercuts: the bound on time, or all work where it is cheapest."""
    per_second = rates(tables.problem)
    if per_second is None:
        return seconds_bound
    prices = [per_second[pool.name] for pool in tables.problem.pools]
    if not any(prices):
        return 0.0
    cheapest = cheapest_work(tables, prices)
    return cheapest if math.isfinite(cheapest) else 0.0
