"""Groups over pools that hosts join, and programs whose rounds differ: priced as they replay."""

from __future__ import annotations

import pytest

from tutti.bench.fabric.fabric_prices import ALLOWED, price_rows
from tutti.collective import Operation
from tutti.cost.network.group_links import group_links
from tutti.cost.network.program_choice import Efficiency, choose_program
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position

MIXED = Cluster.from_document(
    {
        "name": "mixed",
        "pools": [
            {"name": "a", "node": "HGX-A800", "nodes": 8},
            {"name": "p", "node": "OAM-8xP800", "nodes": 4},
            {"name": "n", "node": "Atlas-16x910B", "nodes": 2},
        ],
        "fabric": {
            "rail_optimized": True,
            "tiers": [{"name": "leaf", "nodes": 8}, {"name": "spine"}],
            "links": [
                {"pools": ["a", "p"], "kind": "direct"},
                {"pools": ["a", "n"], "kind": "host_forwarded", "nic_fraction": 0.5},
                {"pools": ["p", "n"], "kind": "host_forwarded", "nic_fraction": 0.5},
            ],
        },
    },
    Place("mixed.yaml"),
)


def test_choices_among_pools_are_the_best_that_replay_and_prices_are_what_it_takes() -> None:
    rows = price_rows(MIXED, sizes=(16e6, 1e9))
    groups = {row.group for row in rows}
    assert groups >= {"one chip of each node", "all of n", "one chip of each island of n"}
    for row in rows:
        assert row.choice_loss <= ALLOWED, row
        assert row.price_error == pytest.approx(0.0, abs=ALLOWED), row


def test_what_goes_to_several_pools_of_one_machine_leaves_a_chip_by_one_way() -> None:
    rows = price_rows(Cluster.load("emulated-4-2-1"))
    assert {row.ranks for row in rows} == {3}
    for row in rows:
        assert row.price_error == pytest.approx(0.0, abs=ALLOWED), row


def test_rails_and_what_crosses_them_leave_by_the_same_nic() -> None:
    """32 copies of a stage, one per island of 16 nodes: half of the others are on another rail."""
    cluster = Cluster.from_document(
        {
            "name": "islands",
            "pools": [{"name": "n", "node": "Atlas-16x910B", "nodes": 16}],
            "fabric": {"rail_optimized": True, "tiers": [{"name": "leaf", "nodes": 16}]},
        },
        Place("islands.yaml"),
    )
    copies = [Position("n", node, slot) for node in range(16) for slot in (0, 8)]
    links = group_links(cluster, copies)
    free = Efficiency(island=1.0, fabric=1.0, startup_s=0.0, hop_s=0.0)
    choice = choose_program(Operation.REDUCE_SCATTER, 1e12, links, free)
    (direct,) = [seconds for name, _, seconds in choice.alternatives if name == "direct"]
    nic = cluster.pool("n").node.nic_rate(0)
    # one of the 31 others is in the same node, and reached over its bridge
    assert direct == pytest.approx(31 / 32 * 1e12 / nic, rel=1e-3)


@pytest.mark.parametrize(
    ("nics", "nodes", "islands"), [(0.5, 4, 2), (1.0, 3, 4), (0.25, 6, 2), (1.0, 12, 4)]
)
def test_prices_are_what_it_takes_where_nodes_have_islands_with_a_bridge_between(
    nics: float, nodes: int, islands: int
) -> None:
    """A flat ring goes out and back over the same edge, one half after the other."""
    size = 8 // islands
    box = {
        "name": "box", "chip": "L40S", "num_chips": 8,
        "islands": [
            {"kind": "NVLink", "slots": f"{i * size}-{(i + 1) * size - 1}",
             "bandwidth": "200 GB/s", "latency_s": "3 us"}
            for i in range(islands)
        ],
        "bridge": {"kind": "PCIe", "bandwidth": "20 GB/s", "latency_s": "9 us"},
        "nics": {"rate": "100 Gb/s", "per_chip": nics},
    }  # fmt: skip
    document = {
        "name": "boxes", "nodes": [box], "pools": [{"name": "a", "node": "box", "nodes": nodes}],
        "fabric": {"rail_optimized": True, "tiers": [{"name": "leaf", "nodes": 16}]},
    }  # fmt: skip
    rows = price_rows(Cluster.from_document(document, Place("boxes.yaml")))
    assert {row.group for row in rows} >= {"all of a", "one chip of each island of a"}
    for row in rows:
        assert row.price_error == pytest.approx(0.0, abs=ALLOWED), row
        assert row.choice_loss <= ALLOWED, row


def test_only_groups_that_meet_over_a_narrow_link_have_a_reach() -> None:
    same, joined = (
        group_links(MIXED, [Position(*place, 0) for place in places])
        for places in ([("a", 0), ("p", 0)], [("a", 0), ("n", 0)])
    )
    assert same.reach is None
    assert joined.reach is not None


def test_rounds_of_a_tree_follow_each_other() -> None:
    """Two halves go up and down two trees of three levels: each level moves two of them."""
    links = group_links(MIXED, [Position("a", node, 0) for node in range(8)])
    free = Efficiency(island=1.0, fabric=1.0, startup_s=0.0, hop_s=0.0)
    size = 1e12  # so that latencies do not count
    choice = choose_program(Operation.ALL_REDUCE, size, links, free)
    priced = {(name, chunks): seconds for name, chunks, seconds in choice.alternatives}
    nic = MIXED.pools[0].node.nic_bandwidth / 8
    ring = 2 * 7 / 8 * size / nic
    assert priced["ring", 1] == pytest.approx(ring, rel=1e-6)
    assert priced["doubling", 1] == pytest.approx(ring, rel=1e-6)  # each round sends both ways
    assert priced["tree", 1] == pytest.approx(2 * 3 * size / nic, rel=1e-6)
