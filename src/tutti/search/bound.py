"""A step time that no plan of the whole space beats.

Think of any plan. A chip of stage s, of a replica of w chips that takes b of the sequences of
every micro-batch, cannot begin before its first micro-batch has passed the stages ahead of it
(F_s seconds of forward passes), and is then busy with its own work. If C is the work of its units
per sequence in chip-seconds (w · seconds of all passes ÷ b), a pipeline that takes q sequences per
step needs at that stage at least

    q · C / (T − F_s)       chips.

Put a price λ_k on every chip of pool k. The cheapest way to lead one sequence through all units
costs κ(T) = min Σ_stages λ C / (T − F), over all sequences of stages with any configurations: a
shortest path over (unit, F), where a stage advances by its units and F by its forward time. All
pipelines together take the whole batch B from chips that cost Σ λ_k n_k, so

    B · κ(T) ≤ Σ λ_k n_k       for every T that is possible, and for every λ.

The smallest such T is a bound, whatever λ is; a few λ near the pools' relative speeds are tried
and the best is kept. It covers plans that mix everything with everything: it looks at single
stages only. Rounding is always down: F to a grid, forward times and bytes to a
coarse scale, memory to the least that a stage may need.

Configurations are those of the space that fit: a stage with so many units must hold their
parameters and the activations of one micro-batch, or gather parameters for every micro-batch
(shard level 3) at the pace of its NICs. On top come the optimizer's step and the slowest node's
delay, which grows with the nodes that take part.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.models.memory import Recompute
from tutti.plan.job import ScheduleKind
from tutti.search.room import host_bytes, usable_bytes
from tutti.search.tables import KINDS, NONE, Config, ConfigTable, Tables
from tutti.simulate.kernel import compiled

FloatArray = npt.NDArray[np.float64]
GRID = 80  # cells of F
FARTHEST = 0.5  # of the step: beyond it a stage could hardly work
_MOST_DELAY = math.sqrt(2.0 * math.log(1e6))  # spreads, of the slowest of a million nodes
_STEPS = 4  # between no and all recomputation
_TRIES = (1.02, 0.98)  # factors on one pool's price


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    """A way for a stage to compute: per unit, chip-seconds per sequence and forward seconds."""

    pool: int
    work: FloatArray
    forward: FloatArray
    static: FloatArray  # bytes that a unit must have on the chip
    passing: FloatArray  # bytes beside them, for the largest unit of a stage
    room: float


def lower_bound(tables: Tables) -> float:
    """Return the bound in seconds."""
    kinds = _kinds(tables)
    if not kinds:
        return 0.0
    problem = tables.problem
    chips = np.array([pool.num_chips for pool in problem.pools], dtype=np.float64)
    best_work = np.array(
        [
            min((float(k.work.sum()) for k in kinds if k.pool == i), default=math.inf)
            for i in range(len(chips))
        ]
    )
    usable = np.isfinite(best_work)
    if not usable.any():
        return 0.0
    prices = np.where(usable, 1.0 / best_work, 0.0)
    path = _Path(kinds, problem.model.num_units, _first_chunk(tables))
    batch = float(problem.job.global_batch)
    least = _fluid(kinds, chips, batch, prices)
    reached = path.least_time(prices, chips, batch, least)
    for index, factor in itertools.product(range(len(chips) - 1), _TRIES):
        changed = prices.copy()
        changed[index] *= factor
        found = path.least_time(changed, chips, batch, reached)
        if found > reached:
            reached, prices = found, changed
    return _with_slowdown(tables, kinds, reached + _step_seconds(tables), least)


def cheapest_work(tables: Tables, prices: list[float]) -> float:
    """Return the least that the batch costs if chip-seconds of each pool have these prices."""
    kinds = _kinds(tables)
    if not kinds:
        return 0.0
    per_unit = np.min([prices[k.pool] * k.work for k in kinds], axis=0)
    return float(tables.problem.job.global_batch * per_unit.sum())


def _first_chunk(tables: Tables) -> bool:
    """Whether a stage's first range may be a single unit (interleaved schedules)."""
    space = tables.problem.space
    return ScheduleKind.INTERLEAVED in space.schedules and max(space.virtual, default=1) > 1


def _fluid(kinds: list[_Kind], chips: FloatArray, batch: float, prices: FloatArray) -> float:
    """The same bound with F = 0: work over speed."""
    per_unit = np.min([prices[k.pool] * k.work for k in kinds], axis=0)
    return float(batch * per_unit.sum() / (prices * chips).sum())


def _kinds(tables: Tables) -> list[_Kind]:
    """Return the configurations of the space that no other one beats in everything."""
    problem = tables.problem
    found: list[_Kind] = []
    for index, pool in enumerate(problem.pools):
        configs = [
            Config(pool.name, tp, cp, ep, b)
            for tp in problem.tensor_degrees(pool)
            for cp in problem.context_degrees()
            for ep in problem.expert_degrees()
            for b in problem.sequence_counts()
            if tp * cp <= pool.num_chips
        ]
        tables.prepare(configs)
        own = [
            kind
            for config in configs
            if (table := tables.get(config)) is not None
            for kind in _ways(tables, table, index)
        ]
        found += _undominated(own)
    return found


def _ways(tables: Tables, table: ConfigTable, index: int) -> Iterator[_Kind]:
    problem, config = tables.problem, table.config
    pool = tables.pool(config.pool)
    room = math.inf
    if not problem.unlimited_memory:
        room = usable_bytes(pool.chip.memory_bytes, tables.sources.overheads)
    per_sequence = config.width / config.sequences
    shard, offload = problem.space.shard, problem.space.offload
    host = host_bytes(pool) if "activations" in offload else 0.0
    traffic = _gather_seconds(tables, table)
    sharded = 3 in shard and pool.num_chips >= 2 * config.width
    for seconds, kept in _recomputed(table, problem.space.recompute, math.isfinite(room)):
        static = table.parameter_bytes.copy()
        if max(shard) < 2 and "gradients" not in offload:
            static = static + table.gradient_bytes
        if max(shard) < 1 and "optimizer" not in offload:
            static = static + table.optimizer_bytes
        if "parameters" in offload:
            static = np.zeros_like(static)
        plain = _Kind(
            pool=index,
            work=seconds * per_sequence,
            forward=table.forward.min(axis=0),
            static=static + kept,
            passing=table.passing,
            room=room + host,
        )
        yield plain
        if sharded:
            busy = np.maximum(seconds, traffic) * per_sequence
            yield dataclasses.replace(plain, work=busy, static=kept)


def _recomputed(
    table: ConfigTable, allowed: tuple[Recompute, ...], limited: bool
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield seconds and kept bytes per unit, for ever more recomputation.

    A stage may recompute some blocks selectively and some fully. The cheapest byte that any
    allowed kind frees sets the price, the one that frees most the amount; between two steps the
    seconds of the lower and the bytes of the higher one are taken, so that no mix is missed.
    """
    kinds = [KINDS.index(kind) for kind in allowed]
    seconds, kept = table.seconds[kinds], table.kept[kinds]
    for row in (seconds, kept):  # embedding and head are never recomputed
        row[:, [0, -1]] = (table.seconds if row is seconds else table.kept)[NONE][[0, -1]]
    least, most = seconds.min(axis=0), kept.max(axis=0)
    freed = most - kept
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(freed > 0, (seconds - least) / freed, np.inf).min(axis=0)
    price = np.where(np.isfinite(ratio), ratio, 0.0) * freed.max(axis=0)
    if not limited or not freed.any():
        yield least, most - freed.max(axis=0) if limited else most
        return
    for step in range(_STEPS):
        share, following = step / _STEPS, (step + 1) / _STEPS
        yield least + share * price, most - following * freed.max(axis=0)


def _gather_seconds(tables: Tables, table: ConfigTable) -> FloatArray:
    """Return the least time that level 3 keeps the links busy for a unit of one micro-batch.

    Two gathers of parameters, one reduction of gradients; at least half of it comes from others,
    and the copies of one node share what its NICs bring in.
    """
    pool = tables.pool(table.config.pool)
    node = pool.node
    copies = max(1, node.num_chips // table.config.width)
    nic = node.nic_bandwidth / node.num_chips * copies if pool.nodes > 1 else math.inf
    link = max((island.bandwidth for island in node.islands), default=0.0)
    fastest = max(nic, link, node.effective_bridge.bandwidth)
    moved = 2.0 * table.parameter_bytes + table.gradient_bytes
    return 0.5 * moved / fastest


def _same_ends(kinds: list[_Kind]) -> list[_Kind]:
    """Give embedding and head the least of all ways: they are few, and ways then compare."""
    ends = [0, -1]
    columns = {
        name: np.min([getattr(kind, name)[ends] for kind in kinds], axis=0)
        for name in ("work", "forward", "static")
    }
    found = []
    for kind in kinds:
        changed = {name: getattr(kind, name).copy() for name in columns}
        for name, values in columns.items():
            changed[name][ends] = values
        found.append(dataclasses.replace(kind, **changed))
    return found


def _coarsened(kind: _Kind) -> _Kind:
    """Round a way's forward seconds and bytes down to a coarse scale, so that few ways differ."""

    def down(values: FloatArray, base: float) -> FloatArray:
        with np.errstate(divide="ignore"):
            steps = np.floor(np.log(values[1:-1]) / math.log(base))
        rounded = values.copy()
        rounded[1:-1] = np.where(values[1:-1] > 0, base**steps, 0.0)
        return rounded

    return dataclasses.replace(
        kind,
        forward=down(kind.forward, 2.0),
        static=down(kind.static, math.sqrt(2.0)),
        passing=np.zeros_like(kind.passing),
    )


def _undominated(kinds: list[_Kind]) -> list[_Kind]:
    """Drop ways that another one of the pool equals or beats in all respects."""
    if not kinds:
        return []
    kinds = [_coarsened(kind) for kind in _same_ends(kinds)]
    order = sorted(kinds, key=lambda k: (float(k.work.sum()), float(k.forward.sum())))
    columns = [
        np.stack([getattr(k, name) for k in order]) for name in ("work", "forward", "static")
    ]
    kept: list[int] = []
    for index in range(len(order)):
        better = np.ones(len(kept), dtype=bool)
        for rows in columns:
            better &= (rows[kept] <= rows[index] * (1 + 1e-12)).all(axis=1)
        if not better.any():
            kept.append(index)
    return [order[index] for index in kept]


class _Path:
    """The cheapest way of a sequence through all units, for given prices of chips."""

    def __init__(self, kinds: list[_Kind], units: int, single: bool) -> None:
        self._work = np.stack([k.work for k in kinds])
        self._forward = np.stack([k.forward for k in kinds])
        self._pool = np.array([k.pool for k in kinds], dtype=np.int64)
        self._reach = np.stack([_reach(kind) for kind in kinds])
        self._units = units
        self._single = single

    def least_time(
        self, prices: FloatArray, chips: FloatArray, batch: float, start: float
    ) -> float:
        """Return the smallest time in which the chips' worth pays for all sequences."""
        worth = float((prices * chips).sum())

        def possible(seconds: float) -> bool:
            return batch * self._cost(prices, seconds) <= worth * (1 + 1e-12)

        low, high, more = start, start, 0.01
        if possible(low):
            return low
        while not possible(high):
            low, high, more = high, high * (1.0 + more), 2.0 * more
            if high > 1e6 * start:
                return low
        for _ in range(5):
            middle = 0.5 * (low + high)
            if possible(middle):
                high = middle
            else:
                low = middle
        return low

    def _cost(self, prices: FloatArray, seconds: float) -> float:
        priced = self._work * prices[self._pool][:, None]
        found: float = compiled(_shortest)(
            _prefix(priced), _prefix(self._forward), self._forward, self._reach, seconds,
            FARTHEST * seconds / GRID, GRID, self._single,
        )  # fmt: skip
        return found


def _prefix(rows: FloatArray) -> FloatArray:
    return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)


def _reach(kind: _Kind) -> npt.NDArray[np.int64]:
    """For each first unit, the end (exclusive) up to which a stage's memory lasts."""
    ends = np.arange(len(kind.static), dtype=np.int64)
    compiled(_extend)(kind.static, kind.passing, kind.room * (1 + 1e-9), ends)
    return ends


def _extend(  # pragma: no cover - compiled
    static: Any, passing: Any, room: float, ends: Any
) -> None:
    units = len(static)
    for start in range(units):
        held = peak = 0.0
        for unit in range(start, units):
            held += static[unit]
            peak = max(peak, passing[unit])
            if held + peak > room:
                break
            ends[start] = unit + 1


def _shortest(  # pragma: no cover - compiled
    work: Any, forward: Any, single_forward: Any, reach: Any, seconds: float, cell: float,
    cells: int, single: bool,
) -> float:  # fmt: skip
    kinds, units = work.shape[0], work.shape[1] - 1
    best = np.full((units + 1, cells), np.inf)
    best[0, 0] = 0.0
    for a in range(units):
        for f in range(cells):
            cost = best[a, f]
            if cost == np.inf:
                continue
            left = seconds - f * cell
            for k in range(kinds):
                for b in range(a + 1, reach[k, a] + 1):
                    ahead = single_forward[k, a] if single else forward[k, b] - forward[k, a]
                    to = int((f * cell + ahead) / cell)
                    if b == units:
                        to = 0
                    elif to >= cells:
                        if not single:
                            break
                        continue
                    total = cost + (work[k, b] - work[k, a]) / left
                    if total < best[b, to]:
                        best[b, to] = total
    found: float = best[units, 0]
    return found


def _step_seconds(tables: Tables) -> float:
    """Return the least time of the optimizer's step: some chip updates an equal share at least."""
    problem = tables.problem
    if tables.layers:
        return 0.0
    chips = sum(pool.num_chips for pool in problem.pools)
    share = problem.model.num_parameters / chips
    return min(tables.prices[pool.name].optimizer(share) for pool in problem.pools)


def _with_slowdown(tables: Tables, kinds: list[_Kind], seconds: float, fluid: float) -> float:
    """Return the bound with the slowest node's delay, for the number of nodes that suits it best.

    With fewer nodes the delay is smaller, but so is the speed: below any number of nodes the work
    alone takes the fluid time, times what is missing.
    """
    jitter = _jitter(tables, kinds, seconds)
    speeds = _node_speeds(tables, kinds)
    count = len(speeds)
    if jitter <= 0 or count < 2:
        return seconds
    ahead = np.cumsum(np.sort(speeds)[::-1])
    nodes = np.arange(1, count + 1)
    slow = 1.0 + jitter * np.sqrt(2.0 * np.log(nodes))
    alone = slow * fluid * ahead[-1] / ahead
    best = 0.0
    for i in range(count):
        fewer = float(alone[:i].min()) if i else math.inf
        best = max(best, min(float(slow[i]) * seconds, fewer))
    return best


def _jitter(tables: Tables, kinds: list[_Kind], seconds: float) -> float:
    """Return the spread of the nodes' times that every plan worth a thought has to bear.

    A plan has the largest spread among its pools; one that leaves pools out has less, but if it
    is then slower than the bound for all pools, it does not matter.
    """
    problem = tables.problem
    chips = np.array([pool.num_chips for pool in problem.pools], dtype=np.float64)
    spreads = [tables.prices[pool.name].node_jitter for pool in problem.pools]
    best = np.array(
        [
            min((float(k.work.sum()) for k in kinds if k.pool == i), default=math.inf)
            for i in range(len(chips))
        ]
    )
    batch = float(problem.job.global_batch)
    least = max(spreads)
    for spread in sorted(set(spreads)):
        kept = np.array([s <= spread for s in spreads])
        speed = (chips[kept] / best[kept]).sum()
        if speed > 0 and batch / speed < seconds * (1.0 + max(spreads) * _MOST_DELAY):
            least = min(least, spread)
    return least


def _node_speeds(tables: Tables, kinds: list[_Kind]) -> FloatArray:
    """Return each node's share of the work that the fluid bound counts on."""
    speeds: list[float] = []
    for index, pool in enumerate(tables.problem.pools):
        own = [k for k in kinds if k.pool == index]
        if own:
            speeds += [pool.node.num_chips / min(float(k.work.sum()) for k in own)] * pool.nodes
    return np.array(speeds, dtype=np.float64)
