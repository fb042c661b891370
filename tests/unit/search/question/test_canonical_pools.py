from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.bench.judge.questions import draw
from tutti.bench.judge.variants import forms, split_pool
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.plan.check import check_plan
from tutti.search.ask_from_values import make_problem
from tutti.search.planner import plan
from tutti.search.question.canonical_pools import canonical_question
from tutti.search.question.effort import Effort


def problem_of(question, cluster=None):
    return make_problem(question.model, cluster or question.cluster,
                        sequence_length=question.sequence_length,
                        global_batch=question.global_batch)  # fmt: skip


def facts(question):
    """Return a question in its one form, without names."""
    cluster = canonical_question(question).problem.cluster
    place = {pool.name: str(i) for i, pool in enumerate(cluster.pools)}
    links = {
        (frozenset(place[name] for name in link.pools), str(replace(link, pools=("", "-"))))
        for link in cluster.fabric.links
    }
    return [replace(pool, name="x") for pool in cluster.pools], links


@pytest.mark.parametrize("number", range(0, 200, 7))
def test_all_forms_of_a_question_are_one(number):
    question = draw(number)
    one = facts(problem_of(question))
    for name, cluster in forms(question):
        assert facts(problem_of(question, cluster)) == one, name


SMALL = {
    "name": "small",
    "pools": [
        {"name": "b", "chip": "A100-80", "chips_per_node": 2, "nodes": 3},
        {"name": "a", "chip": "V100-32", "chips_per_node": 2, "nodes": 1},
    ],
}


def test_a_split_pool_is_planned_as_one_and_given_back_as_two():
    cluster = Cluster.from_document(SMALL, Place("small"))
    split = split_pool(cluster)
    assert [pool.nodes for pool in split.pools] == [1, 2, 1]
    problems = [
        make_problem("llama-3.2-1b", c, sequence_length=1024, global_batch=24)
        for c in (cluster, split, replace(cluster, pools=cluster.pools[::-1]))
    ]
    few = Effort(last_mile=100_000)
    results = [plan(problem, compare=False, effort=few) for problem in problems]
    steps = [result.best.step_seconds for result in results]
    assert steps[1:] == pytest.approx(steps[:1] * 2, rel=3e-3)
    for problem, result in zip(problems, results, strict=True):
        made = result.best.plan
        assert not check_plan(made, problem.model, problem.cluster)
        used = [chip for _, _, stage in made.stages() for chip in stage.chips]
        assert len(used) + len(made.idle) == problem.cluster.num_chips
        assert result.lower_bound_seconds <= result.best.step_seconds


def test_pools_that_something_tells_apart_stay_two():
    cluster = Cluster.from_document(SMALL, Place("small"))
    split = split_pool(cluster)
    dear = replace(split.pools[1], price_per_chip_hour=2.0)
    for other in (
        replace(split, pools=(split.pools[0], dear, split.pools[2])),
        Cluster.from_document(
            {**split.to_document(), "fabric": {
                "links": [{"pools": ["b", "b-rest"], "bandwidth": 1e9}]}},
            Place("slow"),
        ),
    ):  # fmt: skip
        problem = make_problem("llama-3.2-1b", other, sequence_length=1024, global_batch=24)
        assert len(canonical_question(problem).problem.cluster.pools) == 3
