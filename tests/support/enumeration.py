"""Every strategy of a small Space by plain loops: what the exact search is held against.

Obviously right rather than fast, and sharing no code with the search beyond what turns a Draft into
a priced Plan. Where the Space leaves a choice of reading, this is how it is read:

- the groups of a stage stand in the order of the cluster's pools, pipelines in any order;
- two pipelines of one cut and count are one canonical draft whose stages hold the groups of both;
- the rules of a stage (pools, shares, expert degree) hold inside each pipeline before that;
- with two pipelines, either every stage that has experts spreads them or none does;
- every pipeline of an interleaved plan chooses its own number of ranges per stage.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tutti.errors import InputError
from tutti.hardware.pool import Pool
from tutti.plan.check import check_plan
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Offload, Plan, Recompute, UnitRanges
from tutti.plan.schedules import schedule_record
from tutti.plan.uniform import even_cuts
from tutti.search.cutting.build_draft import with_orders
from tutti.search.pricing.unit_tables import Config, Tables
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
from tutti.simulate.estimate import Estimate, estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumerated:
    """The best of all plans, and how many there were."""

    draft: Draft | None  # None: nothing fits
    step_seconds: float | None
    drafts: int  # of the space
    valid: int  # that the checker lets pass
    fitting: int


def enumerate_best(tables: Tables) -> Enumerated:
    """Price every plan of the space and return the fastest that fits."""
    best: tuple[float, Draft] | None = None
    drafts = valid = fitting = 0
    for draft in all_drafts(tables.problem):
        drafts += 1
        finished = finish(draft, tables)
        found = price(finished, tables)
        if found is None:
            continue
        valid += 1
        if not (found.fits or tables.problem.unlimited_memory):
            continue
        fitting += 1
        if best is None or found.step_seconds < best[0]:
            best = (found.step_seconds, finished)
    return Enumerated(
        draft=best[1] if best else None,
        step_seconds=best[0] if best else None,
        drafts=drafts,
        valid=valid,
        fitting=fitting,
    )


def finish(draft: Draft, tables: Tables) -> Draft:
    """Fill in what is derived: pieces of tensor-parallel collectives, relative times."""

    def replica(one: ReplicaDraft) -> ReplicaDraft:
        table = tables.get(one.config)
        assert table is not None, f"{one.config} has no measured profile"
        return replace(one, overlap_chunks=table.overlap_chunks)

    def stage(one: StageDraft) -> StageDraft:
        return replace(one, replicas=tuple(replica(r) for r in one.replicas))

    pipelines = tuple(
        replace(pipeline, stages=tuple(stage(s) for s in pipeline.stages))
        for pipeline in draft.pipelines
    )
    return with_orders(replace(draft, pipelines=pipelines), tables)


def plan_of(draft: Draft, tables: Tables) -> Plan:
    """Place a draft."""
    problem = tables.problem
    return to_plan(draft, tables.references, problem.job, problem.model, problem.cluster)


def price(draft: Draft, tables: Tables) -> Estimate | None:
    """Return what the simulator says of a finished draft; None where the checker refuses it."""
    problem = tables.problem
    plan = plan_of(draft, tables)
    try:
        return estimate(plan, problem.model, problem.cluster, tables.sources)
    except InputError:
        if check_plan(plan, problem.model, problem.cluster):
            return None
        raise  # a plan that the checker lets pass must have a price


# --- whole strategies ------------------------------------------------------------------------


def all_drafts(problem: Problem) -> Iterator[Draft]:
    """Yield every strategy of the space once, in canonical form."""
    seen: set[Draft] = set()
    for draft in _drafts(problem):
        one = canonical(draft)
        if one not in seen and _one_expert_degree(one) and draft_keeps(one, problem):
            seen.add(one)
            yield one


def _drafts(problem: Problem) -> Iterator[Draft]:
    space = problem.space
    plain = [kind for kind in space.schedules if not schedule_record(kind).several_ranges]
    for schedule in space.schedules:
        for together in _together(problem, schedule):
            single = all(len(pipeline.stages) == 1 for pipeline in together)
            if single and schedule is not plain[0]:
                continue  # the same lists as under the first kind
            for shard in space.shard:
                yield Draft(pipelines=together, schedule=schedule, shard=shard)


def _together(problem: Problem, schedule: ScheduleKind) -> Iterator[tuple[PipelineDraft, ...]]:
    """Yield one pipeline, or two, that take the whole batch."""
    every = list(pipelines(problem, schedule))
    for one in every:
        if _takes_all(problem, (one,)):
            yield (one,)
    if problem.space.max_pipelines == 1:
        return
    for first, second in itertools.product(every, repeat=2):
        pair = (first, second)
        if _takes_all(problem, pair) and _spread_alike(problem, pair):
            yield pair


def _takes_all(problem: Problem, together: tuple[PipelineDraft, ...]) -> bool:
    """Whether the pipelines take the whole batch, and the chips that they may and must."""
    sequences = sum(pipeline.micro_batch * pipeline.micro_batches for pipeline in together)
    if sequences != problem.job.global_batch:
        return False
    stages = tuple(stage for pipeline in together for stage in pipeline.stages)
    used = _chips(stages)
    if problem.space.idle:
        return all(used[pool.name] <= pool.num_chips for pool in problem.pools)
    return all(used[pool.name] == pool.num_chips for pool in problem.pools)


def _chips(stages: tuple[StageDraft, ...]) -> Counter[str]:
    used: Counter[str] = Counter()
    for stage in stages:
        for replica in stage.replicas:
            used[replica.config.pool] += replica.num_chips
    return used


def _spread_alike(problem: Problem, together: tuple[PipelineDraft, ...]) -> bool:
    spread = {
        stage.replicas[0].config.ep > 1
        for pipeline in together
        for stage in pipeline.stages
        if has_experts(stage.units, problem.model)
    }
    return len(spread) <= 1


def _one_expert_degree(draft: Draft) -> bool:
    return all(
        len({replica.config.ep for replica in stage.replicas}) == 1
        for pipeline in draft.pipelines
        for stage in pipeline.stages
    )


# --- pipelines -------------------------------------------------------------------------------


def pipelines(problem: Problem, schedule: ScheduleKind) -> Iterator[PipelineDraft]:
    """Yield every pipeline that may be part of a plan, with every count of micro-batches."""
    interleaved = schedule_record(schedule).several_ranges
    rounds = [v for v in problem.space.virtual if v > 1] if interleaved else [1]
    most = min(problem.space.max_stages or problem.model.num_units, problem.model.num_units)
    for depth in range(2 if interleaved else 1, most + 1):
        for virtual in rounds:
            for cut in _cuts(problem, depth * virtual):
                units = [tuple(cut[s::depth]) for s in range(depth)]
                choices = [list(_stages(problem, own)) for own in units]
                for stages in _chains(problem, choices, ()):
                    micro_batch = _sequences(stages[0])
                    for count in range(1, problem.job.global_batch // micro_batch + 1):
                        yield PipelineDraft(micro_batches=count, stages=stages)


def _cuts(problem: Problem, parts: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the ways to cut all units into so many ranges."""
    model = problem.model
    if problem.space.uneven_units:
        for inner in itertools.combinations(range(1, model.num_units), parts - 1):
            yield list(itertools.pairwise((0, *inner, model.num_units)))
        return
    try:
        yield even_cuts(model.num_layers, parts)
    except InputError:  # more parts than layers
        return


def _chains(
    problem: Problem, choices: list[list[StageDraft]], ahead: tuple[StageDraft, ...]
) -> Iterator[tuple[StageDraft, ...]]:
    """Yield the sequences of stages that begin with those ahead and belong together."""
    if len(ahead) == len(choices):
        yield ahead
        return
    for stage in choices[len(ahead)]:
        longer = (*ahead, stage)
        if _belong_together(problem, longer):
            yield from _chains(problem, choices, longer)


def _belong_together(problem: Problem, stages: tuple[StageDraft, ...]) -> bool:
    if len({_sequences(stage) for stage in stages}) > 1:
        return False
    if not problem.space.mixed_pipelines and len({_pools(stage) for stage in stages}) > 1:
        return False
    used = _chips(stages)
    return all(used[pool.name] <= pool.num_chips for pool in problem.pools)


def _sequences(stage: StageDraft) -> int:
    return sum(replica.sequences for replica in stage.replicas)


def _pools(stage: StageDraft) -> tuple[str, ...]:
    return tuple(replica.config.pool for replica in stage.replicas)


# --- stages ----------------------------------------------------------------------------------


def _stages(problem: Problem, units: UnitRanges) -> Iterator[StageDraft]:
    """Yield every way to compute some units."""
    teams: list[tuple[Pool, ...]] = [(pool,) for pool in problem.pools]
    if problem.space.mixed_stages:
        teams += itertools.combinations(problem.pools, 2)
    degrees = problem.expert_degrees() if has_experts(units, problem.model) else (1,)
    for team, ep in itertools.product(teams, degrees):
        groups = [list(_replicas(problem, units, pool, ep)) for pool in team]
        for replicas in itertools.product(*groups):
            stage = StageDraft(units=units, replicas=replicas)
            if _is_stage(problem, stage):
                yield stage


def _is_stage(problem: Problem, stage: StageDraft) -> bool:
    if _sequences(stage) > problem.job.global_batch:
        return False
    if sum(replica.num_chips for replica in stage.replicas) % stage.replicas[0].config.ep:
        return False
    shares = {replica.config.sequences for replica in stage.replicas}
    return problem.space.uneven_shares or len(shares) == 1


def _replicas(problem: Problem, units: UnitRanges, pool: Pool, ep: int) -> Iterator[ReplicaDraft]:
    """Yield every group of equal replicas of a pool."""
    for tp, cp, sequences in itertools.product(
        problem.tensor_degrees(pool), problem.context_degrees(), problem.sequence_counts()
    ):
        if tp > 1 and (problem.job.sequence_length // cp) % tp:
            continue  # sequence parallelism does not divide the tokens
        config = Config(pool.name, tp, cp, ep, sequences)
        for copies in range(1, pool.num_chips // config.width + 1):
            for recompute, offload in itertools.product(
                _recomputes(problem, units), _offloads(problem, units)
            ):
                yield ReplicaDraft(
                    config=config, copies=copies, recompute=recompute, offload=offload
                )


def _recomputes(problem: Problem, units: UnitRanges) -> Iterator[Recompute]:
    """Yield what may be recomputed: leading blocks wholly, then some selectively."""
    allowed = problem.space.recompute
    head = problem.model.head_unit
    blocks = tuple((max(a, 1), min(b, head)) for a, b in units if max(a, 1) < min(b, head))
    if not blocks:
        yield Recompute()
    elif len(units) > 1:  # interleaved: all blocks alike
        for kind in allowed:
            yield {
                "none": Recompute(),
                "selective": Recompute(selective=blocks),
                "full": Recompute(full=blocks),
            }[kind]
    else:
        ((start, stop),) = blocks
        for first, second in itertools.combinations_with_replacement(range(start, stop + 1), 2):
            full = ((start, first),) if first > start else ()
            selective = ((first, second),) if second > first else ()
            used = {"full": full, "selective": selective, "none": second < stop}
            if all(kind in allowed for kind, present in used.items() if present):
                yield Recompute(full=full, selective=selective)


def _offloads(problem: Problem, units: UnitRanges) -> Iterator[Offload]:
    """Yield every set of kinds, each for all units of the stage."""
    kinds = problem.space.offload
    for count in range(len(kinds) + 1):
        for chosen in itertools.combinations(kinds, count):
            yield Offload(**dict.fromkeys(chosen, units))
