"""Switches and links by number: as many as there should be, and every path is one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.unit.fabric.support import RATE, clos
from tutti.errors import InputError
from tutti.fabric.failures import Failures, above
from tutti.fabric.paths import Rules, route_transfers, routed
from tutti.fabric.shares import fair_rates
from tutti.fabric.wiring import Wiring, wire
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import Routing
from tutti.hardware.library import shipped_cluster_names

HASHED = [routing for routing in Routing if routing is not Routing.SPRAY]


def ends_of(wiring: Wiring, link: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (tier, switch) of both ends of a link between switches, or of a port: tier −1."""
    ports = wiring.num_ports
    if link < 2 * ports:
        port = link % ports
        both = ((-1, port), (0, int(wiring.port_leaf[port])))
        return both if link < ports else both[::-1]
    for tier, layer in enumerate(wiring.layers):
        for first, up in ((layer.up, True), (layer.down, False)):
            if first <= link < first + layer.num_links:
                low, at = divmod(link - first, layer.ways * layer.cables)
                both = ((tier, low), (tier + 1, above(wiring, tier, low)[at // layer.cables]))
                return both if up else both[::-1]
    raise AssertionError(f"link {link} is none between switches")


@pytest.mark.parametrize("name", shipped_cluster_names())
def test_every_example_is_wired_and_carries_what_its_file_says(name: str) -> None:
    cluster = Cluster.load(name)
    wiring = wire(cluster)
    assert wiring.num_chips == cluster.num_chips
    offered = wiring.rates[: wiring.num_ports].sum()
    for tier, layer in zip(cluster.fabric.tiers[1:], wiring.layers, strict=True):
        carried = wiring.rates[layer.up : layer.up + layer.num_links].sum()
        assert carried == pytest.approx(offered / tier.oversubscription)
        bundles = wiring.rates[layer.bundle_up : layer.bundle_down].sum()
        assert bundles == pytest.approx(carried)
        offered = carried
    for chip in (0, wiring.num_chips - 1):
        assert wiring.chip(wiring.position(chip)) == chip


def test_ports_and_parallel_links_are_obeyed() -> None:
    given = {"leaf": {"ports": 8, "port_rate": "400 Gb/s"},
             "spine": {"ports": 32, "port_rate": "400 Gb/s", "parallel_links": 2}}  # fmt: skip
    wiring = clos(8, tiers=2, oversubscription=given)
    layer = wiring.layers[0]
    assert (layer.ways, layer.cables, wiring.num_switches) == (2, 2, (16, 2))
    assert set(layer.rates) == {RATE}
    for changes, said in (
        ({"leaf": {"ports": 4}}, "4 of a switch's 4 ports go down; none is left for the spine"),
        ({"spine": {"ports": 8}}, "16 links come up to a switch of 8 ports"),
    ):
        with pytest.raises(InputError, match=said):
            clos(8, tiers=2, oversubscription=changes)


@pytest.mark.parametrize("routing", HASHED)
@pytest.mark.parametrize("fabric", [{}, {"rail_only": True}, {"planes": 2}])
def test_every_path_is_one(routing: Routing, fabric: dict[str, object]) -> None:
    wiring = clos(16, **fabric)
    dice = np.random.default_rng(1)
    a, b = dice.integers(0, wiring.num_chips, (2, 120))
    other = wiring.chip_node[a] != wiring.chip_node[b]
    a, b = a[other], b[other]
    rules = Rules(routing=routing, connections=2)
    flows = route_transfers(wiring, a, b, rules)
    for row, path in enumerate(flows.links):
        links = [int(link) for link in path[:-1] if link >= 0]
        ends = [ends_of(wiring, link) for link in links]
        for (_, reached), (start, _) in itertools.pairwise(ends):
            assert reached == start
        home, away = a[row // flows.per_transfer], b[row // flows.per_transfer]
        assert wiring.port_leaf[links[0]] == ends[0][1][1]
        assert links[-1] - wiring.num_ports in wiring.chip_ports[away]
        if path[-1] < 0:
            assert links[0] in wiring.chip_ports[home]
        else:  # by way of the neighbour on the receiver's rail
            assert fabric == {"rail_only": True}
            assert path[-1] == wiring.island_out + home


def test_polarised_hashes_use_few_links_and_sprayed_packets_all() -> None:
    wiring = clos(16, tiers=3)
    a = np.arange(64)
    b = a + 64
    lows = {}
    for routing in (Routing.POLARISED, Routing.ECMP, Routing.SPRAY):
        flows = route_transfers(wiring, a, b, Rules(routing=routing, connections=8))
        lows[routing] = fair_rates(flows.links, flows.rates).sum()
    assert lows[Routing.POLARISED] < 0.6 * lows[Routing.ECMP] < 0.95 * lows[Routing.SPRAY]
    assert lows[Routing.SPRAY] == pytest.approx(64 * RATE)


def test_chosen_ports_and_adaptive_ways_beat_hashes() -> None:
    wiring = clos(32, tiers=3)
    dice = np.random.default_rng(3)
    order = dice.permutation(32)
    a = (order[:, None] * 8 + np.arange(8)).ravel()
    b = (np.roll(order, -1)[:, None] * 8 + np.arange(8)).ravel()
    found = {}
    for routing in (Routing.ECMP, Routing.ADAPTIVE, Routing.SOURCE_PORT, Routing.FLOWLET):
        flows = route_transfers(wiring, a, b, Rules(routing=routing, connections=4))
        rates = fair_rates(flows.links, flows.rates).reshape(len(a), -1)
        found[routing] = float(rates.sum(axis=1).min())
    assert found[Routing.ECMP] < found[Routing.FLOWLET]
    assert found[Routing.ECMP] < found[Routing.ADAPTIVE]
    assert found[Routing.ECMP] < found[Routing.SOURCE_PORT]


def test_flows_go_around_what_failed_until_nothing_is_left() -> None:
    wiring = clos(8, tiers=2)
    a, b = np.arange(32), np.arange(32, 64)
    rules = Rules(routing=Routing.ECMP, connections=4)
    healthy = route_transfers(wiring, a, b, rules)
    for texts in (["spine 1"], ["leaf 2 - spine 0", "spine 1", "spine 2"]):
        gone = Failures.parse(wiring, texts)
        flows = route_transfers(wiring, a, b, rules, gone)
        assert not np.isin(flows.links, gone.links).any()
        assert np.isin(healthy.links, gone.links).any()
        seconds, hit = gone.stalls(wiring, healthy.links)
        assert hit > 0
        assert seconds == 1.0  # some lost a way down
    up_only = Failures(names=("one way",), links=tuple(
        range(wiring.layers[0].up, wiring.layers[0].up + 4)))  # fmt: skip
    assert up_only.stalls(wiring, healthy.links)[0] == pytest.approx(5e-3)
    with pytest.raises(InputError, match=r"chips h/0/0 and h/4/0 have no path left; of 32 .* 32"):
        route_transfers(
            wiring, a, b, rules, Failures.parse(wiring, [f"spine {i}" for i in range(4)])
        )
    nic = Failures.parse(wiring, ["h/0/3"])
    assert routed(wiring, a, b, rules, nic).unreachable.tolist() == [3]
    spread = Rules(routing=Routing.SPRAY)
    before = route_transfers(wiring, a, b, spread)
    after = route_transfers(wiring, a, b, spread, Failures.parse(wiring, ["spine 0"]))
    rates = [fair_rates(f.links, f.rates).sum() for f in (before, after)]
    assert rates[1] == pytest.approx(0.75 * rates[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spin 3", "no tier 'spin'"),
        ("spine 99", "spine 99 is not among 0-3"),
        ("leaf 0 - leaf 1", "no link joins these two switches"),
        ("h/99/0", "node 99 does not exist"),
        ("leaf", "no tier 'leaf'"),
    ],
)
def test_failures_that_do_not_exist_are_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Failures.parse(clos(8, tiers=2), [text])
