"""Of plans that take the same time, the one that splits less is better."""

from __future__ import annotations

from tests.support.launching import plan_of
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan, Replica
from tutti.search.strategy.tie_break import splitting


def plan(**degrees: int) -> Plan:
    document = {"name": "x", "pools": [{"name": "a", "chip": "A800", "nodes": 1}]}
    cluster = Cluster.from_document(document, Place("x"))
    return plan_of(cluster, [[Replica(chips=ChipSet.of("a/0/0-7"), **degrees)]])


def test_plans_are_ordered_by_what_they_split() -> None:
    apart, by_matrix = plan(count=8), plan(tp=2, count=4)
    by_sequence, both = plan(cp=2, count=4), plan(tp=2, cp=2, count=2)
    assert splitting(apart) == (0, 0)
    found = sorted([both, by_sequence, by_matrix, apart], key=splitting)
    assert found == [apart, by_matrix, both, by_sequence]
