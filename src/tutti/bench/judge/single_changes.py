"""A local search by single changes: what the planner's answer is held against.

Every change is checked and simulated by the functions that answer `tutti predict`. Of all changes
of the given plan the best is taken, from there on the first that is faster, and changes of its kind
are tried next. It ends when no change helps, or when its CPU seconds are spent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tutti.bench.judge.changes import Change, single_changes
from tutti.cost.plan.plan_costs import pool_prices
from tutti.cost.plan.pool_prices import PoolPrices
from tutti.cost.plan.sources import Sources
from tutti.errors import TuttiError
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.plan.check import check_plan
from tutti.plan.plan import Plan
from tutti.schedule.schedule import ScheduleMemo
from tutti.simulate.estimate import PricingMemo, estimate

LEAST_GAIN = 1e-6  # relative: less is rounding
CPU_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """Where single changes led to."""

    plan: Plan
    before_s: float
    after_s: float
    path: tuple[tuple[str, str, float], ...] = ()  # kind, change, gain in percent
    tried: int = 0
    exhausted: bool = False  # no single change is left that helps

    @property
    def gain_pct(self) -> float:
        """How much faster the changed plan is, in percent of the given one."""
        return 100.0 * (1.0 - self.after_s / self.before_s)


@dataclass(slots=True)
class Judge:
    """Prices plans of one question, each once."""

    model: ModelSpec
    cluster: Cluster
    sources: Sources = field(default_factory=Sources)
    _known: dict[object, float | None] = field(default_factory=dict)
    _prices: dict[str, PoolPrices] | None = None
    _memo: PricingMemo = field(default_factory=lambda: PricingMemo(ScheduleMemo()))

    def seconds(self, plan: Plan) -> float | None:
        """Return the predicted seconds of a step; None where a plan is invalid or does not fit."""
        key = _key(plan)
        if key not in self._known:
            self._known[key] = self._priced(plan)
        return self._known[key]

    def knows(self, plan: Plan) -> bool:
        """Tell whether a plan was priced before."""
        return _key(plan) in self._known

    def _priced(self, plan: Plan) -> float | None:
        if check_plan(plan, self.model, self.cluster):
            return None
        if self._prices is None:
            used = {pool.name for pool in self.cluster.pools}
            self._prices = dict(pool_prices(plan, self.model, self.cluster, self.sources, used))
        try:
            priced = estimate(
                plan, self.model, self.cluster, self.sources, prices=self._prices, memo=self._memo
            )
        except TuttiError:  # an order that cannot run
            return None
        return priced.step_seconds if priced.fits else None

    def improve(
        self,
        plan: Plan,
        *,
        seed: int = 0,
        cpu_seconds: float = CPU_SECONDS,
        said: Callable[[str], None] | None = None,
    ) -> Improvement:
        """Take single changes as long as one of them is faster and CPU seconds are left."""
        plan = replace(plan, collectives=())  # a changed plan has programs of its own
        before = self.seconds(plan)
        if before is None:
            raise ValueError("the plan that is to be improved is invalid or does not fit")
        until = time.process_time() + cpu_seconds
        dice = random.Random(seed)
        best, now, tried, last = plan, before, 0, ""
        path: list[tuple[str, str, float]] = []
        while True:
            taken: tuple[Change, float] | None = None
            least = now
            for change in self._ordered(best, dice, last):
                if time.process_time() > until:
                    break
                tried += not self.knows(change.plan)
                seconds = self.seconds(change.plan)
                if seconds is not None and seconds < least * (1.0 - LEAST_GAIN):
                    taken, least = (change, seconds), seconds
                    if path:  # at first all changes are tried: one of them may undo a mistake
                        break
            if taken is None:
                exhausted = time.process_time() <= until
                return Improvement(
                    plan=best, before_s=before, after_s=now, path=tuple(path), tried=tried,
                    exhausted=exhausted,
                )  # fmt: skip
            change, seconds = taken
            path.append((change.kind, change.what, 100.0 * (1.0 - seconds / now)))
            best, now, last = change.plan, seconds, change.kind
            if said is not None:
                said(f"{change.kind}: {change.what}")

    def _ordered(self, plan: Plan, dice: random.Random, last: str) -> list[Change]:
        """Return all changes, those of the kind that helped last first, else in any order.

        Kinds take turns, so that one with many changes does not hide the others.
        """
        kinds: dict[str, list[Change]] = {}
        for change in single_changes(plan, self.model):
            kinds.setdefault(change.kind, []).append(change)
        ordered: list[tuple[float, int, Change]] = []
        for number, (kind, changes) in enumerate(kinds.items()):
            dice.shuffle(changes)
            for index, change in enumerate(changes):
                turn = -1.0 if kind == last else index + dice.random()
                ordered.append((turn, number * 100_000 + index, change))
        ordered.sort(key=lambda entry: entry[:2])
        return [change for _, _, change in ordered]


def _key(plan: Plan) -> object:
    return (plan.pipelines, plan.synchronisation, plan.tied_owner, plan.job)
