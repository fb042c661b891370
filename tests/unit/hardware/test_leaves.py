"""Leaves that pools name: read, written, shared, refused."""

from __future__ import annotations

import pytest

from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.leaves import Leaves, spanning_tier
from tutti.hardware.topology import LinkKind, Position


def cluster(**pools: object) -> Cluster:
    document = {
        "name": "named",
        "pools": [
            {"name": name, "node": "HGX-H800", "nodes": 4, "leaves": leaves}
            for name, leaves in pools.items()
        ],
        "fabric": {
            "rail_optimized": True,
            "tiers": [{"name": "leaf", "nodes": 4}, {"name": "spine", "nodes": 8},
                      {"name": "core", "oversubscription": 2, "latency_s": "9 us"}],
        },
    }  # fmt: skip
    return Cluster.from_document(document, Place("named.yaml"))


def test_leaves_are_written_in_short_and_read_back() -> None:
    for text in ("0*64, 1*32", "3", "2*2, 5, 2"):
        read = Leaves.from_document(text, Place("x"))
        assert str(read) == text
        assert Leaves.from_document(list(read.numbers), Place("x")) == read
    named = cluster(a="0*2, 1*2", b="1*2, 2*2")
    assert Cluster.from_document(named.to_document(), Place("again")) == named


def test_pools_share_leaves_and_meet_where_they_do() -> None:
    named = cluster(a="0*2, 1*2", b="1*2, 2*2")
    beside = named.link(Position("a", 3, 0), Position("b", 0, 0))
    assert (beside.kind, beside.medium) == (LinkKind.CROSS_POOL, "leaf")
    above = named.link(Position("a", 0, 0), Position("b", 0, 0))
    assert above.medium == "spine"
    far = named.link(Position("a", 0, 0), Position("b", 3, 0))
    assert (far.medium, far.oversubscription) == ("core", 2.0)
    assert named.link(Position("a", 0, 0), Position("a", 2, 0)).medium == "spine"
    assert spanning_tier(named.fabric, named.pool("a")) == 1
    assert spanning_tier(named.fabric, named.pool("b")) == 2


def test_some_nodes_of_a_pool_keep_their_places() -> None:
    pool = cluster(a="0*2, 1*2").pool("a")
    assert str(pool.of_nodes([1, 3]).leaves) == "0, 1"
    grown = pool.of_nodes([0, 1, None])
    assert (grown.nodes, len(grown.leaves)) == (3, 0)


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ("0*3", "names the leaves of 3 nodes, but there are 4"),
        ("0*2, one*2", "write the leaf of each node in turn"),
        ("0*9999999", "more than 1,000,000 nodes"),
        (True, "write the leaf of each node in turn"),
    ],
)
def test_bad_leaves_are_one_line(leaves: object, said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        cluster(a=leaves)
    assert "\n" not in str(raised.value)


def test_too_many_nodes_on_a_leaf_and_too_fast_nics_are_refused() -> None:
    with pytest.raises(InputError, match=r"leaf 1 is named by 6 nodes, but tier 'leaf' joins 4"):
        cluster(a="1*4", b="1*2, 2*2")
    document = cluster(a="0*4").to_document()
    document["fabric"]["tiers"][0]["port_rate"] = "100 Gb/s"
    with pytest.raises(InputError, match=r"NIC ports of 400 Gb/s, but the ports of tier 'leaf'"):
        Cluster.from_document(document, Place("slow.yaml"))
    document["fabric"]["planes"] = 4
    assert Cluster.from_document(document, Place("four.yaml")).fabric.planes == 4
