"""Two grains of one replay: rings collapsed to one steady pace, against their rounds one by one.

Random rings of 2 to 16 nodes on three tiers under ECMP with 1 to 3 connections. Collapsed, all
edges of a ring go at its common rate at all times. Round by round a rank that is done early pauses,
and then sends at its full fair share of the links.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.document import Place
from tutti.fabric.paths import Rules
from tutti.fabric.replay import Teams, capacities, pair_flows
from tutti.fabric.rounds import Flow, finish_times
from tutti.fabric.wiring import Wiring, wire
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import Routing

_BYTES, _TURNS = 1e9, 16
_FEWEST = 8  # nodes of a drawn number
_CHIPS = 8  # of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class GrainDraw:
    """How far collapsed rings of one draw are off rings round by round; above 0: too slow."""

    slowest: float  # where all rings move as much
    off: tuple[float, ...]  # of each ring, where all are busy to the end as collapsed says
    paces: tuple[float, ...]  # of each, collapsed, of the slowest one's


def three_tiers(nodes: int) -> Wiring:
    """Return a wiring of 8-chip nodes: leaf groups of 4, pods of 8, then all."""
    document = {
        "name": "rings",
        "pools": [{"name": "h", "node": "HGX-H800", "nodes": nodes}],
        "fabric": {
            "rail_optimized": True,
            "tiers": [{"name": "leaf", "nodes": 4}, {"name": "spine", "nodes": 8},
                      {"name": "core"}],
        },
    }  # fmt: skip
    return wire(Cluster.from_document(document, Place("rings.yaml")))


def drawn_nodes(seed: int, most: int) -> int:
    """Draw how many nodes a draw is over, evenly."""
    return int(np.random.default_rng(10_000 + seed).integers(_FEWEST, most + 1))


def random_rings(seed: int, nodes: int) -> GrainDraw:
    """Draw rings over the nodes, and send them at both grains."""
    dice = np.random.default_rng(seed)
    wiring = three_tiers(nodes)
    order, at, members = dice.permutation(nodes) * _CHIPS, 0, []
    while at < nodes:
        size = min(int(dice.integers(2, 17)), nodes - at)
        if size > 1:
            members.append(order[at : at + size])
        at += size
    a = np.concatenate(members)
    b = np.concatenate([np.roll(ring, -1) for ring in members])
    team = np.concatenate([np.full(len(ring), i) for i, ring in enumerate(members)])
    rules = Rules(routing=Routing.ECMP, connections=int(dice.integers(1, 4)), seed=seed)
    teams = Teams(wiring, a, b, np.full(len(a), _BYTES), team, rules)
    paces = teams.paces()

    def seconds(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        done = finish_times(
            [_round(teams, a, b, sizes[team] / _TURNS, rules) for _ in range(_TURNS)],
            capacities(teams.flows),
        )
        return np.array([max(done[int(chip)] for chip in ring) for ring in members])

    alike = seconds(np.full(len(paces), _BYTES))
    busy = _BYTES * paces / paces.min()
    off = busy / _BYTES / paces / seconds(busy) - 1.0
    return GrainDraw(
        slowest=float(1.0 / paces.min() / alike.max() - 1.0),
        off=tuple(off.tolist()),
        paces=tuple((paces / paces.min()).tolist()),
    )


def _round(
    teams: Teams, a: NDArray[np.int64], b: NDArray[np.int64], sizes: NDArray[np.float64],
    rules: Rules,
) -> list[Flow]:  # fmt: skip
    return [
        flow
        for i in range(len(a))
        for flow in pair_flows(teams.flows, i, int(a[i]), int(b[i]), float(sizes[i]), rules)
    ]
