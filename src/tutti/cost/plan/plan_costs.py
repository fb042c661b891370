"""Seconds and bytes of every instruction of a Plan's Schedule: what the simulator is given.

Each pool is priced with its own calibration (chip and software stack); a chip without one is
priced from the catalog's nominal figures and the constants' priors, and `PricedStep.basis` says so.
Where a profile covers a pool, measured operators (a chip's profile) or units (a layer profile)
replace the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tutti.cost.kernels import Kernels
from tutti.cost.measured.layer_profile_prices import profiled_pools
from tutti.cost.measured.pools import measured_pools
from tutti.cost.memory.instruction_memory import Overheads, StaticBytes
from tutti.cost.memory.rank_state import RankState, workload_of
from tutti.cost.network.recorded_programs import Asked, written_choices
from tutti.cost.plan.class_memo import ClassMemo, PricedClass
from tutti.cost.plan.class_prices import ClassPricer
from tutti.cost.plan.equal_instructions import Kinds
from tutti.cost.plan.layer_prices import LayerPrices
from tutti.cost.plan.pool_prices import PoolPrices
from tutti.cost.plan.simulator_inputs import ClassCosts, StepCosts
from tutti.cost.plan.sources import Sources
from tutti.cost.plan.step_context import StepContext
from tutti.hardware.cluster import Cluster
from tutti.models.operators import Workload
from tutti.models.spec import ModelSpec
from tutti.plan.job import Job
from tutti.plan.plan import CollectiveChoice, Plan
from tutti.plan.wide_units import widest_on
from tutti.schedule.schedule import RankClass, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStep:
    """The costs of a step, and what they rest on."""

    costs: StepCosts
    statics: tuple[StaticBytes, ...]  # per class of ranks
    basis: Mapping[str, str]  # pool → calibration, or "nominal, not measured"
    extrapolations: tuple[str, ...]  # what lies outside the calibrations' measured ranges
    half_width: float  # ln: 8 of 10 measured steps are less far off; of the pool known least
    links_half_width: float  # the same of what the network does
    slowdown: float  # of the slowest node among all, relative to a typical one
    overheads: Overheads
    asked: tuple[Asked, ...]  # its collectives, each with its program

    @property
    def choices(self) -> tuple[CollectiveChoice, ...]:
        """The programs of its collectives, as a plan records them."""
        return written_choices(self.asked)


def price_schedule(
    schedule: Schedule,
    model: ModelSpec,
    cluster: Cluster,
    sources: Sources | None = None,
    *,
    prices: Mapping[str, PoolPrices] | None = None,
    memo: ClassMemo | None = None,
) -> PricedStep:
    """Return the seconds and bytes of every instruction; units by their profile, if given.

    `prices` are those of the pools, and `memo` keeps classes of ranks, where many plans of one job
    are priced.
    """
    sources = sources or Sources()
    kernels, overheads = sources.kernels, sources.overheads
    plan = schedule.plan
    used = {name for _, _, stage in plan.stages() for name in stage.chips.pools}
    if prices is None:
        prices = pool_prices(plan, model, cluster, sources, used)
    prices = {pool.name: prices[pool.name] for pool in cluster.pools if pool.name in used}
    if plan.collectives or sources.measured_ranks:  # by what this plan says, and by place
        memo = None
    shared = StepContext(schedule, model, cluster, prices, memo.steps if memo else None)
    price = partial(_class_costs, shared=shared, overheads=overheads)
    priced: list[PricedClass] = []
    for c in schedule.classes:
        pricer = partial(class_pricer, c, shared, kernels)
        known = price(pricer(), c) if memo is None else memo.priced(c, shared, pricer, price)
        priced.append(known)
    nodes = {
        (chips.pool, node)
        for _, _, stage in plan.stages()
        for replica in stage.replicas
        for chips in replica.chips.ranges
        for node in range(chips.first_node, chips.last_node + 1)
    }
    jitter = max(price.node_jitter for price in prices.values())
    works = list(_works(schedule, prices))
    return PricedStep(
        costs=StepCosts(classes=tuple(known.costs for known in priced)),
        statics=tuple(known.static for known in priced),
        basis={name: price.basis for name, price in prices.items()},
        extrapolations=_extrapolations(works),
        half_width=max(price.half_width(work, **more) for _, price, work, more in works),
        links_half_width=max(p.links_half_width(work, **more) for _, p, work, more in works),
        slowdown=1.0 + jitter * math.sqrt(2.0 * math.log(len(nodes))) if len(nodes) > 1 else 1.0,
        overheads=overheads,
        asked=tuple({id(one): one for known in priced for one in known.asked}.values()),
    )


def pool_prices(
    plan: Plan, model: ModelSpec, cluster: Cluster, sources: Sources, used: set[str]
) -> dict[str, PoolPrices]:
    """Return the prices of some pools; they depend on the plan's job only."""
    layers = profiled_pools(
        sources.layer_profiles, model, cluster, used, extrapolate=sources.extrapolate
    )
    precisions = {
        pool.name: widest_on(pool.chip, plan.job.precision)
        for pool in cluster.pools
        if pool.name in used
    }
    computed = {name: precision.compute for name, precision in precisions.items()}
    measured = measured_pools(sources.profiles, cluster, computed)
    values = job_values(plan.job, model)
    prices: dict[str, PoolPrices] = {}
    for pool in cluster.pools:
        if pool.name in used:
            calibration, chip = sources.calibration(pool, **values), measured.get(pool.name)
            given = (plan, model, cluster, pool, calibration, chip)
            known = sources.known(pool, calibration)
            profile = layers.get(pool.name)
            if profile:
                prices[pool.name] = LayerPrices(*given, profile, known)
            else:
                prices[pool.name] = PoolPrices(
                    *given,
                    kernels=sources.kernels,
                    constants=sources.constants,
                    measured_ranks=sources.measured_ranks,
                    known=known,
                    precision=precisions[pool.name],
                )
    return prices


def job_values(job: Job, model: ModelSpec) -> dict[str, float]:
    """Return what the job is like, in the words of the calibrations' ranges.

    Nothing of the strategy: plans for one job must be priced by the same calibration.
    """
    return {
        "hidden": float(model.hidden),
        "sequence_length": float(job.sequence_length),
    }


_Work = tuple[str, PoolPrices, Workload, dict[str, float]]  # a pool's, with the pipeline's degrees


def _works(schedule: Schedule, prices: Mapping[str, PoolPrices]) -> Iterator[_Work]:
    """Yield what each class of ranks computes, and by whose prices."""
    plan = schedule.plan
    for rank_class in schedule.classes:
        pipeline = plan.pipelines[rank_class.pipeline]
        stage = pipeline.stages[rank_class.stage]
        replica = stage.replicas[rank_class.replica]
        pool = replica.chips.pools[0]
        degrees = {"pp": float(len(pipeline.stages)), "dp": float(stage.num_replicas)}
        yield pool, prices[pool], workload_of(plan, stage, replica), degrees


def _extrapolations(works: Sequence[_Work]) -> tuple[str, ...]:
    lines: dict[str, None] = {}
    for pool, price, work, degrees in works:
        lines |= {f"{pool}: {line}": None for line in price.extrapolations(work, **degrees)}
    return tuple(lines)


def _class_costs(
    pricer: ClassPricer, rank_class: RankClass, shared: StepContext, overheads: Overheads
) -> PricedClass:
    kinds = kinds_of(rank_class, pricer, shared)
    flow = pricer.memory.flow(kinds)
    prices = {example: pricer.price(example) for example in kinds.examples}
    costs = ClassCosts(
        seconds=kinds.spread(lambda example: prices[example].seconds),
        allocate_bytes=flow.allocate,
        free_bytes=flow.free,
        static_bytes=flow.static.total + overheads.context_bytes + overheads.workspace_bytes,
        leaves_node=kinds.spread(lambda example: prices[example].leaves_node) > 0,
        overlap_slowdown=pricer.prices.overlap_slowdown,
    )
    return PricedClass(costs, flow.static, pricer.asked)


def class_pricer(rank_class: RankClass, shared: StepContext, kernels: Kernels) -> ClassPricer:
    """Return who prices a class's instructions."""
    place = (rank_class.pipeline, rank_class.stage, rank_class.replica)
    rank_state = RankState(shared.plan, shared.model, place, kernels, shared.index, shared.elements)
    source = shared.prices[rank_state.replica.chips.pools[0]]
    return ClassPricer(rank_class, shared, rank_state, source.memory(rank_state))


def kinds_of(rank_class: RankClass, pricer: ClassPricer, shared: StepContext) -> Kinds:
    """Return the kinds of a class's instructions; units that are alike are not told apart."""
    alike = pricer.prices.units_alike
    return shared.kinds(rank_class.instructions, pricer.rank_state if alike else None)


def step_context(
    schedule: Schedule, model: ModelSpec, cluster: Cluster, sources: Sources
) -> StepContext:
    """Return what the prices of a schedule's instructions look up."""
    used = {name for _, _, stage in schedule.plan.stages() for name in stage.chips.pools}
    prices = pool_prices(schedule.plan, model, cluster, sources, used)
    return StepContext(schedule, model, cluster, prices)
