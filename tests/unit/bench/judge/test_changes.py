"""Single changes keep what they do not change: chips, the batch, all units once."""

from __future__ import annotations

import collections

import pytest

from tests.support.features import drawn_plans
from tutti.bench.judge.batch_changes import BATCH_CHANGES
from tutti.bench.judge.chip_changes import CHIP_CHANGES
from tutti.bench.judge.single_changes import Judge
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.check import check_plan, embedded_cluster, embedded_model
from tutti.plan.edits import stage_of_size
from tutti.plan.job import Job
from tutti.plan.uniform import Degrees, uniform_plan

NEVER = {"batch", "shares", "chip", "chip_twice", "chip_count", "empty", "units"}
PLANS = 12
MOST_RANKS = 8


def chips_of(plan):
    used = [chip for _, _, stage in plan.stages() for chip in stage.chips]
    return sorted([*used, *plan.idle, *plan.spare])


def test_changes_of_batch_and_chips_keep_both():
    valid = collections.Counter()
    for plan in drawn_plans(PLANS, MOST_RANKS, examples=8 * PLANS):
        model, cluster = embedded_model(plan), embedded_cluster(plan)
        for kind, make in (BATCH_CHANGES | CHIP_CHANGES).items():
            for what, changed in make(plan, model):
                if changed is None:
                    continue
                assert chips_of(changed) == chips_of(plan), (kind, what)
                problems = check_plan(changed, model, cluster)
                assert not {problem.code for problem in problems} & NEVER, (kind, what, problems)
                valid[kind] += not problems
    assert {kind for kind in BATCH_CHANGES | CHIP_CHANGES if not valid[kind]} <= {
        "moved copies"  # drawn plans seldom have two stages of equal copies
    }, valid


def test_any_size_is_shared_out_over_a_stage():
    taken = 0
    for plan in drawn_plans(PLANS, MOST_RANKS, examples=8 * PLANS):
        for _, _, stage in plan.stages():
            copies = sum(replica.count for replica in stage.replicas)
            for size in range(1, 14):
                shared = stage_of_size(stage, size)
                if shared is None:
                    continue
                taken += 1
                assert sum(r.count * r.sequences for r in shared.replicas) == size
                assert shared.chips == stage.chips
                assert sum(replica.count for replica in shared.replicas) == copies
    assert taken > 50


def judged(pools, *, batch, degrees, length, chips=None):
    document = {
        "name": "judged",
        "pools": [
            {"name": f"p{i}", "chip": chip, "chips_per_node": chips, "nodes": 1}
            for i, (chip, chips) in enumerate(pools)
        ],
    }
    cluster = Cluster.from_document(document, Place("judged"))
    model = load_model("smollm2-360m")
    job = Job(sequence_length=length, global_batch=batch)
    made = uniform_plan(model, cluster, job, degrees, chips)
    return Judge(model, cluster).improve(made, cpu_seconds=20.0)


@pytest.mark.parametrize("batch", [25, 35])
def test_a_size_that_no_doubling_reaches_is_tried(batch):
    """One sequence at a time is slow on one chip; neither 2 nor 3 divides the batch."""
    improved = judged([("A100-80", 1)], batch=batch, degrees=Degrees(), length=128)
    assert improved.gain_pct > 1.0
    assert improved.plan.pipelines[0].micro_batch in (5, 7, batch)


@pytest.mark.parametrize("pools", [[("A100-80", 4)], [("A100-80", 3), ("H100", 1)]])
def test_chips_that_stand_idle_are_put_to_use(pools):
    """Three chips work; the fourth of their pool, or of another, would take a quarter."""
    used = {"p0": 3, "p1": 0} if len(pools) > 1 else {"p0": 3}
    degrees = Degrees(dp=3, micro_batch=2)
    improved = judged(pools, batch=48, degrees=degrees, length=4096, chips=used)
    assert improved.gain_pct > 15.0
    assert len(improved.plan.idle) == 0
