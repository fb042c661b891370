"""From places to groups: islands, rails and the order on the wire."""

from __future__ import annotations

import dataclasses

import pytest

from tutti.comm import Place, Topology, place_of
from tutti.cost.network.group_links import group_links
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position


def topology(*hosts: str, **fields: tuple[object, ...]) -> Topology:
    return Topology(
        tuple(
            Place(host=host, **{name: values[rank] for name, values in fields.items()})
            for rank, host in enumerate(hosts)
        )
    )


def test_ranks_of_a_host_stand_together_however_they_are_numbered() -> None:
    group = topology("a", "b", "a", "b", "c").group(range(5))
    assert [island.ranks for island in group.islands] == [(0, 2), (1, 3), (4,)]


def test_the_wire_decides_the_order_of_islands_and_the_rail_that_inside() -> None:
    places = topology("x", "y", "x", "y", wire=((9,), (2,), (9,), (2,)), rail=(1, 1, 0, 0))
    assert places.group(range(4)).ranks == (3, 1, 2, 0)


def test_unlike_backends_of_one_host_are_two_islands() -> None:
    places = topology("a", "a", "a", "a", native=("nccl", "xccl", "nccl", "xccl"))
    group = places.group(range(4))
    assert [island.ranks for island in group.islands] == [(0, 2), (1, 3)]
    assert places.native_backend((0, 2)) == "nccl"
    assert places.native_backend((0, 1)) == ""


def test_two_ranks_on_one_chip_cannot_use_a_native_backend() -> None:
    places = topology("a", "a", native=("nccl", "nccl"), device=("gpu 0", "gpu 0"))
    assert places.native_backend((0, 1)) == ""


def test_nics_of_known_rate_weigh() -> None:
    group = topology("a", "b", bandwidth=(1e9, 4e9)).group([0, 1])
    assert [island.bandwidths for island in group.islands] == [(1e9,), (4e9,)]
    assert topology("a", "b", bandwidth=(1e9, 0.0)).group([0, 1]).islands[1].bandwidths == ()


def test_a_cluster_file_says_where_a_chip_sits() -> None:
    cluster = Cluster.load("S32")
    chips = [
        Position(pool.name, node, slot)
        for pool in cluster.pools
        for node in range(pool.nodes)
        for slot in range(pool.node.num_chips)
    ]
    places = [
        dataclasses.replace(place_of(cluster, chip), host=f"{chip.pool}{chip.node}")
        for chip in reversed(chips)
    ]
    group = Topology(tuple(places)).group(range(len(places)))
    due = group_links(cluster, chips[::-1]).group
    assert [set(island.ranks) for island in group.islands] == [set(i.ranks) for i in due.islands]
    assert all(rate > 0 for island in group.islands for rate in island.bandwidths)


def test_nodes_that_one_host_stands_for_stay_apart() -> None:
    cluster = Cluster.load("S32")
    chips = [Position("a800", node, slot) for node in range(2) for slot in range(8)]
    places = [dataclasses.replace(place_of(cluster, chip), host="here") for chip in chips]
    group = Topology(tuple(places)).group(range(16))
    assert [island.ranks for island in group.islands] == [tuple(range(8)), tuple(range(8, 16))]
    assert {place.chip for place in places} == {"A800"}


def test_the_way_between_two_ranks() -> None:
    places = Topology(
        (
            Place(host="a", local_name="1"),
            Place(host="a", local_name="2"),
            Place(host="b", local_name="3", transports=("rdma",)),
            Place(host="c", transports=("other", "rdma")),
        )
    )
    assert places.transport(0, 1) == "shared"
    assert places.transport(0, 2) == "tcp"
    assert places.transport(2, 3) == "rdma"


def test_groups_of_nobody_or_of_strangers_are_refused() -> None:
    with pytest.raises(InputError, match="no ranks"):
        topology("a").group([])
    with pytest.raises(InputError, match="rank 3 is not among the 1"):
        topology("a").group([3])


def test_a_place_survives_the_store() -> None:
    place = Place(host="a", wire=(1, 2), addresses=("10.0.0.1", "10.0.1.1"), numa=1)
    assert Place.from_document(place.to_document()) == place
