"""A strategy before its chips are named, and how it becomes a Plan.

A Draft counts: pipelines, stages, copies of replicas. `to_plan` places it: tensor and context
groups stay inside an island of native links wherever one is wide enough, and either the copies of
a stage lie side by side (their gradient traffic stays near) or the stages of a copy (its boundary
traffic stays near); node after node, or packed into the groups of nodes under a fabric's tiers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import (
    ClusterReference,
    ExpertGroup,
    ModelReference,
    Offload,
    Order,
    Pipeline,
    Plan,
    Recompute,
    Replica,
    Stage,
    UnitRanges,
    covers,
)
from tutti.plan.uniform import one_rule
from tutti.plan.wide_units import with_wide_units
from tutti.search.pricing.unit_tables import Config
from tutti.search.strategy.group_packing import IslandAllocator, Request, Weights, pack

Placement = Literal["stage", "copy"]  # whose chips lie side by side
PLACEMENTS: tuple[Placement, ...] = ("stage", "copy")
NO_RECOMPUTE, NO_OFFLOAD, PLAIN_ORDER = Recompute(), Offload(), Order()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDraft:
    """`copies` equal replicas of a stage."""

    config: Config
    copies: int = 1
    overlap_chunks: int = 1
    recompute: Recompute = NO_RECOMPUTE
    offload: Offload = NO_OFFLOAD

    @property
    def num_chips(self) -> int:
        """Chips of all copies."""
        return self.copies * self.config.width

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch that all copies take together."""
        return self.copies * self.config.sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDraft:
    """Units and who computes them."""

    units: UnitRanges
    replicas: tuple[ReplicaDraft, ...]
    order: Order = PLAIN_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDraft:
    """Stages, and the micro-batches that pass them."""

    micro_batches: int
    stages: tuple[StageDraft, ...]

    @property
    def micro_batch(self) -> int:
        """Sequences of one micro-batch."""
        return sum(replica.sequences for replica in self.stages[0].replicas)

    @property
    def cut(self) -> tuple[UnitRanges, ...]:
        """The units of each stage."""
        return tuple(stage.units for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A whole strategy."""

    pipelines: tuple[PipelineDraft, ...]
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    shard: int = 0
    placement: Placement = "stage"
    packed: bool = False
    """Into the groups of nodes that a fabric's tiers make, not one node after the other."""
    overlap: bool = True

    @property
    def sequences(self) -> int:
        """Sequences of one step."""
        return sum(p.micro_batch * p.micro_batches for p in self.pipelines)

    def chips(self) -> dict[str, int]:
        """Return how many chips of each pool take part."""
        used: dict[str, int] = defaultdict(int)
        for replica in _replicas(self):
            used[replica.config.pool] += replica.num_chips
        return dict(used)


def _replicas(draft: Draft) -> Iterator[ReplicaDraft]:
    return (
        replica
        for pipeline in draft.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
    )


def canonical(draft: Draft) -> Draft:
    """Return the same strategy with pipelines of one cut and count written as replicas.

    Where state is sharded inside pipelines (levels 2 and 3) they stay apart.
    """
    if draft.shard >= 2:
        return draft
    merged: dict[object, PipelineDraft] = {}
    for pipeline in draft.pipelines:
        key = (pipeline.cut, pipeline.micro_batches)
        known = merged.get(key)
        merged[key] = pipeline if known is None else _joined(known, pipeline)
    return replace(draft, pipelines=tuple(merged.values()))


def _joined(first: PipelineDraft, second: PipelineDraft) -> PipelineDraft:
    stages = tuple(
        replace(a, replicas=_grouped((*a.replicas, *b.replicas)))
        for a, b in zip(first.stages, second.stages, strict=True)
    )
    return replace(first, stages=stages)


def _grouped(replicas: tuple[ReplicaDraft, ...]) -> tuple[ReplicaDraft, ...]:
    groups: dict[ReplicaDraft, int] = {}
    for replica in replicas:
        alike = replace(replica, copies=1)
        groups[alike] = groups.get(alike, 0) + replica.copies
    return tuple(replace(alike, copies=count) for alike, count in groups.items())


def to_plan(
    draft: Draft,
    references: tuple[ModelReference, ClusterReference],
    job: Job,
    model: ModelSpec,
    cluster: Cluster,
) -> Plan:
    """Place a draft on the cluster's chips."""
    draft = canonical(draft)
    chips, idle = _placed(draft, model, job, cluster)
    pipelines = tuple(
        Pipeline(
            micro_batch=pipeline.micro_batch,
            micro_batches=pipeline.micro_batches,
            stages=tuple(
                _stage(stage, [chips[p, s, r] for r in range(len(stage.replicas))], model, job)
                for s, stage in enumerate(pipeline.stages)
            ),
        )
        for p, pipeline in enumerate(draft.pipelines)
    )
    plan = Plan(
        model=references[0],
        cluster=references[1],
        job=replace(job, schedule=draft.schedule),
        pipelines=pipelines,
        synchronisation=one_rule(
            model,
            shard=draft.shard,
            overlap=draft.overlap,
            spread=any(stage.experts for pipeline in pipelines for stage in pipeline.stages),
        ),
        tied_owner=_tied_owner(pipelines, model),
        idle=ChipSet.from_ids(idle),
    )
    return with_wide_units(plan, cluster, model.head_unit)


_Chips = dict[tuple[int, int, int], list[Position]]  # by pipeline, stage, group of replicas


def _placed(
    draft: Draft, model: ModelSpec, job: Job, cluster: Cluster
) -> tuple[_Chips, list[Position]]:
    """Return the chips of every group of replicas, and those that nobody takes."""
    chips: _Chips = defaultdict(list)
    asked = list(_requests(draft))
    if not draft.packed:
        pools = {pool.name: IslandAllocator(pool) for pool in cluster.pools}
        for p, s, r, replica in asked:
            chips[p, s, r] += pools[replica.config.pool].take(replica.config.width)
        return chips, [chip for allocator in pools.values() for chip in allocator.rest()]
    copies: dict[tuple[int, int, int], int] = defaultdict(int)
    requests = []
    for p, s, r, replica in asked:
        copy = copies[p, s, r] = copies[p, s, r] + 1
        block = (p, s) if draft.placement == "stage" else (p, -copy)
        config = replica.config
        requests.append(Request(block, (p, s), config.pool, config.width))
    places, idle = pack(requests, cluster, _weights(draft, model, job))
    for (p, s, r, _), taken in zip(asked, places, strict=True):
        chips[p, s, r] += taken
    return chips, idle


def _weights(draft: Draft, model: ModelSpec, job: Job) -> Weights:
    """Return what stages and copies send each other in a step."""
    units = model.num_layers + 2
    each = 2.0 * model.num_trained * job.precision.gradients.num_bytes / units
    token = model.hidden * job.precision.stream.num_bytes * job.sequence_length
    gradients, boundaries = {}, {}
    for p, pipeline in enumerate(draft.pipelines):
        for s, stage in enumerate(pipeline.stages):
            held = sum(stop - start for start, stop in stage.units)
            gradients[p, s] = each * held
            copy = stage.replicas[0].config.sequences
            boundaries[p, s] = 2.0 * token * copy * pipeline.micro_batches * len(stage.units)
    return Weights(gradients, boundaries)


def _requests(draft: Draft) -> Iterator[tuple[int, int, int, ReplicaDraft]]:
    """Yield one entry per copy, in the order in which chips are handed out."""
    for p, pipeline in enumerate(draft.pipelines):
        groups = [
            (s, r, replica)
            for s, stage in enumerate(pipeline.stages)
            for r, replica in enumerate(stage.replicas)
        ]
        if draft.placement == "stage":
            for s, r, replica in groups:
                yield from itertools.repeat((p, s, r, replica), replica.copies)
            continue
        most = max(replica.copies for _, _, replica in groups)
        for copy in range(most):
            yield from ((p, s, r, replica) for s, r, replica in groups if copy < replica.copies)


def _stage(stage: StageDraft, chips: list[list[Position]], model: ModelSpec, job: Job) -> Stage:
    replicas = tuple(
        Replica(
            chips=ChipSet.from_ids(ids),
            count=replica.copies,
            tp=replica.config.tp,
            cp=replica.config.cp,
            sequence_parallel=replica.config.splits_tokens(job.sequence_length),
            tp_overlap_chunks=replica.overlap_chunks,
            sequences=replica.config.sequences,
            recompute=replica.recompute,
            offload=replica.offload,
        )
        for replica, ids in zip(stage.replicas, chips, strict=True)
    )
    ep = stage.replicas[0].config.ep
    groups: tuple[ExpertGroup, ...] = ()
    if ep > 1 and has_experts(stage.units, model):
        total = sum(replica.num_chips for replica in stage.replicas)
        groups = (ExpertGroup(chips=ep, count=total // ep),)
    return Stage(units=stage.units, replicas=replicas, experts=groups, order=stage.order)


def has_experts(units: UnitRanges, model: ModelSpec) -> bool:
    """Tell whether one of the units has experts."""
    return any(
        model.block(unit).moe is not None
        for unit in range(1, model.num_layers + 1)
        if covers(units, unit)
    )


def _tied_owner(pipelines: tuple[Pipeline, ...], model: ModelSpec) -> int | None:
    if not model.ties_weights:
        return None
    head = model.head_unit
    apart = any(
        covers(stage.units, 0) != covers(stage.units, head)
        for pipeline in pipelines
        for stage in pipeline.stages
    )
    return 0 if apart else None
