"""Nothing unproven leaves the planner: checker, static check, event simulator, and back from JSON.

A candidate is priced by `estimate`, the same function that answers `tutti predict`. What is
returned is read back from its own document, priced again, and must come out the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tutti.errors import TuttiError
from tutti.plan.check import require_valid
from tutti.plan.files import plan_from_document, plan_to_document
from tutti.plan.plan import Plan
from tutti.plan.schedules import schedule_record
from tutti.schedule.check import check_schedule
from tutti.schedule.instruction import Op
from tutti.schedule.listing import OPS
from tutti.search.answer.result import ProvenPlan
from tutti.search.cutting.build_draft import PipelineCopies, Spared, distinct_chains, draft_of
from tutti.search.cutting.micro_batch_shares import Runner, balanced
from tutti.search.pricing.pipeline_recurrence import deeper_draft
from tutti.search.pricing.unit_tables import Tables
from tutti.search.strategy.draft import Draft, Placement, canonical, to_plan
from tutti.search.strategy.space_limits import draft_keeps
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.estimate import (
    Estimate,
    PricingMemo,
    SimulatedStep,
    estimate,
    estimate_of,
    simulated_step,
)

_WEIGHTS = OPS.index(Op.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class SimulatedDraft:
    """A draft with its price, and by how many bytes per chip each pool falls short."""

    draft: Draft
    seconds: float
    short_of: Mapping[str, float]
    whole: tuple[Plan, Estimate] | None = None  # where the whole step was simulated
    free: Mapping[tuple[int, int], float] = field(default_factory=dict)  # bytes, by stage
    spared: Spared = field(default_factory=dict)  # that its cuts were made with
    runners: tuple[Runner, ...] = ()  # its pipelines; none where passes have no steady order
    closing_s: float = 0.0  # from the end of the last of them to that of the step
    slowdown: float = 1.0  # of the slowest of all nodes
    value: float = math.inf  # of the objective, once the search ranks it
    key: object = None  # what makes two of them one strategy
    copies: tuple[PipelineCopies, ...] = ()  # that it was made of

    @property
    def fits(self) -> bool:
        """Whether memory suffices."""
        return not self.short_of

    @property
    def evened(self) -> SimulatedDraft:
        """The same pipelines with micro-batches shared out by their paces."""
        counts = balanced(self.runners)
        if counts == [runner.micro_batches for runner in self.runners]:
            return self
        pipelines = zip(self.draft.pipelines, counts, strict=True)
        draft = replace(
            self.draft, pipelines=tuple(replace(p, micro_batches=n) for p, n in pipelines)
        )
        runners = tuple(
            runner._replace(micro_batches=n) for runner, n in zip(self.runners, counts, strict=True)
        )
        reached = max(runner.end() for runner in runners)
        seconds = (reached + self.closing_s) * self.slowdown
        return SimulatedDraft(canonical(draft), seconds, self.short_of)


def short_lengths(draft: Draft) -> tuple[list[int], list[int]]:
    """Return a few rounds for every pipeline, and more; those of one cut keep what they differ by.

    Interleaved micro-batches pass in groups, of as many as there are stages or a few more: those
    of a shorter step are as long as those of the step that it stands for, the longest and on
    average.
    """
    least: dict[object, int] = {}
    for p in draft.pipelines:
        least[p.cut] = min(p.micro_batches, least.get(p.cut, p.micro_batches))
    shorter, longer = [], []
    for p in draft.pipelines:
        fewest, stages = least[p.cut], len(p.stages)
        more = p.micro_batches - fewest
        few, many = 2 * stages + 1, 3 * stages + 1
        if schedule_record(draft.schedule).several_ranges:
            groups = max(1, fewest // stages)
            few, many = (
                -(-n * fewest // groups)
                for n in (THRESHOLDS.short_groups, THRESHOLDS.short_groups + 1)
            )
        shorter.append(few + more)
        longer.append(many + more)
    return shorter, longer


def pass_ends(estimated: Estimate | SimulatedStep) -> list[float]:
    """Return when each pipeline's last pass ends."""
    result = estimated.result
    ends = [0.0] * len(estimated.schedule.plan.pipelines)
    for index, rank_class in enumerate(estimated.schedule.classes):
        span = result.program.span(index)
        last = result.end[span][result.program.op[span] == _WEIGHTS].max(initial=0.0)
        ends[rank_class.pipeline] = max(ends[rank_class.pipeline], float(last))
    return ends


def _paces(estimated: Estimate) -> list[float]:
    """Return the seconds that a micro-batch adds to each pipeline, by the second half of a step."""
    result, pipelines = estimated.result, estimated.schedule.plan.pipelines
    paces = [0.0] * len(pipelines)
    for index, rank_class in enumerate(estimated.schedule.classes):
        count = pipelines[rank_class.pipeline].micro_batches
        if rank_class.stage != 0 or count < 2:
            continue
        span = result.program.span(index)
        weights = result.program.op[span] == _WEIGHTS
        ends = np.zeros(count)
        np.maximum.at(ends, result.program.micro_batch[span][weights], result.end[span][weights])
        ends.sort()
        half = count // 2
        pace = float(ends[-1] - ends[half - 1]) / (count - half)
        paces[rank_class.pipeline] = max(paces[rank_class.pipeline], pace)
    return paces


def _runners(
    draft: Draft, ends: Sequence[float], paces: Sequence[float], reached: Sequence[int]
) -> tuple[Runner, ...]:
    """Return the pipelines of a draft, given when each ended after how many micro-batches.

    None where a schedule's passes come in no steady order.
    """
    record = schedule_record(draft.schedule)
    if not record.steady:
        return ()
    return tuple(
        Runner(
            micro_batches=p.micro_batches,
            sequences=p.micro_batch,
            start_s=end - count * pace,
            pace_s=pace,
            least=2 * len(p.stages) + 1,
            together=len(p.stages) if record.several_ranges else 1,
        )
        for p, end, pace, count in zip(draft.pipelines, ends, paces, reached, strict=True)
    )


def _free(estimated: Estimate) -> dict[tuple[int, int], float]:
    """Return, by pipeline and stage, the bytes that are left on the fullest chip."""
    free: dict[tuple[int, int], float] = {}
    for rank_class, memory in zip(estimated.schedule.classes, estimated.memory, strict=True):
        place = (rank_class.pipeline, rank_class.stage)
        free[place] = min(free.get(place, math.inf), memory.limit - memory.total)
    return free


def free_by_chain(
    simulated: SimulatedDraft, parts: Sequence[PipelineCopies]
) -> dict[tuple[int, int], float] | None:
    """Return the bytes left in each stage of each chain; None where pipelines were joined."""
    if len(simulated.draft.pipelines) != len(parts):
        return None
    chains = distinct_chains(parts)
    number = [next(n for n, c in enumerate(chains) if c is part.chain) for part in parts]
    free: dict[tuple[int, int], float] = {}
    for (pipeline, stage), left in simulated.free.items():
        place = (number[pipeline], stage)
        free[place] = min(free.get(place, math.inf), left)
    return free


def missing(
    simulated: SimulatedDraft, parts: Sequence[PipelineCopies]
) -> dict[str | tuple[int, int], float]:
    """Return the bytes that stages lack; by pool where stages are not those of the parts."""
    free = free_by_chain(simulated, parts)
    if free is None:
        return dict(simulated.short_of.items())
    return {place: -left for place, left in free.items() if left < 0.0}


class SearchDisagreementError(TuttiError):
    """The search priced a plan differently from what the simulator says of it."""


class DraftSimulator:
    """Prices drafts by simulation; counts its work."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.simulated = 0
        self.instructions = 0
        self.memo = PricingMemo.empty()

    def plan_of(self, draft: Draft) -> Plan:
        """Return the placed plan of a draft."""
        problem = self.tables.problem
        return to_plan(draft, self.tables.references, problem.job, problem.model, problem.cluster)

    def price(self, plan: Plan) -> Estimate:
        """Return what the simulator says of a plan."""
        problem = self.tables.problem
        require_valid(plan, problem.model, problem.cluster)
        return self.whole_estimate(self.step(plan))

    def step(self, plan: Plan) -> SimulatedStep:
        """Return the step of a plan that was checked, played; most plans are asked no more."""
        problem = self.tables.problem
        self.simulated += 1
        played = simulated_step(
            plan, problem.model, problem.cluster, self.tables.sources, prices=self.tables.prices,
            memo=self.memo,
        )  # fmt: skip
        self.instructions += played.result.program.size
        return played

    def whole_estimate(self, played: SimulatedStep) -> Estimate:
        """Return all that the simulator says of a plan whose step was played."""
        problem = self.tables.problem
        return estimate_of(played, problem.model, problem.cluster, self.tables.sources)

    def parts(
        self, parts: Sequence[PipelineCopies], placement: Placement = "stage"
    ) -> SimulatedDraft | None:
        """Cut, place and price chains; where memory falls short, cut again with less of it."""
        spared: dict[str | tuple[int, int], float] = {}
        draft = draft_of(self.tables, parts, placement=placement)
        for _ in range(THRESHOLDS.attempts):
            if draft is None or not draft_keeps(draft, self.tables.problem):
                return None
            simulated = self.quick(draft)
            if simulated.fits:
                return replace(self._run_ahead(simulated), spared=spared)
            short = missing(simulated, parts)
            for place, more in short.items():
                spared[place] = (
                    spared.get(place, 0.0)
                    + THRESHOLDS.spared_share * more
                    + THRESHOLDS.least_spared
                )
            before = draft
            for _ in range(THRESHOLDS.doublings):  # cuts move in whole units: until one has moved
                draft = draft_of(self.tables, parts, placement=placement, spared=spared)
                if draft != before:
                    break
                for place in short:
                    spared[place] *= 2.0
        return None

    def _run_ahead(self, simulated: SimulatedDraft) -> SimulatedDraft:
        """Return the strategy with stages further ahead, where messages ask for it and it pays."""
        deeper = deeper_draft(self.tables, simulated.draft)
        if deeper is None:
            return simulated
        other = self.quick(deeper)
        return other if other.fits and other.seconds < simulated.seconds else simulated

    def quick(self, draft: Draft) -> SimulatedDraft:
        """Price a draft by simulating the beginning of its step, the whole of it if it is short.

        Once a pipeline runs, every further micro-batch adds the same time, or every round of as
        many micro-batches as it has stages does: two short steps tell both the beginning and the
        pace.
        """
        draft = canonical(draft)
        lengths, longer = short_lengths(draft)
        whole = sum(p.micro_batches * sum(map(len, p.cut)) for p in draft.pipelines)
        short = sum(
            (a + b) * sum(map(len, p.cut))
            for a, b, p in zip(lengths, longer, draft.pipelines, strict=True)
        )
        enough = all(n < p.micro_batches for n, p in zip(longer, draft.pipelines, strict=True))
        brief = whole <= THRESHOLDS.long_step or short >= THRESHOLDS.worth_shortening * whole
        if brief or not enough or not schedule_record(draft.schedule).steady:
            made = self.plan_of(draft)
            estimated = self.price(made)
            ends, paces = pass_ends(estimated), _paces(estimated)
            counts = [p.micro_batches for p in draft.pipelines]
            return SimulatedDraft(
                draft,
                estimated.step_seconds,
                self._short_of(estimated),
                (made, estimated),
                _free(estimated),
                runners=_runners(draft, ends, paces, counts),
                closing_s=estimated.result.step_seconds - max(ends),
                slowdown=estimated.priced.slowdown,
            )
        first, second = self._shortened(draft, lengths), self._shortened(draft, longer)
        starts, ends = pass_ends(first), pass_ends(second)
        taken = zip(starts, ends, lengths, longer, strict=True)
        paces = [(end - start) / (more - few) for start, end, few, more in taken]
        runners = _runners(draft, ends, paces, longer)
        reached = max(runner.end() for runner in runners)
        closing, slowdown = second.result.step_seconds - max(ends), second.priced.slowdown
        seconds = (reached + closing) * slowdown
        return SimulatedDraft(
            draft, seconds, self._short_of(second), free=_free(second), runners=runners,
            closing_s=closing, slowdown=slowdown,
        )  # fmt: skip

    def _shortened(self, draft: Draft, lengths: list[int]) -> Estimate:
        pipelines = tuple(
            replace(p, micro_batches=n) for p, n in zip(draft.pipelines, lengths, strict=True)
        )
        shorter = replace(draft, pipelines=pipelines)
        problem = self.tables.problem
        job = replace(problem.job, global_batch=shorter.sequences)
        plan = to_plan(shorter, self.tables.references, job, problem.model, problem.cluster)
        return self.price(plan)

    def _short_of(self, estimated: Estimate) -> dict[str, float]:
        if self.tables.problem.unlimited_memory:
            return {}
        short: dict[str, float] = {}
        for memory in estimated.memory:
            if not memory.fits:
                more = memory.total - memory.limit
                short[memory.pool] = max(short.get(memory.pool, 0.0), more)
        return short

    def prove(self, plan: Plan, priced: Estimate, summary: str) -> ProvenPlan:
        """Return a plan that may leave: checked, and the same after its way through a file.

        It records the collective programs that its price rests on.
        """
        for problem in check_schedule(priced.schedule):
            raise SearchDisagreementError(f"{summary}: its schedule is wrong: {problem}")
        plan = replace(plan, collectives=priced.priced.choices)
        again = plan_from_document(plan_to_document(plan), "plan")
        if again != plan:
            raise SearchDisagreementError(f"{summary}: the plan changes on its way through a file")
        return ProvenPlan(plan=plan, estimate=priced, summary=summary)

    def prove_again(self, proven: ProvenPlan) -> ProvenPlan:
        """Price what is returned once more, by nothing that the search shares; it must agree."""
        problem = self.tables.problem
        again = plan_from_document(plan_to_document(proven.plan), "plan")
        fresh = estimate(again, problem.model, problem.cluster, problem.pinned_sources())
        require_agreement(
            proven.summary, proven.step_seconds, fresh.step_seconds, THRESHOLDS.same_price
        )
        for one, other in zip(proven.estimate.memory, fresh.memory, strict=True):
            require_agreement(
                f"{proven.summary}, bytes", one.total, other.total, THRESHOLDS.same_price
            )
        return proven


def require_agreement(what: str, searched: float, proven: float, within: float) -> None:
    """Raise an error where the search's price is not what the simulator says."""
    if abs(searched - proven) > within * proven:
        raise SearchDisagreementError(
            f"{what}: the search says {searched:.6g}, the simulator {proven:.6g}; "
            f"they may differ by {within:.2g} of it"
        )
