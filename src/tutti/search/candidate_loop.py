"""One search: candidates by promise, simulated until nothing left promises more.

Where nothing is found in a space that seems to have room, its parts are searched one by one: the
coarse model keeps the fastest configurations, and on several pools these may all be too large.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tutti.cost.network.reach import limits_of
from tutti.plan.plan import Plan
from tutti.search.answer.result import ProvenPlan
from tutti.search.coarse.candidates import Candidates
from tutti.search.cutting.build_draft import PipelineCopies
from tutti.search.cutting.local_search import Polish
from tutti.search.exact.enumerate_strategies import TooLargeError
from tutti.search.exact.exact_search import search_exactly
from tutti.search.pricing.money_and_energy import chips_by_pool
from tutti.search.pricing.objective import rates, value
from tutti.search.pricing.simulate_draft import DraftSimulator, SimulatedDraft, require_agreement
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.effort import Effort, Progress, Report, silent
from tutti.search.question.space import Problem
from tutti.search.strategy.candidate import NARROWER, Candidate
from tutti.search.strategy.draft import PLACEMENTS, Draft
from tutti.search.strategy.priced_drafts import RankedDrafts
from tutti.search.strategy.summary import summary_of
from tutti.search.strategy.tie_break import splitting
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.estimate import Estimate


class Search:
    """One search over some pools of a problem."""

    def __init__(
        self, tables: Tables, effort: Effort, report: Report = silent, bound: float | None = None
    ) -> None:
        self.tables = tables
        self.problem = tables.problem
        self.effort = effort
        self.source = Candidates(tables, effort)
        self.simulator = DraftSimulator(tables)
        self.report = report
        self.bound = bound
        self.ranked = RankedDrafts()
        self.interrupted = False
        self.per_second = rates(self.problem)
        self.corrections: dict[object, float] = {}  # by kind and by shape of candidates
        self.curious_until = 0  # instructions
        self.looked_at: list[Candidate] = []
        self.seen: Counter[object] = Counter()  # candidates that were simulated, by kind

    def run_exactly(self) -> RankedDrafts | None:
        """Search a small space whole; None where it is too large, or nothing in it fits."""
        problem = self.problem
        small = (
            problem.num_chips <= THRESHOLDS.exact_chips
            and problem.job.global_batch <= THRESHOLDS.exact_batch
        )
        if not small or self.per_second is not None or not self.tables.units_alike:
            return None
        try:
            exact = search_exactly(problem, self.tables, self.effort.exact)
        except TooLargeError:
            return None
        except KeyboardInterrupt:
            self.interrupted = True
            return None
        if exact is None:
            return None
        self.simulator.simulated += exact.simulated
        seconds = exact.step_seconds
        self.ranked.take(SimulatedDraft(exact.draft, seconds, {}, value=seconds, key="exact"))
        return self.ranked

    @property
    def may_have_more(self) -> bool:
        """Whether the space has plans that the exact search leaves out: of three pipelines."""
        most = self.problem.space.max_pipelines
        return len(self.problem.pools) > 2 and (most is None or most > 2)

    def run(self) -> RankedDrafts:
        """Simulate the most promising candidates until the work is spent."""
        budget = self.effort.budget(self.problem.num_chips)
        if self.effort.width(self.problem.num_chips) > 1:
            self.curious_until = budget // 2
        try:
            left = self.source.all()
            for number in itertools.count():
                candidate = min(left, key=self._promise, default=None)
                if candidate is None or self._enough(candidate, number, budget):
                    break
                left.remove(candidate)
                correction = self._simulate(candidate)
                self.corrections[candidate.kind] = self.corrections[candidate.shape] = correction
                self.seen[candidate.kind] += 1
            self._explore(left, budget)
            self._narrow(left, budget)
            self.ranked.skipped += len(left)
            self._improve()
            self._polish()
        except KeyboardInterrupt:
            self.interrupted = True
        return self.ranked

    def _explore(self, left: list[Candidate], budget: int) -> None:
        """Simulate the best candidates of kinds that were not looked at, where the gap is wide.

        The coarse model errs most between kinds; a local search goes on from several of them.
        """
        best = self.ranked.best
        if best is None or not self.bound or self.per_second is not None:
            return
        most = min(
            THRESHOLDS.most_explored,
            int((best.seconds / self.bound - 1.0) / THRESHOLDS.explored_per_gap),
        )
        kinds = {_family(known.copies) for known in self.ranked.drafts if known.copies}
        for candidate in sorted(left, key=self._promise):
            if most <= 0 or self.simulator.instructions > budget:
                return
            family = _family(candidate.parts)
            if (
                family in kinds
                or self._promise(candidate) > THRESHOLDS.explored_within * best.value
            ):
                continue
            kinds.add(family)
            left.remove(candidate)
            most -= 1
            self._simulate(candidate, whole=True)

    def _narrow(self, left: list[Candidate], budget: int) -> None:
        """Simulate the best candidate that fits of each part of the space of which none was.

        A question that is narrowed to it would find that one.
        """
        best = self.ranked.best
        if best is None or not self.bound or self.per_second is not None:
            return
        if not self.effort.is_wide(best.seconds, self.bound):
            return
        for inside in NARROWER:
            if self.simulator.instructions > budget:
                return
            if any(inside(known.chains) for known in self.looked_at):
                continue
            likely = sorted((c for c in left if inside(c.chains)), key=self._promise)
            for candidate in likely[: THRESHOLDS.most_tried]:
                if (
                    self._promise(candidate) > THRESHOLDS.explored_within * best.value
                    or self.simulator.instructions > budget
                ):
                    break
                left.remove(candidate)
                rejected = self.ranked.rejected
                self._simulate(candidate, whole=True)
                if self.ranked.rejected == rejected:
                    break

    def _promise(self, candidate: Candidate) -> float:
        """Return what a candidate is likely worth.

        What others of its kind took, over what they promised, is held against it; so is what the
        same chains took under another schedule, where no schedule explains it. On a large cluster
        the first few of a kind are believed to be better than that.
        """
        same = self.corrections.get(candidate.shape, 1.0)
        if same < THRESHOLDS.false_promise:
            same = self.corrections.get(candidate.kind, 1.0)
        early = self.simulator.instructions + candidate.instructions < self.curious_until
        if early and self.seen[candidate.kind] < THRESHOLDS.curious:
            same *= THRESHOLDS.believed
        return candidate.value * same

    def _enough(self, candidate: Candidate, number: int, budget: int) -> bool:
        """Tell whether the best plan stands: nothing left promises more, or the work is done."""
        best = self.ranked.best
        if best is None:
            return number >= THRESHOLDS.most_tried
        promised = self._promise(candidate)
        if number >= self.effort.most_candidates or self.simulator.instructions > 4 * budget:
            return True
        fitting = number - self.ranked.rejected  # what did not fit taught little
        enough = self.effort.candidates * self.effort.width(self.problem.num_chips)
        spent = fitting >= enough or self.simulator.instructions > budget
        well_known = self.seen[candidate.kind] > THRESHOLDS.curious
        return promised >= best.value * (
            THRESHOLDS.worth_more if spent or well_known else THRESHOLDS.worth_a_look
        )

    def worth(self, proven: ProvenPlan) -> float:
        """Return what the objective counts of a proven plan."""
        return self.plan_worth(proven.plan, proven.estimate)

    def plan_worth(self, plan: Plan, estimate: Estimate) -> float:
        """Return what the objective counts of a plan."""
        return self.seconds_worth(plan, estimate.step_seconds)

    def seconds_worth(self, plan: Plan, seconds: float) -> float:
        """Return what the objective counts of a plan whose step takes so long."""
        return value(seconds, chips_by_pool(plan), self.per_second)

    def _simulate(self, candidate: Candidate, *, whole: bool = False) -> float:
        """Simulate a candidate, or its `whole` step; return its seconds over what it promised."""
        simulated = self.simulator.parts(candidate.parts)
        if simulated is None:
            self.ranked.rejected += 1
            return THRESHOLDS.unfit
        self.looked_at.append(candidate)
        if whole and simulated.whole is None:
            made = self.simulator.plan_of(simulated.draft)
            priced = self.simulator.price(made)
            simulated = replace(simulated, seconds=priced.step_seconds, whole=(made, priced))
        self.take(simulated, candidate.key, candidate.parts)
        return simulated.seconds / candidate.coarse_seconds

    def take(
        self, draft: SimulatedDraft, key: object, parts: tuple[PipelineCopies, ...] = ()
    ) -> None:
        """Rank a simulated draft, and what its pipelines' paces ask for."""
        worth = value(draft.seconds, draft.draft.chips(), self.per_second)
        self.ranked.take(replace(draft, value=worth, key=key, copies=parts))
        self._even(draft, key)
        best = self.ranked.best
        self.report(
            Progress(
                doing="simulating",
                best_seconds=best.seconds if best is not None else None,
                lower_bound_seconds=self.bound if self.per_second is None else None,
                simulated=self.simulator.simulated,
            )
        )

    def _even(self, simulated: SimulatedDraft, key: object) -> None:
        """Try the micro-batches that the paces ask for, where that would be the best so far."""
        evened, best = simulated.evened, self.ranked.best
        assert best is not None
        chips = evened.draft.chips()
        hoped = value(evened.seconds, chips, self.per_second)
        if evened is simulated or hoped > best.value * THRESHOLDS.worth_evening:
            return
        again = self.simulator.quick(evened.draft)
        if again.fits:
            worth = value(again.seconds, chips, self.per_second)
            self.ranked.take(replace(again, value=worth, key=(key, "evened")))

    def _improve(self) -> None:
        """Take small steps from the best strategies, where a cluster is large enough to earn it."""
        polish = Polish(self.simulator, self.effort.improvement(self.problem.num_chips))
        of_candidates = [simulated for simulated in self.ranked.drafts if simulated.copies]
        for simulated in of_candidates[: self.effort.improved]:
            better = polish.improved(simulated.copies, simulated)
            if better is not simulated:
                self.take(better, simulated.key, simulated.copies)
        self._improve_narrower(of_candidates[self.effort.improved :])

    def _improve_narrower(self, behind: list[SimulatedDraft]) -> None:
        """Take small steps from the best of each part of the space that has none among the best.

        A question that is narrowed to it would take them.
        """
        best = self.ranked.best
        if best is None or not self.bound or not self.effort.is_wide(best.seconds, self.bound):
            return
        work = self.effort.improvement(self.problem.num_chips)
        taken: list[SimulatedDraft] = []
        for inside in NARROWER:
            likely = (d for d in behind if inside([part.chain for part in d.copies]))
            first = next(likely, None)
            if first is None or first in taken:
                continue
            taken.append(first)
            better = Polish(self.simulator, work).improved(first.copies, first)
            if better is not first:
                self.take(better, first.key, first.copies)

    def _polish(self) -> None:
        """Try what the coarse model does not tell apart: other places of the same strategy.

        Stages of a copy side by side, and blocks packed into the groups of nodes that tiers make.
        """
        cluster = self.problem.cluster
        packs = limits_of(cluster) is not None
        if not (packs or cluster.fabric.oversubscribed):
            return
        for ranked in self.ranked.drafts[: self.effort.polished]:
            cut = any(len(pipeline.stages) > 1 for pipeline in ranked.draft.pipelines)
            places: set[object] = {self._chips(ranked.draft)}
            for placement in PLACEMENTS if cut else PLACEMENTS[:1]:
                for packed in (False, True) if packs else (False,):
                    moved = replace(ranked.draft, placement=placement, packed=packed)
                    chips = self._chips(moved)
                    if chips in places:
                        continue
                    places.add(chips)
                    quick = self.simulator.quick(moved)
                    if quick.fits:
                        self.take(quick, ranked.key)

    def _chips(self, draft: Draft) -> object:
        """Return which chips do what."""
        plan = self.simulator.plan_of(draft)
        return tuple(r.chips for _, _, stage in plan.stages() for r in stage.replicas)


def _family(parts: Sequence[PipelineCopies]) -> object:
    """Return what strategies have in common that small steps do not lead away from."""
    return frozenset(
        (
            tuple(config.pool for config in part.chain.configs),
            part.chain.schedule.kind,
            sum(part.chain.stages).bit_length(),
        )
        for part in parts
    )


def proven_best(search: Search, ranked: RankedDrafts) -> tuple[ProvenPlan, ProvenPlan | None]:
    """Simulate the best drafts whole, until none that is left promises more; prove the first."""
    simulator = search.simulator
    whole: list[tuple[Plan, Estimate]] = []
    for number, simulated in enumerate(ranked.drafts[: THRESHOLDS.most_whole]):
        best_worth = min((search.plan_worth(*pair) for pair in whole), default=math.inf)
        if number >= search.effort.whole and simulated.value >= best_worth:
            break
        pair = simulated.whole
        if pair is None:
            made = simulator.plan_of(simulated.draft)
            pair = (made, simulator.price(made))
            claimed, seconds = simulated.seconds, pair[1].step_seconds
            require_agreement(summary_of(made), claimed, seconds, THRESHOLDS.shortened_within)
        whole.append(pair)
    # what differs by rounding only is equal: then the plan that splits less
    whole.sort(key=lambda pair: (float(f"{search.plan_worth(*pair):.9e}"), splitting(pair[0])))
    best = simulator.prove(*whole[0], summary_of(whole[0][0]))
    if len(whole) == 1:
        return best, None
    made, estimate = whole[1]
    return best, ProvenPlan(plan=made, estimate=estimate, summary=summary_of(made))


def search_parts(search: Search) -> Search:
    """Search the parts of a space in which nothing was found; return the search that found most.

    By micro-batch, then with the smallest one by tensor and by expert degree: the parts of the
    first of these rounds in which something fits are all searched, and the best of them counts.
    """
    for parts in _rounds(search.problem):
        best: Search | None = None
        for part in parts:
            tables = search.tables.for_problem(part)
            one = Search(tables, search.effort, search.report, search.bound)
            draft = one.run().best
            if one.interrupted:
                search.interrupted = True
                return best or search
            known = best.ranked.best if best is not None else None
            if draft is not None and (known is None or draft.value < known.value):
                best = one
        if best is not None:
            return best
    return search


def _rounds(problem: Problem) -> Iterator[list[Problem]]:
    space, counts = problem.space, problem.sequence_counts()
    if len(counts) > 1:
        yield [replace(problem, space=replace(space, sequences=(count,))) for count in counts]
    frugal = replace(space, sequences=counts[:1])
    degrees = sorted({d for pool in problem.pools for d in problem.tensor_degrees(pool)})
    if len(degrees) > 1:
        yield [replace(problem, space=replace(frugal, tp=(degree,))) for degree in degrees]
    spread = problem.expert_degrees()
    if len(spread) > 1:
        yield [replace(problem, space=replace(frugal, ep=(degree,))) for degree in spread]
