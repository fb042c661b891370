"""A plan's passes alone never take longer than its simulated step, whatever the plan."""

from __future__ import annotations

import functools
import random

import pytest

from tutti.bench.judge.changes import single_changes
from tutti.bench.judge.questions import draw
from tutti.cost.plan.plan_costs import pool_prices
from tutti.errors import TuttiError
from tutti.plan.check import check_plan
from tutti.search.ask_from_values import make_problem
from tutti.search.improve.least_time import LeastTime
from tutti.search.planner import plan
from tutti.search.question.effort import Effort
from tutti.simulate.estimate import PricingMemo, estimate

FEW = Effort(
    candidates=2, most_candidates=2, last_mile=0, instructions=5_000, per_chip=0, smaller=0
)
NUMBERS = (0, 3, 7)
WALK = 30  # plans of each question, each a drawn change of one before


@functools.cache
def walked(number):
    """Return simulated plans of a drawn question, and what their passes take at the least."""
    return tuple(walk(number))


def walk(number):
    question = draw(number, 12)
    problem = make_problem(
        question.model, question.cluster, sequence_length=min(4096, question.sequence_length),
        global_batch=min(64, question.global_batch),
    )  # fmt: skip
    try:
        first = plan(problem, effort=FEW, compare=False).best.plan
    except TuttiError:
        return
    sources = problem.pinned_sources()
    used = {pool.name for pool in problem.cluster.pools}
    prices = dict(pool_prices(first, problem.model, problem.cluster, sources, used))
    least = LeastTime(problem.model, problem.cluster, prices, sources.kernels)
    dice, memo, at = random.Random(number), PricingMemo.empty(), first
    for _ in range(WALK):
        changes = list(single_changes(at, problem.model))
        kinds = sorted({change.kind for change in changes})
        kind = dice.choice(kinds)
        changed = dice.choice([change.plan for change in changes if change.kind == kind])
        if check_plan(changed, problem.model, problem.cluster):
            continue
        try:
            estimated = estimate(
                changed, problem.model, problem.cluster, sources, prices=prices, memo=memo
            )
        except TuttiError:
            continue
        at = changed
        yield changed, least.seconds(changed), estimated


@pytest.mark.parametrize("number", NUMBERS)
def test_no_simulated_step_is_shorter_than_its_passes(number):
    assert len(walked(number)) > 5
    for changed, least, estimated in walked(number):
        assert 0.0 < least <= estimated.result.step_seconds * (1 + 1e-9), changed


def test_passes_are_most_of_a_step_where_little_travels():
    shares = [
        least / estimated.result.step_seconds
        for number in NUMBERS
        for _, least, estimated in walked(number)
    ]
    assert len(shares) > 20
    assert max(shares) > 0.97
