"""The comparison formula: the published rows to the digit, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.cost.layer_folder import PUBLISHED, write_folder
from tutti.cost.measured.layer_profiles import LayerProfiles
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import Pipeline, Plan, Recompute, Replica, Stage, Synchronisation
from tutti.search.exact.comparison_formula import Setting, score

MODEL = load_model("opt-350m")
METIS = {8: "19,595.5", 16: "10,158.6", 32: "5,364.0", 64: "2,966.6"}


def metis_plan(size: int, sequences: int = 2) -> Plan:
    """V100 7 units, then A100 19 units, tp 1, equal shares."""
    cluster = Cluster.load(f"OPT-{size}")
    nodes = size // 8
    stages = tuple(
        Stage(
            units=(units,),
            replicas=(
                Replica(
                    chips=ChipSet.of(f"{pool}/0-{nodes - 1}/0-7"), count=size, sequences=sequences
                ),
            ),
        )
        for pool, units in (("v100", (0, 7)), ("a100", (7, 26)))
    )
    micro_batch = size * sequences
    pipeline = Pipeline(micro_batch=micro_batch, micro_batches=1024 // micro_batch, stages=stages)
    return Plan(
        model=refer_to_model(MODEL),
        cluster=refer_to_cluster(cluster),
        job=Job(sequence_length=2048, global_batch=1024),
        pipelines=(pipeline,),
    )


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"the published profiles are not in {PUBLISHED}")
@pytest.mark.parametrize("size", METIS)
def test_the_published_rows_to_the_digit(size):
    found = score(metis_plan(size), LayerProfiles.load(PUBLISHED))
    assert f"{found.step_ms:,.1f}" == METIS[size]
    assert found.fits


@pytest.fixture
def profiles(tmp_path):
    return LayerProfiles.load(write_folder(tmp_path / "layers"))


def test_each_term_by_hand(profiles):
    """A100 (1+2b)/4 ms per unit, V100 (1+2b) ms, the head twice that, optimizer 52 ms."""
    found = score(metis_plan(8), profiles)
    v100, a100 = 7 * 5.0, (18 + 2) * 5.0 / 4.0
    assert found.pipeline_ms == pytest.approx(63 * max(v100, a100) + v100 + a100)
    assert found.optimizer_ms == pytest.approx(52.0 * 19 / 26)
    assert found.boundary_ms == pytest.approx(2 * 2 * 2048 * 1024 * 2 / 10e9 * 1e3)
    sizes = profiles.figures["V100", 1, 2].parameter_bytes
    most = max(float(sizes[:7].sum()), float(sizes[7:].sum()))
    assert found.synchronisation_ms == pytest.approx(2 * 7 / 8 * most / 46e9 * 1e3)
    wide = score(metis_plan(16), profiles)
    assert wide.synchronisation_ms == pytest.approx(2 * 15 / 16 * most / 10e9 * 1e3)


def test_memory_is_said(profiles):
    setting = Setting(memory_mb={"A100": 40_000.0, "V100": 100.0})
    found = score(metis_plan(8), profiles, setting=setting)
    assert not found.fits
    assert found.too_much[0].startswith("stage 0 on V100: ")
    assert found.too_much[0].endswith(" MB of 100")


def changed(plan: Plan, **changes: object) -> Plan:
    (pipeline,) = plan.pipelines
    stage = pipeline.stages[0]
    replica = replace(stage.replicas[0], **changes)
    stages = (replace(stage, replicas=(replica,)), *pipeline.stages[1:])
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def test_what_it_has_no_term_for_is_refused(profiles):
    plan = metis_plan(8)
    rule = Synchronisation(units=(0, 26), shard_level=1)
    for wrong, said in (
        (replace(plan, pipelines=plan.pipelines * 2), "2 pipelines"),
        (
            replace(plan, job=replace(plan.job, schedule=ScheduleKind.ZERO_BUBBLE)),
            "the schedule is zero_bubble",
        ),
        (replace(plan, synchronisation=(rule,)), "sharded"),
        (changed(plan, recompute=Recompute(full=((1, 3),))), "stage 0 recomputes"),
        (changed(plan, cp=2, count=4), "context parallelism"),
        (changed(plan, sequences=3), "V100 was not measured with tp 1 and 3 sequences"),
        (changed(plan, tp=2), "V100 was not measured with tp 2"),
    ):
        with pytest.raises(InputError, match=said):
            score(wrong, profiles)


def test_another_model_or_chip_is_refused(profiles):
    with pytest.raises(InputError, match="26 layers, but gpt2 has 14 units"):
        score(metis_plan(8), profiles, model=load_model("gpt2"))
    with pytest.raises(InputError, match="none of its chips"):
        score(metis_plan(8), profiles, setting=Setting(memory_mb={"A100": 40_000.0}))
