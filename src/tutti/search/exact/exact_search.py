"""The exact search for small problems: every strategy of the space, the hopeless ones unpriced.

Skeletons (who forms which stages, which micro-batches, which schedule and shard level) are
enumerated with a lower bound each: the best possible cut if memory were free. In the order of
their bounds they are opened: every cut with its own bound, every choice of recomputation and
offload with its own; what cannot beat the best plan found so far is never simulated. When nothing
is left open, the best plan is the best of the space.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tutti.models.spec import ModelSpec
from tutti.plan.check import check_plan
from tutti.plan.plan import Offload, Recompute, UnitRanges
from tutti.search.cutting.build_draft import with_orders
from tutti.search.exact.enumerate_strategies import (
    Group,
    Skeleton,
    Stages,
    TooLargeError,
    cuts,
    limited,
    skeletons,
)
from tutti.search.pricing.simulate_draft import DraftSimulator
from tutti.search.pricing.unit_tables import KINDS, NONE, Config, ConfigTable, Tables
from tutti.search.question.space import Problem
from tutti.search.strategy.draft import (
    Draft,
    PipelineDraft,
    ReplicaDraft,
    StageDraft,
    canonical,
    has_experts,
    to_plan,
)
from tutti.search.strategy.space_limits import draft_keeps
from tutti.search.strategy.tie_break import Splitting, splitting

Kinds = tuple[int, int]  # leading blocks recomputed fully, then selectively


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The best plan of a space, and the work that proved it."""

    draft: Draft
    step_seconds: float
    lower_bound_seconds: float
    simulated: int


def search_exactly(
    problem: Problem, tables: Tables | None = None, most: int | None = None
) -> ExactResult | None:
    """Return the best plan of the space; None where none fits.

    With `most`, raise TooLargeError as soon as more pipelines, skeletons or fillings of one
    skeleton than that would have to be looked at.
    """
    return _Exact(problem, tables or Tables(problem), most or math.inf).run()


class _Exact:
    def __init__(self, problem: Problem, tables: Tables, most: float) -> None:
        self.problem = problem
        self.tables = tables
        self.most = most
        self.simulator = DraftSimulator(tables)
        self.best: tuple[float, Splitting, Draft] | None = None
        self._tried: set[Draft] = set()

    def run(self) -> ExactResult | None:
        queue: list[tuple[float, int, Skeleton]] = []
        every = skeletons(self.problem, self.tables, self.most)
        for number, skeleton in enumerate(limited(every, self.most)):
            heapq.heappush(queue, (self._bound(skeleton), number, skeleton))
        while queue:
            bound, _, skeleton = heapq.heappop(queue)
            if self.best is not None and bound >= self.best[0]:
                break
            self._open(skeleton)
        if self.best is None:
            return None
        seconds, _, draft = self.best
        return ExactResult(
            draft=draft,
            step_seconds=seconds,
            lower_bound_seconds=seconds,
            simulated=self.simulator.simulated,
        )

    def _table(self, config: Config) -> ConfigTable:
        table = self.tables.get(config)
        assert table is not None, f"{config} has no measured profile"
        return table

    def _bound(self, skeleton: Skeleton) -> float:
        """Return the bound of the best cut of every pipeline."""
        return max(
            min(
                (self._cut_bound(stages, cut, count) for cut in self._cuts(len(stages), virtual)),
                default=math.inf,
            )
            for (stages, count), virtual in zip(skeleton.pipelines, skeleton.virtual, strict=True)
        )

    def _cuts(self, num_stages: int, virtual: int) -> Iterator[tuple[UnitRanges, ...]]:
        return limited(cuts(self.problem, num_stages, virtual), self.most)

    def _cut_bound(self, stages: Stages, cut: tuple[UnitRanges, ...], count: int) -> float:
        """Return the time that every chip needs after its first micro-batch can have arrived."""
        bound = ahead = 0.0
        for groups, units in zip(stages, cut, strict=True):
            index = np.concatenate([np.arange(a, b) for a, b in units])
            first = np.arange(*units[0])
            busy, soonest = 0.0, math.inf
            for group in groups:
                table = self._table(group.config)
                kinds = self._least_kind(table)
                busy = max(busy, count * float(kinds[index].sum()))
                soonest = min(soonest, float(table.forward[NONE, first].sum()))
            bound = max(bound, ahead + busy)
            ahead += soonest
        return bound

    def _least_kind(self, table: ConfigTable) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        allowed = [KINDS.index(kind) for kind in self.problem.space.recompute]
        least = table.seconds[allowed].min(axis=0)
        least[[0, -1]] = table.seconds[NONE][[0, -1]]
        least_kinds: np.ndarray[tuple[int], np.dtype[np.float64]] = least
        return least_kinds

    def _open(self, skeleton: Skeleton) -> None:
        """Go through the cuts of all pipelines, cheapest bound first."""
        choices = [
            sorted(
                (self._cut_bound(stages, cut, count), cut)
                for cut in self._cuts(len(stages), virtual)
            )
            for (stages, count), virtual in zip(skeleton.pipelines, skeleton.virtual, strict=True)
        ]
        combined = sorted(
            (max(bound for bound, _ in chosen), tuple(cut for _, cut in chosen))
            for chosen in limited(itertools.product(*choices), self.most)
        )
        for bound, chosen in combined:
            if self.best is not None and bound >= self.best[0]:
                return
            self._fill(skeleton, chosen)

    def _fill(self, skeleton: Skeleton, chosen: tuple[tuple[UnitRanges, ...], ...]) -> None:
        """Go through recomputation and offload of every replica group, least work first."""
        places = [
            (p, s, g)
            for p, (stages, _) in enumerate(skeleton.pipelines)
            for s, groups in enumerate(stages)
            for g in range(len(groups))
        ]
        options = []
        for p, s, g in places:
            stages, count = skeleton.pipelines[p]
            table = self._table(stages[s][g].config)
            units = chosen[p][s]
            options.append(
                sorted(
                    (count * self._busy(table, units, kinds), kinds, away)
                    for kinds in self._recompute_choices(units, skeleton.virtual[p])
                    for away in _subsets(self.problem.space.offload)
                )
            )
        every = limited(itertools.product(*options), self.most)
        combined = sorted(every, key=lambda c: max(o[0] for o in c))
        for combination in combined:
            if self.best is not None and max(o[0] for o in combination) >= self.best[0]:
                return
            filled = {
                place: (kinds, away)
                for place, (_, kinds, away) in zip(places, combination, strict=True)
            }
            self._try(self._draft(skeleton, chosen, filled))

    def _recompute_choices(self, units: UnitRanges, virtual: int) -> list[Kinds]:
        blocks = _blocks(units, self.problem.model)
        allowed = self.problem.space.recompute
        choices: list[Kinds] = []
        counts = range(blocks + 1) if virtual == 1 else sorted({0, blocks})
        for full in counts:
            for selective in counts:
                plain = blocks - full - selective
                if plain < 0 or (plain and "none" not in allowed):
                    continue
                if (full and "full" not in allowed) or (selective and "selective" not in allowed):
                    continue
                choices.append((full, selective))
        return choices

    def _busy(self, table: ConfigTable, units: UnitRanges, kinds: Kinds) -> float:
        which = np.zeros(table.forward.shape[1], dtype=np.int64)
        full, selective = recomputed(units, kinds, self.problem.model)
        for ranges, kind in ((full, KINDS.index("full")), (selective, KINDS.index("selective"))):
            for a, b in ranges:
                which[a:b] = kind
        index = np.concatenate([np.arange(a, b) for a, b in units])
        return float(table.seconds[which[index], index].sum())

    def _draft(
        self,
        skeleton: Skeleton,
        chosen: tuple[tuple[UnitRanges, ...], ...],
        filled: Mapping[tuple[int, int, int], tuple[Kinds, tuple[str, ...]]],
    ) -> Draft:
        pipelines = []
        for p, (stages, count) in enumerate(skeleton.pipelines):
            drafts = []
            for s, groups in enumerate(stages):
                units = chosen[p][s]
                replicas = tuple(
                    self._replica(group, units, *filled[p, s, g]) for g, group in enumerate(groups)
                )
                drafts.append(StageDraft(units=units, replicas=replicas))
            pipelines.append(PipelineDraft(micro_batches=count, stages=tuple(drafts)))
        return Draft(pipelines=tuple(pipelines), schedule=skeleton.schedule, shard=skeleton.shard)

    def _replica(
        self, group: Group, units: UnitRanges, kinds: Kinds, away: tuple[str, ...]
    ) -> ReplicaDraft:
        full, selective = recomputed(units, kinds, self.problem.model)
        config = group.config
        if not has_experts(units, self.problem.model):
            config = config._replace(ep=1)
        return ReplicaDraft(
            config=config,
            copies=group.copies,
            overlap_chunks=self._table(config).overlap_chunks,
            recompute=Recompute(full=full, selective=selective),
            offload=Offload(**dict.fromkeys(away, units)),
        )

    def _try(self, draft: Draft) -> None:
        draft = canonical(draft)
        if draft in self._tried:
            return
        if len(self._tried) >= self.most:
            raise TooLargeError
        self._tried.add(draft)
        problem = self.problem
        if not draft_keeps(draft, problem):
            return
        made = with_orders(draft, self.tables)
        plan = to_plan(made, self.tables.references, problem.job, problem.model, problem.cluster)
        if check_plan(plan, problem.model, problem.cluster):
            return
        estimated = self.simulator.price(plan)
        if not (estimated.fits or problem.unlimited_memory):
            return
        worth = (estimated.step_seconds, splitting(plan))
        if self.best is None or worth < self.best[:2]:
            self.best = (*worth, made)


def _subsets(kinds: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for size in range(len(kinds) + 1):
        yield from itertools.combinations(kinds, size)


def _blocks(units: UnitRanges, model: ModelSpec) -> int:
    return sum(max(0, min(b, model.head_unit) - max(a, 1)) for a, b in units)


def recomputed(units: UnitRanges, kinds: Kinds, model: ModelSpec) -> tuple[UnitRanges, UnitRanges]:
    """Return the ranges of the leading blocks that are recomputed fully, then selectively."""
    left = list(kinds)
    ranges: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for a, b in units:
        start, stop = max(a, 1), min(b, model.head_unit)
        for kind in (0, 1):
            taken = min(left[kind], max(0, stop - start))
            if taken:
                ranges[kind].append((start, start + taken))
                start += taken
                left[kind] -= taken
    return tuple(ranges[0]), tuple(ranges[1])
