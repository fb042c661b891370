"""How often to save, and what a day loses to failures and to saving. Pure.

A save costs `stall_s` of training, and is of use `safe_s` after it began. At a failure the work
since the last save that was safe is lost, and the restart. Per second of time, with a save every T
and a failure every M on average, the loss is

    stall / T + (T / 2 + safe + restart) / M

which is least at T = √(2 · stall · M): Young's and Daly's first order. Saves cannot overlap, so T
is at least `safe_s`; and a save falls between two steps, so it is at least one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.hardware.cluster import Cluster
from tutti.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureFacts:
    """What decides how often a job saves."""

    mean_time_s: float  # between failures of the whole job
    stall_s: float  # of training, by a save
    safe_s: float  # from the begin of a save until it is of use
    restart_s: float  # from a failure until training goes on, with the restore
    step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingInterval:
    """How often to save, and what that loses."""

    interval_s: float
    lost_share: float  # of all time

    @property
    def hours_lost_per_day(self) -> float:
        """Of 24."""
        return 24.0 * self.lost_share


def mean_time_between_failures(plan: Plan, cluster: Cluster) -> float | None:
    """Return the mean time between failures of a job; None where no pool says its own."""
    rate = 0.0
    for pool, count in nodes_by_pool(plan).items():
        each = cluster.pool(pool).mean_time_between_failures_s
        rate += count / each if each is not None else 0.0
    return 1.0 / rate if rate else None


def nodes_by_pool(plan: Plan) -> dict[str, int]:
    """Return how many nodes of each pool a plan uses."""
    held = (r for _, _, stage in plan.stages() for r in stage.chips.ranges)
    nodes = {(r.pool, n) for r in held for n in range(r.first_node, r.last_node + 1)}
    return dict(Counter(pool for pool, _ in nodes))


def lost_share(facts: FailureFacts, interval_s: float) -> float:
    """Return the part of all time that saving and failures take, to first order; at most 1."""
    lost = interval_s / 2.0 + facts.safe_s + facts.restart_s
    return min(1.0, facts.stall_s / interval_s + lost / facts.mean_time_s)


def best_interval(facts: FailureFacts) -> SavingInterval:
    """Return how often to save, by Young's formula within what saves allow."""
    wanted = math.sqrt(2.0 * facts.stall_s * facts.mean_time_s)
    interval = max(wanted, facts.safe_s, facts.step_s, 1e-3)
    return SavingInterval(interval_s=interval, lost_share=lost_share(facts, interval))


def simulated_share(facts: FailureFacts, interval_s: float, gaps: FloatArray) -> float:
    """Return the part of the time that is lost under these times between failures.

    After each failure the job restarts, then works; a save begins after every `interval_s` of
    work, stalls it, and is of use when it is safe. What no safe save holds is done again.
    """
    cycle = interval_s + facts.stall_s
    left = np.maximum(gaps - facts.restart_s, 0.0)
    behind = facts.safe_s - facts.stall_s  # a save is safe so long after work went on
    saves = np.floor(np.maximum(left - max(behind, 0.0), 0.0) / cycle)
    done = float(np.sum(saves) * interval_s)
    return 1.0 - done / float(np.sum(gaps))


def month_of_failures(facts: FailureFacts, seed: int, days: float = 30.0) -> FloatArray:
    """Return times between failures that come independently, over so many days."""
    chance = np.random.default_rng(seed)
    whole = days * 86_400.0
    count = int(2 * whole / facts.mean_time_s) + 20
    times = np.cumsum(chance.exponential(facts.mean_time_s, count))
    inside = times[times < whole]
    return np.diff(np.concatenate([[0.0], inside, [whole]]))


def best_simulated(facts: FailureFacts, gaps: FloatArray, tries: int = 400) -> SavingInterval:
    """Return the interval that loses least under given failures, of many that were tried."""
    low = max(facts.safe_s, facts.step_s, facts.stall_s / 4, 1e-3)
    candidates = np.geomspace(low, max(2 * low, 4.0 * facts.mean_time_s), tries)
    shares = [simulated_share(facts, float(interval), gaps) for interval in candidates]
    best = int(np.argmin(shares))
    return SavingInterval(interval_s=float(candidates[best]), lost_share=shares[best])
