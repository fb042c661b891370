"""FlagScale configurations: read back to the same strategy, or refused with the reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings

from tests.support.plans import plans
from tests.unit.export.refusals import assert_refused
from tests.unit.search.exports import cases, mixed, uniform, with_cuts, with_replicas, with_stage
from tutti.errors import InputError
from tutti.export.flagscale import flagscale_yaml
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.check import check_plan, embedded_cluster, embedded_model
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job, Precision, ScheduleKind
from tutti.plan.plan import (
    ContextKind,
    ExpertGroup,
    Offload,
    Pipeline,
    Plan,
    Recompute,
    Replica,
    Stage,
    Synchronisation,
)

FEW = settings(max_examples=max(20, settings.default.max_examples // 4))


def export(plan):
    return yaml.safe_load(flagscale_yaml(plan, embedded_model(plan), embedded_cluster(plan)))


def meshes(document):
    flat = document["system"]["hetero"]["hetero_process_meshes"]
    assert len(flat) % 5 == 0
    return [tuple(flat[at : at + 5]) for at in range(0, len(flat), 5)]


def mixed_plan(model_name="llama-2-13b", *, level=1, **first):
    """Two A800 stages of tp 4 and one P800 stage of tp 8, dp 2; layers 14, 14, 12."""
    model, cluster = load_model(model_name), mixed()
    cuts = [(0, 15), (15, 29), (29, 42)]
    degrees = {"count": 2, "tp": 4, "sequence_parallel": True, **first}
    stages = [
        Stage(units=(cuts[0],), replicas=(Replica(chips=ChipSet.of("a800/0/0-7"), **degrees),)),
        Stage(units=(cuts[1],), replicas=(Replica(chips=ChipSet.of("a800/1/0-7"), **degrees),)),
        Stage(
            units=(cuts[2],),
            replicas=(
                Replica(
                    chips=ChipSet.of("p800/0-1/0-7"), count=2, tp=8, sequence_parallel=True,
                ),
            ),
        ),
    ]  # fmt: skip
    plan = Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(cluster),
        job=Job(sequence_length=2048, global_batch=64),
        pipelines=(Pipeline(micro_batch=2, micro_batches=32, stages=tuple(stages)),),
        synchronisation=(Synchronisation(units=(0, 42), shard_level=level),) if level else (),
    )
    assert check_plan(plan) == []
    return plan


@pytest.mark.parametrize(("name", "degrees"), cases())
def test_uniform_plans_are_read_back(name, degrees):
    plan = uniform(name, degrees)
    if "shard=3" in degrees:
        with pytest.raises(InputError, match="shard level is 3"):
            export(plan)
        return
    document, model = export(plan), embedded_model(plan)
    system, hetero = document["system"], document["system"]["hetero"]
    found = meshes(document)
    assert sum(tp * cp * dp * pp for tp, cp, _, dp, pp in found) == plan.num_ranks
    assert sum(pp for *_, pp in found) == system["pipeline_model_parallel_size"]
    assert len(hetero["hetero_pipeline_layer_split"]) == system["pipeline_model_parallel_size"]
    assert sum(hetero["hetero_pipeline_layer_split"]) == model.num_layers
    assert document["model"]["num_layers"] == model.num_layers
    assert len(hetero["hetero_device_types"]) == len(found) == 1
    tp, cp, ep, dp, _ = found[0]
    stage = plan.pipelines[0].stages[0]
    assert (tp, cp, dp) == (stage.replicas[0].tp, stage.replicas[0].cp, stage.num_replicas)
    assert document["model"]["micro_batch_size"] * dp == plan.pipelines[0].micro_batch
    if model.num_experts:
        sliced = hetero["expert_tensor_parallel_size_per_process_mesh"][0]
        assert (tp * cp * dp) % (ep * sliced) == 0
    assert system["precision"]["bf16"] is True


def test_unlike_chips_are_meshes_of_their_own():
    document = export(mixed_plan())
    hetero = document["system"]["hetero"]
    assert meshes(document) == [(4, 1, 1, 2, 2), (8, 1, 1, 2, 1)]
    assert hetero["enable_hetero"] is True
    assert hetero["hetero_pipeline_layer_split"] == [14, 14, 12]
    assert hetero["hetero_device_types"] == ["A800", "Kunlun-P800"]
    assert hetero["hetero_current_device_type"] == "A800"
    assert hetero["standalone_embedding_stage"] is False
    assert document["system"]["distributed_backend"] == "flagcx"
    assert document["system"]["use_distributed_optimizer"] is True
    assert document["system"]["pipeline_model_parallel_size"] == 3
    assert document["model"]["global_batch_size"] == 64
    assert document["data"] == {"tokenizer": {"vocab_size": 32000}}


def test_stages_may_differ_in_data_parallelism():
    plan = with_replicas(mixed_plan(), 2, count=1, tp=8, cp=1, sequences=2,
                         chips=ChipSet.of("p800/0/0-7"))  # fmt: skip
    assert check_plan(plan) == []
    assert meshes(export(plan)) == [(4, 1, 1, 2, 2), (8, 1, 1, 1, 1)]
    assert export(plan)["model"]["micro_batch_size"] == 1


def test_recomputation_per_stage():
    plan = mixed_plan()
    plan = with_replicas(plan, 0, recompute=Recompute(full=((1, 5),)))
    plan = with_replicas(plan, 2, recompute=Recompute(full=((29, 41),)))
    found = export(plan)["system"]["recompute"]
    assert found["recompute_granularity"] == "full"
    assert found["recompute_granularity_per_stage_micro_batch"] == [
        [1, 32, 1], [1, 32, 0], [1, 32, 1],
    ]  # fmt: skip
    assert found["recompute_method_per_stage_micro_batch"] == [[1, 32, 1]] * 3
    assert found["recompute_num_layers_per_stage_micro_batch"] == [
        [1, 32, 4], [1, 32, 0], [1, 32, 12],
    ]  # fmt: skip
    equal = with_replicas(mixed_plan(), 0, recompute=Recompute(full=((1, 5),)))
    equal = with_replicas(equal, 1, recompute=Recompute(full=((15, 19),)))
    found = export(equal)["system"]["recompute"]
    assert found["recompute_num_layers_per_stage_micro_batch"] == [[2, 32, 4], [1, 32, 0]]
    everywhere = uniform("llama-2-13b", "tp=8,pp=2,sp=1,recompute=full")
    assert export(everywhere)["system"]["recompute"] == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    some = uniform("llama-2-13b", "tp=8,pp=2,sp=1,recompute=selective")
    assert export(some)["system"]["recompute"]["recompute_modules"] == ["core_attn"]
    assert "recompute" not in export(mixed_plan())["system"]


def test_dense_stages_take_the_expert_degree_of_the_others():
    plan = uniform("deepseek-v3", "tp=1,pp=4,ep=8")
    plan = with_cuts(plan, 3, 20, 20, 18)  # the first three layers are dense
    assert plan.pipelines[0].stages[0].experts == ()
    assert meshes(export(plan)) == [(1, 1, 8, 16, 4)]


def test_tied_weights_over_unlike_data_parallelism():
    plan = uniform("smollm2-1.7b", "tp=2,pp=2,sp=1,shard=1")  # dp 16
    stage = plan.pipelines[0].stages[1]
    half = replace(stage.replicas[0], chips=stage.replicas[0].chips.cut(0, 16), count=8,
                   sequences=2)  # fmt: skip
    plan = with_stage(plan, 1, replace(stage, replicas=(half,)))
    assert check_plan(plan) == []
    hetero = export(plan)["system"]["hetero"]
    assert hetero["use_partial_reduce_for_shared_embedding"] is True


def test_the_file_is_stable_and_readable():
    plan = mixed_plan()
    text = flagscale_yaml(plan, embedded_model(plan), embedded_cluster(plan))
    assert text == flagscale_yaml(mixed_plan(), embedded_model(plan), embedded_cluster(plan))
    assert text.startswith("# llama-2-13b on mixed: 32 chips")
    assert "    hetero_process_meshes: [4, 1, 1, 2, 2, 8, 1, 1, 2, 1]\n" in text
    keys = [line.split(":")[0] for line in text.splitlines() if re.match(r"[a-z]", line)]
    assert keys == ["system", "model", "data"]
    assert max(map(len, text.splitlines())) <= 120


# --- refusals --------------------------------------------------------------------------------


def swapped():
    """A800, P800, A800: ranks sorted by chip kind cannot follow."""
    plan = mixed_plan()
    stages = plan.pipelines[0].stages
    one, two, three = (s.replicas for s in stages)
    for index, replicas in enumerate((one, three, two)):
        plan = with_stage(plan, index, replace(stages[index], replicas=replicas))
    return plan


def both_kinds():
    plan = mixed_plan()
    stage = plan.pipelines[0].stages[2]
    first, second = (
        replace(stage.replicas[0], chips=ChipSet.of(chips), count=1, tp=8)
        for chips in ("p800/0/0-7", "a800/1/0-7")
    )
    return with_stage(plan, 2, replace(stage, replicas=(first, second)))


def tied():
    plan = uniform("smollm2-1.7b", "tp=2,pp=2,sp=1")
    return with_replicas(plan, 1, tp=4, count=8, sequences=2)


def tied_ragged():
    plan = uniform("smollm2-1.7b", "tp=2,pp=2,sp=1,shard=1,dp=12", global_batch=96)
    stage = plan.pipelines[0].stages[1]
    fewer = replace(stage.replicas[0], chips=stage.replicas[0].chips.cut(0, 16), count=8)
    return with_stage(plan, 1, replace(stage, replicas=(fewer,)))


def mixed_experts():
    plan = uniform("mixtral-8x7b", "tp=2,pp=2,ep=8,sp=1")
    stage = plan.pipelines[0].stages[1]
    return with_stage(plan, 1, replace(stage, experts=(ExpertGroup(chips=1, count=32),)))


def few_chips_for_experts():
    plan = uniform("deepseek-v3", "tp=1,pp=4,ep=8,mbs=1", global_batch=512)
    plan = with_cuts(plan, 3, 20, 20, 18)
    stage = plan.pipelines[0].stages[0]
    fewer = replace(stage.replicas[0], chips=stage.replicas[0].chips.cut(0, 4), count=4)
    return with_stage(plan, 0, replace(stage, replicas=(fewer,)))


REFUSALS = {
    "interleaved": (
        lambda: uniform("llama-2-13b", "tp=8,pp=4,vpp=2,sp=1"),
        "job, schedule: is 'interleaved'; it has '1f1b'",
    ),
    "zero_bubble": (
        lambda: replace(mixed_plan(), job=replace(mixed_plan().job,
                                                  schedule=ScheduleKind.ZERO_BUBBLE)),
        "is 'zero_bubble'",
    ),
    "level_2": (lambda: mixed_plan(level=2), "synchronisation: shard level is 2"),
    "device_order": (swapped, "stages: A800 comes back after other chips"),
    "mixed_stage": (both_kinds, "stage 2: mixes Kunlun-P800 and A800"),
    "context": (
        lambda: with_replicas(mixed_plan(), 2, tp=4, cp=2),
        r"stage 2: its context parallelism is 2 \(ring\), that of stage 0 1",
    ),
    "context_kind": (
        lambda: with_replicas(mixed_plan(), 2, context_kind=ContextKind.ALL_GATHER),
        "stage 2: its context parallelism is 1 .all_gather.",
    ),
    "no_layer": (
        lambda: with_cuts(uniform("llama-2-13b", "tp=8,pp=4,sp=1"), 0, 20, 10, 10),
        "stage 0: has no decoder layer",
    ),
    "offload": (
        lambda: with_replicas(mixed_plan(), 1, offload=Offload(optimizer=((15, 17),))),
        "stage 1, offload: is not possible",
    ),
    "sequence_parallel": (
        lambda: with_replicas(mixed_plan(), 2, sequence_parallel=False),
        "stage 2: differs from stage 0 in sequence parallelism",
    ),
    "overlap": (
        lambda: with_replicas(mixed_plan(), sequence_parallel=False, tp_overlap_chunks=2),
        "overlaps tensor parallelism without sequence parallelism",
    ),
    "tied": (tied, "stage 1: tp 4, stage 0 has 2; stages with tied weights need the same"),
    "tied_ragged": (tied_ragged, "stage 1: dp 8, stage 0 has 12; with tied weights one must"),
    "selective": (
        lambda: with_replicas(mixed_plan(), 0, recompute=Recompute(selective=((1, 15),))),
        "stage 1, recompute: is not selective as in other stages",
    ),
    "recompute": (
        lambda: with_replicas(mixed_plan(), 0, recompute=Recompute(full=((3, 7),))),
        "stage 0, recompute: full recomputation in units 1-15 does not begin",
    ),
    "moments": (
        lambda: uniform("llama-2-13b", "tp=4", precision=Precision(moments=Dtype.BF16)),
        "narrow moments need shard level 1",
    ),
    "experts": (mixed_experts, "experts: expert parallelism is 8, 1; all 1, or none"),
    "experts_sequence": (
        lambda: with_replicas(
            uniform("mixtral-8x7b", "tp=2,pp=2,ep=8,sp=1"), 0, sequence_parallel=False
        ),
        "stage 0: experts with tp 2 need sequence parallelism",
    ),
    "expert_chips": (few_chips_for_experts, "stage 0: has no experts, but its 4 chips must divide"),
    "stand_in": (
        lambda: uniform("llama-2-13b", "tp=2,pp=2", cluster=Cluster.load("S16")),
        "stage 1: chip 'V100-32' has no bf16",
    ),
    "replicas": (
        lambda: with_stage(
            mixed_plan(),
            0,
            replace(
                mixed_plan().pipelines[0].stages[0],
                replicas=tuple(
                    Replica(chips=ChipSet.of(chips), tp=tp, cp=4 // tp)
                    for chips, tp in (("a800/0/0-3", 4), ("a800/0/4-7", 2))
                ),
            ),
        ),
        "stage 0, replica 1: its tp is 2, that of replica 0 4",
    ),
    "pipelines": (
        lambda: replace(mixed_plan(), pipelines=mixed_plan().pipelines * 2),
        "pipelines: it has 2",
    ),
    "model": (lambda: uniform("falcon-7b", "tp=1"), "model 'falcon-7b': "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_cannot_express_is_refused(name):
    make, reason = REFUSALS[name]
    assert_refused("FlagScale", reason, lambda: export(make()))


@FEW
@given(plans())
def test_any_plan_is_exported_or_refused(plan):
    try:
        document = export(plan)
    except InputError as error:
        refused = str(error)
    else:
        split = document["system"]["hetero"]["hetero_pipeline_layer_split"]
        assert sum(split) == embedded_model(plan).num_layers
        assert sum(tp * cp * dp * pp for tp, cp, _, dp, pp in meshes(document)) == plan.num_ranks
        return
    assert refused.startswith("FlagScale: ")
