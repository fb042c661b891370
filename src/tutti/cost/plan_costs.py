"""Seconds and bytes of every instruction of a Plan's Schedule: what the simulator is given.

Each pool is priced with its own calibration (chip and software stack); a chip without one is
priced from the catalog's nominal figures and the constants' priors, and `PricedStep.basis` says so.
Where a layer profile covers a pool, its measured units replace the model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.collective import Operation
from tutti.cost.boundaries import boundary_seconds
from tutti.cost.holdings import HolderIndex, Holdings, Kernels, workload_of
from tutti.cost.inputs import ClassCosts, StepCosts
from tutti.cost.kinds import Kinds
from tutti.cost.links import group_links
from tutti.cost.memory import MemoryModel, Overheads, StaticBytes
from tutti.cost.pool_prices import PoolPrices
from tutti.cost.profiled import ProfiledMemory, memory_model, profiled_pools
from tutti.cost.programs import choose_program
from tutti.cost.sources import Sources
from tutti.cost.synchronise import Groups, collective_choice
from tutti.hardware.cluster import Cluster
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Plan, covers
from tutti.schedule.boundary import must_join
from tutti.schedule.instruction import Instruction, Op, What
from tutti.schedule.schedule import RankClass, Schedule

FloatArray = npt.NDArray[np.float64]
BATCH_ENTRY_BYTES = 24.0  # token, label and position of one place in a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStep:
    """The costs of a step, and what they rest on."""

    costs: StepCosts
    statics: tuple[StaticBytes, ...]  # per class of ranks
    basis: Mapping[str, str]  # pool → calibration, or "nominal, not measured"
    extrapolations: tuple[str, ...]  # what lies outside the calibrations' measured ranges
    slowdown: float  # of the slowest node among all, relative to a typical one
    overheads: Overheads


def price_schedule(
    schedule: Schedule,
    model: ModelSpec,
    cluster: Cluster,
    sources: Sources | None = None,
) -> PricedStep:
    """Return the seconds and bytes of every instruction; units by their profile, if given."""
    sources = sources or Sources()
    kernels, overheads = sources.kernels, sources.overheads
    plan = schedule.plan
    used = {name for _, _, stage in plan.stages() for name in stage.chips.pools}
    layers = profiled_pools(
        sources.layer_profiles, model, cluster, used, extrapolate=sources.extrapolate
    )
    prices = {
        pool.name: PoolPrices(
            plan,
            model,
            cluster,
            pool,
            sources.calibration(pool, **_typical(plan, model)),
            layers.get(pool.name),
        )
        for pool in cluster.pools
        if pool.name in used
    }
    shared = _Shared(schedule, model, cluster, prices)
    found = [_class_costs(c, shared, kernels, overheads) for c in schedule.classes]
    nodes = {(chip.pool, chip.node) for _, _, stage in plan.stages() for chip in stage.chips}
    jitter = max(price.node_jitter for price in prices.values())
    return PricedStep(
        costs=StepCosts(classes=tuple(costs for costs, _ in found)),
        statics=tuple(static for _, static in found),
        basis={name: price.basis for name, price in prices.items()},
        extrapolations=_extrapolations(schedule, prices),
        slowdown=1.0 + jitter * math.sqrt(2.0 * math.log(len(nodes))) if len(nodes) > 1 else 1.0,
        overheads=overheads,
    )


def _typical(plan: Plan, model: ModelSpec) -> dict[str, float]:
    """What the job is like, in the words of the calibrations' ranges.

    Nothing of the strategy: plans for one job must be priced by the same calibration.
    """
    return {
        "hidden": float(model.hidden),
        "sequence_length": float(plan.job.sequence_length),
    }


def _extrapolations(schedule: Schedule, prices: Mapping[str, PoolPrices]) -> tuple[str, ...]:
    plan = schedule.plan
    found: dict[str, None] = {}
    for rank_class in schedule.classes:
        pipeline = plan.pipelines[rank_class.pipeline]
        stage = pipeline.stages[rank_class.stage]
        replica = stage.replicas[rank_class.replica]
        pool = replica.chips.pools[0]
        outside = prices[pool].extrapolations(
            workload_of(plan, stage, replica),
            pp=float(len(pipeline.stages)),
            dp=float(stage.num_replicas),
        )
        found |= {f"{pool}: {line}": None for line in outside}
    return tuple(found)


class _Shared:
    """What the classes of one schedule look up together."""

    def __init__(
        self,
        schedule: Schedule,
        model: ModelSpec,
        cluster: Cluster,
        prices: Mapping[str, PoolPrices],
    ) -> None:
        self.schedule = schedule
        self.plan: Plan = schedule.plan
        self.model = model
        self.cluster = cluster
        self.prices = prices
        self.index = HolderIndex(schedule.plan)
        self.groups = Groups(schedule.plan, cluster, self.index)
        self._boundaries: dict[tuple[int, int, What], float] = {}

    def boundary(self, pipeline: int, unit: int, what: What) -> float:
        """Seconds of one micro-batch over a boundary."""
        key = (pipeline, unit, what)
        if key not in self._boundaries:
            wire = self.schedule.boundary(pipeline, unit, what)
            slowest = min(
                (self.prices[pool] for side in (wire.sender, wire.receiver)
                 for pool in side.chips.pools),
                key=lambda price: price.efficiency.fabric,
            )  # fmt: skip
            token_bytes = self.model.hidden * self.plan.job.precision.compute.num_bytes
            self._boundaries[key] = boundary_seconds(
                wire, self.cluster, token_bytes, slowest.efficiency
            )
        return self._boundaries[key]


def _class_costs(
    rank_class: RankClass, shared: _Shared, kernels: Kernels, overheads: Overheads
) -> tuple[ClassCosts, StaticBytes]:
    place = (rank_class.pipeline, rank_class.stage, rank_class.replica)
    holdings = Holdings(shared.plan, shared.model, place, kernels, shared.index)
    memory = memory_model(holdings, shared.prices[holdings.replica.chips.pools[0]].layers)
    kinds = Kinds.of(rank_class.instructions)
    flow = memory.flow(kinds)
    costs = ClassCosts(
        seconds=kinds.spread(_ClassPricer(rank_class, shared, holdings, memory).seconds),
        allocate_bytes=flow.allocate,
        free_bytes=flow.free,
        static_bytes=flow.static.total + overheads.context_bytes + overheads.workspace_bytes,
    )
    return costs, flow.static


class _ClassPricer:
    """Seconds of the instructions of one class of ranks."""

    def __init__(
        self,
        rank_class: RankClass,
        shared: _Shared,
        holdings: Holdings,
        memory: MemoryModel,
    ) -> None:
        self.rank_class = rank_class
        self.shared = shared
        self.holdings = holdings
        self.memory = memory
        self.replica = holdings.replica
        self.prices = shared.prices[self.replica.chips.pools[0]]
        self._updated = sum(memory.optimizer_parameters(unit) for unit in memory.units)
        self._optimizer = self.prices.optimizer(self._updated)

    def seconds(self, entry: Instruction) -> float:
        """Return how long an instruction occupies its lane."""
        if entry.op in (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            return sum(self._pass(unit, entry.op) for unit in range(entry.start, entry.stop))
        handler = {
            Op.SEND: self._send,
            Op.RECEIVE: self._receive,
            Op.GATHER_PARAMETERS: self._collective,
            Op.REDUCE_GRADIENTS: self._collective,
            Op.SYNC_TIED: self._tied,
            Op.CLIP_NORM: self._norm,
            Op.FETCH: self._copy,
            Op.OFFLOAD: self._copy,
            Op.STEP: self._step,
        }[entry.op]
        return handler(entry)

    def _pass(self, unit: int, op: Op) -> float:
        times = self.prices.unit(self.holdings.workload, unit, self.holdings.recompute_kind(unit))
        return {
            Op.FORWARD: times.forward,
            Op.RECOMPUTE: times.recompute,
            Op.BACKWARD_INPUT: times.backward_input,
            Op.BACKWARD_WEIGHT: times.backward_weight,
        }[op]

    def _send(self, entry: Instruction) -> float:
        return self.shared.boundary(self.rank_class.pipeline, entry.start, entry.what)

    def _receive(self, entry: Instruction) -> float:
        """Joining the slices of a tensor-parallel group over its own links."""
        del entry
        if not must_join(self.replica):
            return 0.0
        chips = [self.replica.chips.at(i) for i in range(self.replica.tp)]
        links = group_links(self.shared.cluster, chips)
        size = self.memory.boundary()
        return choose_program(Operation.ALL_GATHER, size, links, self.prices.efficiency).seconds

    def _collective(self, entry: Instruction) -> float:
        kind = ParameterClass(entry.what.value)
        precision = self.shared.plan.job.precision
        gather = entry.op is Op.GATHER_PARAMETERS
        element = precision.parameters if gather else precision.gradients
        level = self.holdings.level(entry.start, kind)
        units = range(entry.start, entry.stop)
        count = float(sum(self.holdings.parameters(unit, kind) for unit in units))
        if level >= 2 and entry.micro_batch < 0 and not gather:  # shards meet across pipelines
            count *= self.holdings.shard(entry.start, kind, 2)
        choice = collective_choice(
            self.shared.groups,
            entry,
            pipeline=self.rank_class.pipeline,
            level=level,
            num_bytes=count * element.num_bytes,
            efficiency=self.prices.efficiency,
        )
        return choice.seconds

    def _tied(self, entry: Instruction) -> float:
        """The tied table travels once between the stages that hold its two copies."""
        precision = self.shared.plan.job.precision
        element = precision.gradients if entry.what is What.GRADIENTS else precision.parameters
        model, replica = self.shared.model, self.replica
        held = 0 if covers(self.holdings.stage.units, 0) else model.head_unit
        share = self.holdings.shard(held, ParameterClass.DENSE, 1)
        size = -(-model.vocab // replica.tp) * model.embedding.dim * element.num_bytes * share
        ends = [
            stage.replicas[0].chips.at(0)
            for unit in (0, model.head_unit)
            for p, _, stage in self.shared.plan.holders(unit)
            if p == self.rank_class.pipeline
        ]
        if ends[0] == ends[-1]:
            return 0.0
        links = group_links(self.shared.cluster, [ends[0], ends[-1]])
        operation = Operation.BROADCAST if entry.what is What.PARAMETERS else Operation.REDUCE
        return choose_program(operation, size, links, self.prices.efficiency).seconds

    def _norm(self, entry: Instruction) -> float:
        """A handful of numbers up a tree of all ranks and down again."""
        del entry
        ranks = self.shared.groups.everyone()
        hop = self.prices.efficiency.hop_s
        return 2.0 * math.ceil(math.log2(ranks)) * hop if ranks > 1 else 0.0

    def _copy(self, entry: Instruction) -> float:
        if entry.what is What.BATCH:
            moved = self.holdings.workload.tokens * BATCH_ENTRY_BYTES
        else:
            taken, given = self.memory.effect(entry)
            moved = max(taken, given)
        return self.prices.copy_seconds(moved)

    def _step(self, entry: Instruction) -> float:
        """A bucket's part of the whole stage's optimizer step."""
        layers = self.prices.layers
        if layers is not None and isinstance(self.memory, ProfiledMemory):
            units = self.memory.updated_units(entry.start, entry.stop)
            return layers.optimizer_s(self.holdings.workload, units)
        count = sum(self.memory.optimizer_parameters(u) for u in range(entry.start, entry.stop))
        return self._optimizer * count / self._updated if self._updated else 0.0
