"""Prices where tiers limit: against flows on the wiring."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.unit.fabric.support import clos
from tutti.bench.fabric.fabric_prices import price_rows
from tutti.collective import Operation, build
from tutti.cost.arrays import Machine
from tutti.cost.constants import Constants
from tutti.cost.network.closed_forms import all_reduce_seconds, all_to_all_seconds
from tutti.cost.network.group_links import group_links
from tutti.cost.network.program_choice import Efficiency, choose_program, price_named
from tutti.cost.network.reach import limits_of, may_limit
from tutti.document import Place
from tutti.fabric.balance import balance
from tutti.fabric.paths import Rules
from tutti.fabric.replay import Teams, replay
from tutti.fabric.wiring import wire
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import Routing
from tutti.hardware.topology import Position
from tutti.plan.chips import ChipSet

EFFICIENCY = Efficiency()


def _replayed(cluster: Cluster, chips: list[Position], name: str) -> float:
    links = group_links(cluster, chips)
    return replay(
        build(Operation.ALL_REDUCE, name, links.group), chips, wire(cluster), 1e9,
        efficiency=EFFICIENCY.fabric, inside=EFFICIENCY.island, hop_s=EFFICIENCY.hop_s,
    ).seconds  # fmt: skip


def test_an_all_reduce_over_an_oversubscribed_spine_is_a_ring() -> None:
    """One chip of each of 32 nodes: every program priced as its flows take, the ring chosen."""
    cluster = Cluster.load("oversubscribed")
    chips = [Position("h800", node, 0) for node in range(32)]
    choice = choose_program(Operation.ALL_REDUCE, 1e9, group_links(cluster, chips), EFFICIENCY)
    assert choice.algorithm == "ring"
    for name, chunks, seconds in choice.alternatives:
        assert chunks == 1
        assert seconds == pytest.approx(_replayed(cluster, chips, name), rel=0.02), name
    # 38.75 ms of bytes at the whole rate, as `fabric` replays it
    assert choice.seconds == pytest.approx(38.75e-3 / EFFICIENCY.fabric, rel=0.02)


def test_scattered_chips_cost_more_than_neighbours() -> None:
    cluster = Cluster.load("oversubscribed")
    scattered = [Position("h800", (node * 9) % 32, 0) for node in range(32)]
    order = sorted(scattered)
    for chips in (scattered, order):  # a group's ring is in the order of the nodes, not of ranks
        links = group_links(cluster, chips)
        found = price_named(Operation.ALL_REDUCE, 1e9, links, EFFICIENCY, "ring", 1)
        assert found.seconds == pytest.approx(_replayed(cluster, chips, "ring"), rel=0.02)
    apart = [Position("h800", node, 0) for node in (0, 8, 16, 24)]
    near = [Position("h800", node, 0) for node in range(4)]
    limits = limits_of(cluster)
    assert limits is not None
    parties = [
        [ChipSet.from_ids([Position("h800", n + 8 * leaf, s) for leaf in range(4)])]
        for n in range(8) for s in range(8)
    ]  # fmt: skip
    seconds = [
        price_named(Operation.ALL_REDUCE, 1e9, group_links(cluster, chips, crowd), EFFICIENCY,
                    "ring", 1).seconds
        for chips, crowd in ((near, None), (apart, None), (apart, limits.crossers(parties)))
    ]  # fmt: skip
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)  # alone: its ways up are empty
    # all rings at once: every edge leaves a leaf (2:1), every other one its pod (4:1)
    assert seconds[2] == pytest.approx(2 * seconds[0], rel=0.01)


@pytest.mark.parametrize("name", ["oversubscribed", "leftovers", "S32", "helix-24"])
def test_choices_are_near_the_best_replayed_program(name: str) -> None:
    cluster = Cluster.load(name)
    rows = price_rows(cluster, ("all_reduce", "all_gather"), (1e9,))
    assert rows
    for row in rows:
        assert row.choice_loss <= 0.10, row
        if limits_of(cluster) is not None:
            assert abs(row.price_error) <= 0.10, row


def test_clusters_whose_tiers_limit_nobody_have_no_reach() -> None:
    for name in ("S64", "E100", "laptop", "nvl72"):
        cluster = Cluster.load(name)
        assert limits_of(cluster) is None
        pool = cluster.pools[0]
        chips = [Position(pool.name, 0, slot) for slot in range(min(2, pool.node.num_chips))]
        assert group_links(cluster, chips).reach is None
        assert not Machine.of(cluster, pool, Dtype.BF16).has_tiers
    fabric = Cluster.load("S64").fabric
    assert may_limit(dataclasses.replace(fabric, routing=Routing.ECMP))


def test_closed_forms_count_what_leaves_a_group_of_nodes() -> None:
    flat = {"peak": 1, "memory_bandwidth": 1, "compute_units": 1, "link": 1e15, "nic": 400e9,
            "nics": 8}  # fmt: skip
    plain = Machine.filled(**flat)
    tiers = Machine.filled(**flat, leaf_nodes=8, leaf_over=2, pod_nodes=16, pod_over=4)
    constants = Constants()

    def ratio(price: object, size: float, stride: float = 1.0) -> float:
        args = (1e12, size, stride)
        slow, fast = (price(*args, m, constants) for m in (tiers, plain))  # type: ignore[operator]
        return float(slow / fast)

    assert ratio(all_reduce_seconds, 64.0) == 1.0  # a leaf group holds it
    assert ratio(all_reduce_seconds, 256.0) == 1.0  # one of 8 members sends out of it
    assert ratio(all_reduce_seconds, 4.0, 64.0) == pytest.approx(2.0, rel=1e-3)  # one per leaf
    assert ratio(all_reduce_seconds, 4.0, 128.0) == pytest.approx(4.0, rel=1e-3)
    assert ratio(all_to_all_seconds, 64.0) == 1.0
    assert ratio(all_to_all_seconds, 256.0) == pytest.approx(4 * 16 / 31, rel=1e-3)


@pytest.mark.parametrize("routing", [Routing.ECMP, Routing.FLOWLET, Routing.SOURCE_PORT])
@pytest.mark.parametrize("connections", [1, 4, 16])
def test_balance_is_what_routed_flows_show(routing: Routing, connections: int) -> None:
    """Every chip sends to the other half; the mean pace of five draws."""
    wiring = clos(32, tiers=2)
    layer, chips = wiring.layers[0], wiring.num_chips
    paces = []
    for seed in range(5):
        dice = np.random.default_rng(seed)
        targets = np.empty(chips, dtype=np.int64)
        for slot in range(8):
            own = np.arange(slot, chips, 8)
            low, high = own[: len(own) // 2], own[len(own) // 2 :]
            targets[low], targets[high] = dice.permutation(high), dice.permutation(low)
        rules = Rules(routing=routing, connections=connections, seed=seed)
        one = np.zeros(chips, dtype=np.int64)
        paces.append(
            Teams(wiring, np.arange(chips), targets, np.ones(chips), one, rules).paces()[0]
        )
    found = balance(routing, connections, 4, layer.ways * layer.cables, layer.switches)
    assert found == pytest.approx(np.mean(paces) / 50e9, rel=0.2)


def test_hashed_connections_are_priced_dearer() -> None:
    document = clos(16, tiers=2, routing="ecmp").cluster.to_document(embed=True)
    cluster = Cluster.from_document(document, Place("clos.yaml"))
    chips = [Position("h", node, slot) for node in range(16) for slot in range(8)]
    links = group_links(cluster, chips)
    assert links.reach is not None
    for operation, name in ((Operation.ALL_TO_ALL, "direct"), (Operation.ALL_REDUCE, "direct")):
        priced = price_named(operation, 1e9, links, EFFICIENCY, name, 1).seconds
        found = [
            replay(build(operation, name, links.group), chips, wire(cluster), 1e9,
                   rules=Rules(routing=Routing.ECMP, seed=seed), efficiency=EFFICIENCY.fabric,
                   inside=EFFICIENCY.island, hop_s=EFFICIENCY.hop_s).seconds
            for seed in range(3)
        ]  # fmt: skip
        assert priced == pytest.approx(np.mean(found), rel=0.25), (priced, found)
