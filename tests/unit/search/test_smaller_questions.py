"""What smaller questions find belongs to the larger one, and is looked at where the gap is wide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.search.ask_from_values import Limits, make_problem
from tutti.search.candidate_loop import Search
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.effort import Effort
from tutti.search.smaller_questions import smaller_questions, take_smaller
from tutti.search.strategy.space_limits import draft_keeps, plan_in_space

CLUSTER = {
    "name": "three",
    "pools": [
        {"name": "a", "chip": "A100-80", "chips_per_node": 4},
        {"name": "b", "chip": "V100-32", "chips_per_node": 4},
        {"name": "c", "chip": "L40S", "chips_per_node": 2},
    ],
}
FEW = Effort(candidates=1, most_candidates=1, instructions=5_000, per_chip=0)


def problem_of(**limits):
    cluster = Cluster.from_document(CLUSTER, Place("three"))
    return make_problem("llama-3.2-1b", cluster, sequence_length=1024, global_batch=24,
                        limits=Limits(**limits))  # fmt: skip


def searched(problem, effort, bound):
    search = Search(Tables(problem), effort, bound=bound)
    search.run()
    return search


def test_what_they_find_is_ranked_beside_the_rest():
    problem = problem_of()
    search = searched(problem, FEW, 1e-6)  # as wide a gap as can be
    before = list(search.ranked.drafts)
    take_smaller(search)
    added = [ranked for ranked in search.ranked.drafts if ranked not in before]
    assert added
    assert search.ranked.best.seconds <= before[0].seconds
    for ranked in added:
        assert ranked.fits
        assert draft_keeps(ranked.draft, problem)
        assert plan_in_space(search.simulator.plan_of(ranked.draft), problem)


@pytest.mark.parametrize(
    ("effort", "bound"),
    [(FEW, 1e3), (FEW, None), (replace(FEW, smaller=0), 1e-6), (replace(FEW, large=4), 1e-6)],
)
def test_nothing_is_asked_where_little_can_be_won_or_much_costs(effort, bound):
    search = searched(problem_of(), effort, bound)
    before = search.simulator.simulated
    take_smaller(search)
    assert search.simulator.simulated == before


def test_each_is_a_part_of_the_question():
    problem = problem_of(idle=False, tp_max=1)
    names = [name for name, _ in smaller_questions(Tables(problem), 4)]
    assert names == ["cp = 1", "half as many stages", "less memory"]
    problem = problem_of()
    asked = dict(smaller_questions(Tables(problem), 1))
    wanted = {"tp ≤ 2", "cp = 1", "without a", "without b", "without c", "less memory"}
    assert asked.keys() == wanted
    assert {pool.name for pool in asked["without a"].problem.pools} == {"b", "c"}
    memory = asked["less memory"].problem.cluster.memory_bytes
    assert memory == pytest.approx(2 / 3 * problem.cluster.memory_bytes)
