"""What single changes a local search may make: all that the judge knows, and valid ones."""

from __future__ import annotations

import collections
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.features import drawn_plans
from tutti.bench.judge.changes import single_changes
from tutti.bench.judge.questions import draw
from tutti.errors import TuttiError
from tutti.plan.check import check_plan, embedded_cluster, embedded_model
from tutti.search.ask_from_values import make_problem
from tutti.search.improve.chip_moves import CHIP_MOVES
from tutti.search.improve.plan_moves import Here
from tutti.search.improve.plan_search import MOVES, _key
from tutti.search.improve.stage_loads import Loads
from tutti.search.planner import plan
from tutti.search.question.effort import Effort
from tutti.search.question.space import Space
from tutti.search.strategy.space_limits import plan_in_space

FEW = Effort(
    candidates=2, most_candidates=2, last_mile=0, instructions=5_000, per_chip=0, smaller=0
)
NEVER = {"batch", "shares", "chip", "chip_twice", "chip_count", "empty", "units"}
PLANS = 12
# Two kinds of holders share shards equally, whatever the weight that they all have.
ALIKE = {"shard shares"}


def chips_of(plan):
    used = [chip for _, _, stage in plan.stages() for chip in stage.chips]
    return sorted([*used, *plan.idle, *plan.spare])


@pytest.mark.parametrize("number", [3, 7])
def test_every_change_of_the_judge_is_a_move(number):
    """Those that are valid and in the space, from the plan of a drawn question."""
    question = draw(number, 8)
    problem = make_problem(
        question.model, question.cluster, sequence_length=min(4096, question.sequence_length),
        global_batch=min(64, question.global_batch),
    )  # fmt: skip
    try:
        result = plan(problem, effort=FEW, compare=False)
    except TuttiError:
        pytest.skip("no plan fits")
    at = replace(result.best.plan, collectives=())
    here = Here(problem=problem, plan=at, loads=Loads.of(result.best.estimate))
    moves = {_key(moved) for make in MOVES.values() for moved in make(here) if moved is not None}
    missing, known = [], 0
    for change in single_changes(at, problem.model):
        wanted = plan_in_space(change.plan, problem) and change.kind not in ALIKE
        if not wanted or check_plan(change.plan, problem.model, problem.cluster):
            continue
        known += 1
        if _key(change.plan) not in moves:
            missing.append((change.kind, change.what))
    assert known > 20
    assert not missing


def test_moves_of_chips_keep_the_batch_and_the_chips():
    valid = collections.Counter()
    for at in drawn_plans(PLANS, 8, examples=8 * PLANS):
        model, cluster = embedded_model(at), embedded_cluster(at)
        problem = SimpleNamespace(model=model, space=Space())
        here = Here(problem=problem, plan=at, loads=Loads({}))
        for kind, make in CHIP_MOVES.items():
            for moved in make(here):
                if moved is None:
                    continue
                assert chips_of(moved) == chips_of(at), kind
                problems = check_plan(moved, model, cluster)
                assert not {problem.code for problem in problems} & NEVER, (kind, problems)
                valid[kind] += not problems
    assert len(valid) >= len(CHIP_MOVES) - 2
