"""Collective programs recorded in a plan: obeyed, exact, few, and refused where unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.support.plans import plans
from tutti.collective.builder import CATALOG
from tutti.cost.plan.plan_costs import price_schedule
from tutti.cost.plan.record_programs import record_collectives
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.check import check_plan
from tutti.plan.collectives import ALGORITHMS
from tutti.plan.files import load_plan, save_plan
from tutti.plan.job import Job
from tutti.plan.plan import CollectiveChoice
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.schedule.schedule import build_schedule
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


def embedded(plan):
    return plan.model.spec, plan.cluster.cluster


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


def test_a_program_that_cannot_run_is_refused_in_one_line():
    plan = job_on("S16", tp=1, dp=16)
    choice = CollectiveChoice(use="gradients", operation="all_reduce", algorithm="native")
    with pytest.raises(InputError, match=r"2 islands .*'native', which needs one") as no:
        estimate(replace(plan, collectives=(choice,)))
    assert "\n" not in str(no.value)
    elsewhere = replace(choice, islands=1)
    assert estimate(replace(plan, collectives=(elsewhere,))) is not None


def test_an_entry_for_certain_groups_goes_before_one_for_all():
    plan = job_on("S16", tp=1, dp=16)
    ring = CollectiveChoice(use="gradients", operation="all_reduce", algorithm="ring")
    tree = replace(ring, algorithm="tree", ranks=16, islands=2)
    (written,) = record_collectives(replace(plan, collectives=(ring, tree))).collectives
    assert written.algorithm == "tree"
    (written,) = record_collectives(
        replace(plan, collectives=(ring, replace(tree, ranks=8)))
    ).collectives
    assert written.algorithm == "ring"


def test_what_costs_the_same_is_left_to_the_islands_library():
    (written,) = record_collectives(job_on("S16", tp=2, pp=2, dp=4)).collectives[:1]
    assert (written.algorithm, written.islands) == ("native", 1)


def test_limits_lie_between_the_sizes_that_were_priced():
    plan = record_collectives(job_on("S32", tp=1, dp=32, shard=1))
    asked = price_schedule(build_schedule(plan), *embedded(plan)).asked
    for choice in plan.collectives:
        sizes = {
            a.num_bytes for a in asked if (a.use, a.operation) == (choice.use, choice.operation)
        }
        if choice.max_bytes is not None:
            assert choice.max_bytes not in sizes
            assert min(sizes) < choice.max_bytes < max(sizes)
    assert any(choice.max_bytes for choice in plan.collectives)


def test_the_table_of_names_is_the_catalog():
    assert {op: set(names) for op, names in ALGORITHMS.items()} == {
        op.value: set(names) for op, names in CATALOG.items()
    }
