"""Small steps from a simulated strategy to a better one, each decided by the simulator.

What a stage really keeps is known once it was simulated: memory that is left over is given back
to it, and fewer units are recomputed or moved to the host. Then boundaries between ranges shift by
a unit where the recurrence of `pace` says that it may pay. Work is counted in simulated
instructions; nothing here depends on time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tutti.search.cutting.build_draft import (
    PipelineCopies,
    Spared,
    cuts_of,
    cutter_of,
    distinct_chains,
    draft_of,
)
from tutti.search.cutting.cut_chain import Cutter, Ranges, StageCut
from tutti.search.pricing.pipeline_recurrence import chain_seconds
from tutti.search.pricing.simulate_draft import (
    DraftSimulator,
    SimulatedDraft,
    free_by_chain,
    missing,
)
from tutti.search.strategy.draft import Draft
from tutti.search.strategy.space_limits import draft_keeps
from tutti.search.thresholds import THRESHOLDS


@dataclass(slots=True)
class Polish:
    """Improves strategies as long as its work lasts."""

    simulator: DraftSimulator
    budget: int  # instructions, of all strategies together
    _until: int = field(init=False)

    def __post_init__(self) -> None:
        self._until = self.simulator.instructions + self.budget

    @property
    def spent(self) -> bool:
        """Whether no work is left."""
        return self.simulator.instructions >= self._until

    def improved(
        self, parts: Sequence[PipelineCopies], simulated: SimulatedDraft
    ) -> SimulatedDraft:
        """Return a strategy of the same chains that takes no longer."""
        if self.spent or free_by_chain(simulated, parts) is None:
            return simulated
        best, spared = self._given_back(parts, simulated)
        return self._moved(parts, best, spared)

    # --- memory ------------------------------------------------------------------------------

    def _given_back(
        self, parts: Sequence[PipelineCopies], simulated: SimulatedDraft
    ) -> tuple[SimulatedDraft, Spared]:
        """Cut again with the memory that was left over; return also what that came to."""
        best, kept = simulated, simulated.spared
        spared, was_short = dict(simulated.spared), set[str | tuple[int, int]]()
        for _ in range(THRESHOLDS.most_given):
            if self.spent or not _has_remedies(simulated.draft):
                break
            short = missing(simulated, parts)
            was_short |= short.keys()
            for place, left in (free_by_chain(simulated, parts) or {}).items():
                if place not in was_short:  # what was given back once too often is not given again
                    spared[place] = spared.get(place, 0.0) - THRESHOLDS.given_share * left
            for lacking, more in short.items():
                spared[lacking] = (
                    spared.get(lacking, 0.0)
                    + THRESHOLDS.spared_share * more
                    + THRESHOLDS.least_spared
                )
            draft = draft_of(self.simulator.tables, parts, spared=spared)
            if draft is None or draft == simulated.draft or not self._keeps(draft):
                break
            simulated = self.simulator.quick(draft)
            if simulated.fits and simulated.seconds < best.seconds:
                best, kept = simulated, dict(spared)
        return best, kept

    # --- units -------------------------------------------------------------------------------

    def _moved(
        self, parts: Sequence[PipelineCopies], best: SimulatedDraft, spared: Spared
    ) -> SimulatedDraft:
        """Shift boundaries as long as the simulator says that it pays."""
        tables = self.simulator.tables
        cuts = cuts_of(tables, parts, spared)
        if cuts is None or not tables.problem.space.uneven_units:
            return best
        tried: set[tuple[int, Ranges]] = set()
        while not self.spent:
            better = None
            for number, cut in self._promising(parts, cuts, spared, tried):
                if self.spent:
                    break
                tried.add((number, cut.ranges))
                chain = distinct_chains(parts)[number]
                other = [
                    cut if part.chain is chain else c for part, c in zip(parts, cuts, strict=True)
                ]
                draft = draft_of(tables, parts, cuts=other)
                if draft is None or not self._keeps(draft):
                    continue
                simulated = self.simulator.quick(draft)
                if simulated.fits and simulated.seconds < best.seconds:
                    best, better = simulated, other
                    break
            if better is None:
                return best
            cuts = better
        return best

    def _promising(
        self,
        parts: Sequence[PipelineCopies],
        cuts: Sequence[StageCut],
        spared: Spared,
        tried: set[tuple[int, Ranges]],
    ) -> list[tuple[int, StageCut]]:
        """Return the moves that look best: a chain, by number, and its other cut.

        Only the chain that ends last can hold the step up.
        """
        tables = self.simulator.tables
        ends = [chain_seconds(tables, *pair) for pair in zip(parts, cuts, strict=True)]
        last = max(range(len(parts)), key=lambda i: (ends[i], -i))
        part, now = parts[last], ends[last]
        number = next(n for n, c in enumerate(distinct_chains(parts)) if c is part.chain)
        cutter = cutter_of(tables, parts, part, spared)
        moves = []
        for ranges in _shifted(cutter, cuts[last]):
            if (number, ranges) in tried:
                continue
            cut = cutter.cut(ranges)
            if cut is None:
                continue
            seconds = chain_seconds(tables, part, cut)
            if seconds < THRESHOLDS.hopeful * now:
                moves.append((seconds, ranges, cut))
        moves.sort(key=lambda entry: entry[:2])
        return [(number, cut) for _, _, cut in moves[: THRESHOLDS.most_moves]]

    def _keeps(self, draft: Draft) -> bool:
        return draft_keeps(draft, self.simulator.tables.problem)


def _has_remedies(draft: Draft) -> bool:
    """Tell whether anything is recomputed or kept on the host."""
    return any(
        replica.recompute.full or replica.recompute.selective
        or replica.offload.activations or replica.offload.optimizer
        for pipeline in draft.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
    )  # fmt: skip


def _shifted(cutter: Cutter, cut: StageCut) -> Iterator[Ranges]:
    """Yield cuts in which one range hands a unit to another, those between them moving along.

    Near ranges do; the ranges of the slowest stage hand to all.
    """
    bounds = [cut.ranges[0][0], *(stop for _, stop in cut.ranges)]
    stages = cutter.stages
    sums = [sum(cut.seconds[s::stages]) for s in range(stages)]
    slowest = max(range(stages), key=lambda s: (sums[s], -s))
    count = len(cut.ranges)
    for giving in range(count):
        for taking in range(count):
            near = abs(giving - taking) <= THRESHOLDS.near_ranges
            if giving == taking or not (near or giving % stages == slowest):
                continue
            low, high, step = (
                (taking + 1, giving, 1) if taking < giving else (giving + 1, taking, -1)
            )
            moved = [b + step if low <= i <= high else b for i, b in enumerate(bounds)]
            if all(a < b for a, b in itertools.pairwise(moved)):
                yield tuple(itertools.pairwise(moved))
