"""Moves of a local search over Plans: rules of single stages, shards, experts, ends on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from tutti.models.parameters import ParameterClass
from tutti.plan.edits import each_replica, expert_width, ranges_of, units_of, with_stage
from tutti.plan.plan import ExpertGroup, Plan, Replica, Share, Stage, Synchronisation, covers
from tutti.search.improve.plan_moves import BUCKETS, Here, Moves, rules_of

WEIGHTS = (0, 1, 4)  # of a replica group in a shard, beside 2 of all others
STATES = ("optimizer", "parameters", "gradients")


def stage_rule_moves(here: Here) -> Moves:
    """Give the units of one range a rule of their own: another level, bucket or overlap."""
    plan, units = here.plan, here.problem.model.num_units
    now = rules_of(here)
    spans = {span for _, _, stage in plan.stages() for span in stage.units}
    for rule in now:
        others = tuple(other for other in now if other is not rule)
        for changed in _other_rules(here, rule):
            for start, stop in sorted(spans - {(0, units)}):
                parts = [
                    replace(changed if at == start else rule, units=(at, end))
                    for at, end in ((0, start), (start, stop), (stop, units))
                    if at < end
                ]
                yield replace(plan, synchronisation=(*parts, *others))


def _other_rules(here: Here, rule: Synchronisation) -> Iterator[Synchronisation]:
    for level in here.problem.space.shard:
        if level != rule.shard_level:
            yield replace(rule, shard_level=level)
    for bucket in (1, *BUCKETS):
        if bucket != rule.bucket:
            yield replace(rule, bucket=bucket)
    yield replace(rule, overlap=not rule.overlap)


def group_share_moves(here: Here) -> Moves:
    """Let one replica group hold more of every shard than others, less, or nothing."""
    plan, units = here.plan, here.problem.model.num_units
    dense = replace(plan.synchronisation_of(1, ParameterClass.DENSE), units=(0, units), shares=())
    kept = [r for r in plan.synchronisation if r.parameter_class is not ParameterClass.DENSE]
    places = [(p, s, r) for p, s, stage in plan.stages() for r in range(len(stage.replicas))]
    if dense.shard_level == 0 or len(places) == 1:
        return
    yield replace(plan, synchronisation=(dense, *kept))
    for weight, chosen in itertools.product(WEIGHTS, places):
        shares = tuple(
            Share(pipeline=p, stage=s, replica=r, weight=weight if (p, s, r) == chosen else 2)
            for p, s, r in places
        )
        yield replace(plan, synchronisation=(replace(dense, shares=shares), *kept))


def stage_expert_moves(here: Here) -> Moves:
    """Spread the experts of one stage over more chips, or fewer."""
    plan, ep = here.plan, expert_width(here.plan)
    if ep == 1:
        return
    for wanted in sorted({ep // 2, ep // 3, 2 * ep, 3 * ep} & set(here.problem.expert_degrees())):
        for p, s, stage in plan.stages():
            if stage.experts and wanted > 1:
                groups = (ExpertGroup(chips=wanted, count=max(1, stage.num_chips // wanted)),)
                yield with_stage(plan, p, s, replace(stage, experts=groups))


def uneven_expert_moves(here: Here) -> Moves:
    """Let some chips of an expert group hold an expert more than others: neighbours, halves."""
    plan, model = here.plan, here.problem.model
    for p, s, stage in plan.stages():
        for g, group in enumerate(stage.experts):
            even, half = group.per_chip(model.num_experts), group.chips // 2
            first, second = range(half), range(group.chips - half, group.chips)
            pairs = [(first, second), (second, first)]
            for i in range(group.chips - 1):
                one, next_one = range(i, i + 1), range(i + 1, i + 2)
                pairs += [(one, next_one), (next_one, one)]
            for more, less in pairs:
                held = tuple(n + (i in more) - (i in less) for i, n in enumerate(even))
                if min(held) >= 0:
                    groups = list(stage.experts)
                    groups[g] = replace(group, experts=held)
                    yield with_stage(plan, p, s, replace(stage, experts=tuple(groups)))


def end_offload_moves(here: Here) -> Moves:
    """Keep states of the embedding or of the head on the host, or bring them back."""
    plan, ends = here.plan, (0, here.problem.model.head_unit)
    names = [name for name in STATES if name in here.problem.space.offload]
    for name, unit in itertools.product(names, ends):
        changed: Plan = plan
        for p, s, stage in plan.stages():
            if covers(stage.units, unit):
                changed = with_stage(changed, p, s, _turned(stage, name, unit))
        yield changed


def _turned(stage: Stage, name: str, unit: int) -> Stage:
    def turn(replica: Replica) -> Replica:
        units = set(units_of(getattr(replica.offload, name))) ^ {unit}
        away = replace(replica.offload, **{name: ranges_of(units, stage.units)})
        return replace(replica, offload=away)

    return each_replica(stage, turn)


STATE_MOVES: dict[str, Callable[[Here], Moves]] = {
    "rules of stages": stage_rule_moves,
    "shares of groups": group_share_moves,
    "experts of stages": stage_expert_moves,
    "uneven experts": uneven_expert_moves,
    "ends on the host": end_offload_moves,
}
