"""Whether a strategy keeps to what its Space leaves: the limits that show only in whole plans.

Degrees, schedules and the like are chosen from the Space to begin with. Which chips meet in a
stage, how they share it and whether some are left out is seen when a strategy is put together.
"""

from __future__ import annotations

from collections.abc import Sequence

from tutti.models.memory import Recompute
from tutti.models.spec import ModelSpec
from tutti.plan.expert_meetings import missed_meeting
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.plan import ExpertGroup, Plan, Replica, chunks, covers
from tutti.plan.plan import Stage as PlanStage
from tutti.plan.uniform import even_cuts
from tutti.search.pricing.money_and_energy import chips_by_pool
from tutti.search.question.exportable import export_refusal
from tutti.search.question.space import Problem, Space
from tutti.search.strategy.draft import Draft, StageDraft, canonical, has_experts, to_plan

Stage = Sequence[tuple[str, int]]  # pool and sequences of its replicas


def draft_keeps(draft: Draft, problem: Problem) -> bool:
    """Tell whether a draft, as it would be written, keeps to the problem's space.

    Members of an expert group that recompute unlike units keep to no space.
    """
    written = canonical(draft).pipelines
    pipelines = [
        [[(r.config.pool, r.config.sequences) for r in stage.replicas] for stage in p.stages]
        for p in written
    ]
    if not (_keeps(problem.space, pipelines) and uses_enough(draft.chips(), problem)):
        return False
    if not all(meets(stage, problem.model) for pipeline in written for stage in pipeline.stages):
        return False
    if problem.space.exportable is None:
        return True
    names = refer_to_model(problem.model), refer_to_cluster(problem.cluster)
    return exports(to_plan(draft, names, problem.job, problem.model, problem.cluster), problem)


def meets(stage: StageDraft, model: ModelSpec) -> bool:
    """Tell whether a stage's chips make whole expert groups that recompute the same of its units.

    Replicas of several pools may together have more chips than a whole number of groups.
    """
    ep = stage.replicas[0].config.ep
    if ep == 1 or len(stage.replicas) == 1 or not has_experts(stage.units, model):
        return True
    holders = [(replica.num_chips, replica.recompute.full) for replica in stage.replicas]
    total = sum(chips for chips, _ in holders)
    if total % ep:
        return False
    groups = (ExpertGroup(chips=ep, count=total // ep),)
    return missed_meeting(holders, groups, stage.units, model) is None


def exports(plan: Plan, problem: Problem) -> bool:
    """Tell whether the system can run a plan that it must be exportable to."""
    system = problem.space.exportable
    return system is None or not export_refusal(plan, problem.model, problem.cluster, system)


def plan_keeps(plan: Plan, problem: Problem) -> bool:
    """Tell whether a plan that was made by other rules keeps to the problem's space."""
    pipelines = [
        [[(r.chips.pools[0], r.sequences) for r in stage.replicas] for stage in p.stages]
        for p in plan.pipelines
    ]
    return (
        _keeps(problem.space, pipelines)
        and _keeps_form(problem.space, plan)
        and uses_enough(chips_by_pool(plan), problem)
        and exports(plan, problem)
    )


def plan_in_space(plan: Plan, problem: Problem) -> bool:
    """Tell whether every field of a plan, degrees and remedies too, is in the problem's space."""
    space = problem.space
    counts = problem.local_sequence_counts()
    for _, _, stage in plan.stages():
        for replica in stage.replicas:
            pool = problem.cluster.pool(replica.chips.pools[0])
            if (
                replica.tp not in problem.all_tensor_degrees(pool)
                or replica.cp not in problem.all_context_degrees()
                or replica.sequences not in counts
                or not _recomputed_kinds(stage, replica, problem.model) <= set(space.recompute)
                or any(name not in space.offload for name, _ in replica.offload.kinds())
            ):
                return False
        if any(group.chips not in problem.expert_degrees() for group in stage.experts):
            return False
    return plan_keeps(plan, problem) and (space.uneven_units or _is_even(plan, problem.model))


def _recomputed_kinds(stage: PlanStage, replica: Replica, model: ModelSpec) -> set[Recompute]:
    """Return in which ways a replica recomputes blocks."""
    full, selective = replica.recompute.full, replica.recompute.selective
    return {
        "full" if covers(full, unit) else "selective" if covers(selective, unit) else "none"
        for start, stop in stage.units
        for unit in range(max(1, start), min(stop, model.num_layers + 1))
    }


def _is_even(plan: Plan, model: ModelSpec) -> bool:
    """Tell whether every pipeline is cut evenly."""
    cuts = [[(c.start, c.stop) for c in chunks(pipeline)] for pipeline in plan.pipelines]
    layers = model.num_layers
    return all(len(cut) <= layers and cut == even_cuts(layers, len(cut)) for cut in cuts)


def _keeps_form(space: Space, plan: Plan) -> bool:
    """Tell whether stages, their ranges, the schedule and the shard levels are the space's."""
    stages = [stage for _, _, stage in plan.stages()]
    deepest = max(len(pipeline.stages) for pipeline in plan.pipelines)
    return (
        (space.max_stages is None or deepest <= space.max_stages)
        and all(len(stage.units) in (1, *space.virtual) for stage in stages)
        and (deepest == 1 or plan.job.schedule in space.schedules)
        and all(group.shard_level in space.shard for group in plan.synchronisation)
    )


def uses_enough(chips: dict[str, int], problem: Problem) -> bool:
    """Tell whether all chips take part, where none may be left out."""
    if problem.space.idle:
        return True
    return all(chips.get(pool.name, 0) == pool.num_chips for pool in problem.pools)


def _keeps(space: Space, pipelines: Sequence[Sequence[Stage]]) -> bool:
    stages = [stage for pipeline in pipelines for stage in pipeline]
    if not space.mixed_stages and any(len({pool for pool, _ in s}) > 1 for s in stages):
        return False
    if not space.uneven_shares and any(len({shares for _, shares in s}) > 1 for s in stages):
        return False
    if space.max_pipelines is not None and len(pipelines) > space.max_pipelines:
        return False
    return space.mixed_pipelines or all(
        len({tuple(sorted({pool for pool, _ in stage})) for stage in pipeline}) == 1
        for pipeline in pipelines
    )
