"""From a mixture of engines to a Plan: chips, shares, routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.plan.chips import NO_CHIPS, ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job
from tutti.plan.plan import Pipeline, Plan, Replica, Stage
from tutti.plan.serving import Engine, Role, Route
from tutti.search.serving.flows import Mixture
from tutti.search.serving.kinds import ChipGroup
from tutti.search.serving.options import EngineOption
from tutti.search.serving.question import ServeProblem


class _Chips:
    """Hands out groups of chips of a pool, none across islands."""

    def __init__(self, cluster: Cluster, pool: str) -> None:
        node = cluster.pool(pool).node
        islands = [list(island.slots) for island in node.islands] or []
        known = {slot for island in islands for slot in island}
        islands += [[slot] for slot in range(node.num_chips) if slot not in known]
        self._free = [
            [Position(pool, number, slot) for slot in island]
            for number in range(cluster.pool(pool).nodes)
            for island in islands
        ]

    def take(self, tp: int) -> list[Position]:
        """Return a group; wide ones are asked for first."""
        for island in self._free:
            if len(island) >= tp:
                taken, island[:] = island[:tp], island[tp:]
                return taken
        raise IndexError("no group is left")

    def rest(self) -> Iterator[Position]:
        """Yield what nobody took."""
        return (chip for island in self._free for chip in island)


@dataclass(slots=True)
class _Laid:
    option: EngineOption
    count: int
    chips: list[list[Position]]  # of each stage, copy by copy


def build_plan(problem: ServeProblem, mixture: Mixture) -> Plan:
    """Return the plan of a mixture."""
    laid, idle = _lay(problem, mixture)
    total = mixture.rate or 1.0
    used = _used(mixture)
    pipelines = tuple(_pipeline(problem, one, total, used) for one in laid)
    spec = problem.model
    apart = spec.ties_weights and any(len(p.stages) > 1 for p in pipelines)
    return Plan(
        model=refer_to_model(spec),
        cluster=refer_to_cluster(problem.cluster),
        job=Job(
            sequence_length=problem.longest,
            global_batch=sum(pipeline.sequences for pipeline in pipelines),
            serving=problem.service,
        ),
        pipelines=_normed(pipelines),
        tied_owner=0 if apart else None,
        idle=idle,
        routes=_routes(laid, mixture),
    )


def plan_of_one(problem: ServeProblem, option: EngineOption) -> Plan:
    """Return a plan of one engine, to which all requests come: of decodes, with their keys."""
    alone = Mixture(engines=((option, 1),), flows={}, rate=option.rate, bound=0.0)
    (one,), idle = _lay(problem, alone)
    pipeline = _pipeline(problem, one, option.rate, {})
    assert pipeline.engine is not None
    pipeline = replace(pipeline, engine=replace(pipeline.engine, share=1.0))
    return Plan(
        model=refer_to_model(problem.model),
        cluster=refer_to_cluster(problem.cluster),
        job=Job(
            sequence_length=problem.longest,
            global_batch=pipeline.sequences,
            serving=problem.service,
        ),
        pipelines=(pipeline,),
        idle=idle,
    )


def _lay(problem: ServeProblem, mixture: Mixture) -> tuple[list[_Laid], ChipSet]:
    """Give chips to engines, the widest groups first."""
    free = {name: _Chips(problem.cluster, name) for name in problem.pools}
    laid = [_Laid(option, count, [[] for _ in option.kinds]) for option, count in mixture.engines]
    wanted: list[tuple[int, _Laid, int, ChipGroup]] = [
        (kind.tp, one, stage, kind)
        for one in laid
        for stage, kind in enumerate(one.option.kinds)
        for _ in range(one.count)
    ]
    for tp, one, stage, kind in sorted(wanted, key=lambda item: -item[0]):
        one.chips[stage] += free[kind.pool].take(tp)
    left = [chip for chips in free.values() for chip in chips.rest()]
    return laid, ChipSet.from_ids(left) if left else NO_CHIPS


def _sent(mixture: Mixture) -> dict[str, float]:
    """Return the requests per second that leave the prefill engines of each pool."""
    rates: dict[str, float] = {}
    for (pool, _), rate in mixture.flows.items():
        rates[pool] = rates.get(pool, 0.0) + rate
    return rates


def _used(mixture: Mixture) -> dict[str, float]:
    """Return which part of what they could the prefill engines of each pool send."""
    able: dict[str, float] = {}
    for option, count in mixture.engines:
        if option.role is Role.PREFILL:
            able[option.home] = able.get(option.home, 0.0) + option.rate * count
    return {pool: rate / able[pool] for pool, rate in _sent(mixture).items()}


def _pipeline(problem: ServeProblem, one: _Laid, total: float, used: dict[str, float]) -> Pipeline:
    option, count = one.option, one.count
    each = option.slots // option.lanes
    stages, first = [], 0
    for place, (kind, layers) in enumerate(zip(option.kinds, option.layers, strict=True)):
        last = first + layers + (1 if place == 0 else 0)
        if place == len(option.kinds) - 1:
            last = problem.model.num_units
        replica = Replica(
            chips=ChipSet.from_ids(one.chips[place]), count=count, tp=kind.tp, sequences=each
        )
        stages.append(Stage(units=((first, last),), replicas=(replica,)))
        first = last
    share = 0.0
    if option.role is Role.BOTH:
        share = option.rate * count / total
    elif option.role is Role.PREFILL:
        share = used.get(option.home, 0.0) * option.rate * count / total
    formats = option.kinds[0].formats
    return Pipeline(
        micro_batch=each * count,
        micro_batches=option.lanes,
        stages=tuple(stages),
        engine=Engine(
            role=option.role,
            pages=option.pages,
            chunk=option.chunk,
            share=share,
            weights=formats.weights,
            cache=formats.cache,
        ),
    )


def _normed(pipelines: tuple[Pipeline, ...]) -> tuple[Pipeline, ...]:
    """Let shares sum to one."""
    engines = [pipeline.engine for pipeline in pipelines if pipeline.engine is not None]
    total = sum(engine.share for engine in engines)
    return tuple(
        replace(pipeline, engine=replace(engine, share=min(1.0, engine.share / total)))
        for pipeline, engine in zip(pipelines, engines, strict=True)
    )


def _routes(laid: list[_Laid], mixture: Mixture) -> tuple[Route, ...]:
    """Return the routes: a pool's flow spreads over its decode engines by their rates."""
    sent, routes = _sent(mixture), []
    decodes = [(d, one) for d, one in enumerate(laid) if one.option.role is Role.DECODE]
    for p, one in enumerate(laid):
        if one.option.role is not Role.PREFILL:
            continue
        for d, other in decodes:
            flow = mixture.flows.get((one.option.home, other.option.home), 0.0)
            own = [o for _, o in decodes if o.option.home == other.option.home]
            rates = sum(o.option.rate * o.count for o in own)
            share = flow / sent[one.option.home] * other.option.rate * other.count / rates
            if share > 1e-6:
                routes.append(Route(prefill=p, decode=d, share=min(1.0, share)))
    return tuple(routes)
