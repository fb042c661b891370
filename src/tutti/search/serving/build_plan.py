"""From a mixture of engines to a Plan: chips, shares, routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    sent = _sent(mixture)
    pipelines = tuple(_pipeline(problem, one, total, sent) for one in laid)
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


def _pipeline(problem: ServeProblem, one: _Laid, total: float, sent: dict[str, float]) -> Pipeline:
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
        share = sent.get(option.home, 0.0) / total
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
    """Let shares sum to one; prefill engines of one pool share its flow by their numbers."""
    from dataclasses import replace

    normed = []
    by_home: dict[str, int] = {}
    for pipeline in pipelines:
        if pipeline.engine is not None and pipeline.engine.role is Role.PREFILL:
            home = pipeline.stages[0].chips.pools[0]
            by_home[home] = by_home.get(home, 0) + pipeline.copies
    total = 0.0
    for pipeline in pipelines:
        engine = pipeline.engine
        assert engine is not None
        if engine.role is Role.PREFILL:
            home = pipeline.stages[0].chips.pools[0]
            engine = replace(engine, share=engine.share * pipeline.copies / by_home[home])
        total += engine.share
        normed.append(replace(pipeline, engine=engine))
    return tuple(
        replace(p, engine=replace(p.engine, share=min(1.0, p.engine.share / total)))
        for p in normed
        if p.engine is not None
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
