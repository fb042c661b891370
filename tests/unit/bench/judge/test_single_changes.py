"""The judge of plans wins back what a planted change spoiled."""

from __future__ import annotations

import random

import pytest

from tutti.bench.judge.changes import single_changes
from tutti.bench.judge.single_changes import Judge
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.search.ask_from_values import make_problem
from tutti.search.planner import plan

SPOILED_BY = 1.005  # what a planted change costs at the least
WON_BACK = 1.0005  # of the step before
PLANTED = 9  # per question, each of another kind
CPU_SECONDS = 60.0  # never reached where nothing else runs: a stop for machines that stand still
QUESTIONS = {
    "dense": ("llama-3.2-1b", [("A100-80", 2, 1), ("V100-32", 2, 1)], 1024, 16),
    "experts": ("deepseek-v2-lite", [("A100-80", 4, 1), ("H100", 4, 1)], 1024, 16),
    "three": ("smollm2-360m", [("H20", 1, 1), ("L40S", 2, 1), ("T4", 1, 1)], 2048, 24),
}


def question(name):
    model, pools, length, batch = QUESTIONS[name]
    document = {
        "name": name,
        "pools": [
            {"name": f"p{i}", "chip": chip, "chips_per_node": chips, "nodes": nodes}
            for i, (chip, chips, nodes) in enumerate(pools)
        ],
    }
    cluster = Cluster.from_document(document, Place(name))
    return make_problem(load_model(model), cluster, sequence_length=length, global_batch=batch)


def spoiled(judge, best, seconds, dice):
    """Yield plans that one change made slower."""
    changes = list(single_changes(best, judge.model))
    dice.shuffle(changes)
    kinds = set()
    for change in changes:
        if change.kind in kinds:
            continue
        slower = judge.seconds(change.plan)
        if slower is not None and slower > SPOILED_BY * seconds:
            kinds.add(change.kind)
            yield change


@pytest.mark.slow
def test_planted_changes_are_won_back():
    planted, won, lost = 0, 0, []
    for name in QUESTIONS:
        problem = question(name)
        judge = Judge(problem.model, problem.cluster, problem.pinned_sources())
        settled = judge.improve(plan(problem, compare=False).best.plan, cpu_seconds=CPU_SECONDS)
        best, seconds = settled.plan, settled.after_s
        dice = random.Random(name)
        for change, _ in zip(spoiled(judge, best, seconds, dice), range(PLANTED), strict=False):
            fresh = Judge(problem.model, problem.cluster, problem.pinned_sources())
            found = fresh.improve(change.plan, cpu_seconds=CPU_SECONDS)
            planted += 1
            if found.after_s <= WON_BACK * seconds:
                won += 1
            else:
                lost.append((name, change.kind, change.what, found.after_s / seconds))
    assert planted >= 15
    assert won >= 0.95 * planted, lost


@pytest.mark.slow  # what is planted is of every kind, too
def test_every_kind_of_change_is_tried():
    problem = question("three")
    best = plan(problem, compare=False).best.plan
    kinds = {change.kind for change in single_changes(best, problem.model)}
    assert {"units", "schedule", "micro-batch", "sharding", "recompute", "offload"} <= kinds
    assert all(change.plan != best for change in single_changes(best, problem.model))


def test_an_improvement_is_a_valid_plan_and_no_slower():
    problem = question("dense")
    judge = Judge(problem.model, problem.cluster, problem.pinned_sources())
    best = plan(problem, compare=False).best
    found = judge.improve(best.plan, cpu_seconds=1.0)
    assert found.before_s == pytest.approx(best.step_seconds, rel=1e-9)
    assert found.after_s <= found.before_s
    assert judge.seconds(found.plan) == found.after_s
