"""Single changes of the states that chips hold: shard rules, shares, experts, the tied table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.edits import expert_width, with_stage
from tutti.plan.plan import ExpertGroup, Plan, Share, Stage, Synchronisation, covers

BUCKETS = (1, 2, 4, 8, 1024)
WEIGHTS = (0, 1, 2, 4)  # with which a replica group takes part in a shard, beside 2 of all others

Changes = Iterator[tuple[str, Plan | None]]


def _rules(plan: Plan, model: ModelSpec, **values: object) -> dict[object, Synchronisation]:
    """Return one rule per class of parameters, for all units."""
    spread = expert_width(plan) > 1
    kinds = tuple(ParameterClass) if spread else (ParameterClass.DENSE,)
    whole = (0, model.num_units)
    return {
        kind: replace(plan.synchronisation_of(1, kind), units=whole, shares=(), **values)  # type: ignore[arg-type]
        for kind in kinds
    }


def _sharding(plan: Plan, model: ModelSpec) -> Changes:
    """Try other shard levels, buckets and overlap: of all parameters, one class, the ends."""
    tried: list[tuple[str, dict[str, object]]] = []
    tried += [(f"level {level}", {"shard_level": level}) for level in range(4)]
    tried += [(f"bucket {bucket}", {"bucket": bucket}) for bucket in BUCKETS]
    tried += [(f"overlap {on}", {"overlap": on}) for on in (False, True)]
    now = _rules(plan, model)
    for what, values in tried:
        rules = _rules(plan, model, **values)
        yield what, replace(plan, synchronisation=tuple(rules.values()))
        if len(rules) > 1:
            for kind in rules:
                one = now | {kind: rules[kind]}
                yield f"{kind} {what}", replace(plan, synchronisation=tuple(one.values()))
        if "shard_level" in values:
            yield from _sharded_ends(plan, model, now, what, values)


def _sharded_ends(
    plan: Plan,
    model: ModelSpec,
    now: dict[object, Synchronisation],
    what: str,
    values: dict[str, object],
) -> Changes:
    dense, *others = now.values()
    units = model.num_units
    for name, end in (("embedding", (0, 1)), ("head", (units - 1, units))):
        rest = (1, units) if end[0] == 0 else (0, units - 1)
        apart = (
            replace(dense, units=end, **values),  # type: ignore[arg-type]
            replace(dense, units=rest),
            *others,
        )
        yield f"{name} {what}", replace(plan, synchronisation=apart)


def _tied_owner(plan: Plan, model: ModelSpec) -> Changes:
    if plan.tied_owner is not None:
        other = model.head_unit if plan.tied_owner == 0 else 0
        yield f"unit {other}", replace(plan, tied_owner=other)


def _stage_rules(plan: Plan, model: ModelSpec) -> Changes:
    """Give the units of one stage rules of their own: another level, bucket or overlap."""
    now = _rules(plan, model)
    spans = {span for _, _, stage in plan.stages() for span in stage.units}
    whole = (0, model.num_units)
    for (start, stop), kind in itertools.product(sorted(spans - {whole}), now):
        rule = now[kind]
        tried: list[tuple[str, Synchronisation]] = [
            (f"level {level}", replace(rule, shard_level=level)) for level in range(4)
        ]
        tried += [(f"bucket {bucket}", replace(rule, bucket=bucket)) for bucket in BUCKETS]
        tried.append((f"overlap {not rule.overlap}", replace(rule, overlap=not rule.overlap)))
        for what, changed in tried:
            if changed == rule:
                continue
            parts = [replace(changed, units=(start, stop))]
            parts += [replace(rule, units=(0, start))] if start else []
            parts += [replace(rule, units=(stop, whole[1]))] if stop < whole[1] else []
            others = [other for name, other in now.items() if name is not kind]
            rules = tuple(sorted(parts, key=lambda part: part.units)) + tuple(others)
            yield f"units {start}-{stop}: {kind} {what}", replace(plan, synchronisation=rules)


def _shard_shares(plan: Plan, model: ModelSpec) -> Changes:
    """Let a replica group, or all of a pool, hold more or less of every shard than the others."""
    rules = _rules(plan, model)
    dense = rules[ParameterClass.DENSE]
    if dense.shard_level == 0:
        return
    others = [rule for kind, rule in rules.items() if kind is not ParameterClass.DENSE]
    places = [
        ((p, s, r), replica.chips.pools[0])
        for p, s, stage in plan.stages()
        for r, replica in enumerate(stage.replicas)
    ]
    wholes = {pool: {place for place, own in places if own == pool} for _, pool in places}
    chosen = [(f"pool {pool}", own) for pool, own in wholes.items()]
    chosen += [(f"replica {place}", {place}) for place, _ in places]
    for (name, own), weight in itertools.product(chosen, WEIGHTS):
        shares = tuple(
            Share(pipeline=p, stage=s, replica=r, weight=weight if (p, s, r) in own else 2)
            for (p, s, r), _ in places
        )
        ragged = replace(dense, shares=() if weight == 2 else shares)
        yield f"{name} holds {weight} : 2", replace(plan, synchronisation=(ragged, *others))


# --- experts ---------------------------------------------------------------------------------


def _has_experts(stage: Stage, model: ModelSpec) -> bool:
    blocks = range(1, model.num_layers + 1)
    return any(covers(stage.units, unit) and model.block(unit).moe is not None for unit in blocks)


def _experts(plan: Plan, model: ModelSpec) -> Changes:
    """Spread experts over more chips or fewer: on all stages, or on one."""
    ep = expert_width(plan)
    if not model.num_experts:
        return
    for wanted in sorted({max(1, ep // 2), max(1, ep // 3), 2 * ep, 3 * ep, 1} - {ep}):
        changed = plan
        for p, s, stage in plan.stages():
            held = replace(stage, experts=())
            if wanted > 1 and _has_experts(stage, model):
                groups = (ExpertGroup(chips=wanted, count=max(1, stage.num_chips // wanted)),)
                held = replace(stage, experts=groups)
                if ep > 1:
                    yield (
                        f"over {wanted} chips, pipeline {p}, stage {s}",
                        with_stage(plan, p, s, held),
                    )
            changed = with_stage(changed, p, s, held)
        rules = tuple(_rules(changed, model).values()) if plan.synchronisation else ()
        yield f"over {wanted} chips", replace(changed, synchronisation=rules)


def _uneven_experts(plan: Plan, model: ModelSpec) -> Changes:
    """Let chips of a group hold more experts than the others: each one, or half of them."""
    for p, s, stage in plan.stages():
        for g, group in enumerate(stage.experts):
            even = group.per_chip(model.num_experts)
            half = group.chips // 2
            pairs = [((i,), (j,)) for i, j in itertools.permutations(range(group.chips), 2)]
            near = [pair for pair in pairs if abs(pair[0][0] - pair[1][0]) == 1]
            first, second = tuple(range(half)), tuple(range(group.chips - half, group.chips))
            for more, less in (*near, (first, second), (second, first)):
                held = [n + (i in more) - (i in less) for i, n in enumerate(even)]
                groups = list(stage.experts)
                groups[g] = replace(group, experts=tuple(held))
                if min(held) < 0:
                    continue
                what = f"pipeline {p}, stage {s}, group {g}: {held}"
                yield what, with_stage(plan, p, s, replace(stage, experts=tuple(groups)))


STATE_CHANGES: dict[str, Callable[[Plan, ModelSpec], Changes]] = {
    "sharding": _sharding,
    "rules of stages": _stage_rules,
    "shard shares": _shard_shares,
    "tied owner": _tied_owner,
    "experts": _experts,
    "uneven experts": _uneven_experts,
}
