"""Ways to break a valid plan, each with the code of the problem that the checker must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import assume

from tutti.hardware.chip import Dtype
from tutti.models.parameters import ParameterClass
from tutti.plan.chips import ChipSet
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import (
    ExpertGroup,
    Offload,
    Order,
    Plan,
    ProfileReference,
    Recompute,
    Share,
    Synchronisation,
)

Pick = Callable[[int], int]  # n → a drawn number below n


def _with_stage(plan: Plan, pick: Pick, change: Callable[[Any], Any]) -> Plan:
    p = pick(len(plan.pipelines))
    pipeline = plan.pipelines[p]
    s = pick(len(pipeline.stages))
    stages = list(pipeline.stages)
    stages[s] = change(stages[s])
    pipelines = list(plan.pipelines)
    pipelines[p] = replace(pipeline, stages=tuple(stages))
    return replace(plan, pipelines=tuple(pipelines))


def _with_replica(plan: Plan, pick: Pick, change: Callable[[Any], Any]) -> Plan:
    def changed(stage):
        r = pick(len(stage.replicas))
        replicas = list(stage.replicas)
        replicas[r] = change(replicas[r])
        return replace(stage, replicas=tuple(replicas))

    return _with_stage(plan, pick, changed)


def _with_pipeline(plan: Plan, pick: Pick, **changes: Any) -> Plan:
    p = pick(len(plan.pipelines))
    pipelines = list(plan.pipelines)
    pipelines[p] = replace(pipelines[p], **changes)
    return replace(plan, pipelines=tuple(pipelines))


def _last(stage):
    (*before, (start, stop)) = stage.units
    return before, start, stop


def units_missing(plan, pick):
    def changed(stage):
        before, start, stop = _last(stage)
        assume(stop - start > 1)
        return replace(stage, units=(*before, (start + 1, stop)))

    return _with_stage(plan, pick, changed)


def units_twice(plan, pick):
    assume(all(len(pipeline.stages) > 1 for pipeline in plan.pipelines))

    def changed(stage):
        (start, stop), *rest = stage.units
        widened = (start - 1, stop) if start > 0 else (start, stop + 1)
        return replace(stage, units=(widened, *rest))

    return _with_stage(plan, pick, changed)


def units_beyond(plan, pick):
    def changed(stage):
        before, start, stop = _last(stage)
        return replace(stage, units=(*before, (start, stop + 100)))

    return _with_stage(plan, pick, changed)


def units_empty(plan, pick):
    return _with_stage(plan, pick, lambda stage: replace(stage, units=()))


def ranges_where_one_is_wanted(plan, pick):
    assume(plan.job.schedule is not ScheduleKind.INTERLEAVED)

    def changed(stage):
        ((start, stop),) = stage.units
        assume(stop - start > 1)
        return replace(stage, units=((start, start + 1), (start + 1, stop)))

    return _with_stage(plan, pick, changed)


def chip_of_no_pool(plan, pick):
    return _with_replica(
        plan, pick, lambda r: replace(r, chips=ChipSet.of(f"nowhere/0/0-{r.num_chips - 1}"))
    )


def chip_beyond_the_pool(plan, pick):
    return _with_replica(
        plan, pick, lambda r: replace(r, chips=ChipSet.of(f"fast/9999/0-{r.num_chips - 1}"))
    )


def chip_used_twice(plan, pick):
    stages = [stage for _, _, stage in plan.stages()]
    taken = stages[pick(len(stages))].replicas[0].chips
    return replace(plan, spare=taken)


def too_few_chips(plan, pick):
    def changed(replica):
        assume(replica.num_chips > 1)
        return replace(replica, chips=replica.chips.cut(0, replica.num_chips - 1))

    return _with_replica(plan, pick, changed)


def mixed_pools(plan, pick):
    def changed(replica):
        assume(replica.num_chips > 1)
        other = "slow" if "slow" not in replica.chips.pools else "fast"
        chips = [replica.chips.cut(0, replica.num_chips - 1), ChipSet.of(f"{other}/0/0")]
        return replace(replica, chips=ChipSet.join(chips))

    return _with_replica(plan, pick, changed)


def share_too_large(plan, pick):
    return _with_replica(plan, pick, lambda r: replace(r, sequences=r.sequences + 1))


def wrong_micro_batch(plan, pick):
    p = pick(len(plan.pipelines))
    return _with_pipeline(plan, lambda _: p, micro_batch=plan.pipelines[p].micro_batch + 1)


def wrong_global_batch(plan, pick):
    return replace(plan, job=replace(plan.job, global_batch=plan.job.global_batch + 1 + pick(9)))


def tp_that_divides_nothing(plan, pick):
    return _with_replica(plan, pick, lambda r: replace(r, tp=3))


def cp_that_does_not_divide(plan, pick):
    return _with_replica(plan, pick, lambda r: replace(r, cp=7))


def sequence_parallel_without_tp(plan, pick):
    return _with_replica(plan, pick, lambda r: replace(r, tp=1, sequence_parallel=True))


def overlap_without_tp(plan, pick):
    return _with_replica(plan, pick, lambda r: replace(r, tp=1, tp_overlap_chunks=2))


def recompute_elsewhere(plan, pick):
    return _with_replica(plan, pick, lambda r: replace(r, recompute=Recompute(full=((90, 91),))))


def recompute_both_ways(plan, pick):
    def changed(stage):
        both = Recompute(full=stage.units[:1], selective=stage.units[:1])
        return replace(stage, replicas=(replace(stage.replicas[0], recompute=both),))

    return _with_stage(plan, pick, changed)


def offload_elsewhere(plan, pick):
    return _with_replica(
        plan, pick, lambda r: replace(r, offload=Offload(optimizer=((0, 1), (500, 501))))
    )


def experts_on_too_many_chips(plan, pick):
    assume(plan.model.spec.num_experts)

    def changed(stage):
        assume(stage.experts)
        return replace(stage, experts=(*stage.experts, ExpertGroup(chips=1, experts=(8,))))

    return _with_stage(plan, pick, changed)


def experts_lost(plan, pick):
    def changed(stage):
        assume(stage.experts)
        group = stage.experts[0]
        held = (7, *([0] * (group.chips - 1)))
        return replace(stage, experts=(replace(group, experts=held),))

    return _with_stage(plan, pick, changed)


def experts_in_a_dense_model(plan, pick):
    assume(not any(plan.model.spec.block(u).moe for u in range(1, plan.model.spec.num_layers + 1)))
    return _with_stage(plan, pick, lambda s: replace(s, experts=(ExpertGroup(chips=s.num_chips),)))


def experts_recomputed_by_halves(plan, pick):
    model = plan.model.spec
    sparse = [u for u in range(1, model.num_layers + 1) if model.block(u).moe]

    def changed(stage):
        assume(stage.experts and len(stage.replicas) > 1)
        unit = next((u for u in sparse if any(a <= u < b for a, b in stage.units)), None)
        assume(unit is not None)
        first, *others = stage.replicas
        alike = [replace(replica, recompute=Recompute()) for replica in others]
        again = replace(first, recompute=Recompute(full=((unit, unit + 1),)))
        whole = ExpertGroup(chips=stage.num_chips, experts=(8, *[0] * (stage.num_chips - 1)))
        return replace(stage, replicas=(again, *alike), experts=(whole,))

    return _with_stage(plan, pick, changed)


def tied_owner_of_nothing(plan, pick):
    assume(not plan.model.spec.head.tied)
    return replace(plan, tied_owner=0)


def tied_owner_in_the_middle(plan, pick):
    assume(plan.model.spec.head.tied)
    return replace(plan, tied_owner=1)


def tied_owner_missing(plan, pick):
    assume(plan.model.spec.head.tied and len(plan.pipelines[0].stages) > 1)
    assume(plan.job.schedule is not ScheduleKind.INTERLEAVED)
    return replace(plan, tied_owner=None)


def two_rules_for_a_unit(plan, pick):
    rule = Synchronisation(units=(0, 1))
    return replace(plan, synchronisation=(rule, replace(rule, shard_level=1)))


def rule_beyond_the_model(plan, pick):
    return replace(plan, synchronisation=(Synchronisation(units=(0, 10_000)),))


def share_of_a_stranger(plan, pick):
    share = Share(pipeline=77, stage=0, replica=0, weight=1)
    rule = Synchronisation(
        units=(0, 1), parameter_class=ParameterClass.DENSE, shard_level=1, shares=(share,)
    )
    return replace(plan, synchronisation=(rule,))


def same_pipeline_again(plan, pick):
    assume(all(rule.shard_level < 2 for rule in plan.synchronisation))  # else they may be apart
    return replace(plan, pipelines=(*plan.pipelines, plan.pipelines[pick(len(plan.pipelines))]))


def growing_warm_up(plan, pick):
    assume(plan.job.schedule is ScheduleKind.ONE_F_ONE_B)
    p = pick(len(plan.pipelines))
    pipeline = plan.pipelines[p]
    assume(len(pipeline.stages) > 1 and pipeline.micro_batches > 1)
    depths = [1, *([2] * (len(pipeline.stages) - 1))]
    stages = tuple(
        replace(stage, order=Order(warm_up=depth))
        for stage, depth in zip(pipeline.stages, depths, strict=True)
    )
    return _with_pipeline(plan, lambda _: p, stages=stages)


def warm_up_in_gpipe(plan, pick):
    assume(plan.job.schedule in (ScheduleKind.GPIPE, ScheduleKind.INTERLEAVED))
    return _with_stage(plan, pick, lambda stage: replace(stage, order=Order(warm_up=1)))


def parameters_on_the_host_of_a_sharded_unit(plan, pick):
    units = plan.model.spec.num_units
    assume(plan.job.precision.master is not None and units > 3)
    rule = Synchronisation(units=(0, units), shard_level=1)
    broken = _with_stage(
        plan,
        pick,
        lambda s: replace(
            s, replicas=(replace(s.replicas[0], offload=Offload(parameters=s.units[:1])),)
        ),
    )
    return replace(broken, synchronisation=(rule,))


def shares_of_nobody(plan, pick):
    shares = tuple(
        Share(pipeline=p, stage=s, replica=r, weight=0)
        for p, s, stage in plan.holders(0)
        for r in range(len(stage.replicas))
    )
    rule = Synchronisation(units=(0, 1), shard_level=1, shares=shares)
    return replace(plan, synchronisation=(rule,))


def no_pipeline(plan, pick):
    return replace(plan, pipelines=())


def no_stage(plan, pick):
    return _with_pipeline(plan, pick, stages=())


def no_replica(plan, pick):
    return _with_stage(plan, pick, lambda stage: replace(stage, replicas=()))


def another_model(plan, pick):
    return replace(plan, model=replace(plan.model, hash="0" * 12))


def profile_of_no_pool(plan, pick):
    return replace(plan, profiles=(ProfileReference(pool="fats", name="x", hash="0"),))


def fp64_on_a_chip_without(plan, pick):
    names = {chip.pool for _, _, stage in plan.stages() for chip in stage.chips}
    cluster = plan.cluster.cluster
    assume(any(cluster.pool(name).chip.compute_dtype(Dtype.FP64) is None for name in names))
    precision = replace(plan.job.precision, compute=Dtype.FP64)
    return replace(plan, job=replace(plan.job, precision=precision))


MUTATIONS: dict[Callable[[Plan, Pick], Plan], str] = {
    units_missing: "units",
    units_twice: "units",
    units_beyond: "units",
    units_empty: "units",
    ranges_where_one_is_wanted: "interleave",
    chip_of_no_pool: "chip",
    chip_beyond_the_pool: "chip",
    chip_used_twice: "chip_twice",
    too_few_chips: "chip_count",
    mixed_pools: "pools",
    share_too_large: "shares",
    wrong_micro_batch: "shares",
    wrong_global_batch: "batch",
    tp_that_divides_nothing: "tp",
    cp_that_does_not_divide: "sequence",
    sequence_parallel_without_tp: "sequence",
    overlap_without_tp: "overlap",
    recompute_elsewhere: "ranges",
    recompute_both_ways: "ranges",
    offload_elsewhere: "ranges",
    experts_on_too_many_chips: "experts",
    experts_lost: "experts",
    experts_in_a_dense_model: "experts",
    experts_recomputed_by_halves: "meeting",
    tied_owner_of_nothing: "tied",
    tied_owner_in_the_middle: "tied",
    tied_owner_missing: "tied",
    two_rules_for_a_unit: "synchronisation",
    rule_beyond_the_model: "synchronisation",
    share_of_a_stranger: "synchronisation",
    same_pipeline_again: "canonical",
    growing_warm_up: "warm_up",
    warm_up_in_gpipe: "warm_up",
    parameters_on_the_host_of_a_sharded_unit: "offload",
    shares_of_nobody: "synchronisation",
    no_pipeline: "empty",
    no_stage: "empty",
    no_replica: "empty",
    another_model: "reference",
    profile_of_no_pool: "reference",
    fp64_on_a_chip_without: "precision",
}
