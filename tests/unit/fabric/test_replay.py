"""Programs sent over a fabric, at two grains."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.fabric.support import RATE, clos
from tutti.bench.fabric.grains import random_rings
from tutti.collective import Group, Layout, Operation, algorithms, build
from tutti.collective.expand import rounds
from tutti.collective.phases import phases
from tutti.fabric.paths import Rules, route_transfers
from tutti.fabric.replay import Teams, replay
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


@pytest.mark.parametrize("seed", [0])
def test_collapsed_rings_go_as_fast_as_rings_round_by_round(seed: int) -> None:
    draw = random_rings(seed, 48)
    assert abs(draw.slowest) < 0.01
    assert np.mean(np.abs(draw.off) < 0.1) >= 0.95


@pytest.mark.slow
def test_collapsed_rings_of_more_draws() -> None:
    draws = [random_rings(seed, nodes) for seed in (0, 1) for nodes in (32, 64)]
    assert max(abs(draw.slowest) for draw in draws) < 0.01
    assert np.mean([abs(one) < 0.1 for draw in draws for one in draw.off]) >= 0.95
