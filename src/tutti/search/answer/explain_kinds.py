"""What a plan does with chips of unlike kinds, in words: shared stages, blocks in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.plan.drawing import units_text
from tutti.plan.plan import Plan, Stage
from tutti.plan.wide_units import chosen_wide_units, precision_refusal, widened
from tutti.units import many


def mixed_text(plan: Plan, mixed: Sequence[tuple[int, int, Stage]]) -> str:
    """Say who shares a stage of unlike chips."""
    p, s, stage = mixed[0]
    whole = plan.pipelines[p].micro_batch
    parts = [
        f"{replica.sequences * replica.count:,} of {many(whole, 'sequence')} go to "
        f"{' + '.join(replica.chips.pools)}"
        for replica in stage.replicas
    ]
    where = f"stage {s}" if len(mixed) == 1 else f"{len(mixed)} stages; in stage {s}"
    return f"Unlike chips share {where}: {listed(parts)}."


def wide_text(plan: Plan, model: ModelSpec, cluster: Cluster) -> Iterator[str]:
    """Say which blocks of an 8-bit job multiply in 16 bits, and why."""
    job = plan.job
    if job.precision.compute is not Dtype.FP8 or not job.wide_units:
        return
    last, wide = model.head_unit, widened(job.precision).compute
    chosen = chosen_wide_units(plan, cluster)
    if chosen != job.wide_units:
        used = {name for _, _, stage in plan.stages() for name in stage.chips.pools}
        unable = [
            pool.name
            for pool in cluster.pools
            if pool.name in used and precision_refusal(pool.chip, job.precision) is not None
        ]
        yield (
            f"Blocks {units_text(job.wide_units, last)} multiply in {wide}: {listed(unable)} "
            f"{'has' if len(unable) == 1 else 'have'} no products of 8 bits."
        )
    if chosen:
        yield (
            f"Blocks {units_text(chosen, last)} multiply in {wide} because that is faster: their "
            "products are small."
        )


def listed(words: Sequence[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
