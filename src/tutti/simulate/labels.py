"""What tables and pictures call a class of ranks, and how much memory its chips have."""

from __future__ import annotations

from dataclasses import dataclass

from tutti.plan.plan import Plan
from tutti.schedule.schedule import RankClass, Schedule, replica_of, stage_of
from tutti.units import many


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLabel:
    """How a class of ranks is shown."""

    name: str
    detail: str = ""
    pool: str = ""
    chip: str = ""
    limit_bytes: float | None = None  # memory of one chip
    peak_bytes: float | None = None  # of one chip, allocator slack included; None: as simulated


def labels_of(schedule: Schedule) -> tuple[ClassLabel, ...]:
    """Return labels from the plan: short names, degrees, chip and its memory where embedded."""
    return tuple(_label(schedule.plan, c) for c in schedule.classes)


def pools_of(plan: Plan, rank_class: RankClass) -> tuple[str, ...]:
    """Return the pools whose chips a class of ranks runs on."""
    chips = replica_of(plan, rank_class).chips
    return tuple(dict.fromkeys(span.pool for span in chips.ranges))


def _label(plan: Plan, rank_class: RankClass) -> ClassLabel:
    stage, replica = stage_of(plan, rank_class), replica_of(plan, rank_class)
    words = [f"stage {rank_class.stage}"]
    if len(plan.pipelines) > 1:
        words.insert(0, f"pipeline {rank_class.pipeline}")
    if len(stage.replicas) > 1:
        words.append(f"replica {rank_class.replica}")
    units = ", ".join(f"{a}–{b - 1}" if b - a > 1 else f"{a}" for a, b in stage.units)
    degrees = [f"units {units}", many(rank_class.num_ranks, "rank")]
    degrees += [
        f"{name} {value}"
        for name, value in (("dp", replica.count), ("tp", replica.tp), ("cp", replica.cp))
        if value > 1
    ]
    pools = pools_of(plan, rank_class)
    cluster = plan.cluster.cluster
    chips = [cluster.pool(pool).chip for pool in pools] if cluster is not None else []
    return ClassLabel(
        name=" · ".join(words),
        detail=" · ".join(degrees),
        pool=" + ".join(pools),
        chip=" + ".join(dict.fromkeys(chip.name for chip in chips)),
        limit_bytes=min((chip.memory_bytes for chip in chips), default=None),
    )
