"""The best plan by the comparison formula: an exact dynamic programme over its stages.

For a micro-batch M and a limit T on the slowest stage, the formula is a sum over stages: their
times and the boundaries between them. So the cheapest sequence of stages is a shortest path over
(unit, chips used of each pool, largest share of the last stage). A stage's replicas may be of both
chips, of any measured tensor degree and share; for every share-out the fewest chips are taken. T
falls until nothing is possible; limits on what closes the step are tried likewise.
Chips are handed out in steps of an eighth of a pool, one by one where a pool has eight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.cost.measured.layer_profiles import MEGABYTE, LayerProfiles
from tutti.errors import InputError
from tutti.plan.plan import Plan
from tutti.search.exact.comparison_formula import Score, Setting, score
from tutti.search.pricing.unit_tables import Config, Tables
from tutti.search.question.space import Problem
from tutti.search.strategy.draft import Draft, PipelineDraft, ReplicaDraft, StageDraft, to_plan
from tutti.simulate.kernel import compiled

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
STEPS = 8  # of chips, per pool
MOST_POOLS = 2
MOST_SEQUENCES = 4  # of a micro-batch, per chip of the larger pool
# Limits on what closes a step (reduction and optimizer), as parts of the whole model's.
LIMITS = (1.0, 0.7, 0.65, 0.6, 0.55, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)


class _Kinds(NamedTuple):
    """The measured ways in which a replica may compute, as columns; sums run over units."""

    configs: tuple[Config, ...]
    pool: IntArray
    tp: IntArray
    sequences: IntArray
    ms: FloatArray  # of all units before each
    memory_mb: FloatArray
    parameter_bytes: FloatArray
    optimizer_ms: FloatArray  # of one unit
    limit_mb: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaResult:
    """The plan with the lowest score that was found."""

    plan: Plan
    score: Score
    bound_ms: float  # no plan with chips in these steps and such micro-batches is faster
    chips_step: int
    priced: int  # stages


def search_by_formula(
    problem: Problem, profiles: LayerProfiles, setting: Setting | None = None
) -> FormulaResult:
    """Return the best plan of the formula's freedom; an InputError where none fits."""
    return _Search(problem, profiles, setting or Setting()).run()


class _Search:
    def __init__(self, problem: Problem, profiles: LayerProfiles, setting: Setting) -> None:
        if len(problem.pools) > MOST_POOLS:
            raise InputError(f"comparison formula: {len(problem.pools)} pools; it knows two chips")
        self.problem = problem
        self.profiles = profiles
        self.setting = setting
        self.tables = Tables(problem)
        self.kinds = _kinds(problem, profiles, setting)
        self.chips = [pool.num_chips for pool in problem.pools] + [0]
        self.step = max(1, max(self.chips) // STEPS)
        self.best: tuple[float, Plan, Score] | None = None
        self.bound = np.inf
        self.priced = 0

    def run(self) -> FormulaResult:
        """Try every micro-batch that divides the batch, the likeliest first."""
        batch = self.problem.job.global_batch
        whole = self.kinds.parameter_bytes[:, -1].max() / self.setting.between_bandwidth * 2e3
        whole += self.kinds.optimizer_ms.max() * self.profiles.num_units
        most = min(batch, MOST_SEQUENCES * max(self.chips))
        sizes = [m for m in range(1, most + 1) if batch % m == 0]
        for micro_batch in sorted(sizes, key=lambda m: abs(m - 2 * max(self.chips))):
            stages = self._stages(micro_batch)
            for limit, lower in itertools.pairwise((*LIMITS, 0.0)):
                self._descend(micro_batch, stages, limit * whole, lower * whole)
        if self.best is None:
            raise InputError("comparison formula: no plan of measured replicas fits into memory")
        _, plan, best = self.best
        return FormulaResult(
            plan=plan,
            score=best,
            bound_ms=min(self.bound, best.step_ms),
            chips_step=self.step,
            priced=self.priced,
        )

    def _stages(self, micro_batch: int) -> FloatArray:
        """Return every stage worth a look, by first unit."""
        kinds = self.kinds
        rows = compiled(_all_stages)(
            micro_batch, kinds.pool, kinds.tp, kinds.sequences, kinds.ms, kinds.memory_mb,
            kinds.parameter_bytes, kinds.optimizer_ms, kinds.limit_mb, self.chips[0],
            self.chips[1], self.step, self.setting.node_chips, self.setting.inside_bandwidth,
            self.setting.between_bandwidth, self._longest(micro_batch),
        )  # fmt: skip
        self.priced += len(rows)
        stages: FloatArray = rows[np.argsort(rows[:, 0], kind="stable")]
        return stages

    def _longest(self, micro_batch: int) -> float:
        """Return the longest stage that could still be part of something better."""
        if self.best is None:
            return np.inf
        return self.best[0] / (self.problem.job.global_batch // micro_batch)

    def _descend(
        self, micro_batch: int, stages: FloatArray, closing_ms: float, lower_ms: float
    ) -> None:
        """Lower the limit on the slowest stage until nothing is possible.

        Plans that take between `lower_ms` and `closing_ms` to close are bounded by it: the longest
        reduction and the longest update take no less than one stage's both.
        """
        rounds = self.problem.job.global_batch // micro_batch
        kept = stages[stages[:, 6] <= closing_ms]
        limit = self._longest(micro_batch)
        while True:
            kept = kept[kept[:, 4] <= limit]
            chosen = compiled(_cheapest)(
                kept, self.profiles.num_units, self.chips[0] // self.step,
                self.chips[1] // self.step, self._boundary_ms(),
            )  # fmt: skip
            if not len(chosen):
                return
            path = kept[chosen]
            slowest = float(path[:, 4].max())
            about = (rounds - 1) * slowest + float(path[:, 4].sum())
            self.bound = min(self.bound, about + lower_ms)
            if self.best is None or about < self.best[0]:
                self._take(micro_batch, path)
            limit = min(slowest * (1.0 - 1e-9), self._longest(micro_batch))

    def _boundary_ms(self) -> float:
        """Return what one sequence takes over a boundary, there and back."""
        job, hidden = self.problem.job, self.problem.model.hidden
        return 2.0 * job.sequence_length * hidden * 2.0 / self.setting.between_bandwidth * 1e3

    def _take(self, micro_batch: int, path: FloatArray) -> None:
        draft = self._draft(micro_batch, path)
        problem = self.problem
        made = to_plan(draft, self.tables.references, problem.job, problem.model, problem.cluster)
        seconds = score(made, self.profiles, problem.model, problem.cluster, self.setting)
        if seconds.fits and (self.best is None or seconds.step_ms < self.best[0]):
            self.best = (seconds.step_ms, made, seconds)

    def _draft(self, micro_batch: int, path: FloatArray) -> Draft:
        stages = tuple(
            StageDraft(
                units=((int(start), int(stop)),),
                replicas=tuple(
                    self._replicas((int(start), int(stop)), ms, int(least), int(split), micro_batch)
                ),
            )
            for start, stop, _, _, ms, _, _, split, least in path.tolist()
        )
        rounds = self.problem.job.global_batch // micro_batch
        return Draft(pipelines=(PipelineDraft(micro_batches=rounds, stages=stages),))

    def _replicas(
        self, units: tuple[int, int], ms: float, least: int, split: int, micro_batch: int
    ) -> Iterator[ReplicaDraft]:
        """Yield the fewest chips that take `split` sequences on the first pool, the rest behind."""
        kinds, (start, stop) = self.kinds, units
        for pool, sequences in enumerate((split, micro_batch - split)):
            chips, last = [0] + [1 << 30] * sequences, [-1] * (sequences + 1)
            for k in range(len(kinds.configs)):
                late = kinds.ms[k, stop] - kinds.ms[k, start] > ms * (1.0 + 1e-12)
                full = kinds.memory_mb[k, stop] - kinds.memory_mb[k, start] > kinds.limit_mb[k]
                if kinds.pool[k] != pool or kinds.tp[k] < least or late or full:
                    continue
                own = int(kinds.sequences[k])
                for x in range(own, sequences + 1):
                    if chips[x - own] + kinds.tp[k] < chips[x]:
                        chips[x], last[x] = chips[x - own] + int(kinds.tp[k]), k
            copies: dict[Config, int] = {}
            while sequences:
                config = kinds.configs[last[sequences]]
                copies[config] = copies.get(config, 0) + 1
                sequences -= config.sequences
            for config, count in copies.items():
                yield ReplicaDraft(config=config, copies=count)


def _kinds(problem: Problem, profiles: LayerProfiles, setting: Setting) -> _Kinds:
    """Look up what was measured of the problem's chips."""
    rows: list[tuple[Config, int, float]] = []
    figures = []
    for number, pool in enumerate(problem.pools):
        chip = profiles.name_of(pool.chip)
        if chip is None or chip not in setting.memory_mb:
            raise InputError(f"comparison formula: {pool.chip.name} is none of its chips")
        for (name, tp, sequences), kinds in sorted(profiles.figures.items()):
            if name == chip and tp <= pool.node.num_chips:
                config = Config(pool.name, tp, 1, 1, sequences)
                rows.append((config, number, setting.memory_mb[chip]))
                figures.append(kinds)
    configs = tuple(config for config, _, _ in rows)
    return _Kinds(
        configs=configs,
        pool=np.array([number for _, number, _ in rows], dtype=np.int64),
        tp=np.array([config.tp for config in configs], dtype=np.int64),
        sequences=np.array([config.sequences for config in configs], dtype=np.int64),
        ms=_sums([1e3 * kinds.seconds for kinds in figures]),
        memory_mb=_sums([kinds.memory_bytes / MEGABYTE for kinds in figures]),
        parameter_bytes=_sums([kinds.parameter_bytes for kinds in figures]),
        optimizer_ms=np.array([1e3 * f.optimizer_s / profiles.num_units for f in figures]),
        limit_mb=np.array([limit for _, _, limit in rows]),
    )


def _sums(rows: Sequence[FloatArray]) -> FloatArray:
    table = np.array(rows, dtype=np.float64)
    return np.concatenate([np.zeros((len(table), 1)), np.cumsum(table, axis=1)], axis=1)


def _all_stages(  # pragma: no cover - compiled
    micro_batch: int, pool: Any, tp: Any, sequences: Any, sums: Any, memory: Any, parameters: Any,
    optimizer: Any, limit: Any, most: int, most_behind: int, step: int, node_chips: int,
    inside: float, between: float, longest: float,
) -> Any:  # fmt: skip
    """Return the undominated stages of every range of units, one per row.

    Columns: first unit, behind the last, steps of chips of both pools, ms, largest share, ms that
    close the step, sequences on the first pool, the narrowest replica that was looked at.
    """
    units, kinds = sums.shape[1] - 1, len(tp)
    degrees = np.unique(tp)
    rows: list[Any] = []
    chips = np.zeros((2, micro_batch + 1), dtype=np.int64)  # the fewest for so many sequences
    copies = np.zeros((2, micro_batch + 1), dtype=np.int64)
    widest = np.zeros((2, micro_batch + 1), dtype=np.int64)
    moved = np.zeros((2, micro_batch + 1))
    updating = np.zeros((2, micro_batch + 1))
    for start in range(units):
        for stop in range(start + 1, units + 1):
            first = len(rows)
            levels = np.unique(sums[:, stop] - sums[:, start])
            for turn in range(len(levels) * len(degrees)):
                # Wider replicas reduce less; they count only where narrow ones are left out.
                ms, least = levels[turn // len(degrees)], degrees[turn % len(degrees)]
                if ms > longest:
                    break
                chips[:] = 1 << 30
                chips[:, 0] = 0
                for k in range(kinds):
                    late = sums[k, stop] - sums[k, start] > ms * (1.0 + 1e-12)
                    if late or tp[k] < least or memory[k, stop] - memory[k, start] > limit[k]:
                        continue
                    p, b, size = pool[k], sequences[k], parameters[k, stop] - parameters[k, start]
                    for x in range(b, micro_batch + 1):
                        if chips[p, x - b] + tp[k] < chips[p, x]:
                            chips[p, x] = chips[p, x - b] + tp[k]
                            copies[p, x] = copies[p, x - b] + 1
                            widest[p, x] = max(widest[p, x - b], b)
                            moved[p, x] = max(moved[p, x - b], size)
                            updating[p, x] = max(updating[p, x - b], optimizer[k])
                for split in range(micro_batch + 1):
                    rest = micro_batch - split
                    here, behind = chips[0, split], chips[1, rest]
                    if here > most or behind > most_behind:
                        continue
                    count = copies[0, split] + copies[1, rest]
                    share = max(widest[0, split], widest[1, rest])
                    size = max(moved[0, split], moved[1, rest])
                    rate = inside if here + behind <= node_chips else between
                    closing = 2e3 * (count - 1) / count * size / rate
                    closing += max(updating[0, split], updating[1, rest]) * (stop - start)
                    a, b = -(-here // step), -(-behind // step)
                    dominated = False
                    for r in range(first, len(rows)):
                        other = rows[r]
                        if (other[2] <= a and other[3] <= b and other[5] <= share
                                and other[6] <= closing):  # fmt: skip
                            dominated = True
                            break
                    if not dominated:
                        rows.append((start, stop, a, b, ms, share, closing, split, least))
    table = np.zeros((len(rows), 9))
    for r in range(len(rows)):
        row = rows[r]
        table[r, 0], table[r, 1], table[r, 2], table[r, 3] = row[0], row[1], row[2], row[3]
        table[r, 4], table[r, 5], table[r, 6], table[r, 7] = row[4], row[5], row[6], row[7]
        table[r, 8] = row[8]
    return table


def _cheapest(  # pragma: no cover - compiled
    stages: Any, units: int, most: int, most_behind: int, boundary: float
) -> Any:
    """Return the rows of the cheapest sequence of stages; none where there is no sequence."""
    shares = 4  # largest shares are powers of two up to 8
    cost = np.full((units + 1, most + 1, most_behind + 1, shares), np.inf)
    origin = np.full((units + 1, most + 1, most_behind + 1, shares, 2), -1, dtype=np.int64)
    cost[0, 0, 0, 0] = 0.0
    for r in range(len(stages)):  # in the order of their first units
        start, stop = int(stages[r, 0]), int(stages[r, 1])
        here, behind, ms = int(stages[r, 2]), int(stages[r, 3]), stages[r, 4]
        own = 0
        while 1 << own < stages[r, 5]:
            own += 1
        for a in range(most + 1 - here):
            for b in range(most_behind + 1 - behind):
                for last in range(shares):
                    total = cost[start, a, b, last]
                    if total == np.inf:
                        continue
                    total += ms
                    if start > 0:
                        total += boundary * (1 << max(last, own))
                    if total < cost[stop, a + here, b + behind, own]:
                        cost[stop, a + here, b + behind, own] = total
                        origin[stop, a + here, b + behind, own, 0] = r
                        origin[stop, a + here, b + behind, own, 1] = last
    best, a, b, last = np.inf, 0, 0, 0
    for i in range(most + 1):
        for j in range(most_behind + 1):
            for s in range(shares):
                if cost[units, i, j, s] < best:
                    best, a, b, last = cost[units, i, j, s], i, j, s
    path = np.zeros(units, dtype=np.int64)
    length, unit = 0, units
    if best == np.inf:
        return path[:0]
    while unit > 0:
        r = origin[unit, a, b, last, 0]
        before = origin[unit, a, b, last, 1]
        path[length] = r
        length += 1
        unit = int(stages[r, 0])
        a -= int(stages[r, 2])
        b -= int(stages[r, 3])
        last = before
    return path[:length][::-1].copy()
