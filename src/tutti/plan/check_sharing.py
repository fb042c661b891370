"""Checks of what several holders share: tied weights, shards, experts, host memory, collectives.

The other checks, and the list of all of them, are in `check`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tutti.errors import hint
from tutti.hardware.cluster import Cluster
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.check_stage import Problem
from tutti.plan.collectives import ALGORITHMS, AUTO
from tutti.plan.plan import Plan, Synchronisation, covers


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with what it is checked against."""

    plan: Plan
    model: ModelSpec
    cluster: Cluster


def _tied(case: Case) -> Iterator[Problem]:
    owner, ends = case.plan.tied_owner, (0, case.model.head_unit)
    if not case.model.ties_weights:
        if owner is not None:
            yield Problem("tied", "tied_owner", "is given, but the model ties no weights")
        return
    apart = any(
        covers(stage.units, ends[0]) != covers(stage.units, ends[1])
        for _, _, stage in case.plan.stages()
    )
    if owner is None and apart:
        message = f"is missing: embedding and head share weights; say {ends[0]} or {ends[1]}"
        yield Problem("tied", "tied_owner", message)
    elif owner is not None and owner not in ends:
        yield Problem("tied", "tied_owner", f"is {owner}; must be {ends[0]} or {ends[1]}")


def _synchronisation(case: Case) -> Iterator[Problem]:
    rules = case.plan.synchronisation
    for index, rule in enumerate(rules):
        where = f"synchronisation[{index}]"
        start, stop = rule.units
        if not start < stop <= case.model.num_units:
            message = f"units {start}-{stop} are not in 0-{case.model.num_units}"
            yield Problem("synchronisation", where, message)
            continue
        yield from _shares(where, rule, case.plan)
    for kind in ParameterClass:
        spans = sorted(
            (rule.units, index) for index, rule in enumerate(rules) if rule.parameter_class is kind
        )
        for ((_, stop), first), ((start, _), second) in itertools.pairwise(spans):
            if start < stop:
                message = f"unit {start} has a {kind} rule already in synchronisation[{first}]"
                yield Problem("synchronisation", f"synchronisation[{second}]", message)


def _shares(where: str, rule: Synchronisation, plan: Plan) -> Iterator[Problem]:
    if not rule.shares:
        return
    if rule.shard_level == 0:
        yield Problem("synchronisation", where, "has shares, but shard_level 0 shards nothing")
    named = [(share.pipeline, share.stage, share.replica) for share in rule.shares]
    holding = {
        (p, s, r)
        for p, s, stage in plan.stages()
        if any(start < rule.units[1] and rule.units[0] < stop for start, stop in stage.units)
        for r in range(len(stage.replicas))
    }
    for p, s, r in sorted(set(named) - holding):
        message = (
            f"a share names pipeline {p}, stage {s}, replica {r}, which holds none of its units"
        )
        yield Problem("synchronisation", where, message)
    for p, s, r in sorted(holding - set(named)):
        message = f"pipeline {p}, stage {s}, replica {r} holds its units but has no share"
        yield Problem("synchronisation", where, message)
    if len(set(named)) != len(named):
        yield Problem("synchronisation", where, "gives one replica two shares")
    if rule.parameter_class is ParameterClass.EXPERT:
        yield Problem("synchronisation", where, "has shares; experts shard evenly, leave them out")
    weight = {(s.pipeline, s.stage, s.replica): s.weight for s in rule.shares}
    for unit in range(*rule.units):
        sums: dict[int, int] = {}
        for p, s, stage in plan.holders(unit):
            scope = p if rule.shard_level >= 2 else 0
            held = sum(weight.get((p, s, r), 0) for r in range(len(stage.replicas)))
            sums[scope] = sums.get(scope, 0) + held
        if not all(sums.values()):
            yield Problem("synchronisation", where, f"all shares of unit {unit} are 0")
            return


def _experts(case: Case) -> Iterator[Problem]:
    """Experts are spread in all pipelines or in none; else their copies would drift apart."""
    for unit in range(1, case.model.num_layers + 1):
        if case.model.block(unit).moe is None:
            continue
        spread = {p: bool(stage.experts) for p, _, stage in case.plan.holders(unit)}
        if len(set(spread.values())) > 1:
            whole = next(p for p, groups in spread.items() if not groups)
            message = f"unit {unit} has expert groups in other pipelines; give it some here too"
            yield Problem("experts", f"pipeline {whole}", message)
            return


def _offload(case: Case) -> Iterator[Problem]:
    """Refuse state on the host where others, or the optimizer, would miss it on the chip."""
    plan = case.plan
    ends = (0, case.model.head_unit) if plan.tied_owner is not None else ()
    for p, s, stage in plan.stages():
        for r, replica in enumerate(stage.replicas):
            where, offload = f"pipeline {p}, stage {s}, replica {r}", replica.offload
            if offload.parameters and plan.job.precision.master is None:
                label = plan.job.precision.label
                message = f"offload.parameters needs a master copy; precision {label} has none"
                yield Problem("offload", where, message)
            for unit in (u for a, b in offload.parameters for u in range(a, min(b, a + 10_000))):
                level = plan.synchronisation_of(unit).shard_level
                if level in (1, 2):
                    message = (
                        f"offload.parameters of unit {unit} needs shard level 0 or 3, not {level}"
                    )
                    yield Problem("offload", where, message)
                    break
            for unit in ends:
                if covers(offload.parameters, unit) or covers(offload.gradients, unit):
                    message = f"unit {unit} holds tied weights, which must stay on the chip"
                    yield Problem("offload", where, message)


def _collectives(case: Case) -> Iterator[Problem]:
    pools = [pool.name for pool in case.cluster.pools]
    for index, choice in enumerate(case.plan.collectives):
        where = f"collectives[{index}]"
        known = ALGORITHMS.get(choice.operation)
        if known is None:
            message = f"no operation '{choice.operation}'; {hint(choice.operation, ALGORITHMS)}"
            yield Problem("collective", where, message)
        elif choice.algorithm not in (AUTO, *known):
            message = (
                f"no algorithm '{choice.algorithm}' for {choice.operation}; "
                f"{hint(choice.algorithm, (AUTO, *known))}"
            )
            yield Problem("collective", where, message)
        for pool in choice.pools:
            if pool not in pools:
                message = f"names pool '{pool}'; {hint(pool, pools)}"
                yield Problem("collective", where, message)


CHECKS_OF_SHARING: tuple[Callable[[Case], Iterator[Problem]], ...] = (
    _tied,
    _synchronisation,
    _experts,
    _offload,
    _collectives,
)
