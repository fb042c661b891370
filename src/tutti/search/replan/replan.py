"""A new plan for a running one whose cluster changed: what to run, what must move, when it pays.

Warm-started: the running plan, on the chips that are left of it, is the first candidate, so that on
a large cluster a search with a small budget suffices. If nothing faster is found, the running plan
goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tutti.errors import InputError
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Pipeline, Plan
from tutti.search.answer.explanation import step_text
from tutti.search.answer.result import ProvenPlan, SearchResult
from tutti.search.bound.lower_bound import lower_bound
from tutti.search.cutting.build_draft import Grouping, PipelineCopies
from tutti.search.planner import plan
from tutti.search.pricing.simulate_draft import DraftSimulator
from tutti.search.pricing.unit_tables import Config, Tables
from tutti.search.question.effort import Effort, Report, silent
from tutti.search.question.renumbering import renumbered
from tutti.search.question.space import Problem
from tutti.search.replan.state_movement import Movement, NodeMoves, movement, payback
from tutti.search.replan.surviving_plan import surviving_plan
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption
from tutti.search.strategy.matching import chips_of
from tutti.search.strategy.summary import summary_of
from tutti.units import bytes_text, seconds_text

# The running plan is a good start already: a few strategies of each kind are enough to beat it.
WARM = Effort(
    instructions=20_000, per_chip=60, most=300_000, candidates=3, chains=2, polished=1,
    refined=2, wider=1, improved=0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The answer to a changed cluster."""

    result: SearchResult
    movement: Movement
    staying: ProvenPlan | None  # the running plan on what is left; None where it cannot go on
    payback_seconds: float | None  # None: the move never pays
    kept_old: bool  # nothing faster was found
    words: str
    renumbered: Mapping[str, str] = field(default_factory=dict)  # "a800/4" → "a800/3"

    def to_document(self) -> dict[str, object]:
        """Return what `--json` adds to the result's own document."""
        moved = self.movement
        return {
            "kept_old": self.kept_old,
            "staying_step_time_s": self.staying.step_seconds if self.staying else None,
            "moved_bytes": moved.total_bytes,
            "busiest_chip_bytes": moved.busiest_chip_bytes,
            "from_checkpoint_bytes": moved.from_checkpoint_bytes,
            "moved_bytes_by_pool": dict(moved.by_pool),
            "movement_s": moved.seconds if moved.storage_known else None,
            "between_chips_s": moved.seconds if not moved.storage_known else None,
            "renumbered": dict(self.renumbered),
            "payback_s": self.payback_seconds,
            "words": self.words,
        }


def replan(
    old: Plan,
    problem: Problem,
    *,
    moved: NodeMoves | None = None,
    effort: Effort | None = None,
    report: Report | None = None,
    steps_lost: float = 0.0,
) -> Replanned:
    """Return the best plan for the problem's cluster, which differs from the old plan's.

    `moved` says which of the old plan's nodes became which of the cluster's (lost ones are
    missing); without it every node is where it was. `steps_lost` are the steps since the last
    checkpoint, done again if state was lost.
    """
    started = time.process_time()
    _require_same_job(old, problem)
    tables = Tables(problem)
    simulator = DraftSimulator(tables)
    staying = _staying(old, problem, moved, simulator)
    warm = effort or _warm(old, problem)
    answer = _searched(old, tables, warm, report, staying)
    kept = staying is not None and staying.step_seconds <= answer.best.step_seconds
    if staying is not None and kept:
        proven = simulator.prove(staying.plan, staying.estimate, staying.summary)
        rival = None if answer.best is staying else answer.best
        answer = replace(answer, best=proven, runner_up=rival, why_runner_up_lost="")
    answer = replace(
        answer,
        # The running plan may lie outside of a space that was narrowed since.
        lower_bound_seconds=min(answer.lower_bound_seconds, answer.best.step_seconds),
        search_cpu_seconds=time.process_time() - started,
    )
    needed = movement(old, answer.best.plan, problem.model, problem.cluster, moved)
    pays = payback(
        staying.step_seconds if staying is not None else None,
        answer.best.step_seconds,
        needed.seconds,
        steps_lost=steps_lost if needed.rolls_back else 0.0,
    )
    if staying is not None and not needed.storage_known:
        pays = None  # nobody can tell how long the pause is
    return Replanned(
        result=answer,
        movement=needed,
        staying=staying,
        payback_seconds=pays,
        kept_old=kept,
        words=_words(answer, staying, needed, pays, kept=kept),
        renumbered=renumbered(moved or {}),
    )


def _warm(old: Plan, problem: Problem) -> Effort:
    """Return the work to do: that of any search on a small cluster, where it takes no longer."""
    seeds, usual = _seeds(old, problem), Effort()
    if problem.num_chips < usual.large:
        return replace(usual, seeds=seeds)
    return replace(WARM, groupings=_arrangements(old, problem), seeds=seeds)


def _require_same_job(old: Plan, problem: Problem) -> None:
    if old.model.hash and old.model.hash != problem.model.fingerprint:
        raise InputError(
            f"re-planning: the old plan trains {old.model.name} ({old.model.hash}), this is "
            f"{problem.model.name} ({problem.model.fingerprint}); give the same model"
        )
    for name in ("global_batch", "sequence_length", "precision"):
        was, wanted = getattr(old.job, name), getattr(problem.job, name)
        if was != wanted:
            raise InputError(
                f"re-planning: the old plan has {name} {_value(was)}, this {_value(wanted)}; steps "
                "can be compared only if the job stays the same"
            )


def _value(value: object) -> object:
    return getattr(value, "label", value)


def _arrangements(old: Plan, problem: Problem) -> tuple[Grouping, ...]:
    """Return how the running plan arranges the pools: what it does is likely still right."""
    names = [pool.name for pool in problem.pools]
    chains = dict.fromkeys(
        tuple(
            dict.fromkeys(name for stage in p.stages for name in stage.chips.pools if name in names)
        )
        for p in old.pipelines
    )
    seen: set[str] = set()
    grouping: list[tuple[str, ...]] = []
    for chain in chains:
        fresh = tuple(name for name in chain if name not in seen)
        seen |= set(fresh)
        if fresh:
            grouping.append(fresh)
    return (tuple(grouping),) if grouping else ()


def _seeds(old: Plan, problem: Problem) -> tuple[tuple[PipelineCopies, ...], ...]:
    """Return the running plan's chains with as many copies as the changed pools hold."""
    level = max((rule.shard_level for rule in old.synchronisation), default=0)
    by_chain: dict[object, PipelineCopies] = {}
    for pipeline in old.pipelines:
        chain = _chain(pipeline, old.job.schedule, level)
        if chain is None or not _allowed(chain, problem):
            return ()
        known = by_chain.get(chain.form)
        if known is not None:
            chain = replace(chain, copies=chain.copies + known.copies)
        by_chain[chain.form] = PipelineCopies(
            chain=chain, copies=chain.copies, micro_batches=pipeline.micro_batches
        )
    copies = _fitted(list(by_chain.values()), {pool.name: pool.num_chips for pool in problem.pools})
    parts = tuple(
        replace(part, chain=replace(part.chain, copies=count), copies=count)
        for part, count in zip(by_chain.values(), copies, strict=True)
        if count > 0
    )
    return (parts,) if parts else ()


def _chain(pipeline: Pipeline, schedule: ScheduleKind, level: int) -> Chain | None:
    """Return what a pipeline has copies of; None where a stage mixes replicas."""
    runs: list[tuple[Config, int]] = []
    counts: list[int] = []
    for stage in pipeline.stages:
        if len(stage.replicas) > 1:
            return None
        replica = stage.replicas[0]
        ep = stage.experts[0].chips if stage.experts else 1
        config = Config(replica.chips.pools[0], replica.tp, replica.cp, ep, replica.sequences)
        counts.append(replica.count * replica.sequences)
        if runs and runs[-1][0] == config:
            runs[-1] = (config, runs[-1][1] + 1)
        else:
            runs.append((config, 1))
    configs = tuple(config for config, _ in runs)
    per_copy = max(config.sequences for config in configs)
    if len({config.pool for config in configs}) < len(configs):
        return None
    if any(per_copy % c.sequences for c in configs):
        return None
    ranges = max(len(stage.units) for stage in pipeline.stages)
    return Chain(
        configs=configs,
        stages=tuple(stages for _, stages in runs),
        copies=min(counts) // per_copy,
        sequences=per_copy,
        schedule=ScheduleOption(kind=schedule, virtual=ranges),
        shard=level,
        pace=1.0,
        fill=0.0,
        closing=0.0,
    )


def _allowed(chain: Chain, problem: Problem) -> bool:
    """Tell whether a chain is one of the problem's space, which may be narrower than it was."""
    space, depth = problem.space, sum(chain.stages)
    pools = {pool.name: pool for pool in problem.pools}
    return (
        (space.max_stages is None or depth <= space.max_stages)
        and (depth == 1 or chain.schedule.kind in space.schedules)
        and chain.schedule.virtual in (1, *space.virtual)
        and chain.shard in space.shard
        and all(
            config.sequences in problem.all_sequence_counts()
            and config.cp in problem.context_degrees()
            and config.ep in problem.expert_degrees()
            and (
                config.pool not in pools or config.tp in problem.tensor_degrees(pools[config.pool])
            )
            for config in chain.configs
        )
    )


def _fitted(parts: list[PipelineCopies], chips: dict[str, int]) -> list[int]:
    """Return as many copies of each as fit: fewer of the most numerous, or more where room is."""
    copies = [part.copies for part in parts]
    each = [chips_of([replace(part, copies=1)]) for part in parts]

    def left() -> dict[str, int]:
        taken = dict.fromkeys(chips, 0)
        for own, count in zip(each, copies, strict=True):
            for pool, number in own.items():
                taken[pool] = taken.get(pool, 0) + number * count
        return {pool: chips.get(pool, 0) - number for pool, number in taken.items()}

    def most_numerous(numbers: Iterable[int]) -> int | None:
        return max(numbers, key=lambda i: (copies[i], -i), default=None)

    while lacking := {pool for pool, number in left().items() if number < 0}:
        place = most_numerous(i for i, n in enumerate(copies) if n and lacking & each[i].keys())
        assert place is not None
        copies[place] -= 1
    while True:
        free = left()
        place = most_numerous(
            i for i, own in enumerate(each) if copies[i] and all(free[p] >= own[p] for p in own)
        )
        if place is None:
            return copies
        copies[place] += 1


def _staying(
    old: Plan, problem: Problem, moved: NodeMoves | None, simulator: DraftSimulator
) -> ProvenPlan | None:
    """Return the running plan on what is left of the cluster, priced; proven only if it stays."""
    left = surviving_plan(old, problem.model, problem.cluster, moved)
    if left is None:
        return None
    priced = simulator.price(left)
    if not priced.fits and not problem.unlimited_memory:
        return None
    return ProvenPlan(plan=left, estimate=priced, summary=summary_of(left))


def _searched(
    old: Plan, tables: Tables, effort: Effort, report: Report | None, staying: ProvenPlan | None
) -> SearchResult:
    """Search, with little work among strategies of the running plan's kind only.

    The bound is that of all strategies.
    """
    problem, bound = tables.problem, lower_bound(tables)
    if effort.groupings is not None:
        level = max((rule.shard_level for rule in old.synchronisation), default=0)
        ranges = max(len(stage.units) for _, _, stage in old.stages())
        space = replace(
            problem.space, schedules=(old.job.schedule,), shard=(level,), virtual=(1, ranges)
        )
        problem = replace(problem, space=space)
    try:
        return plan(
            problem,
            effort=effort,
            compare=False,
            report=report or silent,
            bound=bound,
            tables=tables,
        )
    except InputError:
        if staying is None:
            raise
    # The search found nothing with its small budget, but the running plan proves there is one.
    bound = min(bound, staying.step_seconds)
    return SearchResult(
        best=staying,
        lower_bound_seconds=bound,
        search_cpu_seconds=0.0,
        objective=problem.objective,
        uniform_missing="not looked for",
    )


def movement_text(needed: Movement) -> str:
    """Return how long a movement takes, as far as anybody can tell."""
    took = f" in about {seconds_text(needed.seconds)}"
    if needed.storage_known:
        return took
    known = f" ({seconds_text(needed.seconds)} between chips)" if needed.seconds else ""
    return (
        f"; how long that takes is not known{known}: the cluster file says nothing of the storage "
        "('storage') that the checkpoint is read from"
    )


def _words(
    result: SearchResult,
    staying: ProvenPlan | None,
    needed: Movement,
    pays: float | None,
    *,
    kept: bool,
) -> str:
    """Say in a few sentences what to do and what it costs."""
    new = step_text(result.best.step_seconds)
    lost = (
        f" {bytes_text(needed.from_checkpoint_bytes)} of it are held by nobody and come from the "
        "last checkpoint, so training goes on from its step."
        if needed.rolls_back
        else ""
    )
    moves = f"{bytes_text(needed.total_bytes)} of state move{movement_text(needed)}.{lost}"
    if kept:
        stays = "Nothing faster was found: the old plan goes on, on the chips that are left, with "
        return f"{stays}{new} per step. {moves if needed.total_bytes else 'Nothing moves.'}"
    if staying is None:
        return f"The old plan cannot go on. The new one takes {new} per step. {moves}"
    faster = 100 * (staying.step_seconds / result.best.step_seconds - 1)
    gain = (
        f"The new plan takes {new} per step, the old one on the chips that are left "
        f"{step_text(staying.step_seconds)} ({faster:.1f} % more). {moves}"
    )
    if pays is None and not needed.storage_known:
        return f"{gain} When it pays back is not known, either."
    if pays is None:
        return f"{gain} It never pays back."
    return f"{gain} It has paid back after {seconds_text(pays)}."
