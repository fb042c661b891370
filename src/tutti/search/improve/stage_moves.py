"""Moves of a local search over Plans: what concerns the replicas of stages.

Each is tried for one stage (where its replicas differ, for one of them) and for all stages.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tutti.hardware.topology import Position
from tutti.plan.chips import ChipSet
from tutti.plan.edits import ranges_of, units_of, with_pipeline, with_replica, with_stage
from tutti.plan.plan import (
    ContextKind,
    Offload,
    Pipeline,
    Plan,
    Recompute,
    Replica,
    Stage,
    UnitRanges,
)
from tutti.search.improve.plan_moves import Here, Moves
from tutti.search.pricing.unit_tables import CHUNKS

FACTORS = (2, 3, 5, 7)
AXES = ("tp", "cp", "count")
AMOUNTS = ("one fewer", "one more", "none", "all", "half", "last half")

Alter = Callable[[Replica, Stage], Replica | None]


def _applied(here: Here, alter: Alter) -> Moves:
    """Yield the plan with all stages altered, with each of them, and each replica of unlike ones.

    All together come first: they change most. Of the others those of busy stages.
    """
    plan = here.plan
    whole: Plan | None = plan
    single: list[tuple[float, Plan]] = []
    stages = 0
    for p, s, stage in plan.stages():
        stages += 1
        altered = [alter(replica, stage) for replica in stage.replicas]
        busy = here.loads.seconds.get((p, s), 0.0)
        if len(altered) > 1:
            for r, replica in enumerate(altered):
                if replica is not None and replica != stage.replicas[r]:
                    single.append((busy, with_replica(plan, (p, s, r), replica)))
        kept = tuple(replica for replica in altered if replica is not None)
        if len(kept) < len(altered):
            whole = None
            continue
        changed = replace(stage, replicas=kept)
        if changed != stage:
            single.append((busy, with_stage(plan, p, s, changed)))
        whole = None if whole is None else with_stage(whole, p, s, changed)
    if stages > 1:
        yield whole
    single.sort(key=operator.itemgetter(0), reverse=True)
    yield from (moved for _, moved in single)


def _flagged(replica: Replica, length: int) -> Replica:
    """Return a replica whose flags go with its degrees."""
    return replace(
        replica,
        sequence_parallel=replica.tp > 1 and length // replica.cp % replica.tp == 0,
        tp_overlap_chunks=replica.tp_overlap_chunks if replica.tp > 1 else 1,
    )


def degree_moves(here: Here) -> Moves:
    """Split the work of a replica's chips otherwise.

    Each way is tried for all stages, and for all of a pipeline, before any for single stages.
    """
    plan = here.plan
    for factor in FACTORS:
        ways: list[Moves] = []
        for more, less in itertools.permutations(AXES, 2):
            ways.append(_applied(here, partial(_resplit, plan, factor, more, less)))
            if "count" in (more, less):
                ways.append(_other_widths(plan, factor, more, less))
        for moves in itertools.zip_longest(*ways):
            yield from (move for move in moves if move is not None)


def _resplit(
    plan: Plan, factor: int, more: str, less: str, replica: Replica, _: Stage
) -> Replica | None:
    """Return a replica with more ways along one axis and fewer along another; None: not whole."""
    sequences = replica.sequences
    if getattr(replica, less) % factor or (more == "count" and sequences % factor):
        return None
    if "count" in (more, less):
        sequences = sequences // factor if more == "count" else sequences * factor
    degrees = {axis: getattr(replica, axis) for axis in AXES}
    degrees[more] *= factor
    degrees[less] //= factor
    return _flagged(replace(replica, sequences=sequences, **degrees), plan.job.sequence_length)


def _other_widths(plan: Plan, factor: int, more: str, less: str) -> Moves:
    """Give all stages of a pipeline other widths, and micro-batches of another size with them."""
    for p, pipeline in enumerate(plan.pipelines):
        replicas = [replica for stage in pipeline.stages for replica in stage.replicas]
        if any(getattr(replica, less) % factor for replica in replicas):
            continue
        stages = tuple(
            replace(
                stage,
                replicas=tuple(
                    _flagged(
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
                ),
            )
            for stage in pipeline.stages
        )
        size = sum(replica.count * replica.sequences for replica in stages[0].replicas)
        count, rest = divmod(pipeline.sequences, size)
        if not rest:
            other = Pipeline(micro_batch=size, micro_batches=count, stages=stages)
            yield with_pipeline(plan, p, other)


def flag_moves(here: Here) -> Moves:
    """Carry tensor and context parallelism out otherwise."""

    def sequence_parallel(replica: Replica, _: Stage) -> Replica:
        flag = replica.tp > 1 and not replica.sequence_parallel
        return replace(replica, sequence_parallel=flag)

    yield from _applied(here, sequence_parallel)
    for chunks in CHUNKS:
        yield from _applied(
            here,
            lambda r, _, n=chunks: replace(r, tp_overlap_chunks=n if r.tp > 1 else 1),  # type: ignore[misc]
        )
    for kind in ContextKind:
        yield from _applied(
            here,
            lambda r, _, k=kind: replace(r, context_kind=k if r.cp > 1 else ContextKind.RING),  # type: ignore[misc]
        )


def recompute_moves(here: Here, *, remedied: bool = True) -> Moves:
    """Recompute otherwise; `remedied`: only where something is done for memory."""
    model = here.problem.model
    for amount, full in itertools.product(AMOUNTS, (True, False)):

        def alter(
            replica: Replica, stage: Stage, amount: str = amount, full: bool = full
        ) -> Replica:
            if remedied and not _has_remedies(replica):
                return replica
            known = replica.recompute
            named, others = (known.full, known.selective)[:: 1 if full else -1]
            wanted = _amount(named, stage, model.num_layers, amount)
            taken = set(units_of(wanted))
            rest = ranges_of((u for u in units_of(others) if u not in taken), stage.units)
            both = (wanted, rest) if full else (rest, wanted)
            return replace(replica, recompute=Recompute(full=both[0], selective=both[1]))

        yield from _applied(here, alter)


def offload_moves(here: Here, *, remedied: bool = True) -> Moves:
    """Keep less or more on the host; `remedied`: only where something is done for memory."""
    model = here.problem.model
    for name, amount in itertools.product(here.problem.space.offload, AMOUNTS):

        def alter(
            replica: Replica, stage: Stage, name: str = name, amount: str = amount
        ) -> Replica:
            if remedied and not _has_remedies(replica):
                return replica
            named = getattr(replica.offload, name)
            wanted = _amount(named, stage, model.num_layers, amount)
            return replace(replica, offload=replace(replica.offload, **{name: wanted}))

        yield from _applied(here, alter)


def _has_remedies(replica: Replica) -> bool:
    """Tell whether a replica recomputes or offloads; what fits without gains little by it."""
    return replica.recompute != Recompute() or replica.offload != Offload()


def _amount(named: UnitRanges, stage: Stage, num_layers: int, amount: str) -> UnitRanges:
    """Return so many of the stage's blocks; one more or fewer than those that are named."""
    held = [unit for unit in units_of(named) if 1 <= unit <= num_layers]
    ends = [unit for unit in units_of(named) if unit not in held]
    blocks = [unit for unit in units_of(stage.units) if 1 <= unit <= num_layers]
    ordered = [*held, *(unit for unit in blocks if unit not in held)]
    half = len(blocks) // 2
    taken = {
        "none": [],
        "all": blocks,
        "half": blocks[:half],
        "last half": blocks[half:],
        "one more": ordered[: len(held) + 1],
        "one fewer": held[:-1],
    }[amount]
    return ranges_of([*ends, *taken] if taken else [], stage.units)


def idle_moves(here: Here) -> Moves:
    """Widen a replica group onto idle chips, or leave half of its chips idle."""
    plan, length = here.plan, here.plan.job.sequence_length
    free: dict[str, list[Position]] = {}
    for chip in plan.idle:
        free.setdefault(chip.pool, []).append(chip)
    for p, s, stage in plan.stages():
        for (r, replica), axis in itertools.product(enumerate(stage.replicas), AXES):
            for chips in _resized_chips(replica, axis, free.get(replica.chips.pools[0], [])):
                wider = len(chips) > replica.num_chips
                degree, sequences = getattr(replica, axis), replica.sequences
                degree = 2 * degree if wider else degree // 2
                if axis == "count":
                    sequences = sequences // 2 if wider else 2 * sequences
                changed = replace(
                    replica,
                    chips=ChipSet.from_ids(chips),
                    sequences=sequences,
                    **{axis: degree},
                )
                moved = with_replica(plan, (p, s, r), _flagged(changed, length))
                used = set(chips)
                idle = [c for c in (*plan.idle, *replica.chips) if c not in used]
                yield replace(moved, idle=ChipSet.from_ids(sorted(idle)))


def _resized_chips(replica: Replica, axis: str, free: list[Position]) -> Iterator[list[Position]]:
    own = list(replica.chips)
    if len(free) >= len(own) and (axis != "count" or replica.sequences % 2 == 0):
        yield [*own, *free[: len(own)]]
    if getattr(replica, axis) % 2 == 0:
        yield own[: len(own) // 2]


STAGE_MOVES: dict[str, Callable[[Here], Moves]] = {
    "degrees": degree_moves,
    "recompute": recompute_moves,
    "flags": flag_moves,
    "offload": offload_moves,
    "idle chips": idle_moves,
    "recompute at all": partial(recompute_moves, remedied=False),
    "offload at all": partial(offload_moves, remedied=False),
}
