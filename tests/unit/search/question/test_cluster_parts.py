"""Single chips that are gone or slow: parts of a cluster, and plans that go there and back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.launching import plan_of
from tutti.cost.plan.sources import Sources
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.leaves import Leaves
from tutti.hardware.topology import Position
from tutti.hardware.wires import chips_of_wire, wire_of
from tutti.plan.check import check_plan
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica
from tutti.search.question.cluster_parts import cluster_parts
from tutti.simulate.estimate import estimate

LAPTOP = Cluster.load("laptop")
ONE, OTHER, SLOW = Position("fast", 0, 0), Position("fast", 0, 1), Position("slow", 0, 0)


def test_a_whole_cluster_stays_as_it_is() -> None:
    parts = cluster_parts(LAPTOP)
    assert parts is not None
    assert parts.cluster.pools == LAPTOP.pools
    assert all(here == there for here, there in parts.places.items())


def test_a_lost_chip_leaves_a_smaller_node() -> None:
    parts = cluster_parts(LAPTOP, [ONE])
    assert parts is not None
    assert [(p.name, p.num_chips) for p in parts.cluster.pools] == [("fast", 1), ("slow", 2)]
    assert parts.places[OTHER] == Position("fast", 0, 0)
    assert ONE not in parts.places
    assert parts.cluster.link(Position("fast", 0, 0), Position("slow", 0, 0)).bandwidth == 1e9


def test_a_slow_chip_is_a_pool_of_its_own_with_the_link_of_its_island() -> None:
    parts = cluster_parts(LAPTOP, (), {OTHER: 2.0})
    assert parts is not None
    names = [pool.name for pool in parts.cluster.pools]
    assert names == ["fast", "fast+1", "slow"]
    slow = parts.cluster.pool("fast+1").chip
    assert slow.sustained == pytest.approx(LAPTOP.pool("fast").chip.sustained / 2)
    there = parts.places[OTHER]
    assert parts.cluster.link(parts.places[ONE], there).bandwidth == 2e9


def test_nothing_left() -> None:
    everything = [Position(p, 0, s) for p in ("fast", "slow") for s in range(2)]
    assert cluster_parts(LAPTOP, everything) is None


def test_nodes_that_lost_the_same_are_one_pool() -> None:
    cluster = Cluster.load("small-mixed")
    pool = next(pool for pool in cluster.pools if pool.nodes > 1)
    lost = [Position(pool.name, node, 0) for node in range(2)]
    parts = cluster_parts(cluster, lost)
    assert parts is not None
    own = [p for p in parts.cluster.pools if p.name.split("+")[0] == pool.name]
    assert sum(p.num_chips for p in own) == pool.num_chips - 2
    smaller = [p for p in own if p.node.num_chips < pool.node.num_chips]
    assert [p.nodes for p in smaller] == [2]


def test_a_plan_goes_there_and_back_and_its_slow_copy_has_a_price() -> None:
    replicas = [[Replica(chips=ChipSet.of("fast/0/0-1"), count=2)]]
    plan = plan_of(LAPTOP, replicas)
    parts = cluster_parts(LAPTOP, (), {OTHER: 2.0})
    assert parts is not None
    moved = parts.from_real(plan)
    assert moved is not None
    assert [r.count for r in moved.pipelines[0].stages[0].replicas] == [1, 1]
    spec = plan.model.spec
    assert spec is not None
    assert not check_plan(moved, spec, parts.cluster)
    before = estimate(plan, spec, LAPTOP, Sources()).step_seconds
    assert estimate(moved, spec, parts.cluster, Sources()).step_seconds > 1.3 * before
    back = parts.to_real(moved)
    assert not check_plan(back, spec, LAPTOP)
    assert [str(c) for _, _, s in back.stages() for c in s.chips] == ["fast/0/0", "fast/0/1"]


def test_what_has_no_place_in_the_parts_has_no_plan() -> None:
    plan = plan_of(LAPTOP, [[Replica(chips=ChipSet.of("fast/0/0-1"), count=2)]])
    lost = cluster_parts(LAPTOP, [ONE])
    assert lost is not None
    assert lost.from_real(plan) is None
    across = plan_of(LAPTOP, [[Replica(chips=ChipSet.of("fast/0/0-1"), tp=2)]])
    slow = cluster_parts(LAPTOP, (), {OTHER: 2.0})
    assert slow is not None
    assert slow.from_real(across) is None


MIXED = Cluster.from_document(
    {
        "name": "two-pools",
        "pools": [{"name": "a", "chip": "A800", "nodes": 4}, {"name": "b", "chip": "A800"}],
    },
    Place("here"),
)


def several() -> str:
    """Return the name of a pool of several nodes."""
    return next(pool.name for pool in MIXED.pools if pool.nodes > 1)


def test_a_slow_wire_slows_what_goes_over_it_and_nothing_else() -> None:
    name = several()
    chips = [Position(name, node, 0) for node in range(3)]
    wire = wire_of(MIXED, chips[1])
    parts = cluster_parts(MIXED, wires={(wire,): 2.0})
    assert parts is not None
    here = [parts.places[chip] for chip in chips]
    before = MIXED.link(chips[0], chips[1])
    assert parts.cluster.link(here[0], here[1]).bandwidth == pytest.approx(before.bandwidth / 2)
    assert parts.cluster.link(here[2], here[1]).bandwidth == pytest.approx(before.bandwidth / 2)
    assert parts.cluster.link(here[0], here[2]).bandwidth == pytest.approx(before.bandwidth)
    assert parts.cluster.pool(here[1].pool).chip == MIXED.pool(name).chip


def test_a_slow_link_slows_what_goes_between_its_ends_only() -> None:
    name = several()
    chips = [Position(name, node, 0) for node in range(3)]
    ends = (wire_of(MIXED, chips[0]), wire_of(MIXED, chips[2]))
    parts = cluster_parts(MIXED, wires={ends: 4.0})
    assert parts is not None
    here = [parts.places[chip] for chip in chips]
    before = MIXED.link(chips[0], chips[2]).bandwidth
    assert parts.cluster.link(here[0], here[2]).bandwidth == pytest.approx(before / 4)
    assert parts.cluster.link(here[0], here[1]).bandwidth == pytest.approx(before)
    assert parts.cluster.link(here[1], here[2]).bandwidth == pytest.approx(before)


def test_a_slow_wire_slows_links_between_pools_too() -> None:
    one, other = (pool.name for pool in MIXED.pools[:2])
    chips = Position(one, 0, 0), Position(other, 0, 0)
    parts = cluster_parts(MIXED, wires={(wire_of(MIXED, chips[0]),): 2.0})
    assert parts is not None
    now = parts.cluster.link(parts.places[chips[0]], parts.places[chips[1]]).bandwidth
    assert now == pytest.approx(MIXED.link(*chips).bandwidth / 2)


def test_parts_of_a_pool_keep_the_leaves_of_their_nodes() -> None:
    name = several()
    pools = [
        replace(pool, leaves=Leaves(tuple(range(pool.nodes)))) if pool.name == name else pool
        for pool in MIXED.pools
    ]
    parts = cluster_parts(replace(MIXED, pools=tuple(pools)), [Position(name, 1, 0)])
    assert parts is not None
    lost = parts.places[Position(name, 1, 1)].pool
    assert parts.cluster.pool(lost).leaves == Leaves((1,))


def test_wires_are_named_by_their_node_or_by_the_first_chip_that_has_them() -> None:
    for pool in MIXED.pools:
        for slot in range(pool.node.num_chips):
            chip = Position(pool.name, 0, slot)
            sharing = chips_of_wire(MIXED, wire_of(MIXED, chip))
            assert chip in sharing
            assert {pool.node.nics_of(c.slot) for c in sharing} == {pool.node.nics_of(slot)}
    for wrong in ("here", "a/b", f"{several()}/99", f"{several()}/0/99"):
        with pytest.raises(InputError):
            chips_of_wire(MIXED, wrong)
