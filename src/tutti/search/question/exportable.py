"""What another system can run of a search space, and whether it can run a plan.

The exporters themselves have the last word; narrowing the space only keeps the search from
strategies that they are sure to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tutti.errors import InputError, hint
from tutti.export import flagscale, megatron
from tutti.export.megatron_model import model_flags, precision_flags
from tutti.hardware.cluster import Cluster
from tutti.hardware.pool import Pool
from tutti.models.spec import ModelSpec
from tutti.plan.job import Job
from tutti.plan.plan import Plan
from tutti.plan.schedules import kinds_with
from tutti.search.question.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class _Abilities:
    """What a system can run at most."""

    name: str  # as refusals call it
    shard: tuple[int, ...]
    joins_vendors: bool  # whether chips of several vendors may work together


SYSTEMS = {
    "megatron": _Abilities(
        name=megatron.TARGET,
        shard=(0, 1, 2, 3),
        joins_vendors=False,
    ),
    "flagscale": _Abilities(
        name=flagscale.TARGET,
        shard=(0, 1),
        joins_vendors=True,
    ),
}


def require_system(option: str, name: str) -> None:
    """Refuse a system that there is no export to."""
    if name not in SYSTEMS:
        raise InputError(f"{option}: '{name}'; {hint(name, SYSTEMS)}")


def exportable_space(space: Space, system: str, model: ModelSpec, job: Job) -> Space:
    """Return what of a space a system can run; refuse a model or a job that it cannot express."""
    require_system("--exportable", system)
    able = SYSTEMS[system]
    model_flags(model, job, able.name)
    precision_flags(job, able.name)
    known = kinds_with(lambda record: able.name in record.systems)
    schedules = tuple(kind for kind in space.schedules if kind in known)
    shard = tuple(level for level in space.shard if level in able.shard)
    if not schedules or not shard:
        asked = "--schedule" if not schedules else "--shard"
        has = known if not schedules else able.shard
        raise InputError(
            f"--exportable {system}: {able.name} has none of what {asked} leaves; it has "
            f"{', '.join(map(str, has))}"
        )
    return replace(
        space, schedules=schedules, shard=shard, offload=(), mixed_stages=False,
        uneven_shares=False, max_pipelines=1, exportable=system,
    )  # fmt: skip


def joins(pools: Iterable[Pool], system: str | None) -> bool:
    """Tell whether the chips of some pools may work together in a system."""
    if system is None or SYSTEMS[system].joins_vendors:
        return True
    return len({pool.chip.vendor for pool in pools}) == 1


def export_refusal(plan: Plan, model: ModelSpec, cluster: Cluster, system: str) -> str:
    """Return why a system cannot run a plan; empty where it can."""
    try:
        if system == "megatron":
            megatron.megatron_arguments(plan, model, cluster)
        else:
            flagscale.flagscale_document(plan, model, cluster)
    except InputError as error:
        return str(error)
    return ""
