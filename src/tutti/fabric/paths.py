"""Paths: which links the connections between chips take, by the fabric's routing.

A *transfer* is a pair of chips and bytes; each has `connections` flows, which share its bytes
evenly (static) or by what each gets (dynamic). A flow's path follows from the routing: a hash of
its five numbers in every switch, the least loaded way, the best of some source ports, or all ways
at once. What a link between pools lets through at most is a link of its own, per chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tutti.errors import InputError
from tutti.fabric.failures import Failures
from tutti.fabric.wiring import Floats, Integers, Wiring
from tutti.hardware.fabric import CrossKind, Routing
from tutti.hardware.topology import Position

Split = Literal["static", "dynamic"]
PORT_TRIES = 16  # source ports that a sender looks at for each connection
FLOWLETS = 8  # ways that a connection has taken, by its pauses, over a collective
_MODES = {
    Routing.ECMP: 0, Routing.FLOWLET: 0, Routing.POLARISED: 1, Routing.SPRAY: 2,
    Routing.ADAPTIVE: 3, Routing.SOURCE_PORT: 4,
}  # fmt: skip
_NOBODY = np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How flows are made of transfers; the fabric's own where nothing else is said."""

    routing: Routing
    connections: int = 1
    split: Split = "static"
    seed: int = 0

    @classmethod
    def of(cls, wiring: Wiring) -> Rules:
        """Return what the cluster file says."""
        return cls(routing=wiring.fabric.routing, connections=wiring.fabric.connections)

    @property
    def flows_per_transfer(self) -> int:
        """Flows that each transfer is cut into."""
        if self.routing is Routing.SPRAY:
            return 1  # more would take the same bundles
        return self.connections * (FLOWLETS if self.routing is Routing.FLOWLET else 1)

    @property
    def elastic(self) -> bool:
        """Whether bytes go where there is room: flowlets always do."""
        return self.split == "dynamic" or self.routing is Routing.FLOWLET


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """Flows with their paths; those of one transfer stand side by side."""

    transfers: int
    per_transfer: int
    links: npt.NDArray[np.int32]  # flow × column; −1: nothing
    rates: Floats  # of all links, those of the flows' own limits at the end
    unreachable: Integers  # transfers without a path left

    @property
    def size(self) -> int:
        """Number of flows."""
        return len(self.links)


def route_transfers(
    wiring: Wiring,
    sources: Integers,
    targets: Integers,
    rules: Rules | None = None,
    failures: Failures | None = None,
) -> Flows:
    """Return the flows of transfers between chips, by number; an InputError: no path is left."""
    flows = routed(wiring, sources, targets, rules, failures)
    if len(flows.unreachable):
        one = int(flows.unreachable[0])
        a, b = (wiring.position(int(chips[one])) for chips in (sources, targets))
        raise InputError(
            f"chips {a} and {b} have no path left; of {len(sources):,} transfers "
            f"{len(flows.unreachable):,} are cut off"
        )
    return flows


def routed(
    wiring: Wiring,
    sources: Integers,
    targets: Integers,
    rules: Rules | None = None,
    failures: Failures | None = None,
) -> Flows:
    """Return the flows of transfers; those without a path are named, and load nothing."""
    from tutti.fabric.path_loops import route  # numba is loaded only where flows are routed
    from tutti.loops import compiled

    rules = rules or Rules.of(wiring)
    each = rules.flows_per_transfer
    a = np.repeat(np.asarray(sources, dtype=np.int64), each)
    b = np.repeat(np.asarray(targets, dtype=np.int64), each)
    flowlets = FLOWLETS if rules.routing is Routing.FLOWLET else 1
    turns = np.tile(np.arange(each) // flowlets, len(sources))
    sports = np.random.default_rng(rules.seed).integers(1024, 65536, len(a))
    layers = wiring.layers
    out = np.full((len(a), 3 + 2 * len(layers)), -1, dtype=np.int32)
    alive = np.zeros(0, dtype=np.bool_) if failures is None else failures.alive(wiring)
    rates = wiring.rates if failures is None else failures.rates(wiring)
    mode = _MODES[rules.routing]
    loads = np.zeros(wiring.num_links if mode >= 3 else 0)
    nothing = np.zeros(1, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum([len(p) for p in wiring.group_parent])])
    shape = (
        np.array(wiring.switches_per_group, dtype=np.int64), wiring.lanes,
        _column(layers, "ways"), _column(layers, "cables"), _column(layers, "up"),
        _column(layers, "down"), starts.astype(np.int64),
    )  # fmt: skip
    bundles = np.stack([_column(layers, "bundle_up"), _column(layers, "bundle_down")])
    compiled(route)(
        a, b, turns, sports, mode,
        (wiring.chip_node, wiring.chip_island, wiring.chip_ports, _same_host(wiring),
         wiring.chip_pool),
        (wiring.port_leaf, wiring.port_rail, wiring.port_lane),
        wiring.node_port, (wiring.island_out, wiring.bridge_out), shape,
        np.concatenate([*wiring.group_parent, nothing]), bundles,
        alive if mode != 2 else _ports_alive(wiring, alive), loads, PORT_TRIES, out,
    )  # fmt: skip
    lost = np.unique(np.flatnonzero(out[:, 0] == -2) // each)
    out[out[:, 0] == -2] = -1
    out, rates = _with_caps(wiring, a, b, out, rates)
    return Flows(
        transfers=len(sources), per_transfer=each, links=out, rates=rates, unreachable=lost
    )


def _column(layers: tuple[Any, ...], name: str) -> Integers:
    return np.array([getattr(layer, name) for layer in layers], dtype=np.int64)


def _ports_alive(wiring: Wiring, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Packets that are spread avoid what has failed; only ports can cut a chip off."""
    usable = np.ones(len(alive), dtype=np.bool_)
    if len(alive):
        usable[: 2 * wiring.num_ports] = alive[: 2 * wiring.num_ports]
    return usable


def _same_host(wiring: Wiring) -> npt.NDArray[np.bool_]:
    pools = wiring.cluster.pools
    together = np.zeros((len(pools), len(pools)), dtype=np.bool_)
    for i, home in enumerate(pools):
        for j, away in enumerate(pools):
            if i != j:
                together[i, j] = wiring.cluster.cross_link(home.name, away.name).same_host
    return together


def _with_caps(
    wiring: Wiring, a: Integers, b: Integers, out: npt.NDArray[np.int32], rates: Floats
) -> tuple[npt.NDArray[np.int32], Floats]:
    """Add what links between pools let through, per chip and other pool, at either end.

    Pools of one machine meet in its memory: all that a chip sends to them takes one way out, as
    fast as its fastest link there.
    """
    pools = wiring.cluster.pools
    capped = np.zeros((len(pools), len(pools)), dtype=np.bool_)
    for i, home in enumerate(pools):
        for j, away in enumerate(pools):
            if i != j:
                cross = wiring.cluster.cross_link(home.name, away.name)
                forwarded = cross.kind is CrossKind.HOST_FORWARDED
                capped[i, j] = (
                    forwarded or cross.bandwidth is not None or cross.nic_fraction is not None
                )
    met = wiring.chip_pool[a], wiring.chip_pool[b]
    for rows, apart in (
        (np.flatnonzero(capped[met]), len(pools)),
        (np.flatnonzero(_same_host(wiring)[met]), 1),
    ):
        if len(rows):
            out, rates = _with_cap(wiring, (a[rows], b[rows]), rows, apart, out, rates)
    return out, rates


def _with_cap(
    wiring: Wiring, ends: tuple[Integers, Integers], rows: Integers, apart: int,
    out: npt.NDArray[np.int32], rates: Floats,
) -> tuple[npt.NDArray[np.int32], Floats]:  # fmt: skip
    """Add a link at either end of some flows: one per chip and, kept apart, other pool."""
    more = np.full((len(out), 2), -1, dtype=np.int32)
    extra: list[Floats] = []
    first = len(rates)
    for side, (near, far) in enumerate((ends, ends[::-1])):
        met = near * len(wiring.cluster.pools) + wiring.chip_pool[far]
        _, example, pair = np.unique(met, return_index=True, return_inverse=True)
        caps = np.array([_cap(wiring, int(near[e]), int(far[e])) for e in example])
        key = near * apart + wiring.chip_pool[far] % apart
        distinct, index = np.unique(key, return_inverse=True)
        more[rows, side] = first + index.reshape(-1)
        fastest = np.zeros(len(distinct))
        np.maximum.at(fastest, index.reshape(-1), caps[pair.reshape(-1)])
        extra.append(fastest)
        first += len(distinct)
    return np.hstack([out, more]), np.concatenate([rates, *extra])


def _cap(wiring: Wiring, near: int, far: int) -> float:
    return wiring.cluster.link(wiring.position(near), wiring.position(far)).chip_bandwidth


def chips_of(wiring: Wiring, positions: list[Position]) -> Integers:
    """Return the numbers of some chips."""
    return np.array([wiring.chip(position) for position in positions], dtype=np.int64)
