"""Collective programs recorded in a plan: obeyed, exact, few, and refused where unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.support.plans import plans
from tutti.collective.builder import CATALOG
from tutti.cost.plan.record_programs import record_collectives
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.check import check_plan
from tutti.plan.collectives import ALGORITHMS
from tutti.plan.files import load_plan, save_plan
from tutti.plan.job import Job
from tutti.plan.plan import CollectiveChoice
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.simulate.estimate import estimate

FEW = settings(max_examples=max(10, settings.default.max_examples // 5))


@FEW
@given(plans())
def test_a_recorded_plan_has_the_same_price(plan):
    plan = replace(plan, collectives=())
    recorded = record_collectives(plan)
    assert estimate(recorded).step_seconds == estimate(plan).step_seconds
    assert record_collectives(recorded).collectives == recorded.collectives


def job_on(cluster: str, **degrees):
    model, where = load_model("llama-2-7b"), Cluster.load(cluster)
    job = Job(sequence_length=2048, global_batch=64)
    return uniform_plan(model, where, job, Degrees(**degrees))


def test_a_file_keeps_the_price(tmp_path):
    plan = record_collectives(job_on("S16", tp=2, dp=8, shard=1))
    assert plan.collectives
    save_plan(plan, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again.collectives == plan.collectives
    assert estimate(again).step_seconds == estimate(plan).step_seconds


def test_a_recorded_program_is_obeyed():
    plan = job_on("S16", tp=1, dp=16)
    free = estimate(plan).step_seconds
    for algorithm, chunks in (("leader", 1), ("ring", 1)):
        choice = CollectiveChoice(
            use="gradients", operation="all_reduce", algorithm=algorithm, chunks=chunks
        )
        forced = replace(plan, collectives=(choice,))
        assert estimate(forced).step_seconds > free
        (written,) = record_collectives(forced).collectives
        assert (written.algorithm, written.chunks) == (algorithm, chunks)


@pytest.mark.parametrize(
    "fields",
    [{"max_bytes": 1.0}, {"pools": ("other",)}, {"use": "boundary"}, {"operation": "all_gather"}],
)
def test_what_does_not_match_changes_nothing(fields):
    plan = job_on("S16", tp=1, dp=16)
    values = {"use": "gradients", "operation": "all_reduce", "algorithm": "leader", **fields}
    forced = replace(plan, collectives=(CollectiveChoice(**values),))
    where = replace(Cluster.load("S16"), name="S16")
    if "pools" in fields:
        assert any(problem.code == "collective" for problem in check_plan(forced, None, where))
        return
    assert estimate(forced).step_seconds == estimate(plan).step_seconds


def test_unknown_names_are_refused_in_one_line():
    plan = job_on("S16", tp=1, dp=16)
    for operation, algorithm, word in (
        ("all_reduce", "rign", "did you mean 'ring'"),
        ("all_redcue", "ring", "did you mean 'all_reduce'"),
    ):
        choice = CollectiveChoice(use="gradients", operation=operation, algorithm=algorithm)
        (problem,) = check_plan(replace(plan, collectives=(choice,)))
        assert problem.code == "collective"
        assert word in str(problem)
        assert "\n" not in str(problem)


def test_the_table_of_names_is_the_catalog():
    assert {op: set(names) for op, names in ALGORITHMS.items()} == {
        op.value: set(names) for op, names in CATALOG.items()
    }
