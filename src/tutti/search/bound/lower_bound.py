"""A step time that no plan of the whole space beats.

Think of any plan whose passes take T seconds, and of one of its pipelines. The first backward
pass cannot begin before a micro-batch has gone forward through all units: a *lead* of Φ seconds.
Until then a chip has forward passes only. What these keep must lie in its memory or has been copied
to its host, so that they last so long and no longer; for the rest of the lead the chip waits (or
recomputes later, which takes as long): its *idle* seconds, more the larger Φ is. If C are the
chip-seconds of a unit per sequence, q sequences need at least

    q · C / (T − idle(Φ))       chips for that unit.

Put a price λ_k on every chip of pool k. The cheapest way to lead one sequence through all units,
each computed in any way, costs κ(T). Large micro-batches have little C and a large Φ, small ones
the reverse. All pipelines together take the whole batch B from chips that cost Σ λ_k n_k, so

    B · κ(T) ≤ Σ λ_k n_k       for every T that is possible, and for every λ.

The smallest such T is a bound. Leads are looked at cell by cell: in a cell idle is that of its
lower end, and leads above its upper end are kept out by a price on forward seconds (any price
gives a bound, the best is kept). Where the cheapest lead lies, cells are cut to a hundredth of it.
It covers plans that mix everything with everything, for it looks at single units only.

On top come the optimizer's step and the slowest node's delay, which grows with the nodes that take
part.
"""

from __future__ import annotations

import heapq
import itertools
import math

import numpy as np
import numpy.typing as npt

from tutti.search.bound.unit_choices import Ways, ways_of
from tutti.search.pricing.unit_tables import Tables
from tutti.search.thresholds import THRESHOLDS

FloatArray = npt.NDArray[np.float64]
_MOST_DELAY = math.sqrt(2.0 * math.log(1e6))  # spreads, of the slowest of a million nodes
_NEVER = 1e30  # chip-seconds, where a unit does not fit


def lower_bound(tables: Tables) -> float:
    """Return the bound in seconds; 0 where nothing is known or nothing fits."""
    ways = ways_of(tables)
    if ways is None:
        return 0.0
    problem = tables.problem
    chips = np.array([pool.num_chips for pool in problem.pools], dtype=np.float64)
    best = _best_work(ways, len(chips))
    if not np.isfinite(best).any() or not np.isfinite(ways.work.min(axis=0)).all():
        return 0.0
    prices = np.where(np.isfinite(best), 1.0 / best, 0.0)
    batch = float(problem.job.global_batch)
    fluid = _fluid(ways, chips, batch, prices)
    leads = _Leads(ways, fluid)
    reached = leads.least_time(prices, chips, batch, fluid)
    for _ in range(THRESHOLDS.bound_rounds if len(chips) > 1 else 0):
        prices = leads.fair_prices(prices, reached)
        reached = leads.least_time(prices, chips, batch, reached)
    helpers = _helpers(ways, len(chips))
    for share in THRESHOLDS.bound_shares if helpers.any() and not helpers.all() else ():
        cheaper = np.where(helpers, share * prices, prices)
        reached = leads.least_time(cheaper, chips, batch, reached)
    return _with_slowdown(tables, best, reached + _step_seconds(tables), fluid)


def cheapest_work(tables: Tables, prices: list[float]) -> float:
    """Return the least that the batch costs if chip-seconds of each pool have these prices."""
    ways = ways_of(tables)
    if ways is None:
        return 0.0
    per_unit = _paid(ways, np.array(prices)).min(axis=0)
    return float(tables.problem.job.global_batch * (per_unit * ways.counts).sum())


def _best_work(ways: Ways, pools: int) -> FloatArray:
    """Return the least chip-seconds of a sequence on each pool; infinite where nothing fits.

    Units that a pool cannot hold count as if it could do them in no time: it has help.
    """
    best = np.full(pools, np.inf)
    for pool in range(pools):
        own = ways.work[ways.pool == pool]
        if len(own):
            least = own.min(axis=0)
            held = np.isfinite(least)
            if held[1:-1].any():
                best[pool] = (least[held] * ways.counts[held]).sum()
    return best


def _helpers(ways: Ways, pools: int) -> npt.NDArray[np.bool_]:
    """Tell which pools hold no unit of some kind: they only help, and are worth less for it.

    At no price at all they do what they can for nothing, and the others have the rest to do.
    """
    held = np.isfinite(ways.work)
    return np.array([not held[ways.pool == pool].any(axis=0).all() for pool in range(pools)])


def _paid(ways: Ways, prices: FloatArray) -> FloatArray:
    """Return what a sequence's work costs in each way; infinite where a unit does not fit."""
    held = np.isfinite(ways.work)
    costs: FloatArray = np.where(
        held, prices[ways.pool][:, None] * np.where(held, ways.work, 0), np.inf
    )
    return costs


def _fluid(ways: Ways, chips: FloatArray, batch: float, prices: FloatArray) -> float:
    """The same bound without a lead: work over speed."""
    per_unit = _paid(ways, prices).min(axis=0)
    return float(batch * (per_unit * ways.counts).sum() / (prices * chips).sum())


class _Leads:
    """The cheapest way of a sequence through all units, for every lead."""

    def __init__(self, ways: Ways, fluid: float) -> None:
        self._ways = _undominated(ways)
        ends = np.geomspace(THRESHOLDS.bound_shortest * fluid, fluid, THRESHOLDS.bound_cells)[
            :-1
        ].tolist()
        self._cells = list(itertools.pairwise((0.0, *ends, math.inf)))
        self._shortest = THRESHOLDS.bound_shortest * fluid
        self._idle: dict[float, FloatArray] = {}
        # The head is no part of the lead: its passes come after everyone else's first ones.
        self._lead = self._ways.forward * (np.arange(len(ways.counts)) < len(ways.counts) - 1)
        self._by_lead = self._lead.argsort(axis=0, kind="stable")

    def least_time(
        self, prices: FloatArray, chips: FloatArray, batch: float, start: float
    ) -> float:
        """Return the smallest time, `start` or more, in which the chips pay for all sequences.

        A sequence's price, times the time in which it is paid, falls as the time grows. So a time
        that is too short says by its price how long is enough, and one that is long enough says
        how long is needed at least.
        """
        worth = float((prices * chips).sum()) * (1 + 1e-12)

        def needed(seconds: float) -> float:
            return seconds * batch * self._cost(prices, seconds) / worth

        low, high = start, needed(start)
        trial = high
        while high - low > THRESHOLDS.bound_close * low:
            more = needed(trial)
            low, high = (trial, min(high, more)) if more > trial else (low, trial)
            trial = more if low < more < high else math.sqrt(low * high)
        return low

    def fair_prices(self, prices: FloatArray, seconds: float) -> FloatArray:
        """Return prices at which a sequence costs the same on each pool that can do all units."""
        fair = prices.copy()
        costs = [self._cost(prices, seconds, pool) for pool in range(len(prices))]
        least = min(costs)
        for pool, cost in enumerate(costs):
            if math.isfinite(cost) and cost > 0.0:
                fair[pool] *= least / cost
        return fair

    def _cost(self, prices: FloatArray, seconds: float, only: int | None = None) -> float:
        """Return the least price of a sequence over all leads, on all pools or on one.

        The cheapest cell is cut in two until it is narrow. What holds for a cell holds for its
        parts, so that prices only rise, and never above the true one.
        """
        priced = _paid(self._ways, prices)
        if only is not None:
            priced[self._ways.pool != only] = math.inf
        # A price that is no more than the cell's, whether it is the cell's own, and the cell.
        queue = [(0.0, False, low, high) for low, high in self._cells if low < seconds]
        while queue:
            price, own, low, high = heapq.heappop(queue)
            if not own:
                price = max(price, self._cell_cost(priced, seconds, low, high))
                heapq.heappush(queue, (price, True, low, high))
            elif math.isinf(price) or high <= max(
                self._shortest, (1.0 + THRESHOLDS.bound_narrow) * low
            ):
                return price
            else:
                middle = (
                    THRESHOLDS.bound_wider * low
                    if math.isinf(high)
                    else math.sqrt(max(low, 1e-9) * high)
                )
                for part in ((low, middle), (middle, high)):
                    if part[0] < seconds:
                        heapq.heappush(queue, (price, False, *part))
        return math.inf

    def _cell_cost(self, priced: FloatArray, seconds: float, low: float, high: float) -> float:
        """Return a lower bound on the price of a sequence whose lead lies in a cell."""
        if low not in self._idle:
            self._idle[low] = self._ways.idle(np.array([low]))[:, :, 0]
        cost = priced / (seconds - np.minimum(self._idle[low], 0.9 * seconds))
        free = float((cost.min(axis=0) * self._ways.counts).sum())
        if math.isinf(free) or math.isinf(high):
            return free
        return self._limited(cost, free, high)

    def _limited(self, cost: FloatArray, free: float, longest: float) -> float:
        """Return a lower bound on the cost of those whose lead is below `longest`.

        A price on seconds of the lead is raised until the cheapest ways keep within it.
        """
        kinds = [self._front(cost, kind) for kind in range(cost.shape[1])]

        def at(price: float) -> tuple[float, float]:
            paid, lead = -price * longest, 0.0
            for costs, leads, count in kinds:
                charged = costs + price * leads
                chosen = charged.argmin()
                paid += count * float(charged[chosen])
                lead += count * float(leads[chosen])
            return paid, lead

        bound, lead = at(0.0)
        low, high = 0.0, 1e-3 * free / longest
        while lead > longest and high < 1e6 * free / longest:
            value, lead = at(high)
            bound = max(bound, value)
            low, high = (high, 4.0 * high) if lead > longest else (low, high)
        for _ in range(THRESHOLDS.bound_halvings if high > low > 0.0 else 0):
            middle = 0.5 * (low + high)
            value, lead = at(middle)
            bound = max(bound, value)
            low, high = (middle, high) if lead > longest else (low, middle)
        return bound

    def _front(self, cost: FloatArray, kind: int) -> tuple[FloatArray, FloatArray, float]:
        """Return cost and lead of the ways that no other one equals in the one, beats in the other.

        And how many units of the kind there are. The cheapest of all comes last.
        """
        order = self._by_lead[:, kind]
        costs = cost[order, kind]
        better = np.ones(len(costs), dtype=bool)
        np.less(costs[1:], np.minimum.accumulate(costs)[:-1], out=better[1:])
        kept = np.flatnonzero(better)
        return costs[kept], self._lead[order[kept], kind], float(self._ways.counts[kind])


def _undominated(ways: Ways) -> Ways:
    """Drop ways that another one of the pool equals or beats in all respects, whatever the lead."""
    work = np.where(np.isfinite(ways.work), ways.work, _NEVER)
    keeping = np.stack([ways.rate, ways.again, -ways.early, -ways.host, -ways.copy], axis=1)
    columns = np.concatenate([work, ways.forward, -ways.room, keeping], axis=1)
    order = np.lexsort((ways.forward.sum(axis=1), work.sum(axis=1)))
    kept: list[int] = []
    for pool in np.unique(ways.pool).tolist():
        rows = columns[:0]
        for index in order[ways.pool[order] == pool].tolist():
            if not (rows <= columns[index]).all(axis=1).any():
                kept.append(index)
                rows = np.vstack([rows, columns[index]])
    return ways.take(np.array(kept, dtype=np.int64))


def _step_seconds(tables: Tables) -> float:
    """Return the least time of the optimizer's step: some chip updates an equal share at least."""
    problem = tables.problem
    if not tables.units_alike:
        return 0.0
    chips = sum(pool.num_chips for pool in problem.pools)
    share = problem.model.num_trained / chips
    return min(tables.prices[pool.name].optimizer(share, problem.job) for pool in problem.pools)


def _with_slowdown(tables: Tables, best: FloatArray, seconds: float, fluid: float) -> float:
    """Return the bound with the slowest node's delay, for the number of nodes that suits it best.

    With fewer nodes the delay is smaller, but so is the speed: below any number of nodes the work
    alone takes the fluid time, times what is missing.
    """
    jitter = _jitter(tables, best, seconds)
    speeds = _node_speeds(tables, best)
    count = len(speeds)
    if jitter <= 0 or count < 2:
        return seconds
    ahead = np.cumsum(np.sort(speeds)[::-1])
    nodes = np.arange(1, count + 1)
    slow = 1.0 + jitter * np.sqrt(2.0 * np.log(nodes))
    alone = slow * fluid * ahead[-1] / ahead
    bound = 0.0
    for i in range(count):
        fewer = float(alone[:i].min()) if i else math.inf
        bound = max(bound, min(float(slow[i]) * seconds, fewer))
    return bound


def _jitter(tables: Tables, best: FloatArray, seconds: float) -> float:
    """Return the spread of the nodes' times that every plan worth a thought has to bear.

    A plan has the largest spread among its pools; one that leaves pools out has less, but if it
    is then slower than the bound for all pools, it does not matter.
    """
    problem = tables.problem
    chips = np.array([pool.num_chips for pool in problem.pools], dtype=np.float64)
    spreads = [tables.prices[pool.name].node_jitter for pool in problem.pools]
    batch = float(problem.job.global_batch)
    least = max(spreads)
    for spread in sorted(set(spreads)):
        kept = np.array([s <= spread for s in spreads])
        speed = (chips[kept] / best[kept]).sum()
        if speed > 0 and batch / speed < seconds * (1.0 + max(spreads) * _MOST_DELAY):
            least = min(least, spread)
    return least


def _node_speeds(tables: Tables, best: FloatArray) -> FloatArray:
    """Return each node's share of the work that the fluid bound counts on."""
    speeds: list[float] = []
    for work, pool in zip(best.tolist(), tables.problem.pools, strict=True):
        if math.isfinite(work):
            speeds += [pool.node.num_chips / work] * pool.nodes
    return np.array(speeds, dtype=np.float64)
