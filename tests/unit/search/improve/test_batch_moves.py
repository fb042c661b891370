"""Moves of batch, copies and places keep the batch and the chips, whatever the plan."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import pytest

from tests.support.features import drawn_plans
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.check import check_plan, embedded_cluster, embedded_model
from tutti.plan.job import Job
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.search.improve.batch_moves import BATCH_MOVES
from tutti.search.improve.plan_moves import Here
from tutti.search.improve.stage_loads import Loads

NEVER = {"batch", "shares", "chip", "chip_twice", "chip_count", "empty", "units"}
PLANS = 12
MOST_RANKS = 8


def chips_of(plan):
    used = [chip for _, _, stage in plan.stages() for chip in stage.chips]
    return sorted([*used, *plan.idle, *plan.spare])


def test_moves_keep_what_they_do_not_change():
    valid = collections.Counter()
    for plan in drawn_plans(PLANS, MOST_RANKS, examples=8 * PLANS):
        model, cluster = embedded_model(plan), embedded_cluster(plan)
        here = Here(problem=SimpleNamespace(model=model), plan=plan, loads=Loads({}))
        for kind, make in BATCH_MOVES.items():
            for moved in make(here):
                if moved is None:
                    continue
                assert chips_of(moved) == chips_of(plan), kind
                problems = check_plan(moved, model, cluster)
                assert not {problem.code for problem in problems} & NEVER, (kind, problems)
                valid[kind] += not problems
    assert {kind for kind in BATCH_MOVES if not valid[kind]} <= {"joined", "copies"}, valid


@pytest.mark.parametrize(("used", "sizes"), [(3, {12, 16}), (4, {12, 9})])
def test_idle_chips_become_copies(used, sizes):
    """A pipeline is offered the idle chips of its pool, or a copy less; each plan is whole."""
    pool = {"name": "p", "chip": "A100-80", "chips_per_node": 4, "nodes": 1}
    cluster = Cluster.from_document({"name": "copies", "pools": [pool]}, Place("copies"))
    model, job = load_model("smollm2-360m"), Job(sequence_length=1024, global_batch=144)
    degrees = Degrees(dp=used, micro_batch=12 // used)
    plan = uniform_plan(model, cluster, job, degrees, {"p": used})
    here = Here(problem=SimpleNamespace(model=model), plan=plan, loads=Loads({}))
    offered = [moved for moved in BATCH_MOVES["copies"](here) if moved is not None]
    assert all(not check_plan(moved, model, cluster) for moved in offered)
    counts = {moved.pipelines[0].stages[0].num_replicas for moved in offered}
    assert counts == ({4, 2} if used == 3 else {3})
    assert sizes & {moved.pipelines[0].micro_batch for moved in offered}
