"""Programs sent over a fabric, at two grains."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.fabric.support import RATE, clos
from tutti.collective import Group, Layout, Operation, algorithms, build
from tutti.collective.expand import rounds
from tutti.collective.phases import phases
from tutti.fabric.paths import Rules, route_transfers
from tutti.fabric.replay import Teams, capacities, pair_flows, replay
from tutti.fabric.rounds import finish_times
from tutti.fabric.wiring import wire
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import Routing
from tutti.hardware.topology import Position

ECMP = Rules(routing=Routing.ECMP)


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("islands", [[[0, 1, 2], [3, 4, 5]], [[0], [1], [2], [3], [4]]])
def test_phases_move_what_the_rounds_do(operation: Operation, islands: list[list[int]]) -> None:
    group = Group.of(islands)
    more = {"root": 0} if operation.has_root else {}
    if operation is Operation.SEND_RECEIVE:
        return
    for name in algorithms(operation, group):
        program = build(operation, name, group, **more)
        layout = Layout.of(program, 5040 * group.size)
        for index, step in enumerate(program.steps):
            moved, listed = {}, {}
            for phase in phases(program, index, layout):
                for a, b, n in zip(phase.sources, phase.targets, phase.elements, strict=True):
                    moved[a, b] = moved.get((a, b), 0) + n
            for one in rounds(program, step):
                for t in one:
                    size = layout.size(t.part)
                    if size:
                        listed[t.source, t.target] = listed.get((t.source, t.target), 0) + size
            assert moved == listed, (operation, name, index)


def test_a_ring_in_node_order_crosses_each_boundary_once() -> None:
    """On `oversubscribed`: 38.8 ms of bytes; a doubling that crosses everywhere takes longer."""
    cluster = Cluster.load("oversubscribed")
    wiring = wire(cluster)
    chips = [Position("h800", node, 0) for node in range(32)]
    group = Group.of([[i] for i in range(32)])
    for grain in ("collapsed", "rounds"):
        ring = replay(build("all_reduce", "ring", group), chips, wiring, 1e9,
                      rules=ECMP, grain=grain)  # fmt: skip
        assert ring.seconds - ring.latency_s == pytest.approx(38.75e-3, rel=1e-6)
        assert ring.bus_bandwidth == pytest.approx(2 * 31 / 32 * 1e9 / ring.seconds)
        doubling = replay(build("all_reduce", "doubling", group), chips, wiring, 1e9,
                          rules=ECMP, grain=grain)  # fmt: skip
        assert 0.16 < doubling.seconds < 0.24
    half = replay(build("all_reduce", "ring", group), chips, wiring, 1e9, efficiency=0.5)
    assert half.seconds - half.latency_s == pytest.approx(77.5e-3, rel=1e-6)


def test_links_between_pools_let_through_what_the_file_says() -> None:
    wiring = wire(Cluster.load("E100"))
    first = wiring.first_chip
    a, b = np.array([first["a800"]]), np.array([first["p800"]])
    flows = route_transfers(wiring, a, b, ECMP)
    link = wiring.cluster.link(wiring.position(int(a[0])), wiring.position(int(b[0])))
    teams = Teams(wiring, a, b, np.ones(1), np.zeros(1, dtype=np.int64), ECMP)
    assert teams.paces()[0] == pytest.approx(link.bandwidth)
    assert flows.size == 1


def test_connections_spread_bytes_evenly_or_by_room() -> None:
    wiring = clos(16)
    a, b = np.arange(64), np.arange(64, 128)
    teams = np.zeros(64, dtype=np.int64)
    paces = {}
    for split in ("static", "dynamic"):
        rules = Rules(routing=Routing.ECMP, connections=4, split=split)
        paces[split] = Teams(wiring, a, b, np.ones(64), teams, rules).paces()[0]
    assert paces["static"] < paces["dynamic"] <= RATE


def _random_rings(seed: int, nodes: int = 48) -> tuple[float, list[float]]:
    """Return how far the slowest ring is off, and all of them, collapsed against rounds.

    The slowest where all move as much; each where all are busy to the end, as collapsed says.
    """
    dice = np.random.default_rng(seed)
    wiring = clos(nodes, tiers=3)
    order, at, members = dice.permutation(nodes) * 8, 0, []
    while at < nodes:
        size = min(int(dice.integers(2, 17)), nodes - at)
        if size > 1:
            members.append(order[at : at + size])
        at += size
    a = np.concatenate(members)
    b = np.concatenate([np.roll(ring, -1) for ring in members])
    team = np.concatenate([np.full(len(ring), i) for i, ring in enumerate(members)])
    rules = Rules(routing=Routing.ECMP, connections=int(dice.integers(1, 4)), seed=seed)
    teams = Teams(wiring, a, b, np.full(len(a), 1e9), team, rules)
    paces, turns = teams.paces(), 16

    def seconds(sizes: np.ndarray) -> np.ndarray:
        walk = [
            [flow for i in range(len(a))
             for flow in pair_flows(teams.flows, i, int(a[i]), int(b[i]),
                                    sizes[team[i]] / turns, rules)]
            for _ in range(turns)
        ]  # fmt: skip
        done = finish_times(walk, capacities(teams.flows))
        return np.array([max(done[int(chip)] for chip in ring) for ring in members])

    alike = seconds(np.full(len(paces), 1e9))
    busy = 1e9 * paces / paces.min()
    off = busy / 1e9 / paces / seconds(busy) - 1.0
    return float(1.0 / paces.min() / alike.max() - 1.0), off.tolist()


@pytest.mark.parametrize("seed", [0])
def test_collapsed_rings_go_as_fast_as_rings_round_by_round(seed: int) -> None:
    slowest, off = _random_rings(seed)
    assert abs(slowest) < 0.01
    assert np.mean(np.abs(off) < 0.1) >= 0.95


@pytest.mark.slow
def test_collapsed_rings_of_more_draws() -> None:
    found = [_random_rings(seed, nodes) for seed in (0, 1) for nodes in (32, 64)]
    assert max(abs(slowest) for slowest, _ in found) < 0.01
    assert np.mean([abs(one) < 0.1 for _, off in found for one in off]) >= 0.95
