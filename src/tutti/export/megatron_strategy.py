"""A plan as frameworks of the Megatron family see it: one pipeline, each stage the same all over.

What no member of that family can express (several pipelines, replicas that differ, ragged shards,
recomputation that does not begin at a chunk's first layer) is refused here, with the place in the
plan; what differs from stage to stage is left to each exporter to accept or refuse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tutti.export.megatron_model import refusal
from tutti.hardware.chip import Chip
from tutti.hardware.cluster import Cluster
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.chips import NO_CHIPS
from tutti.plan.plan import ContextKind, Offload, Plan, Replica, Stage, UnitRange, covers
from tutti.plan.schedules import StagePlace, kinds_with, schedule_record


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """What all replicas of a stage have in common."""

    where: str
    chips: tuple[Chip, ...]  # kinds, in order of appearance
    tp: int
    cp: int
    dp: int
    ep: int | None  # None: its units have no experts
    expert_tp: int  # 1 where groups spread whole experts, else sliced like the rest
    context_kind: ContextKind
    sequence_parallel: bool
    tp_overlap: bool
    sequences: int  # per replica and micro-batch
    layers: tuple[int, ...]  # blocks per unit range
    recomputed: tuple[int, ...]  # of those, how many at the beginning fully
    selective: bool  # all blocks recompute their attention only
    offload: Offload

    @property
    def num_chips(self) -> int:
        """Chips of the stage."""
        return self.tp * self.cp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The one synchronisation rule of a plan."""

    level: int
    overlap: bool


def read_stages(plan: Plan, model: ModelSpec, cluster: Cluster, target: str) -> list[StageShape]:
    """Return the stages of a plan that has a single pipeline of plain stages."""
    if len(plan.pipelines) != 1:
        why = f"it has {len(plan.pipelines)}, cut or counted differently; only one is possible"
        raise refusal(target, "pipelines", why)
    stages = plan.pipelines[0].stages
    return [_read(stage, index, model, cluster, target) for index, stage in enumerate(stages)]


def _read(stage: Stage, index: int, model: ModelSpec, cluster: Cluster, target: str) -> StageShape:
    where = f"stage {index}"
    first = stage.replicas[0]
    for number, replica in enumerate(stage.replicas[1:], 1):
        _same(first, replica, f"{where}, replica {number}", target)
    pools = dict.fromkeys(r.pool for r in stage.chips.ranges)
    return StageShape(
        where=where,
        chips=tuple(dict.fromkeys(cluster.pool(name).chip for name in pools)),
        tp=first.tp,
        cp=first.cp,
        dp=stage.num_replicas,
        ep=_expert_degree(stage, where, model, target),
        expert_tp=1 if stage.experts else first.tp,
        context_kind=first.context_kind,
        sequence_parallel=first.sequence_parallel,
        tp_overlap=first.tp_overlap_chunks > 1,
        sequences=first.sequences,
        layers=tuple(num_blocks(span, model) for span in stage.units),
        recomputed=tuple(_prefix(span, first, where, model, target) for span in stage.units),
        selective=_selective(stage, first, where, model, target),
        offload=first.offload,
    )


def _same(first: Replica, other: Replica, where: str, target: str) -> None:
    """Refuse replicas that differ in anything but their chips."""
    fields = ("tp", "cp", "context_kind", "sequence_parallel", "tp_overlap_chunks", "sequences",
              "recompute", "offload")  # fmt: skip
    if replace(first, chips=NO_CHIPS, count=1) == replace(other, chips=NO_CHIPS, count=1):
        return
    name = next(name for name in fields if getattr(first, name) != getattr(other, name))
    mine, theirs = getattr(first, name), getattr(other, name)
    said = f"{theirs}, that of replica 0 {mine}" if isinstance(mine, int) else "another one"
    why = f"its {name.replace('_', ' ')} is {said}; data-parallel replicas must be equal"
    raise refusal(target, where, why)


def num_blocks(span: UnitRange, model: ModelSpec) -> int:
    """Return how many decoder layers a unit range has."""
    start, stop = _blocks(span, model)
    return stop - start


def _blocks(span: UnitRange, model: ModelSpec) -> tuple[int, int]:
    start, stop = max(span[0], 1), min(span[1], model.num_layers + 1)
    return start, max(start, stop)


def _prefix(span: UnitRange, replica: Replica, where: str, model: ModelSpec, target: str) -> int:
    """Return how many blocks of a unit range are recomputed fully, all at its beginning."""
    full = replica.recompute.full
    start, stop = _blocks(span, model)
    marks = [covers(full, unit) for unit in range(start, stop)]
    count = sum(marks)
    if not all(marks[:count]):
        named = f"units {start}-{stop}"
        why = f"full recomputation in {named} does not begin with the first; only the first n can"
        raise refusal(target, f"{where}, recompute", why)
    for end in (0, model.head_unit):
        if span[0] <= end < span[1] and covers(full, end):
            why = f"unit {end} is to be recomputed; only decoder layers can"
            raise refusal(target, f"{where}, recompute", why)
    return count


def _selective(stage: Stage, replica: Replica, where: str, model: ModelSpec, target: str) -> bool:
    blocks = [unit for span in stage.units for unit in range(*_blocks(span, model))]
    marks = [covers(replica.recompute.selective, unit) for unit in blocks]
    if any(marks) and not all(marks):
        why = f"selective for {sum(marks)} of {len(marks)} layers; only for all or none of them"
        raise refusal(target, f"{where}, recompute", why)
    return any(marks)


def _expert_degree(stage: Stage, where: str, model: ModelSpec, target: str) -> int | None:
    blocks = [unit for span in stage.units for unit in range(*_blocks(span, model))]
    if all(model.block(unit).moe is None for unit in blocks):
        return None
    if not stage.experts:
        return 1
    sizes = {group.chips for group in stage.experts}
    if len(sizes) > 1:
        why = f"groups of {' and '.join(map(str, sorted(sizes)))} chips; all must have one size"
        raise refusal(target, f"{where}, experts", why)
    for group in stage.experts:
        if len(set(group.experts)) > 1:
            why = f"chips hold {min(group.experts)} to {max(group.experts)} experts; equally many"
            raise refusal(target, f"{where}, experts", f"{why} must lie on each")
    return sizes.pop()


def read_sharding(plan: Plan, model: ModelSpec, target: str) -> Sharding:
    """Return the synchronisation that all units share; refuse where they differ."""
    rules: dict[tuple[int, bool], str] = {}
    with_groups = any(stage.experts for _, _, stage in plan.stages())
    kinds = ParameterClass if with_groups else (ParameterClass.DENSE,)
    for kind in kinds:
        for unit in range(model.num_units):
            expert = kind is ParameterClass.EXPERT
            if expert and (unit in (0, model.head_unit) or model.block(unit).moe is None):
                continue
            rule = plan.synchronisation_of(unit, kind)
            rules.setdefault((rule.shard_level, rule.overlap), f"unit {unit} ({kind})")
    if len(rules) > 1:
        (first, here), (second, there) = list(rules.items())[:2]
        why = (
            f"{here} has shard level {first[0]}, overlap {first[1]}; {there} {second[0]}, "
            f"{second[1]}; all units must have the same"
        )
        raise refusal(target, "synchronisation", why)
    for index, rule in enumerate(plan.synchronisation):
        if len({share.weight for share in rule.shares}) > 1:
            weights = ", ".join(str(share.weight) for share in rule.shares[:8])
            why = f"shares are unequal ({weights}); shards must be equal"
            raise refusal(target, f"synchronisation[{index}]", why)
    level, overlap = next(iter(rules))
    return Sharding(level=level, overlap=overlap)


def require_schedule(plan: Plan, target: str) -> None:
    """Refuse schedules that the target does not have, and warm-up depths that are not usual."""
    kind, pipeline = plan.job.schedule, plan.pipelines[0]
    depth, count = len(pipeline.stages), pipeline.micro_batches
    record = schedule_record(kind)
    if target not in record.systems and depth > 1:
        has = " or ".join(f"'{k}'" for k in kinds_with(lambda r: target in r.systems))
        raise refusal(target, "job, schedule", f"is '{kind}'; it has {has}")
    for index, stage in enumerate(pipeline.stages):
        usual = record.passes_ahead(StagePlace(depth, index, count))
        given = stage.order.warm_up
        if given is not None and min(given, count) != usual:
            why = f"warm-up is {given} micro-batches; its schedule there fixes it to {usual}"
            raise refusal(target, f"stage {index}, order", why)


def require_native_precision(plan: Plan, stages: list[StageShape], target: str) -> None:
    """Refuse chips that would compute in another format than the job's."""
    wanted = plan.job.precision.compute
    for stage in stages:
        for chip in stage.chips:
            if not chip.supports(wanted):
                other = chip.compute_dtype(wanted) or "nothing"
                why = f"chip '{chip.name}' has no {wanted} and would compute in {other} instead"
                raise refusal(target, stage.where, f"{why}; plan with a format that all chips have")
