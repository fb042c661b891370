"""Single changes of replicas: degrees, shares, recomputation, offload, idle chips.

Each is tried for one replica group, for its whole stage and for all stages together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.edits import (
    each_replica,
    ranges_of,
    units_of,
    with_pipeline,
    with_replica,
    with_stage,
)
from tutti.plan.plan import (
    ContextKind,
    Pipeline,
    Plan,
    Recompute,
    Replica,
    Stage,
    UnitRanges,
    covers,
)

FACTORS = (2, 3, 5, 7)
OVERLAP_CHUNKS = (1, 2, 4, 8)
AMOUNTS = ("none", "all", "one more", "one fewer", "half", "last half")
OFFLOADS = ("optimizer", "parameters", "gradients", "activations")

Changes = Iterator[tuple[str, Plan | None]]
ReplicaChange = Callable[[Replica], Replica | None]
StageChange = Callable[[Stage], Stage | None]


def _everywhere(plan: Plan, what: str, change: ReplicaChange) -> Changes:
    """Apply a change to each replica group, each stage, and all stages."""
    changed: Plan | None = plan
    several = sum(len(stage.replicas) for _, _, stage in plan.stages()) > 1
    for p, s, stage in plan.stages():
        whole: Stage | None = stage
        for r, replica in enumerate(stage.replicas):
            other = change(replica)
            if other is None:
                whole = None
                continue
            place = f"{what}, pipeline {p}, stage {s}"
            if len(stage.replicas) > 1:
                yield f"{place}, replica {r}", with_replica(plan, (p, s, r), other)
            if whole is not None:
                replicas = tuple(other if i == r else x for i, x in enumerate(whole.replicas))
                whole = replace(whole, replicas=replicas)
        if whole is not None:
            yield f"{what}, pipeline {p}, stage {s}", with_stage(plan, p, s, whole)
        if changed is not None:
            changed = None if whole is None else with_stage(changed, p, s, whole)
    if several:
        yield f"{what}, everywhere", changed


# --- degrees ---------------------------------------------------------------------------------


def _degrees(plan: Plan, model: ModelSpec) -> Changes:
    """Split a replica's work otherwise over the same chips."""
    del model
    length = plan.job.sequence_length
    for factor, (more, less) in itertools.product(
        FACTORS, itertools.permutations(("tp", "cp", "count"), 2)
    ):

        def change(
            replica: Replica, factor: int = factor, more: str = more, less: str = less
        ) -> Replica | None:
            if getattr(replica, less) % factor:
                return None
            values = {
                more: getattr(replica, more) * factor,
                less: getattr(replica, less) // factor,
            }
            sequences = replica.sequences
            if more == "count":  # as many sequences by more copies
                if sequences % factor:
                    return None
                sequences //= factor
            elif less == "count":
                sequences *= factor
            return _fitted(replace(replica, sequences=sequences, **values), length)

        yield from _everywhere(plan, f"{more} × {factor}, {less} ÷ {factor}", change)
        if "count" in (more, less):
            yield from _other_copies(plan, factor, more, less)


def _other_copies(plan: Plan, factor: int, more: str, less: str) -> Changes:
    """Give all stages of a pipeline other widths; copies keep their sequences of a micro-batch."""
    for p, pipeline in enumerate(plan.pipelines):
        stages: list[Stage] = []
        for stage in pipeline.stages:
            if any(getattr(replica, less) % factor for replica in stage.replicas):
                break
            replicas = tuple(
                _fitted(
                    replace(
                        replica,
                        **{
                            more: getattr(replica, more) * factor,
                            less: getattr(replica, less) // factor,
                        },
                    ),
                    plan.job.sequence_length,
                )
                for replica in stage.replicas
            )
            stages.append(replace(stage, replicas=replicas))
        else:
            size = _micro_batch_of(stages[0])
            if pipeline.sequences % size == 0:
                other = Pipeline(
                    micro_batch=size,
                    micro_batches=pipeline.sequences // size,
                    stages=tuple(stages),
                )
                what = f"{more} × {factor}, {less} ÷ {factor}, pipeline {p}, same sequences"
                yield what, with_pipeline(plan, p, other)


def _micro_batch_of(stage: Stage) -> int:
    return sum(replica.count * replica.sequences for replica in stage.replicas)


def _fitted(replica: Replica, length: int) -> Replica:
    """Return a replica whose flags go with its degrees."""
    splits = replica.tp > 1 and length // replica.cp % replica.tp == 0
    return replace(
        replica,
        sequence_parallel=splits,
        tp_overlap_chunks=replica.tp_overlap_chunks if replica.tp > 1 else 1,
    )


def _flags(plan: Plan, model: ModelSpec) -> Changes:
    """Try how tensor and context parallelism are carried out."""
    del model

    def sequence_parallel(replica: Replica) -> Replica | None:
        if replica.tp == 1:
            return None
        return replace(replica, sequence_parallel=not replica.sequence_parallel)

    yield from _everywhere(plan, "sequence parallelism", sequence_parallel)
    for count in OVERLAP_CHUNKS:
        yield from _everywhere(
            plan,
            f"{count} overlap chunks",
            lambda r, count=count: replace(r, tp_overlap_chunks=count) if r.tp > 1 else None,  # type: ignore[misc]
        )
    for kind in ContextKind:
        yield from _everywhere(
            plan,
            f"context {kind}",
            lambda r, kind=kind: replace(r, context_kind=kind) if r.cp > 1 else None,  # type: ignore[misc]
        )


# --- shares and idle chips -------------------------------------------------------------------


def _shares(plan: Plan, model: ModelSpec) -> Changes:
    """Let one replica group of a stage take sequences of another."""
    del model
    for p, s, stage in plan.stages():
        for giving, taking in itertools.permutations(range(len(stage.replicas)), 2):
            one, other = stage.replicas[giving], stage.replicas[taking]
            common = math.lcm(one.count, other.count)
            less = replace(one, sequences=max(1, one.sequences - common // one.count))
            more = replace(other, sequences=other.sequences + common // other.count)
            changed = with_replica(plan, (p, s, giving), less)
            changed = with_replica(changed, (p, s, taking), more)
            yield f"pipeline {p}, stage {s}: from {giving} to {taking}", changed


def _idle(plan: Plan, model: ModelSpec) -> Changes:
    """Take idle chips into a replica group, or leave a part of its chips idle."""
    del model
    length = plan.job.sequence_length
    free: dict[str, list[object]] = {}
    for chip in plan.idle:
        free.setdefault(chip.pool, []).append(chip)
    for p, s, stage in plan.stages():
        for r, replica in enumerate(stage.replicas):
            place = f"pipeline {p}, stage {s}, replica {r}"
            idle = free.get(replica.chips.pools[0], [])
            for axis in ("tp", "cp", "count"):
                if len(idle) >= replica.num_chips and (
                    axis != "count" or replica.sequences % 2 == 0
                ):
                    more = ChipSet.from_ids([*replica.chips, *idle[: replica.num_chips]])  # type: ignore[list-item]
                    values = {axis: 2 * getattr(replica, axis)}
                    sequences = replica.sequences // (2 if axis == "count" else 1)
                    wider = replace(replica, chips=more, sequences=sequences, **values)
                    yield f"{axis} × 2, {place}", _placed(plan, (p, s, r), _fitted(wider, length))
                if getattr(replica, axis) % 2 == 0:
                    half = replica.chips.cut(0, replica.num_chips // 2)
                    values = {axis: getattr(replica, axis) // 2}
                    sequences = replica.sequences * (2 if axis == "count" else 1)
                    fewer = replace(replica, chips=half, sequences=sequences, **values)
                    yield f"{axis} ÷ 2, {place}", _placed(plan, (p, s, r), _fitted(fewer, length))


def _placed(plan: Plan, place: tuple[int, int, int], replica: Replica) -> Plan:
    """Return the plan with a replica group on other chips; who is idle follows."""
    p, s, r = place
    before = plan.pipelines[p].stages[s].replicas[r].chips
    used = set(replica.chips)
    idle = [chip for chip in (*plan.idle, *before) if chip not in used]
    changed = with_replica(plan, place, replica)
    return replace(changed, idle=ChipSet.from_ids(sorted(idle)))


# --- memory ----------------------------------------------------------------------------------


def _blocks(stage: Stage, model: ModelSpec) -> list[int]:
    return [unit for unit in units_of(stage.units) if 1 <= unit <= model.num_layers]


def _stagewise(plan: Plan, what: str, change: StageChange) -> Changes:
    """Apply a change to each stage, and to all."""
    changed: Plan | None = plan
    for p, s, stage in plan.stages():
        other = change(stage)
        if other is not None:
            yield f"{what}, pipeline {p}, stage {s}", with_stage(plan, p, s, other)
        if changed is not None:
            changed = None if other is None else with_stage(changed, p, s, other)
    yield f"{what}, everywhere", changed


def _other_units(named: UnitRanges, stage: Stage, blocks: list[int], how: str) -> UnitRanges:
    """Return none of the blocks, all of them, one more or one fewer."""
    held = [unit for unit in units_of(named) if unit in blocks]
    rest = [unit for unit in blocks if unit not in held]
    wanted = {
        "none": [],
        "all": blocks,
        "one more": [*held, *rest[:1]],
        "one fewer": held[:-1],
        "half": blocks[: len(blocks) // 2],
        "last half": blocks[len(blocks) // 2 :],
    }[how]
    return ranges_of(wanted, stage.units)


def _recompute(plan: Plan, model: ModelSpec) -> Changes:
    """Recompute more, less, or in another way."""
    for how in AMOUNTS:
        for full in (True, False):

            def change(stage: Stage, how: str = how, full: bool = full) -> Stage:
                blocks = _blocks(stage, model)

                def one(replica: Replica) -> Replica:
                    known = replica.recompute
                    named = known.full if full else known.selective
                    new = _other_units(named, stage, blocks, how)
                    taken = set(units_of(new))
                    kept = [
                        u for u in units_of(known.selective if full else known.full)
                        if u not in taken
                    ]  # fmt: skip
                    rest = ranges_of(kept, stage.units)
                    both = (new, rest) if full else (rest, new)
                    return replace(replica, recompute=Recompute(full=both[0], selective=both[1]))

                return each_replica(stage, one)

            yield from _stagewise(plan, f"{'full' if full else 'selective'}: {how}", change)


def _offload(plan: Plan, model: ModelSpec) -> Changes:
    """Keep more or less in host memory."""
    for name in OFFLOADS:
        for how in AMOUNTS:

            def change(stage: Stage, how: str = how, name: str = name) -> Stage:
                blocks = _blocks(stage, model)

                def one(replica: Replica) -> Replica:
                    named = getattr(replica.offload, name)
                    new = _other_units(named, stage, blocks, how)
                    return replace(replica, offload=replace(replica.offload, **{name: new}))

                return each_replica(stage, one)

            yield from _stagewise(plan, f"{name}: {how}", change)


def _offloaded_ends(plan: Plan, model: ModelSpec) -> Changes:
    """Keep states of the embedding or of the head in host memory, or not."""
    for name, unit in itertools.product(OFFLOADS[:3], (0, model.head_unit)):

        def change(stage: Stage, unit: int = unit, name: str = name) -> Stage | None:
            if not covers(stage.units, unit):
                return None

            def one(replica: Replica) -> Replica:
                units = {unit} ^ set(units_of(getattr(replica.offload, name)))
                kept = {name: ranges_of(units, stage.units)}
                return replace(replica, offload=replace(replica.offload, **kept))

            return each_replica(stage, one)

        yield from _stagewise(plan, f"{name} of unit {unit}", change)


REPLICA_CHANGES: dict[str, Callable[[Plan, ModelSpec], Changes]] = {
    "degrees": _degrees,
    "flags": _flags,
    "shares": _shares,
    "idle chips": _idle,
    "recompute": _recompute,
    "offload": _offload,
    "offloaded ends": _offloaded_ends,
}
