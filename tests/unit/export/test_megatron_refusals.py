"""What Megatron-LM cannot express is refused with a reason; what it can is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.export.refusals import assert_refused
from tests.unit.export.test_megatron import export
from tests.unit.search.exports import (
    mixed,
    uniform,
    with_cuts,
    with_replicas,
    with_stage,
)
from tutti.errors import InputError
from tutti.export.megatron_limits import model_problems
from tutti.export.megatron_model import model_flags
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.models.load import catalog_names, load_model
from tutti.plan.check import check_plan
from tutti.plan.job import PRECISIONS, Job, Precision, ScheduleKind
from tutti.plan.plan import (
    ExpertGroup,
    Offload,
    Order,
    Recompute,
    Share,
    Synchronisation,
)

PLAIN = uniform("llama-2-13b", "tp=4,pp=2,sp=1,shard=1")  # 64 chips, dp 8, 42 units


MOE = uniform("mixtral-8x7b", "tp=2,pp=2,ep=8,sp=1,shard=1")


def different_tp():
    plan = uniform("llama-2-13b", "tp=4,pp=2,sp=1")
    return with_replicas(plan, 1, tp=2, cp=2)


def two_pipelines():
    line = PLAIN.pipelines[0]
    other = replace(with_cuts(PLAIN, 21, 19).pipelines[0], micro_batches=1)
    return replace(PLAIN, pipelines=(line, other))


def unequal_replicas(**changes):
    stage = PLAIN.pipelines[0].stages[0]
    replica = stage.replicas[0]
    half = replica.num_chips // 2
    first = replace(replica, chips=replica.chips.cut(0, half), count=replica.count // 2)
    second = replace(first, chips=replica.chips.cut(half, 2 * half), **changes)
    return with_stage(PLAIN, 0, replace(stage, replicas=(first, second)))


def shares():
    halves = unequal_replicas()
    given = tuple(Share(pipeline=0, stage=0, replica=r, weight=w) for r, w in ((0, 1), (1, 3)))
    rule = replace(halves.synchronisation[0], shares=given)
    return replace(halves, synchronisation=(rule,))


def rules(*pairs):
    return replace(
        PLAIN,
        synchronisation=tuple(
            Synchronisation(units=units, shard_level=level) for units, level in pairs
        ),
    )


def warm_up():
    stage = PLAIN.pipelines[0].stages[0]
    return with_stage(PLAIN, 0, replace(stage, order=Order(warm_up=5)))


def job(**changes):
    return replace(PLAIN, job=replace(PLAIN.job, **changes))


def experts(stage_index, *groups):
    stage = MOE.pipelines[0].stages[stage_index]
    return with_stage(MOE, stage_index, replace(stage, experts=groups))


REFUSALS = {
    "pipelines": (two_pipelines, "pipelines: it has 2"),
    "tp": (different_tp, "stage 1: its tensor parallelism is 2, that of stage 0 4"),
    "micro_batch": (
        lambda: with_replicas(PLAIN, 1, sequences=2),
        "stage 1: its micro-batch is 2, that of stage 0 1",
    ),
    "sequence_parallel": (
        lambda: with_replicas(PLAIN, 1, sequence_parallel=False),
        "stage 1: its sequence parallelism is False",
    ),
    "replica_tp": (
        lambda: unequal_replicas(tp=2, cp=2),
        "stage 0, replica 1: its tp is 2, that of replica 0 4",
    ),
    "replica_shares": (
        lambda: unequal_replicas(sequences=3),
        "stage 0, replica 1: its sequences is 3, that of replica 0 1",
    ),
    "replica_recompute": (
        lambda: unequal_replicas(recompute=Recompute(full=((1, 3),))),
        "stage 0, replica 1: its recompute is another one",
    ),
    "shards": (shares, r"synchronisation\[0\]: shares are unequal \(1, 3\)"),
    "level_per_unit": (lambda: rules(((0, 21), 1), ((21, 42), 0)), "unit 0 .* has shard level 1"),
    "level_2_pipeline": (lambda: rules(((0, 42), 2)), "shard level 2 with 2 pipeline stages"),
    "level_3_pipeline": (lambda: rules(((0, 42), 3)), "shard level 3 with 2 pipeline stages"),
    "recompute_last": (
        lambda: with_replicas(PLAIN, 0, recompute=Recompute(full=((5, 9),))),
        "stage 0, recompute: full recomputation in units 1-21 does not begin with the first",
    ),
    "recompute_counts": (
        lambda: with_replicas(PLAIN, 0, recompute=Recompute(full=((1, 5),))),
        "stage 1, recompute: 0 layers fully, elsewhere 4",
    ),
    "recompute_embedding": (
        lambda: with_replicas(PLAIN, 0, recompute=Recompute(full=((0, 21),))),
        "stage 0, recompute: unit 0 is to be recomputed",
    ),
    "selective_part": (
        lambda: with_replicas(PLAIN, 0, recompute=Recompute(selective=((1, 5),))),
        "stage 0, recompute: selective for 4 of 20 layers",
    ),
    "selective_stage": (
        lambda: with_replicas(PLAIN, 0, recompute=Recompute(selective=((1, 21),))),
        "stage 1, recompute: is not selective as in other stages",
    ),
    "gpipe": (lambda: job(schedule=ScheduleKind.GPIPE), "job, schedule: is 'gpipe'; it has '1f1b'"),
    "zero_bubble": (lambda: job(schedule=ScheduleKind.ZERO_BUBBLE), "is 'zero_bubble'"),
    "warm_up": (
        warm_up,
        "stage 0, order: warm-up is 5 micro-batches; its schedule there fixes it to 2",
    ),
    "pure_bf16": (lambda: job(precision=PRECISIONS["pure_bf16"]), "master copy none"),
    "overlap": (
        lambda: with_replicas(PLAIN, sequence_parallel=False, tp_overlap_chunks=2),
        "overlaps tensor parallelism without sequence parallelism",
    ),
    "offload_parameters": (
        lambda: with_replicas(PLAIN, 0, offload=Offload(parameters=((1, 3),))),
        "stage 0, offload: keeps parameters on the host",
    ),
    "offload_part": (
        lambda: with_replicas(PLAIN, 0, offload=Offload(optimizer=((1, 3),))),
        "stage 0, offload: of 2 units' optimizer state",
    ),
    "offload_activations": (
        lambda: with_replicas(PLAIN, 0, offload=Offload(activations=((1, 3),))),
        "works only without pipeline stages",
    ),
    "offload_last": (
        lambda: with_replicas(
            uniform("llama-2-13b", "tp=4,sp=1"), offload=Offload(activations=((5, 9),))
        ),
        "activations of the first layers only",
    ),
    "offload_unsharded": (
        lambda: with_replicas(
            uniform("llama-2-13b", "tp=4,sp=1"), offload=Offload(optimizer=((0, 42),))
        ),
        "needs the sharded one",
    ),
    "moments_unsharded": (
        lambda: uniform("llama-2-13b", "tp=4", precision=Precision(moments=Dtype.BF16)),
        "narrow moments need the sharded optimizer",
    ),
    "experts_per_chip": (
        lambda: experts(0, ExpertGroup(chips=8, count=4, experts=(2, 0, 1, 1, 1, 1, 1, 1))),
        "stage 0, experts: chips hold 0 to 2 experts",
    ),
    "expert_sizes": (
        lambda: experts(0, ExpertGroup(chips=8, count=2), ExpertGroup(chips=4, count=4)),
        "stage 0, experts: groups of 4 and 8 chips",
    ),
    "expert_degrees": (
        lambda: experts(1, ExpertGroup(chips=4, count=8)),
        "stage 1: its experts are spread over 4 chips",
    ),
    "experts_without_sequence_parallelism": (
        lambda: with_replicas(MOE, sequence_parallel=False),
        "experts with tp 2 need sequence parallelism",
    ),
    "experts_in_fp16": (
        lambda: replace(MOE, job=replace(MOE.job, precision=PRECISIONS["fp16"])),
        "expert parallelism does not work with fp16",
    ),
    "vendors": (
        lambda: uniform("llama-2-13b", "tp=4,pp=2,sp=1", cluster=mixed()),
        "chips: chips of Kunlunxin and NVIDIA",
    ),
    "stand_in": (
        lambda: uniform("llama-2-13b", "tp=2,pp=2", cluster=Cluster.load("S16")),
        "stage 1: chip 'V100-32' has no bf16 and would compute in fp16",
    ),
    "interleaved_micro_batches": (
        lambda: uniform("llama-2-13b", "tp=8,pp=4,vpp=2,sp=1", global_batch=10),
        "5 micro-batches are no multiple of 4 stages",
    ),
    "model": (
        lambda: uniform("gemma-2-9b", "tp=4"),
        "model 'gemma-2-9b': its norms stand in sandwich position, which Megatron-LM cannot say",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_cannot_express_is_refused(name):
    make, reason = REFUSALS[name]
    assert_refused("Megatron-LM", reason, lambda: export(make()))


def test_the_refused_plans_are_valid_otherwise():
    for name in ("recompute_last", "level_per_unit", "warm_up", "replica_recompute"):
        plan = REFUSALS[name][0]()
        assert check_plan(plan) == []


def test_every_model_of_the_catalog_is_said_or_refused():
    said = []
    for name in catalog_names():
        model = load_model(name)
        job = Job(sequence_length=min(2048, model.max_length), global_batch=8)
        blocks = [model.blocks[index] for index in model.layer_blocks]
        problems = list(model_problems(model, blocks, job))
        if problems:
            with pytest.raises(InputError, match=f"^Megatron-LM: model '{name}': "):
                model_flags(model, job, "Megatron-LM")
        else:
            said.append(name)
            assert model_flags(model, job, "Megatron-LM")["num-layers"] == model.num_layers
    assert len(said) >= 45
