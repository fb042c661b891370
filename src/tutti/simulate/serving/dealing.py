"""Who gets which request: groups of engines by their shares, decode engines by routes.

Equal engines take turns; those that are not simulated have theirs dealt, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.loops import compiled, has_numba
from tutti.plan.plan import Plan

I64 = NDArray[np.int64]
SHORT = 20_000  # requests that are dealt before numba is loaded


def dealt(plan: Plan, shown: Sequence[int], count: int) -> I64:
    """Return the requests that go to engines which are simulated, each with its group.

    Groups have their shares of all requests evenly over time; equal engines take turns.
    """
    shares = {
        group: pipeline.engine.share
        for group, pipeline in enumerate(plan.pipelines)
        if pipeline.engine is not None and pipeline.engine.share
    }
    if not shares:
        return np.empty((0, 2), np.int64)
    own = np.array(list(shares.values()))
    loop = compiled(deal) if count > SHORT and has_numba() else deal
    groups: I64 = (
        loop(own, np.zeros(count, np.int64)) if len(own) > 1 else np.zeros(count, np.int64)
    )
    rows = [np.empty((0, 2), np.int64)]
    for place, group in enumerate(shares):
        own = np.flatnonzero(groups == place)
        own = own[np.arange(len(own)) % plan.pipelines[group].copies < shown[group]]
        rows.append(np.column_stack((own, np.full(len(own), group))))
    every = np.concatenate(rows)
    return every[np.argsort(every[:, 0])]


def deal(shares: Any, groups: Any) -> Any:
    """Deal each request to whom most is owed (compiled where there are many)."""
    given = np.zeros(len(shares))
    for index in range(len(groups)):
        furthest, group = -np.inf, -1
        for each in range(len(shares)):
            owed = shares[each] * (index + 1) - given[each]
            if owed > furthest:
                furthest, group = owed, each
        given[group] += 1
        groups[index] = group
    return groups


class Onward:
    """Deals what prefill engines began to groups of decode engines, by the routes' shares."""

    def __init__(self, plan: Plan, shown: Sequence[int]) -> None:
        copies = [pipeline.copies for pipeline in plan.pipelines]
        self._routes = {
            p: [(r.decode, r.share) for r in plan.routes if r.prefill == p]
            for p in range(len(plan.pipelines))
        }
        # of what simulated prefill engines begin, so much goes to decode engines that are, too
        self._kept = {
            (r.prefill, r.decode): copies[r.prefill] * shown[r.decode]
            / (shown[r.prefill] * copies[r.decode])
            for r in plan.routes
        }  # fmt: skip
        self._given: dict[tuple[int, int], int] = {}
        self._total: dict[int, int] = {}

    def sends(self, group: int) -> bool:
        """Tell whether anybody goes on with what a group begins."""
        return bool(self._routes[group])

    def next(self, group: int) -> tuple[int, bool]:
        """Return the group that goes on, and whether an engine of it that is simulated does."""
        total = self._total.get(group, 0) + 1
        self._total[group] = total
        target = max(
            self._routes[group],
            key=lambda route: route[1] * total - self._given.get((group, route[0]), 0),
        )[0]
        given, kept = self._given.get((group, target), 0), self._kept[group, target]
        self._given[group, target] = given + 1
        return target, math.floor((given + 1) * kept) > math.floor(given * kept)
