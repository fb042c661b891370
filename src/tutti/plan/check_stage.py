"""The part of the checker that looks at one stage: degrees, shares of work, experts, ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.plan.expert_meetings import missed_meeting
from tutti.plan.job import Job
from tutti.plan.plan import ExpertGroup, Replica, Stage, UnitRanges, covers
from tutti.plan.wide_units import precision_refusal, widened


class Problem(NamedTuple):
    """One thing that is wrong: a code for machines, the place and the words for people."""

    code: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def check_stage(
    where: str, stage: Stage, job: Job, model: ModelSpec, cluster: Cluster
) -> Iterator[Problem]:
    """Yield what is wrong inside one stage."""
    if not stage.replicas:
        yield Problem("empty", where, "has no replica")
    for r, replica in enumerate(stage.replicas):
        place = f"{where}, replica {r}"
        yield from _layout(place, replica)
        yield from _pool(place, stage, replica, job, cluster, model.head_unit)
        yield from _degrees(place, stage, replica, model)
        yield from _sequence(place, replica, job)
        yield from _ranges(place, stage, replica)
    yield from _experts(where, stage, model)


def _layout(where: str, replica: Replica) -> Iterator[Problem]:
    if len(replica.chips) != replica.num_chips:
        yield Problem(
            "chip_count",
            where,
            f"{replica.count} copies of tp {replica.tp} · cp {replica.cp} need {replica.num_chips} "
            f"chips, '{replica.chips}' are {len(replica.chips)}",
        )
    if replica.tp == 1 and replica.sequence_parallel:
        yield Problem("sequence", where, "sequence_parallel needs tp of 2 or more")
    if replica.tp == 1 and replica.tp_overlap_chunks > 1:
        yield Problem("overlap", where, "tp_overlap_chunks needs tp of 2 or more")


def _pool(
    where: str, stage: Stage, replica: Replica, job: Job, cluster: Cluster, head_unit: int
) -> Iterator[Problem]:
    names = replica.chips.pools
    if len(names) > 1:
        message = f"mixes pools {', '.join(names)}; unlike chips go into separate replicas"
        yield Problem("pools", where, message)
    blocks = [u for start, stop in stage.units for u in range(start, stop)]
    narrow = any(job.narrow(unit) for unit in blocks if 0 < unit < head_unit)
    precision = job.precision if narrow else widened(job.precision)
    for pool in cluster.pools:
        refusal = precision_refusal(pool.chip, precision) if pool.name in names else None
        if refusal is not None:
            yield Problem("precision", where, refusal)


def _degrees(where: str, stage: Stage, replica: Replica, model: ModelSpec) -> Iterator[Problem]:
    problem = model.tensor_parallel_problem(replica.tp)
    if problem is not None:
        yield Problem("tp", where, problem)
        return
    if stage.experts or replica.tp == 1:
        return
    for block in model.blocks:
        if block.moe is not None and block.moe.hidden % replica.tp:
            message = (
                f"tp={replica.tp} does not divide the experts' width {block.moe.hidden}; "
                "use expert groups"
            )
            yield Problem("tp", where, message)
            return


def _sequence(where: str, replica: Replica, job: Job) -> Iterator[Problem]:
    length, cp = job.sequence_length, replica.cp
    if cp > 1 and length % (2 * cp):
        message = f"cp={cp} needs a sequence_length divisible by {2 * cp}; it is {length}"
        yield Problem("sequence", where, message)
    elif replica.sequence_parallel and (length // cp) % replica.tp:
        message = (
            f"sequence_parallel with tp={replica.tp} does not divide {length // cp} tokens "
            f"(sequence_length {length} ÷ cp {cp})"
        )
        yield Problem("sequence", where, message)


def _ranges(where: str, stage: Stage, replica: Replica) -> Iterator[Problem]:
    named = (
        ("recompute.full", replica.recompute.full),
        ("recompute.selective", replica.recompute.selective),
        ("offload.optimizer", replica.offload.optimizer),
        ("offload.parameters", replica.offload.parameters),
        ("offload.gradients", replica.offload.gradients),
        ("offload.activations", replica.offload.activations),
    )
    for name, ranges in named:
        yield from _inside(where, name, ranges, stage)
    for full, selective in itertools.product(replica.recompute.full, replica.recompute.selective):
        if full[0] < selective[1] and selective[0] < full[1]:
            unit = max(full[0], selective[0])
            message = f"unit {unit} is to be recomputed both fully and selectively"
            yield Problem("ranges", where, message)
            return


def _inside(where: str, name: str, ranges: UnitRanges, stage: Stage) -> Iterator[Problem]:
    for start, stop in ranges:
        if not any(lo <= start < stop <= hi for lo, hi in stage.units):
            held = ", ".join(f"{lo}-{hi}" for lo, hi in stage.units)
            message = f"{name} names units {start}-{stop}; the stage holds {held}"
            yield Problem("ranges", where, message)
    for (a, b), (c, _) in itertools.pairwise(sorted(ranges)):
        if c < b:
            yield Problem("ranges", where, f"{name}: {a}-{b} and {c}-… overlap")


def _experts(where: str, stage: Stage, model: ModelSpec) -> Iterator[Problem]:
    if not stage.experts:
        return
    counts = {
        block.moe.experts
        for unit in range(1, model.num_layers + 1)
        if covers(stage.units, unit) and (block := model.block(unit)).moe is not None
    }
    if not counts:
        message = "has expert groups, but none of its units has experts"
        yield Problem("experts", where, message)
        return
    chips = sum(group.count * group.chips for group in stage.experts)
    if chips != stage.num_chips:
        message = f"its expert groups span {chips} chips, the stage has {stage.num_chips}"
        yield Problem("experts", where, message)
    for g, group in enumerate(stage.experts):
        for experts in sorted(counts):
            reason = _expert_group(group, experts)
            if reason is not None:
                yield Problem("experts", f"{where}, expert group {g}", reason)
    holders = [(replica.num_chips, replica.recompute.full) for replica in stage.replicas]
    missed = missed_meeting(holders, stage.experts, stage.units, model)
    if missed is not None:
        message = (
            f"replicas {missed.first} and {missed.second} share an expert group, but only one of "
            f"them recomputes unit {missed.unit} in full: the tokens it exchanges again would meet "
            "nobody; recompute it on both or on neither"
        )
        yield Problem("meeting", where, message)


def _expert_group(group: ExpertGroup, experts: int) -> str | None:
    """Say why a group cannot hold `experts` experts, or None."""
    if not group.experts:
        if experts % group.chips == 0:
            return None
        return f"{experts} experts do not divide over {group.chips} chips; say how many each holds"
    if len(group.experts) != group.chips:
        return f"says what {len(group.experts)} chips hold; it has {group.chips}"
    if sum(group.experts) != experts:
        return f"holds {sum(group.experts)} experts, the model has {experts}"
    return None
