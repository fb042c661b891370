"""A local search from a simulated plan: the first move that the simulator finds faster is taken.

Kinds of moves take turns, so that one with many moves does not hide the others: a few moves of each
at first, more where nothing has helped yet. One in which nothing helps waits until another has
changed the plan. Work that helped is given back, up to a limit: a search that gains goes on. Of a
long step the beginning is simulated, as in the search before it, and the whole step once a move is
to be taken; whole steps of what was nearly as good by its beginning are simulated in their turn.
A plan whose passes alone take longer than the best plan is not simulated, and costs no work. Work
is counted in instructions, never timed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tutti.errors import TuttiError
from tutti.hardware.chip import Dtype
from tutti.plan.check import check_plan
from tutti.plan.plan import Pipeline, Plan
from tutti.plan.schedules import schedule_record, warm_up_depth
from tutti.plan.wide_units import chosen_wide_units, with_wide_units
from tutti.schedule.check import check_schedule
from tutti.search.improve.batch_moves import BATCH_MOVES
from tutti.search.improve.chip_moves import CHIP_MOVES
from tutti.search.improve.least_time import LeastTime
from tutti.search.improve.plan_moves import PLAN_MOVES, Here
from tutti.search.improve.stage_loads import Loads
from tutti.search.improve.stage_moves import STAGE_MOVES
from tutti.search.improve.state_moves import STATE_MOVES
from tutti.search.pricing.simulate_draft import DraftSimulator, pass_ends
from tutti.search.strategy.space_limits import plan_in_space
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.estimate import Estimate, SimulatedStep

# In the order in which they are tried: much for little work first.
MOVES = {
    name: (PLAN_MOVES | STAGE_MOVES | BATCH_MOVES | CHIP_MOVES | STATE_MOVES)[name]
    for name in (
        "tied owner", "micro-batch", "warm-up", "shard level", "shares", "units", "degrees",
        "schedule", "sizes", "copies", "order", "experts", "sharding", "recompute", "sequences",
        "joined", "warm-up of stages", "flags", "places", "fewer stages", "shard shares", "offload",
        "idle chips", "order times", "copies of stages", "handed copies", "rules of stages",
        "experts of stages", "shares of groups", "apart", "left out", "more stages",
        "idle pipelines", "recompute at all", "offload at all", "ends on the host", "dealt out",
        "uneven experts", "wide blocks",
    )
}  # fmt: skip

NEARLY = "nearly as good"  # plans that were tried already, but by short steps only


@dataclass(frozen=True, slots=True)
class Standing:
    """A plan with its price."""

    plan: Plan
    estimate: Estimate
    worth: float


@dataclass(slots=True)
class _Turns:
    """Where a kind of moves stands: how many were tried, and whether a better plan came of them.

    After a better plan the moves go on at their place, and those before it come once more.
    """

    place: int = 0
    left: Iterator[Plan | None] | None = None  # the moves from there on, of the best plan
    number: int = 0
    is_over: bool = False
    _helped: bool = False

    def begin(self) -> int:
        """Return how many moves the next turn may price: first few, then more."""
        self.number += 1
        longest = THRESHOLDS.moves_a_turn
        return min(longest, THRESHOLDS.first_moves << (self.number - 1))

    def go_on(self) -> None:
        """A better plan was found: its moves are others."""
        self.left, self._helped = None, True

    def follow(self) -> None:
        """Another kind found a plan that is a little better: its moves from here on."""
        self.left = None

    def end(self) -> None:
        """All moves were tried."""
        self.is_over = not self._helped
        self.place, self.left, self._helped = 0, None, False


@dataclass(slots=True)
class PlanSearch:
    """Improves plans of one problem as long as its work lasts."""

    simulator: DraftSimulator
    worth: Callable[[Plan, float], float]  # of the objective, given the seconds of a step
    refundable: int = 0  # instructions that helped and may be given back
    spent: int = 0  # instructions, without those that were given back
    _until: int = 0
    _tried: set[object] = field(default_factory=set)
    _known: dict[object, float | None] = field(default_factory=dict)  # by short steps
    # Plans that short steps found nearly as good as one: how much longer, by that one.
    _near: dict[object, list[tuple[float, Plan]]] = field(default_factory=dict)
    _least: LeastTime = field(init=False)

    def __post_init__(self) -> None:
        tables = self.simulator.tables
        self._least = LeastTime(
            tables.problem.model, tables.problem.cluster, tables.prices, tables.sources.kernels
        )

    @property
    def is_spent(self) -> bool:
        """Whether no work is left."""
        return self.spent >= self._until

    def improved(self, plan: Plan, estimate: Estimate, budget: int) -> tuple[Plan, Estimate]:
        """Return a plan from which no move leads on, or the best when work or patience ends."""
        self._until = self.spent + budget
        plan = replace(plan, collectives=())  # those of another plan are not the best ones of this
        best = Standing(plan, estimate, self.worth(plan, estimate.step_seconds))
        self._tried.add(_key(plan))
        kinds = [*MOVES, NEARLY]
        waiting = list(kinds)
        turns = {kind: _Turns() for kind in kinds}
        begun = best.worth  # when the kinds began anew
        try:
            while waiting and not self.is_spent:
                kind = waiting.pop(0)
                better = self._turn(kind, best, turns[kind])
                if better is not best:
                    best = better
                    others = [other for other in kinds if other != kind]
                    if best.worth < begun * (1.0 - THRESHOLDS.worth_anew):
                        begun = best.worth
                        turns |= {other: _Turns() for other in others}
                        waiting += [other for other in others if other not in waiting]
                    for other in others:
                        turns[other].follow()
                if not turns[kind].is_over or (kind == NEARLY and waiting):
                    waiting.append(kind)
        except KeyboardInterrupt:
            pass
        return best.plan, best.estimate

    def _give_back(self, work: int) -> None:
        """Count work that helped as if it had not been done, as far as it may be."""
        returned = min(work, self.refundable)
        self.refundable -= returned
        self.spent -= returned

    def _turn(self, kind: str, best: Standing, turns: _Turns) -> Standing:
        """Try some moves of one kind from where it stood, each from the best plan at that time.

        Return the best plan.
        """
        priced, before, most = 0, self.spent, turns.begin()
        if kind == NEARLY:  # those nearest of all that there are by now
            turns.left, turns.place = None, 0
        while priced < most:
            if turns.left is None:
                turns.left = itertools.islice(self._moves(kind, best), turns.place, None)
            counts = _short_counts(best.plan)
            now = None if counts is None else self._short_worth(best.plan, counts)
            for plan in turns.left:
                turns.place += 1
                spent = self.spent
                if kind == NEARLY and plan is not None:
                    better = self._whole(plan, best)
                else:
                    better = None if plan is None else self._better(plan, best, now)
                priced += self.spent > spent
                if better is not None:
                    self._near.pop(_key(best.plan), None)
                    self._give_back(self.spent - before)
                    best, priced, before = better, 0, self.spent
                    turns.go_on()
                    break
                if self.is_spent or priced >= most:
                    return best
            else:
                turns.end()
                return best
        return best

    def _moves(self, kind: str, best: Standing) -> Iterator[Plan | None]:
        """Yield the moves of a kind from the best plan."""
        if kind == NEARLY:
            near = self._near.get(_key(best.plan), [])
            near.sort(key=lambda pair: pair[0], reverse=True)
            return (near.pop()[1] for _ in range(len(near)))
        problem = self.simulator.tables.problem
        return MOVES[kind](Here(problem=problem, plan=best.plan, loads=Loads.of(best.estimate)))

    def _better(self, plan: Plan, best: Standing, now: float | None) -> Standing | None:
        """Return a plan with its price where it is better than the best.

        `now` is what the best is worth by its own short steps, where it has some.
        """
        plan = self._widened(plan, best.plan)
        if self.is_spent or not self._is_new(plan) or self._takes_longer(plan, best):
            return None
        counts = _short_counts(plan)
        if counts is not None and now is not None:
            hoped = self._short_worth(plan, counts)
            if hoped is None:
                return None
            if hoped >= now * (1.0 - THRESHOLDS.least_gain):
                if hoped < now * THRESHOLDS.nearly_as_good:
                    self._near.setdefault(_key(best.plan), []).append((hoped / now, plan))
                return None
        return self._whole(plan, best)

    def _widened(self, plan: Plan, before: Plan) -> Plan:
        """Return a changed plan with the blocks wide that now must be, or that it chose to be."""
        problem = self.simulator.tables.problem
        if plan.job.precision.compute is not Dtype.FP8:
            return plan
        chosen = chosen_wide_units(
            before if plan.job.wide_units == before.job.wide_units else plan, problem.cluster
        )
        return with_wide_units(plan, problem.cluster, problem.model.head_unit, chosen)

    def _is_new(self, plan: Plan) -> bool:
        """Tell whether a plan was not tried yet, is in the space and means something."""
        key = _key(plan)
        if key in self._tried:
            return False
        self._tried.add(key)
        problem = self.simulator.tables.problem
        return plan_in_space(plan, problem) and not check_plan(plan, problem.model, problem.cluster)

    def _takes_longer(self, plan: Plan, best: Standing) -> bool:
        """Tell whether a plan's passes alone take as long as the best plan: nothing to simulate."""
        same_chips = plan.idle == best.plan.idle
        slowdown = best.estimate.priced.slowdown if same_chips else 1.0
        least = slowdown * self._least.seconds(plan)
        return self.worth(plan, least) >= best.worth * (1.0 - THRESHOLDS.least_gain)

    def _whole(self, plan: Plan, best: Standing) -> Standing | None:
        """Return a plan with its price where it is better than the best."""
        played = self._played(plan)
        if played is None:
            return None
        worth = self.worth(plan, played.step_seconds)
        if worth >= best.worth * (1.0 - THRESHOLDS.least_gain) or not self._fits(played):
            return None
        if any(check_schedule(played.schedule)):
            return None
        return Standing(plan, self.simulator.whole_estimate(played), worth)

    def _played(self, plan: Plan) -> SimulatedStep | None:
        """Return the step that the simulator plays; None where the plan cannot run."""
        self.spent += THRESHOLDS.per_plan
        try:
            played = self.simulator.step(plan)
        except TuttiError:  # an order in which stages wait for each other
            return None
        self.spent += played.result.program.size
        return played

    def _fits(self, played: SimulatedStep) -> bool:
        problem = self.simulator.tables.problem
        return problem.unlimited_memory or played.fits(problem.cluster)

    def _short_worth(self, plan: Plan, counts: tuple[list[int], list[int]]) -> float | None:
        """Return what a plan is worth by two short steps: they tell the beginning and the pace."""
        key = _key(plan)
        if key not in self._known:
            self._known[key] = self._by_short_steps(plan, counts)
        return self._known[key]

    def _by_short_steps(self, plan: Plan, counts: tuple[list[int], list[int]]) -> float | None:
        ends: list[list[float]] = []
        played: SimulatedStep | None = None
        for lengths in counts:
            played = self._played(_shortened(plan, lengths))
            if played is None or not self._fits(played):
                return None
            ends.append(pass_ends(played))
        assert played is not None
        reached = 0.0
        for p, pipeline in enumerate(plan.pipelines):
            pace = (ends[1][p] - ends[0][p]) / (counts[1][p] - counts[0][p])
            left = pipeline.micro_batches - counts[1][p]
            reached = max(reached, ends[1][p] + left * pace)
        closing = played.result.step_seconds - max(ends[1])
        return self.worth(plan, (reached + closing) * played.priced.slowdown)


def _key(plan: Plan) -> object:
    return (plan.pipelines, plan.synchronisation, plan.tied_owner, plan.job)


def _pace_key(pipeline: Pipeline) -> object:
    """Return what pipelines have in common whose micro-batches take the same time."""
    return tuple(
        (stage.units, tuple((r.chips.pools, r.tp, r.cp, r.sequences) for r in stage.replicas))
        for stage in pipeline.stages
    )


def _shortened(plan: Plan, lengths: list[int]) -> Plan:
    pipelines = tuple(
        replace(pipeline, micro_batches=count)
        for pipeline, count in zip(plan.pipelines, lengths, strict=True)
    )
    total = sum(pipeline.sequences for pipeline in pipelines)
    return replace(plan, pipelines=pipelines, job=replace(plan.job, global_batch=total))


def _short_counts(plan: Plan) -> tuple[list[int], list[int]] | None:
    """Return micro-batches of two short steps; None where the whole step is hardly longer.

    Pipelines whose micro-batches take the same time keep what they differ by.
    """
    record = schedule_record(plan.job.schedule)
    if not record.steady:
        return None
    paces = [_pace_key(pipeline) for pipeline in plan.pipelines]
    least: dict[object, int] = {}
    for key, pipeline in zip(paces, plan.pipelines, strict=True):
        least[key] = min(pipeline.micro_batches, least.get(key, pipeline.micro_batches))
    shorter: list[int] = []
    longer: list[int] = []
    short = whole = 0
    for key, pipeline in zip(paces, plan.pipelines, strict=True):
        stages, fewest = len(pipeline.stages), least[key]
        depth = warm_up_depth(pipeline, 0, plan.job.schedule)
        few = max(2 * stages + 1, depth + stages)
        many = few + stages
        if record.several_ranges:
            groups = max(1, fewest // stages)
            few, many = (
                math.ceil(n * fewest / groups)
                for n in (THRESHOLDS.short_groups, THRESHOLDS.short_groups + 1)
            )
        more = pipeline.micro_batches - fewest
        if many >= fewest:
            return None
        shorter.append(few + more)
        longer.append(many + more)
        ranges = sum(len(stage.units) for stage in pipeline.stages)
        short += (few + many + 2 * more) * ranges
        whole += pipeline.micro_batches * ranges
    return (shorter, longer) if short < THRESHOLDS.short_enough * whole else None
