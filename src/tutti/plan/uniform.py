"""Uniform plans from a few numbers, laid out as Megatron-LM does it.

Every stage has the same degrees; tensor positions are fastest, then context, then data, and the
pipeline is outermost. The special case of a Plan in which nothing differs, and the baseline that
every searched plan is held against.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tutti.errors import InputError, hint
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.check import require_valid
from tutti.plan.chips import NO_CHIPS, ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job
from tutti.plan.plan import (
    ExpertGroup,
    Pipeline,
    Plan,
    Recompute,
    Replica,
    Stage,
    Synchronisation,
    UnitRanges,
)
from tutti.plan.schedules import kinds_with, schedule_record
from tutti.plan.wide_units import with_wide_units

_FLAGS = ("sequence_parallel", "overlap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The numbers of a Megatron-style strategy; dp follows from the cluster unless given."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int | None = None
    vpp: int = 1  # unit ranges per stage
    micro_batch: int = 1  # sequences per replica and micro-batch
    shard: int = 0
    sequence_parallel: bool = False
    overlap: bool = True  # gradients are reduced beside the last backward pass
    recompute: str = "none"

    @classmethod
    def parse(cls, text: str) -> Degrees:
        """Read "tp=8,pp=4,sp=1"; short names mbs and sp are understood."""
        known = {
            "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "dp": "dp", "vpp": "vpp",
            "mbs": "micro_batch", "micro_batch": "micro_batch", "shard": "shard",
            "sp": "sequence_parallel", "sequence_parallel": "sequence_parallel",
            "recompute": "recompute", "overlap": "overlap",
        }  # fmt: skip
        given: dict[str, object] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, equals, value = part.partition("=")
            if not equals or key not in known:
                remedy = hint(key, known) if key not in known else "write it like tp=8"
                raise InputError(f"--uniform: '{part}': {remedy}")
            if known[key] in given:
                raise InputError(f"--uniform: '{key}' stands twice")
            given[known[key]] = _degree(key, known[key], value)
        return cls(**given)  # type: ignore[arg-type]


def _degree(key: str, name: str, value: str) -> object:
    if name == "recompute":
        choices = ("none", "selective", "full")
        if value not in choices:
            raise InputError(f"--uniform: recompute is '{value}'; {hint(value, choices)}")
        return value
    least = 0 if name in ("shard", *_FLAGS) else 1
    most = 3 if name == "shard" else 1 if name in _FLAGS else 1_000_000
    if not value.isdecimal() or not least <= int(value) <= most:
        raise InputError(f"--uniform: {key} is '{value}'; give a whole number {least} to {most}")
    return bool(int(value)) if name in _FLAGS else int(value)


def uniform_plan(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    degrees: Degrees,
    chips: Mapping[str, int] | None = None,
) -> Plan:
    """Lay the same strategy over all chips; what does not divide is refused with the numbers.

    `chips` says how many of each pool take part, the first ones; the others are idle.
    """
    dp = _data_parallel(cluster, degrees)
    micro_batch = dp * degrees.micro_batch
    if job.global_batch % micro_batch:
        raise InputError(
            f"global batch {job.global_batch} does not divide by dp {dp} · micro-batch "
            f"{degrees.micro_batch} = {micro_batch}"
        )
    if degrees.vpp > 1 and not schedule_record(job.schedule).several_ranges:
        able = " or ".join(kinds_with(lambda record: record.several_ranges))
        raise InputError(f"vpp={degrees.vpp} needs --schedule {able}")
    cuts = _cuts(model.num_layers, degrees.pp * degrees.vpp)
    ids = [
        Position(pool.name, node, slot)
        for pool in cluster.pools
        for node in range(pool.nodes)
        for slot in range(pool.node.num_chips)
    ]
    idle: list[Position] = []
    if chips is not None:
        ids, idle = _first_chips(ids, chips)
    width = dp * degrees.cp * degrees.tp
    if len(ids) < degrees.pp * width:
        raise InputError(f"{degrees.pp * width} chips are needed, {len(ids)} take part")
    idle += ids[degrees.pp * width :]
    stages = tuple(
        _stage(tuple(cuts[s :: degrees.pp]), ids[s * width : (s + 1) * width], degrees, dp, model)
        for s in range(degrees.pp)
    )
    plan = Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(cluster),
        job=job,
        pipelines=(
            Pipeline(
                micro_batch=micro_batch,
                micro_batches=job.global_batch // micro_batch,
                stages=stages,
            ),
        ),
        synchronisation=one_rule(
            model, shard=degrees.shard, overlap=degrees.overlap, spread=degrees.ep > 1
        ),
        tied_owner=0 if model.ties_weights and degrees.pp > 1 else None,
        idle=ChipSet.from_ids(idle) if idle else NO_CHIPS,
    )
    plan = with_wide_units(plan, cluster, model.head_unit)
    require_valid(plan)
    return plan


def _first_chips(
    ids: list[Position], chips: Mapping[str, int]
) -> tuple[list[Position], list[Position]]:
    """Return the first so many chips of each pool, and the others."""
    taken: Counter[str] = Counter()
    used: list[Position] = []
    others: list[Position] = []
    for place in ids:
        taken[place.pool] += 1
        (used if taken[place.pool] <= chips.get(place.pool, 0) else others).append(place)
    return used, others


def default_batch(cluster: Cluster, degrees: Degrees) -> int:
    """Return a global batch with eight micro-batches per stage."""
    return _data_parallel(cluster, degrees) * degrees.micro_batch * 8 * degrees.pp


def _data_parallel(cluster: Cluster, degrees: Degrees) -> int:
    model_chips = degrees.tp * degrees.cp * degrees.pp
    if degrees.dp is not None:
        if degrees.dp * model_chips > cluster.num_chips:
            raise InputError(
                f"tp {degrees.tp} · cp {degrees.cp} · pp {degrees.pp} · dp {degrees.dp} = "
                f"{degrees.dp * model_chips} chips; '{cluster.name}' has {cluster.num_chips}"
            )
        return degrees.dp
    if model_chips > cluster.num_chips:
        raise InputError(
            f"tp {degrees.tp} · cp {degrees.cp} · pp {degrees.pp} = {model_chips} chips; "
            f"'{cluster.name}' has {cluster.num_chips}"
        )
    if cluster.num_chips % model_chips:
        raise InputError(
            f"tp {degrees.tp} · cp {degrees.cp} · pp {degrees.pp} = {model_chips} does not divide "
            f"the {cluster.num_chips} chips of '{cluster.name}'; give dp= to leave some idle"
        )
    return cluster.num_chips // model_chips


def _cuts(num_layers: int, parts: int) -> list[tuple[int, int]]:
    """Cut evenly; with more parts than blocks, embedding and head count as blocks."""
    units = num_layers + 2
    if num_layers < parts <= units:
        return list(itertools.pairwise(units * n // parts for n in range(parts + 1)))
    return even_cuts(num_layers, parts)


def even_cuts(num_layers: int, parts: int) -> list[tuple[int, int]]:
    """Cut the blocks evenly; the first part takes the embedding, the last the head."""
    if parts > num_layers:
        raise InputError(f"{parts} stages, but the model has only {num_layers} layers")
    bounds = [1 + num_layers * part // parts for part in range(parts + 1)]
    bounds[0], bounds[-1] = 0, num_layers + 2
    return list(itertools.pairwise(bounds))


def _stage(
    units: UnitRanges, ids: list[Position], degrees: Degrees, dp: int, model: ModelSpec
) -> Stage:
    """Group neighbouring copies of one pool; a copy must not lie across two."""
    width = degrees.tp * degrees.cp
    runs: list[tuple[str, list[Position]]] = []
    for copy in range(dp):
        chips = ids[copy * width : (copy + 1) * width]
        if chips[0].pool != chips[-1].pool:
            raise InputError(
                f"tp {degrees.tp} · cp {degrees.cp} would put one replica on chips of "
                f"'{chips[0].pool}' and '{chips[-1].pool}'; choose degrees that divide each pool"
            )
        if not runs or runs[-1][0] != chips[0].pool:
            runs.append((chips[0].pool, []))
        runs[-1][1].extend(chips)
    blocks = tuple((max(a, 1), min(b, model.num_layers + 1)) for a, b in units)
    recompute = {
        "none": Recompute(),
        "selective": Recompute(selective=blocks),
        "full": Recompute(full=blocks),
    }[degrees.recompute]
    replicas = tuple(
        Replica(
            chips=ChipSet.from_ids(chips),
            count=len(chips) // width,
            tp=degrees.tp,
            cp=degrees.cp,
            sequence_parallel=degrees.sequence_parallel,
            sequences=degrees.micro_batch,
            recompute=recompute,
        )
        for _, chips in runs
    )
    return Stage(units=units, replicas=replicas, experts=_experts(units, len(ids), degrees, model))


def _experts(
    units: UnitRanges, num_chips: int, degrees: Degrees, model: ModelSpec
) -> tuple[ExpertGroup, ...]:
    if degrees.ep == 1:
        return ()
    if not model.num_experts:
        raise InputError(f"ep={degrees.ep}, but model '{model.name}' has no experts")
    if num_chips % degrees.ep:
        raise InputError(f"ep={degrees.ep} does not divide the {num_chips} chips of a stage")
    blocks = (u for a, b in units for u in range(max(a, 1), min(b, model.num_layers + 1)))
    if all(model.block(unit).moe is None for unit in blocks):
        return ()
    return (ExpertGroup(chips=degrees.ep, count=num_chips // degrees.ep),)


def one_rule(
    model: ModelSpec, *, shard: int, overlap: bool, spread: bool
) -> tuple[Synchronisation, ...]:
    """Return the rules that treat all units alike; `spread` experts have one of their own."""
    if shard == 0 and overlap:
        return ()
    kinds = tuple(ParameterClass) if spread else (ParameterClass.DENSE,)
    return tuple(
        Synchronisation(
            units=(0, model.num_units), parameter_class=kind, shard_level=shard, overlap=overlap
        )
        for kind in kinds
    )
