from __future__ import annotations

import functools
import math

from tutti.bench.judge.questions import MODELS, NUM_DRAWN, DrawnQuestion, draw
from tutti.bench.judge.variants import forms, more, split_pool
from tutti.bench.judge.verdict import verdict_of


@functools.cache
def drawn() -> list[DrawnQuestion]:
    return [draw(number) for number in range(NUM_DRAWN)]


def test_questions_are_the_same_every_time():
    assert [draw(number) for number in (3, 17)] == [drawn()[3], drawn()[17]]


def test_questions_cover_what_they_promise():
    assert len(MODELS) == 12
    assert {question.model.name for question in drawn()} >= {"mixtral-8x7b", "smollm2-360m"}
    assert {len(question.cluster.pools) for question in drawn()} == {2, 3, 4}
    chips = [question.cluster.num_chips for question in drawn()]
    assert min(chips) <= 3
    assert 256 < max(chips) <= 512
    assert max(question.sequence_length for question in drawn()) == 131072
    assert min(question.global_batch for question in drawn()) == 8
    assert any(question.model.num_experts for question in drawn())
    assert any(question.cluster.fabric.links for question in drawn())
    assert any(question.cluster.fabric.oversubscribed for question in drawn())


def test_other_forms_are_the_same_chips():
    for question in drawn():
        for name, cluster in forms(question):
            assert cluster.num_chips == question.cluster.num_chips, name
            assert cluster.memory_bytes == question.cluster.memory_bytes
        split = split_pool(question.cluster)
        if split is not None:
            assert len(split.pools) == len(question.cluster.pools) + 1
            for one in question.cluster.pools:
                for other in question.cluster.pools:
                    if one is not other:
                        links = (
                            c.cross_link(one.name, other.name) for c in (question.cluster, split)
                        )
                        first, second = links
                        assert first == second


def test_more_is_more():
    for question in drawn()[:40]:
        clusters = dict(more(question))
        assert clusters["memory"].memory_bytes == 1.5 * question.cluster.memory_bytes
        if "a node" in clusters:
            assert clusters["a node"].num_chips > question.cluster.num_chips
        before, after = (sum(p.node.nic_bandwidth for p in c.pools)
                         for c in (question.cluster, clusters["links"]))  # fmt: skip
        assert after == 2 * before


def test_the_verdict_counts_what_was_lost():
    row = {"gain_pct": 0.0, "forms_pct": {"order": -0.4}, "more_pct": {"a node": -5.0},
           "below_bound": False}  # fmt: skip
    lost = {**row, "gain_pct": 1.5, "more_pct": {"memory": None}, "below_bound": True}
    verdict = verdict_of([row, lost, {"why": "does not fit"}])
    assert verdict.unanswered == 1
    assert verdict.nothing_pct == 50.0
    assert verdict.worst_form_pct == 0.4
    assert verdict.worst_more_pct == math.inf
    assert (verdict.forms_apart, verdict.more_worse, verdict.below_bound) == (2, 1, 1)
    assert not verdict.passes
