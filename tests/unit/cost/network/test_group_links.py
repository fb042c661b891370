"""Groups of chips of several pools: what they are must not depend on how a file is written."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tutti.cost.network.group_links import group_links
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position

THREE = {
    "name": "three",
    "pools": [
        {"name": "c", "chip": "V100-32", "chips_per_node": 8, "nodes": 2},
        {"name": "b", "chip": "MI300X", "chips_per_node": 8, "nodes": 1},
        {"name": "a", "chip": "H20", "chips_per_node": 8, "nodes": 1},
    ],
}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:])
def test_a_group_is_the_same_in_whatever_order_pools_are_written(order: tuple[int, ...]) -> None:
    """Algorithms begin at the first island: which one that is must follow from what the pools are.

    Otherwise a plan that was searched in one order takes longer in the order of the user's file.
    """
    cluster = Cluster.from_document(THREE, Place("three"))
    chips = [Position(name, 0, slot) for name in "cab" for slot in range(2)]
    one = group_links(cluster, chips)
    other = group_links(replace(cluster, pools=tuple(cluster.pools[i] for i in order)), chips)
    assert other == one
    names = {"a": "z", "b": "x", "c": "y"}
    renamed = tuple(replace(pool, name=names[pool.name]) for pool in cluster.pools)
    elsewhere = [chip._replace(pool=names[chip.pool]) for chip in chips]
    assert group_links(replace(cluster, pools=renamed), elsewhere).group == one.group


def test_islands_of_one_pool_lie_side_by_side() -> None:
    cluster = Cluster.from_document(THREE, Place("three"))
    chips = [Position("c", 0, 0), Position("a", 0, 0), Position("c", 1, 0), Position("b", 0, 0)]
    found = group_links(cluster, chips)
    assert [island.ranks for island in found.group.islands] == [(1,), (3,), (0,), (2,)]
