"""A question to the planner out of plain values, as the command line and Python users give them.

Turns names and numbers into a `Problem`: fills in what was left out, refuses what makes no sense
with the option's name in the message.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tutti.cost.plan.sources import Sources
from tutti.document import Place, build
from tutti.errors import InputError, hint
from tutti.hardware.chip import Chip
from tutti.hardware.cluster import Cluster
from tutti.models.lengths import length_refusal
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec
from tutti.plan.job import Job, Precision, ScheduleKind
from tutti.plan.wide_units import precision_refusal, widened
from tutti.search.answer.result import Objective, SearchResult
from tutti.search.planner import plan
from tutti.search.pricing.objective import rates
from tutti.search.question.effort import Effort, Report, silent
from tutti.search.question.exportable import exportable_space
from tutti.search.question.space import (
    ALL_OFFLOAD,
    ALL_RECOMPUTE,
    ALL_SCHEDULES,
    Problem,
    Space,
)
from tutti.search.thresholds import THRESHOLDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What narrows a search, as a person says it; None and empty: whatever suits."""

    tp_max: int | None = None
    cp_max: int | None = None
    max_stages: int | None = None
    micro_batch: tuple[int, ...] = ()  # sequences per replica and micro-batch
    schedules: tuple[str, ...] = ()
    shard: tuple[int, ...] = ()
    pools: tuple[str, ...] = ()
    offload: bool = True
    recompute: bool = True
    mixed_stages: bool = True
    mixed_pipelines: bool = True
    idle: bool = True  # chips may be left out
    exportable: str | None = None  # only what this system can run: megatron or flagscale

    def __post_init__(self) -> None:
        for name in ("tp_max", "cp_max", "max_stages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{option(name)}: {value} is too small; give 1 or more")
        for count in self.micro_batch:
            if count < 1:
                raise InputError(f"{option('micro_batch')}: {count} is too small; give 1 or more")
        for level in self.shard:
            if level not in range(4):
                raise InputError(f"{option('shard')}: no level {level}; give some of 0, 1, 2, 3")
        for name in self.schedules:
            if name not in list(ScheduleKind):
                raise InputError(f"{option('schedule')}: '{name}'; {hint(name, ScheduleKind)}")


def option(name: str) -> str:
    """Return how the command line calls a value."""
    return "--" + name.replace("_", "-")


def make_problem(
    model: str | os.PathLike[str] | ModelSpec,
    cluster: str | os.PathLike[str] | Cluster,
    *,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    precision: str = "bf16",
    objective: str = "time",
    limits: Limits | None = None,
    sources: Sources | None = None,
    optimizer: str = "adamw",
    average: bool = False,
) -> Problem:
    """Return the question; what is left out is filled in as `tutti plan --help` says."""
    spec = model if isinstance(model, ModelSpec) else load_model(os.fspath(model))
    given_cluster = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    length = (
        min(THRESHOLDS.usual_length, spec.max_length)
        if sequence_length is None
        else sequence_length
    )
    if problem := length_refusal(spec, length):
        raise InputError(f"{option('sequence_length')}: {problem}")
    values = {
        "sequence_length": length,
        "global_batch": default_batch(given_cluster) if global_batch is None else global_batch,
        "precision": precision,
        "optimizer": optimizer,
        "average": average,
    }
    job = build(Job, values, Place("plan"))
    _require_products(job.precision, [pool.chip for pool in given_cluster.pools])
    asked = Problem(
        model=spec,
        cluster=given_cluster,
        job=job,
        sources=sources or Sources(),
        space=_limited_space(limits or Limits(), given_cluster, job, spec),
        objective=_objective(objective),
    )
    rates(asked)  # refuses an objective for which the cluster file lacks a figure
    return asked


def _require_products(precision: Precision, chips: Sequence[Chip]) -> None:
    """Refuse a precision that some chip lacks.

    Blocks of an 8-bit job stay wide on chips without such products, if others have them.
    """
    refusals = [precision_refusal(chip, precision) for chip in chips]
    if None in refusals:
        refusals = [precision_refusal(chip, widened(precision)) for chip in chips]
    for refusal in refusals:
        if refusal is not None:
            raise InputError(f"{option('precision')}: {refusal}")


def _limited_space(limits: Limits, cluster: Cluster, job: Job, model: ModelSpec) -> Space:
    space = space_of(limits, cluster, job)
    if limits.exportable is None:
        return space
    return exportable_space(space, limits.exportable, model, job)


def default_batch(cluster: Cluster) -> int:
    """Return eight sequences per chip, rounded up to a power of two."""
    return 1 << (THRESHOLDS.sequences_per_chip * cluster.num_chips - 1).bit_length()


def space_of(limits: Limits, cluster: Cluster, job: Job) -> Space:
    """Return the strategies that the limits leave."""
    too_large = [count for count in limits.micro_batch if count > job.global_batch]
    if too_large:
        raise InputError(
            f"{option('micro_batch')}: {too_large[0]} sequences are more than the global batch "
            f"of {job.global_batch}"
        )
    return Space(
        tp=_tensor_degrees(limits.tp_max, cluster),
        cp=_context_degrees(limits.cp_max, job),
        sequences=tuple(sorted(set(limits.micro_batch))) or None,
        schedules=tuple(dict.fromkeys(map(ScheduleKind, limits.schedules))) or ALL_SCHEDULES,
        shard=tuple(sorted(set(limits.shard))) or Space().shard,
        recompute=ALL_RECOMPUTE if limits.recompute else ("none",),
        offload=ALL_OFFLOAD if limits.offload else (),
        max_stages=limits.max_stages,
        pools=tuple(dict.fromkeys(limits.pools)) or None,
        mixed_stages=limits.mixed_stages,
        mixed_pipelines=limits.mixed_pipelines,
        idle=limits.idle,
    )


def _tensor_degrees(most: int | None, cluster: Cluster) -> tuple[int, ...] | None:
    sizes = [pool.node.num_chips for pool in cluster.pools]
    if most is None or most >= max(sizes):
        return None
    return tuple(d for d in range(1, most + 1) if any(size % d == 0 for size in sizes))


def _context_degrees(most: int | None, job: Job) -> tuple[int, ...] | None:
    longest = max(1, job.sequence_length // THRESHOLDS.least_local)
    if most is None or most >= longest:
        return None
    return tuple(1 << i for i in range(most.bit_length()) if 1 << i <= most)


def _objective(name: str) -> Objective:
    if name not in list(Objective):
        raise InputError(f"--objective: '{name}'; {hint(name, Objective)}")
    return Objective(name)


def ask(
    model: str | os.PathLike[str] | ModelSpec,
    cluster: str | os.PathLike[str] | Cluster,
    *,
    effort: Effort | None = None,
    report: Report = silent,
    compare: bool = True,
    **options: Any,
) -> SearchResult:
    """Search the best plan: what `tutti.plan(model, cluster, …)` calls.

    `options` are those of `make_problem` and the fields of `Limits`, such as `global_batch=512`,
    `tp_max=4` or `offload=False`.
    """
    asked = set(inspect.signature(make_problem).parameters) - {"model", "cluster", "limits"}
    limits = Limits.__dataclass_fields__
    for name in options:
        if name not in limits and name not in asked:
            known = [*sorted(asked), *limits]
            raise InputError(f"plan: unknown option '{name}'; {hint(name, known)}")
    problem = make_problem(
        model,
        cluster,
        limits=Limits(**{name: value for name, value in options.items() if name in limits}),
        **{name: value for name, value in options.items() if name in asked},
    )
    return plan(problem, effort=effort, compare=compare, report=report)
