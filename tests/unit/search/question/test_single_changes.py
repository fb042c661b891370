"""What-if changes of single chips, wires and links, and a running plan under them."""

from __future__ import annotations

import pytest

from tests.support.launching import plan_of
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.plan.check import check_plan
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica
from tutti.search.question.what_if import change_cluster
from tutti.search.replan.changed_plan import changed_plan

ROOM = Cluster.from_document(
    {
        "name": "room",
        "pools": [{"name": "a", "chip": "A800", "nodes": 4}, {"name": "b", "chip": "A800"}],
    },
    Place("here"),
)


def test_a_chip_goes_and_the_others_of_its_node_stay() -> None:
    change = change_cluster(ROOM, "-chip a/1/3")
    assert change.parts is not None
    assert change.cluster.num_chips == ROOM.num_chips - 1
    assert Position("a", 1, 3) not in change.parts.places
    assert change.words == "-chip a/1/3"


def test_a_slow_chip_and_a_slow_node() -> None:
    sustained = ROOM.pool("a").chip.sustained
    for text, chips in (("slow a/1/3 0.5", 1), ("slow a/1 0.5", 8)):
        change = change_cluster(ROOM, text)
        slow = [p for p in change.cluster.pools if p.chip.sustained < sustained]
        assert sum(p.num_chips for p in slow) == chips
        assert slow[0].chip.sustained == pytest.approx(sustained / 2)


def test_a_slow_wire_and_a_slow_link_after_a_node_went() -> None:
    """Numbers are those of the cluster before all changes."""
    here = [Position("a", node, 0) for node in range(4)]
    before = ROOM.link(here[2], here[3]).bandwidth
    change = change_cluster(ROOM, "-node a/0, link a/2/0 a/3/0 0.25")
    assert change.parts is not None
    now = [change.parts.places[Position("a", node - 1, 0)] for node in (1, 2, 3)]
    assert change.cluster.link(now[1], now[2]).bandwidth == pytest.approx(before / 4)
    assert change.cluster.link(now[0], now[2]).bandwidth == pytest.approx(before)
    change = change_cluster(ROOM, "wire a/2/0 0.5")
    assert change.parts is not None
    now = [change.parts.places[chip] for chip in here]
    assert change.cluster.link(now[0], now[2]).bandwidth == pytest.approx(before / 2)
    assert change.cluster.link(now[0], now[3]).bandwidth == pytest.approx(before)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-chip a/9/0", "node 9 does not exist"),
        ("-chip c/0/0", "no pool 'c'"),
        ("slow a/0/0 2", "at most as quick as it is"),
        ("slow a/0/0 fast", "is no factor"),
        ("wire a/0 1.5", "at most what it can"),
        ("link a/0/0 a/0/0 0.5", "on one wire"),
        ("-node a/1, slow a/1/0 0.5", "is gone already"),
        ("-chip a/1", "no change"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as told:
        change_cluster(ROOM, text)
    assert str(told.value).startswith("what-if: ")
    assert "\n" not in str(told.value)


def test_a_running_plan_goes_to_the_parts_and_what_comes_back_holds() -> None:
    laptop = Cluster.load("laptop")
    replicas = [[Replica(chips=ChipSet.of("fast/0/0-1"), count=2)]]
    plan = plan_of(laptop, replicas)
    spec = plan.model.spec
    assert spec is not None
    for text, chips in (("slow fast/0/1 0.5", 2), ("-chip fast/0/1", 1)):
        change = change_cluster(laptop, text)
        moved = changed_plan(plan, change, spec)
        assert moved.num_ranks == chips
        assert not check_plan(moved, spec, change.cluster)
        assert change.parts is not None
        assert not check_plan(change.parts.to_real(moved), spec, laptop)
    whole = change_cluster(laptop, "-pool slow")
    assert changed_plan(plan, whole, spec) is plan


def test_a_plan_that_cannot_go_on_is_said_so() -> None:
    laptop = Cluster.load("laptop")
    stages = [[Replica(chips=ChipSet.of(f"fast/0/{n}"))] for n in range(2)]
    plan = plan_of(laptop, stages)
    spec = plan.model.spec
    assert spec is not None
    with pytest.raises(InputError, match="plan without --replan-from"):
        changed_plan(plan, change_cluster(laptop, "-chip fast/0/1"), spec)
    both = change_cluster(laptop, "-pool slow, slow fast/0/1 0.5")
    assert changed_plan(plan, both, spec).num_ranks == 2
