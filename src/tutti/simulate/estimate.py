"""The Estimate of a Plan: seconds, bytes and MFU, with the breakdown they are the sum of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tutti.cost.calibration.intervals import Interval, interval
from tutti.cost.memory.rank_state import workload_of
from tutti.cost.plan.class_memo import ClassMemo
from tutti.cost.plan.plan_costs import PricedStep, price_schedule
from tutti.cost.plan.pool_prices import PoolPrices
from tutti.cost.plan.sources import Sources
from tutti.cost.storage.prediction import StorageSeconds, storage_seconds
from tutti.hardware.cluster import Cluster
from tutti.models.flops import flops_per_token
from tutti.models.memory import Recompute, recompute_flops
from tutti.models.spec import ModelSpec
from tutti.plan.check import embedded_cluster, embedded_model, require_valid
from tutti.plan.plan import Plan, UnitRanges
from tutti.schedule.forward import forward_schedule
from tutti.schedule.schedule import Schedule, ScheduleMemo, build_schedule
from tutti.simulate.labels import ClassLabel, labels_of
from tutti.simulate.result import IdleReason, SimulationResult
from tutti.simulate.run import simulate


@dataclass(frozen=True, slots=True)
class PricingMemo:
    """What plans of one model, cluster and sources have in common: lists, prices of classes."""

    schedules: ScheduleMemo | None = None
    classes: ClassMemo | None = None

    @classmethod
    def empty(cls) -> PricingMemo:
        """Return one that keeps everything from now on."""
        return cls(ScheduleMemo(), ClassMemo())


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMemory:
    """The bytes of one chip of a class of ranks, and what they are."""

    name: str
    pool: str
    parameters: float
    gradients: float
    optimizer: float
    moving: float  # activations, buffers and whatever else comes and goes, at the peak
    runtime: float  # driver context and allocator slack
    limit: float

    @property
    def total(self) -> float:
        """The peak."""
        return self.parameters + self.gradients + self.optimizer + self.moving + self.runtime

    @property
    def fits(self) -> bool:
        """Whether the chip holds it."""
        return self.total <= self.limit


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step that was priced and played: all that a search asks of most plans."""

    schedule: Schedule
    priced: PricedStep
    result: SimulationResult

    @property
    def step_seconds(self) -> float:
        """Seconds of the slowest node among all."""
        return self.result.step_seconds * self.priced.slowdown

    def fits(self, cluster: Cluster) -> bool:
        """Whether every chip holds its part."""
        memory = class_memory(self.schedule, self.priced, self.result, cluster)
        return all(each.fits for each in memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a plan is predicted to take."""

    result: SimulationResult
    schedule: Schedule
    priced: PricedStep
    step_seconds: float  # of the slowest node among all
    parts: Mapping[str, float]  # seconds of the step, by what the busiest class does in them
    mfu: float
    hfu: float
    memory: tuple[ClassMemory, ...]
    storage: StorageSeconds
    tokens: int
    half_width: float  # ln: of the step's 10–90 % interval

    @property
    def interval(self) -> Interval:
        """Seconds that 8 of 10 measured steps lie within."""
        return interval(self.step_seconds, self.half_width)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole job."""
        return self.tokens / self.step_seconds

    @property
    def labels(self) -> tuple[ClassLabel, ...]:
        """What its classes of ranks are called, with the peaks of `memory`."""
        return labels_with_peaks(self.schedule, self.memory)

    @property
    def tightest(self) -> ClassMemory:
        """The class nearest to its limit."""
        return max(self.memory, key=lambda memory: memory.total / memory.limit)

    @property
    def fits(self) -> bool:
        """Whether every chip holds its part."""
        return all(memory.fits for memory in self.memory)


def estimate(
    plan: Plan,
    model: ModelSpec | None = None,
    cluster: Cluster | None = None,
    sources: Sources | None = None,
    *,
    prices: Mapping[str, PoolPrices] | None = None,
    memo: PricingMemo | None = None,
) -> Estimate:
    """Check a plan, price its schedule (by measured layers, if given) and simulate one step.

    `prices` are those of the pools under these sources, and `memo` keeps lists and prices of
    classes, where many plans of one job are priced.
    """
    model, cluster = model or embedded_model(plan), cluster or embedded_cluster(plan)
    require_valid(plan, model, cluster)
    step = simulated_step(plan, model, cluster, sources, prices=prices, memo=memo)
    return estimate_of(step, model, cluster, sources)


def simulated_step(
    plan: Plan,
    model: ModelSpec,
    cluster: Cluster,
    sources: Sources | None = None,
    *,
    prices: Mapping[str, PoolPrices] | None = None,
    memo: PricingMemo | None = None,
) -> SimulatedStep:
    """Price and play the schedule of a plan that was checked; `estimate_of` says the rest."""
    memo = memo or PricingMemo()
    schedule = build_schedule(plan, memo.schedules)
    priced = price_schedule(schedule, model, cluster, sources, prices=prices, memo=memo.classes)
    return SimulatedStep(schedule, priced, simulate(schedule, priced.costs))


def estimate_of(
    simulated: SimulatedStep, model: ModelSpec, cluster: Cluster, sources: Sources | None = None
) -> Estimate:
    """Return the whole estimate of a step that was played."""
    schedule, priced, result = simulated.schedule, simulated.priced, simulated.result
    plan, step = schedule.plan, simulated.step_seconds
    useful = flops_per_token(model, plan.job.sequence_length) * plan.job.tokens
    peak = cluster.peak_flops(plan.job.precision.compute, fallback=True)
    again = _recomputed_flops(plan, model)
    parts = _parts(result, priced.slowdown)
    return Estimate(
        result=result,
        schedule=schedule,
        priced=priced,
        step_seconds=step,
        parts=parts,
        mfu=useful / step / peak,
        hfu=(useful + again) / step / peak,
        memory=class_memory(schedule, priced, result, cluster),
        storage=storage_seconds(
            plan,
            model,
            cluster,
            step_s=step,
            exposed_s=parts.get(IdleReason.COMMUNICATION.value, 0.0),
            statics=[
                (static, each.num_ranks)
                for static, each in zip(priced.statics, schedule.classes, strict=True)
            ],
            profiles=sources.profiles if sources is not None else (),
        ),
        tokens=plan.job.tokens,
        half_width=_half_width(priced, parts.get(IdleReason.COMMUNICATION.value, 0.0) / step),
    )


def with_forward_before(
    estimated: Estimate, model: ModelSpec, cluster: Cluster, sources: Sources | None = None
) -> Estimate:
    """Return the estimate of steps before each of which as many rows pass forward, without loss."""
    forward = forward_schedule(estimated.schedule)
    priced = price_schedule(forward, model, cluster, sources)
    more = simulate(forward, priced.costs).step_seconds * priced.slowdown
    step = estimated.step_seconds + more
    share = estimated.step_seconds / step
    parts = {**estimated.parts, "forward pass before": more}
    return replace(
        estimated,
        step_seconds=step,
        parts=parts,
        mfu=estimated.mfu * share,
        hfu=estimated.hfu * share,
    )


def _parts(result: SimulationResult, slowdown: float) -> dict[str, float]:
    """Split the step as the busiest class spends it; the parts sum to the step."""
    busiest = max(result.classes, key=lambda each: -each.idle_compute_seconds)
    parts = {name: seconds for name, seconds in busiest.compute.items() if seconds}
    parts |= {reason.value: seconds for reason, seconds in busiest.idle.items() if seconds}
    if slowdown > 1.0:
        parts["slowest node"] = (slowdown - 1.0) * result.step_seconds
    return parts


def _half_width(priced: PricedStep, waiting: float) -> float:
    """Return how far the step may be off; the network is never known better than by calibration."""
    more = max(priced.links_half_width**2 - priced.half_width**2, 0.0)
    return math.sqrt(priced.half_width**2 + waiting**2 * more)


def labels_with_peaks(schedule: Schedule, memory: Sequence[ClassMemory]) -> tuple[ClassLabel, ...]:
    """Return the labels of all classes; every table and page then says the same peaks."""
    pairs = zip(labels_of(schedule), memory, strict=True)
    return tuple(replace(label, peak_bytes=peak.total) for label, peak in pairs)


def class_memory(
    schedule: Schedule, priced: PricedStep, result: SimulationResult, cluster: Cluster
) -> tuple[ClassMemory, ...]:
    """Return what a chip of each class holds at its peak; the simulation knows of no slack."""
    memory: list[ClassMemory] = []
    labels = labels_of(schedule)
    for index, (label, static) in enumerate(zip(labels, priced.statics, strict=True)):
        fixed = priced.overheads.context_bytes + priced.overheads.workspace_bytes
        peak = result.classes[index].peak_bytes - fixed
        held = static.parameters + static.gradients + static.optimizer
        memory.append(
            ClassMemory(
                name=label.name,
                pool=label.pool,
                parameters=static.parameters,
                gradients=static.gradients,
                optimizer=static.optimizer,
                moving=peak - held,
                runtime=fixed + priced.overheads.slack * peak,
                limit=cluster.pool(label.pool).chip.memory_bytes,
            )
        )
    return tuple(memory)


def _recomputed_flops(plan: Plan, model: ModelSpec) -> float:
    """FLOPs of one step that recomputation repeats, on all chips."""
    total = 0.0
    for p, _, stage in plan.stages():
        count = plan.pipelines[p].micro_batches
        for replica in stage.replicas:
            work = workload_of(plan, stage, replica)
            kinds: dict[Recompute, UnitRanges] = {
                "full": replica.recompute.full,
                "selective": replica.recompute.selective,
            }
            once = sum(
                recompute_flops(model, unit, work, kind)
                for kind, ranges in kinds.items()
                for start, stop in ranges
                for unit in range(start, stop)
            )
            total += once * count * replica.num_chips
    return total
