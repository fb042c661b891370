"""Blocks of an 8-bit job that multiply in 16 bits: those of chips that have no such products.

A unit multiplies alike on all chips that hold it, in whichever pipeline. So a block that lies on
one chip without 8 bits stays wide on the others, too; a plan may leave more of them wide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tutti.hardware.chip import Chip, Dtype
from tutti.hardware.cluster import Cluster
from tutti.plan.edits import ranges_of, units_of
from tutti.plan.job import Job, Precision
from tutti.plan.plan import Plan, Stage, UnitRanges


def precision_refusal(chip: Chip, precision: Precision) -> str | None:
    """Say in one line why a chip does not train in a precision; None: it does.

    For 8 bits nothing stands in, as fp16 does for bf16: other products are slower, not just alike.
    """
    wanted = precision.compute
    if chip.compute_dtype(wanted) is not None and (
        wanted is not Dtype.FP8 or chip.supports(wanted)
    ):
        return None
    has = ", ".join(dtype.value for dtype in chip.peak)
    return f"chip '{chip.name}' cannot compute in {wanted}; it has {has}"


def widened(precision: Precision) -> Precision:
    """Return the precision of the blocks that stay wide."""
    if precision.compute is not Dtype.FP8:
        return precision
    return replace(precision, compute=precision.parameters)


def widest_on(chip: Chip, precision: Precision) -> Precision:
    """Return the narrowest precision of a job that a chip multiplies in."""
    return precision if precision_refusal(chip, precision) is None else widened(precision)


def with_wide_units(plan: Plan, cluster: Cluster, head_unit: int, chosen: UnitRanges = ()) -> Plan:
    """Return the plan with those blocks wide that must be, and those that were chosen to be."""
    if plan.job.precision.compute is not Dtype.FP8:
        return plan
    needed = _needed((stage for _, _, stage in plan.stages()), plan.job, cluster)
    ranges = ranges_of({*needed, *units_of(chosen)}, ((1, head_unit),))
    if ranges == plan.job.wide_units:
        return plan
    return replace(plan, job=replace(plan.job, wide_units=ranges))


def chosen_wide_units(plan: Plan, cluster: Cluster) -> UnitRanges:
    """Return the blocks that a plan leaves wide though all chips that hold them have 8 bits."""
    if not plan.job.wide_units:
        return ()
    needed = set(_needed((stage for _, _, stage in plan.stages()), plan.job, cluster))
    wide = plan.job.wide_units
    return ranges_of(set(units_of(wide)) - needed, wide)


def _needed(stages: Iterable[Stage], job: Job, cluster: Cluster) -> Iterable[int]:
    """Yield the units of stages with a chip that does not multiply in the job's precision."""
    unable = {
        pool.name
        for pool in cluster.pools
        if precision_refusal(pool.chip, job.precision) is not None
    }
    for stage in stages:
        if any(name in unable for replica in stage.replicas for name in replica.chips.pools):
            for start, stop in stage.units:
                yield from range(start, stop)
