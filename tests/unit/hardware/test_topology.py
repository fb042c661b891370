"""How two chips reach each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped_cluster_names
from tutti.hardware.topology import Link, LinkKind, Position


def link(cluster: str, first: str, second: str) -> Link:
    return Cluster.load(cluster).link(Position.parse(first), Position.parse(second))


def test_inside_a_node() -> None:
    assert link("E1000", "a800/0/3", "a800/0/3").kind is LinkKind.SELF
    nvlink = link("E1000", "a800/0/0", "a800/0/7")
    assert (nvlink.kind, nvlink.medium, nvlink.bandwidth) == (LinkKind.ISLAND, "NVLink", 200e9)
    mesh = link("E1000", "ascend/0/0", "ascend/0/7")
    assert (mesh.kind, mesh.bandwidth, mesh.chip_bandwidth) == (LinkKind.ISLAND, 28e9, 196e9)
    bridge = link("E1000", "ascend/0/7", "ascend/0/8")
    assert (bridge.kind, bridge.medium, bridge.bandwidth) == (LinkKind.NODE, "PCIe", 25e9)


def test_rails_and_tiers() -> None:
    rail = link("H16384", "a800/0/3", "a800/63/3")
    assert (rail.kind, rail.medium, rail.bandwidth) == (LinkKind.RAIL, "leaf", 25e9)
    other_rail = link("H16384", "a800/0/3", "a800/1/4")
    assert (other_rail.kind, other_rail.medium) == (LinkKind.FABRIC, "spine")
    assert link("H16384", "a800/0/3", "a800/64/3").medium == "spine"
    assert link("H16384", "a800/0/3", "a800/512/3").medium == "core"
    assert link("H16384", "a800/0/3", "a800/512/3").latency_s == pytest.approx(6e-6)


def test_oversubscription_multiplies_on_the_way_up() -> None:
    assert link("oversubscribed", "h800/0/0", "h800/7/0").oversubscription == 1
    assert link("oversubscribed", "h800/0/0", "h800/8/0").oversubscription == 2
    top = link("oversubscribed", "h800/0/0", "h800/16/0")
    assert top.oversubscription == 4
    assert top.contended_bandwidth == 50e9 / 4


def test_between_pools() -> None:
    direct = link("E1536", "a800/0/0", "p800/0/0")
    assert (direct.kind, direct.host_forwarded, direct.bandwidth) == (
        LinkKind.CROSS_POOL,
        False,
        25e9,
    )
    forwarded = link("E1536", "a800/0/0", "ascend/0/0")
    assert (forwarded.host_forwarded, forwarded.bandwidth) == (True, 12.5e9)
    assert forwarded.latency_s > direct.latency_s
    shared = link("laptop", "fast/0/0", "slow/0/1")
    assert (shared.medium, shared.bandwidth, shared.latency_s) == ("shared memory", 1e9, 50e-6)


def test_pools_without_a_link_are_direct_within_a_vendor_only() -> None:
    pools = [{"name": n, "chip": c} for n, c in (("a", "A800"), ("h", "H100"), ("p", "P800"))]
    cluster = Cluster.from_document({"name": "x", "pools": pools}, Place("x"))
    assert not cluster.link(Position("a", 0, 0), Position("h", 0, 0)).host_forwarded
    assert cluster.link(Position("a", 0, 0), Position("h", 0, 0)).bandwidth == 25e9
    assert cluster.link(Position("a", 0, 0), Position("p", 0, 0)).host_forwarded


def test_a_shared_nic_is_shared() -> None:
    shared = link("leftovers", "l40s/0/0", "l40s/1/0")
    assert shared.bandwidth == 25e9
    assert shared.chip_bandwidth == 25e9 / 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a800", "pool/node/slot"),
        ("a800/1", "pool/node/slot"),
        ("a800/x/1", "pool/node/slot"),
        ("a800/-1/1", "pool/node/slot"),
        ("a800/1/8", "slot 8 does not exist; pool 'a800' has slots 0-7"),
        ("a800/8/0", "node 8 does not exist; pool 'a800' has nodes 0-7"),
        ("a80/0/0", "did you mean 'a800'"),
    ],
)
def test_chips_that_do_not_exist(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        link("E100", text, "a800/0/0")
    assert message in str(caught.value)


@given(st.data())
def test_links_are_symmetric_positive_and_ids_round_trip(data: st.DataObject) -> None:
    cluster = Cluster.load(data.draw(st.sampled_from(shipped_cluster_names())))

    def anywhere() -> Position:
        pool = data.draw(st.sampled_from(cluster.pools))
        node = data.draw(st.integers(0, pool.nodes - 1))
        return Position(pool.name, node, data.draw(st.integers(0, pool.node.num_chips - 1)))

    first, second = anywhere(), anywhere()
    there, back = cluster.link(first, second), cluster.link(second, first)
    assert there == back
    assert Position.parse(str(first)) == first
    assert there.contended_bandwidth > 0
    assert there.bandwidth > 0
    assert there.latency_s >= 0
    assert (there.kind is LinkKind.SELF) == (first == second)
