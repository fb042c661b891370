"""The checker: every inconsistency of a Plan, each in one helpful line.

It answers whether a Plan means something on its model and cluster. Whether it *fits* is the cost
model's question, whether its lists can hang the schedule's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tutti.errors import InputError, hint
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.check_stage import Problem, check_stage
from tutti.plan.chips import ChipSet
from tutti.plan.collectives import ALGORITHMS, AUTO
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Pipeline, Plan, Synchronisation, chunks, covers


@dataclass(frozen=True, slots=True)
class _Case:
    plan: Plan
    model: ModelSpec
    cluster: Cluster


def check_plan(
    plan: Plan, model: ModelSpec | None = None, cluster: Cluster | None = None
) -> list[Problem]:
    """Return all problems of a plan; model and cluster default to the embedded ones."""
    case = _Case(plan, model or embedded_model(plan), cluster or embedded_cluster(plan))
    checks: tuple[Callable[[_Case], Iterator[Problem]], ...] = (
        _references,
        _batches,
        _units,
        _warm_up,
        _canonical,
        _chips,
        _stages,
        _tied,
        _synchronisation,
        _experts,
        _offload,
        _collectives,
    )
    return [problem for check in checks for problem in check(case)]


def require_valid(
    plan: Plan, model: ModelSpec | None = None, cluster: Cluster | None = None
) -> None:
    """Raise an InputError that names the first problem and counts the others."""
    problems = check_plan(plan, model, cluster)
    if problems:
        more = f" (and {len(problems) - 1} more; `tutti show` lists them)" if problems[1:] else ""
        raise InputError(f"plan: {problems[0]}{more}")


def embedded_model(plan: Plan) -> ModelSpec:
    """Return the model that the plan carries."""
    if plan.model.spec is None:
        raise InputError(
            f"plan: the model '{plan.model.name}' is not embedded in this plan; make the plan again"
        )
    return plan.model.spec


def embedded_cluster(plan: Plan) -> Cluster:
    """Return the cluster that the plan carries."""
    if plan.cluster.cluster is None:
        raise InputError(
            f"plan: the cluster '{plan.cluster.name}' is not embedded in this plan; make it again"
        )
    return plan.cluster.cluster


class _Same:
    """An object as a key by what it is, not by what it is equal to."""

    def __init__(self, value: ModelSpec | Cluster) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


@functools.lru_cache(maxsize=16)
def _fingerprint(same: _Same) -> str:
    """Return a description's hash; a search asks for the same one thousands of times."""
    value = same.value
    return value.fingerprint if isinstance(value, ModelSpec) else value.fingerprint()


def _references(case: _Case) -> Iterator[Problem]:
    plan = case.plan
    for what, said, found in (
        ("model", plan.model.hash, _fingerprint(_Same(case.model))),
        ("cluster", plan.cluster.hash, _fingerprint(_Same(case.cluster))),
    ):
        if said and said != found:
            yield Problem(
                "reference", what, f"has the hash {found}, but the plan was made for {said}"
            )
    pools = [pool.name for pool in case.cluster.pools]
    for profile in plan.profiles:
        if profile.pool not in pools:
            message = f"names pool '{profile.pool}'; {hint(profile.pool, pools)}"
            yield Problem("reference", f"profile '{profile.name}'", message)


def _batches(case: _Case) -> Iterator[Problem]:
    plan = case.plan
    if not plan.pipelines:
        yield Problem("empty", "plan", "has no pipeline")
        return
    for p, pipeline in enumerate(plan.pipelines):
        if not pipeline.stages:
            yield Problem("empty", f"pipeline {p}", "has no stage")
        for s, stage in enumerate(pipeline.stages):
            total = sum(replica.count * replica.sequences for replica in stage.replicas)
            if stage.replicas and total != pipeline.micro_batch:
                yield Problem(
                    "shares",
                    f"pipeline {p}, stage {s}",
                    f"its replicas take {total} sequences of each micro-batch, "
                    f"which has {pipeline.micro_batch}",
                )
    total = sum(pipeline.sequences for pipeline in plan.pipelines)
    if total != plan.job.global_batch:
        terms = " + ".join(f"{p.micro_batch}·{p.micro_batches}" for p in plan.pipelines)
        yield Problem(
            "batch",
            "job",
            f"global_batch is {plan.job.global_batch}, the pipelines do {terms} = {total}",
        )


# --- units -----------------------------------------------------------------------------------


def _units(case: _Case) -> Iterator[Problem]:
    for p, pipeline in enumerate(case.plan.pipelines):
        where = f"pipeline {p}"
        empty = [
            (s, span)
            for s, stage in enumerate(pipeline.stages)
            for span in stage.units or ((0, 0),)
            if span[0] >= span[1]
        ]
        for s, (start, stop) in empty:
            yield Problem("units", f"{where}, stage {s}", f"the unit range {start}-{stop} is empty")
        if empty or not pipeline.stages:
            continue
        yield from _coverage(where, pipeline, case.model.num_units)
        yield from _shape(where, pipeline, case.plan.job.schedule)


def _coverage(where: str, pipeline: Pipeline, num_units: int) -> Iterator[Problem]:
    reached = 0
    for start, stop, stage in chunks(pipeline):
        if start > reached:
            yield Problem("units", where, f"no stage holds units {reached}-{start - 1}")
        elif start < reached:
            again = f"units {start}-{min(reached, stop) - 1} again; a unit belongs to one stage"
            yield Problem("units", f"{where}, stage {stage}", f"holds {again}")
        reached = max(reached, stop)
    if reached < num_units:
        yield Problem("units", where, f"no stage holds units {reached}-{num_units - 1}")
    elif reached > num_units:
        message = f"holds units up to {reached - 1}; the model has units 0-{num_units - 1}"
        yield Problem("units", where, message)


def _shape(where: str, pipeline: Pipeline, kind: ScheduleKind) -> Iterator[Problem]:
    """Check that the chunks lie on the stages the way the schedule visits them."""
    visits = [chunk.stage for chunk in chunks(pipeline)]
    num_stages = len(pipeline.stages)
    if kind is not ScheduleKind.INTERLEAVED:
        if visits != list(range(num_stages)):
            yield Problem(
                "interleave",
                where,
                f"schedule '{kind}' wants one unit range per stage, in the order of the stages; "
                "use 'interleaved' for several",
            )
        return
    rounds, rest = divmod(len(visits), num_stages)
    if rest or visits != list(range(num_stages)) * rounds:
        yield Problem(
            "interleave",
            where,
            "schedule 'interleaved' visits the stages in turn: every stage needs equally many "
            "unit ranges, rising in the order of the stages",
        )


def _warm_up(case: _Case) -> Iterator[Problem]:
    kind = case.plan.job.schedule
    for p, pipeline in enumerate(case.plan.pipelines):
        given = [stage.order.warm_up for stage in pipeline.stages]
        if kind in (ScheduleKind.GPIPE, ScheduleKind.INTERLEAVED) and any(given):
            message = f"warm_up is fixed by schedule '{kind}'; leave it out"
            yield Problem("warm_up", f"pipeline {p}", message)
        if kind is not ScheduleKind.ONE_F_ONE_B:
            continue
        depths = [len(given) - s if depth is None else depth for s, depth in enumerate(given)]
        depths = [min(depth, pipeline.micro_batches) for depth in depths]
        for s, (before, after) in enumerate(itertools.pairwise(depths)):
            if after > before:
                yield Problem(
                    "warm_up",
                    f"pipeline {p}, stage {s + 1}",
                    f"warm-up {after} is deeper than the {before} of the stage before it; "
                    "it would wait for ever",
                )


def _canonical(case: _Case) -> Iterator[Problem]:
    """Check that what could be replicas is.

    Levels 2 and 3 shard inside a pipeline: pipelines of one cut and count may be apart there.
    """
    if any(rule.shard_level >= 2 for rule in case.plan.synchronisation):
        return
    seen: dict[object, int] = {}
    for p, pipeline in enumerate(case.plan.pipelines):
        key = (tuple(stage.units for stage in pipeline.stages), pipeline.micro_batches)
        if key in seen:
            message = f"has the cut and the counts of pipeline {seen[key]}; make them replicas"
            yield Problem("canonical", f"pipeline {p}", message)
        seen.setdefault(key, p)


# --- chips -----------------------------------------------------------------------------------


def _chips(case: _Case) -> Iterator[Problem]:
    used: dict[Position, str] = {}
    for where, chips in _chip_sets(case.plan):
        unknown = _unknown_chip(chips, case.cluster)
        if unknown is not None:
            yield Problem("chip", where, unknown)
            continue
        for chip in chips:
            other = used.setdefault(chip, where)
            if other is not where:
                message = f"chip {chip} is used already by {other}"
                yield Problem("chip_twice", where, message)
                break
        if len(set(chips)) != len(chips):
            yield Problem("chip_twice", where, f"'{chips}' names a chip twice")


def _chip_sets(plan: Plan) -> Iterator[tuple[str, ChipSet]]:
    for p, s, stage in plan.stages():
        for r, replica in enumerate(stage.replicas):
            yield f"pipeline {p}, stage {s}, replica {r}", replica.chips
    yield "idle", plan.idle
    yield "spare", plan.spare


def _unknown_chip(chips: ChipSet, cluster: Cluster) -> str | None:
    pools = {pool.name: pool for pool in cluster.pools}
    for r in chips.ranges:
        if r.pool not in pools:
            return f"chips '{r}': no pool '{r.pool}'; {hint(r.pool, pools)}"
        nodes, slots = pools[r.pool].nodes, pools[r.pool].node.num_chips
        if r.last_node >= nodes or r.last_slot >= slots:
            return f"chips '{r}': pool '{r.pool}' has nodes 0-{nodes - 1} with slots 0-{slots - 1}"
    return None


def _stages(case: _Case) -> Iterator[Problem]:
    for p, s, stage in case.plan.stages():
        where = f"pipeline {p}, stage {s}"
        yield from check_stage(where, stage, case.plan.job, case.model, case.cluster)


# --- what holders share ----------------------------------------------------------------------


def _tied(case: _Case) -> Iterator[Problem]:
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


def _synchronisation(case: _Case) -> Iterator[Problem]:
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


def _experts(case: _Case) -> Iterator[Problem]:
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


def _offload(case: _Case) -> Iterator[Problem]:
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


def _collectives(case: _Case) -> Iterator[Problem]:
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
