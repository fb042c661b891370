"""The figures of an explanation, row by row: per group of replicas and per pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tutti.cost.plan.simulator_inputs import FloatArray
from tutti.hardware.cluster import Cluster
from tutti.hardware.pool import Pool
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.drawing import degrees_text, units_text
from tutti.plan.plan import Plan, Replica, Stage, UnitRanges
from tutti.schedule.instruction import Op
from tutti.schedule.listing import OPS
from tutti.schedule.schedule import RankClass, replica_of, stage_of
from tutti.search.answer.explanation import PoolRow, StageRow
from tutti.search.answer.result import ProvenPlan
from tutti.simulate.labels import labels_of
from tutti.simulate.result import IDLE_REASONS, SimulationResult
from tutti.units import many

_PASSES = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def stage_rows(proven: ProvenPlan, model: ModelSpec) -> tuple[StageRow, ...]:
    """Return one row per class of equal ranks, in rank order."""
    plan, estimate = proven.plan, proven.estimate
    labels = labels_of(estimate.schedule)
    work = _unit_work(model, plan.job.sequence_length)
    rows = []
    for index, rank_class in enumerate(estimate.schedule.classes):
        stage, replica = stage_of(plan, rank_class), replica_of(plan, rank_class)
        pipeline = plan.pipelines[rank_class.pipeline]
        timing = estimate.result.classes[index]
        step = timing.step_seconds or 1.0
        sequences = replica.sequences * replica.count
        done = sum(float(work[a:b].sum()) for a, b in stage.units)
        rows.append(
            StageRow(
                name=labels[index].name,
                pipeline=rank_class.pipeline,
                stage=rank_class.stage,
                replica=rank_class.replica,
                pool=labels[index].pool,
                chip=labels[index].chip,
                num_chips=rank_class.num_ranks,
                tp=replica.tp,
                cp=replica.cp,
                dp=replica.count,
                degrees=degrees_text(replica),
                units=units_text(stage.units, model.head_unit),
                num_units=stage.num_units,
                sequences=replica.sequences,
                batch_share=sequences / pipeline.micro_batch,
                work_share=done * sequences * pipeline.micro_batches / plan.job.global_batch,
                experts=_experts_text(stage),
                recompute=_recompute_text(replica, stage),
                offload=_offload_text(replica),
                num_recomputed=_count(replica.recompute.full) + _count(replica.recompute.selective),
                micro_batch_seconds=pass_seconds(estimate.result, index, _PASSES)
                / pipeline.micro_batches,
                idle_share=timing.idle_share,
                idle={reason.value: timing.idle[reason] / step for reason in IDLE_REASONS},
                memory_bytes=estimate.memory[index].total,
                limit_bytes=estimate.memory[index].limit,
            )
        )
    return tuple(rows)


def pass_seconds(result: SimulationResult, index: int, ops: Sequence[Op]) -> float:
    """Return the seconds of some kinds of instruction of one class of ranks."""
    codes = [OPS.index(op) for op in ops]
    chosen = np.isin(result.program.op[result.program.span(index)], codes)
    return float(result.costs.classes[index].seconds[chosen].sum())


def _unit_work(model: ModelSpec, sequence_length: int) -> FloatArray:
    """Return each unit's share of the model FLOPs of a token (DESIGN §5)."""
    work = np.zeros(model.num_units)
    for unit in range(model.num_units):
        work[unit] = sum(p.activated_size * p.matmul_uses for p in model.parameters(unit))
        if 1 <= unit <= model.num_layers:
            part = model.block(unit).attention
            attention = part.heads * (part.head_dim + part.value_dim)
            work[unit] += attention * part.context(sequence_length)
    return np.asarray(work / work.sum(), dtype=np.float64)


def pool_rows(
    proven: ProvenPlan, cluster: Cluster, stages: Sequence[StageRow]
) -> tuple[PoolRow, ...]:
    """Return how well each pool of the cluster is used."""
    plan = proven.plan
    dtype = plan.job.precision.compute
    peak = cluster.peak_flops(dtype, fallback=True)
    held = [_by_pool(plan, c) for c in proven.estimate.schedule.classes]
    rows = []
    for pool in cluster.pools:
        part = [(row, chips.get(pool.name, 0)) for row, chips in zip(stages, held, strict=True)]
        used = sum(chips for _, chips in part)
        unused = pool.num_chips - used
        lost = {
            reason.value: sum(chips * row.idle[reason.value] for row, chips in part)
            / pool.num_chips
            for reason in IDLE_REASONS
        }
        lost["no work"] = unused / pool.num_chips
        basis = proven.estimate.priced.basis.get(pool.name, "")
        rows.append(
            PoolRow(
                pool=pool.name,
                chip=pool.chip.name,
                num_chips=pool.num_chips,
                unused_chips=unused - _in_pool(plan.spare, pool),
                spare_chips=_in_pool(plan.spare, pool),
                peak_share=pool.peak_flops(dtype, fallback=True) / peak,
                work_share=sum(row.work_share * n / row.num_chips for row, n in part),
                idle_share=sum(lost.values()),
                idle=lost,
                basis=basis or "not used by the plan",
                nominal=basis.startswith("nominal"),
            )
        )
    return tuple(rows)


def _by_pool(plan: Plan, rank_class: RankClass) -> dict[str, int]:
    """Return how many chips of a class lie in each pool."""
    counts: dict[str, int] = {}
    for span in replica_of(plan, rank_class).chips.ranges:
        counts[span.pool] = counts.get(span.pool, 0) + span.size
    return counts


def _in_pool(chips: ChipSet, pool: Pool) -> int:
    return sum(span.size for span in chips.ranges if span.pool == pool.name)


# --- a replica in few words --------------------------------------------------------------------


def _experts_text(stage: Stage) -> str:
    return ", ".join(
        f"{group.count} × {many(group.chips, 'chip')}"
        + (f" ({'/'.join(map(str, group.experts))})" if group.experts else "")
        for group in stage.experts
    )


def _recompute_text(replica: Replica, stage: Stage) -> str:
    """Return "full 1-4", or "full" alone where that is every block of the stage."""
    words = []
    for kind, ranges in (
        ("full", replica.recompute.full),
        ("selective", replica.recompute.selective),
    ):
        if ranges:
            everything = _count(ranges) >= stage.num_units - _ends(stage, ranges)
            words.append(f"{kind}, all" if everything else f"{kind} {_ranges_text(ranges)}")
    return ", ".join(words)


def _ends(stage: Stage, ranges: UnitRanges) -> int:
    """Count the units at the edges of a stage that the ranges leave out: embedding, head."""
    low, high = min(a for a, _ in ranges), max(b for _, b in ranges)
    first, last = min(a for a, _ in stage.units), max(b for _, b in stage.units)
    return int(first == 0 and low == 1) + int(last == high + 1)


def _offload_text(replica: Replica) -> str:
    kinds = replica.offload.kinds()
    return ", ".join(f"{what} {_ranges_text(ranges)}" for what, ranges in kinds)


def _count(ranges: UnitRanges) -> int:
    return sum(stop - start for start, stop in ranges)


def _ranges_text(ranges: UnitRanges) -> str:
    return ", ".join(str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in ranges)
