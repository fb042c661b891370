"""The exact search against exhaustive enumeration, and every bound against both.

A few instances in every run; all of them, which together open every pair of a Plan's dimensions,
with `make test-slow`.
"""

from __future__ import annotations

import collections
import itertools
import random

import pytest

from tests.support.enumeration import all_drafts, enumerate_best, finish, price
from tests.support.instances import (
    DIMENSIONS,
    MOST_DRAFTS,
    NUM_INSTANCES,
    PAIRS,
    Instance,
    make_instance,
    memory_needs,
    varied,
    with_memory,
)
from tutti.search.bound.lower_bound import lower_bound
from tutti.search.exact.exact_search import search_exactly
from tutti.search.planner import plan
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.canonical_pools import canonical_question
from tutti.search.question.effort import Effort
from tutti.search.strategy.space_limits import plan_in_space

CLOSE = 1e-9
# Small ones that together open every dimension. In 246 the order of two pipelines decides, in 237
# the choice between selective and full recomputation; in 111 and 278 nothing fits.
_ALWAYS = (
    8, 16, 26, 33, 43, 53, 57, 68, 73, 84, 95, 105, 111, 115, 117, 131, 136, 149,
    157, 167, 178, 184, 194, 206, 213, 219, 226, 236, 237, 244, 246, 254, 264, 275, 278, 287,
    292, 299, 314, 319, 324, 337, 342, 354,
)  # fmt: skip
_LARGE = (206, 246)  # a fourth of what all of them cost
_SELDOM = tuple(n for n in range(NUM_INSTANCES) if n not in _ALWAYS)


@pytest.mark.parametrize(
    "number",
    [
        *(n for n in _ALWAYS if n not in _LARGE),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (*_LARGE, *_SELDOM)),
    ],
)
def test_the_search_finds_what_enumeration_finds(number, record_property):
    instance = make_instance(number)
    asked = canonical_question(instance.problem).problem  # pools in the planner's order
    tables = Tables(asked)
    best = enumerate_best(tables)
    found = search_exactly(asked)
    record_property("drafts", best.drafts)
    assert best.valid <= best.drafts <= MOST_DRAFTS
    if best.step_seconds is None:
        assert found is None, f"{instance.name}: nothing fits, but a plan came back"
        return
    assert found is not None, f"{instance.name}: {best.fitting} plans fit, none came back"
    record_property("simulated", found.simulated)
    assert found.step_seconds == pytest.approx(best.step_seconds, rel=CLOSE), instance.name
    assert found.lower_bound_seconds <= best.step_seconds * (1 + CLOSE)
    assert lower_bound(tables) <= best.step_seconds * (1 + CLOSE), instance.name
    # What a user gets: the planner searches small spaces whole.
    returned = plan(instance.problem, compare=False, effort=Effort(last_mile=0, smaller=0))
    assert returned.best.step_seconds == pytest.approx(best.step_seconds, rel=CLOSE), instance.name
    assert returned.lower_bound_seconds <= best.step_seconds * (1 + CLOSE)


@pytest.mark.parametrize(
    "number",
    [*_ALWAYS[1:36:6], *(pytest.param(n, marks=pytest.mark.slow) for n in _ALWAYS[36:])],
)
def test_a_local_search_leaves_neither_the_space_nor_the_bound_behind(number):
    """It goes on in what the enumeration holds fixed: warm-up, buckets, flags of parallelism."""
    instance = make_instance(number)
    best = search_exactly(canonical_question(instance.problem).problem)
    returned = plan(instance.problem, compare=False)
    assert best is not None
    assert returned.best.step_seconds <= best.step_seconds * (1 + CLOSE), instance.name
    assert plan_in_space(returned.best.plan, instance.problem)
    assert returned.lower_bound_seconds <= best.step_seconds * (1 + CLOSE)


@pytest.mark.parametrize(
    "number", [*_ALWAYS[:12], *(pytest.param(n, marks=pytest.mark.slow) for n in _SELDOM)]
)
def test_chips_that_just_hold_a_plan_do_not_make_the_bound_exceed_its_time(number):
    """Every plan is a test of the bound: its own time, with no byte more than it needs."""
    problem = make_instance(number).problem
    tables = Tables(problem)
    drafts = list(all_drafts(problem))
    for draft in random.Random(number).sample(drafts, min(12, len(drafts))):
        priced = price(finish(draft, tables), tables)
        if priced is None:
            continue
        limits = {pool.name: 1.0 for pool in problem.cluster.pools} | memory_needs(priced)
        just = tables.for_problem(with_memory(problem, limits))
        assert lower_bound(just) <= priced.step_seconds * (1 + CLOSE), draft


@pytest.mark.parametrize("number", _ALWAYS[:8])
def test_the_returned_draft_takes_the_returned_time(number):
    instance = make_instance(number)
    found = search_exactly(instance.problem)
    if found is None:
        return
    tables = Tables(instance.problem)
    priced = price(found.draft, tables)
    assert priced is not None
    assert priced.fits
    assert priced.step_seconds == pytest.approx(found.step_seconds, rel=CLOSE)


def test_most_plans_are_never_simulated():
    """The bounds earn their keep: over the instances, clearly fewer simulations than plans."""
    simulated = plans = 0
    for number in _ALWAYS[:12]:
        problem = make_instance(number).problem
        found = search_exactly(problem)
        if found is not None:
            simulated += found.simulated
            plans += sum(1 for _ in all_drafts(problem))
    assert simulated < 0.9 * plans, f"{simulated} of {plans}"


# --- the instances themselves ----------------------------------------------------------------


def _covered(instances: list[Instance]) -> collections.Counter[tuple[str, str]]:
    return collections.Counter(
        pair for instance in instances for pair in itertools.combinations(instance.open, 2)
    )


@pytest.mark.slow
def test_every_pair_of_dimensions_is_open_together_in_three_instances():
    assert NUM_INSTANCES >= 300
    instances = [make_instance(number) for number in range(NUM_INSTANCES)]
    counts = _covered(instances)
    assert set(counts) == set(PAIRS)
    assert min(counts.values()) >= 3
    for instance in instances:
        assert 3 <= len(instance.open) <= 6
        drafts = list(all_drafts(instance.problem))
        assert set(instance.open) <= varied(drafts) <= set(DIMENSIONS), instance.name
        assert instance.problem.cluster.num_chips <= 8
        assert len(instance.problem.cluster.pools) <= 3
    kinds = collections.Counter(len(i.problem.cluster.pools) for i in instances)
    assert set(kinds) == {1, 2, 3}


def test_an_instance_opens_the_pair_that_its_number_stands_for():
    """Each pair of dimensions has three numbers, so all instances together open every pair."""
    assert NUM_INSTANCES >= 300
    assert {PAIRS[number % len(PAIRS)] for number in range(NUM_INSTANCES)} == set(PAIRS)
    for number in _ALWAYS[:16]:
        instance = make_instance(number)
        assert set(PAIRS[number % len(PAIRS)]) <= set(instance.open)
        assert set(instance.open) <= varied(list(all_drafts(instance.problem)))


def test_instances_are_the_same_every_time():
    number = _ALWAYS[3]
    first = make_instance(number)
    make_instance.cache_clear()
    assert make_instance(number) == first
