"""What others published of fabrics, from our model with nothing fitted.

Assumed: 16,384 chips, 400 Gb/s, three tiers of 51.2T switches, eight rails, a ring per rail over
all nodes in random order; the mean of what a chip's link carries while all of them send. The
all-to-alls: groups of 64 chips on 8 nodes of 8,192 chips, packets spread evenly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tutti.fabric.design import Rails, Wanted, design
from tutti.fabric.parts import parts
from tutti.fabric.paths import Rules, Split, route_transfers
from tutti.fabric.replay import Teams
from tutti.fabric.shares import fair_rates
from tutti.fabric.wiring import Wiring, wire
from tutti.hardware.fabric import Routing
from tutti.hardware.library import shipped
from tutti.hardware.node import NodeType

CHIPS = 16_384
_RAILS = 8


def _node() -> NodeType:
    return shipped().nodes["HGX-H100"]


def _wanted(chips: int, rails: Rails) -> Wanted:
    return Wanted(
        node=_node(), chips=chips, switch=parts().switch("51.2T-400G"), rails=rails,
        tiers=2 if rails == "only" else None,
    )  # fmt: skip


@functools.cache
def pod(chips: int, rails: Rails = "optimized") -> Wiring:
    """Return the wiring of a fabric that we design for so many chips."""
    made = design(_wanted(chips, rails))
    return wire(made.cluster("pod", routing=Routing.ECMP, connections=1))


def scattered(nodes: int, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges of eight rings, one per rail, over all nodes in random order."""
    order = np.random.default_rng(seed).permutation(nodes)
    slots = np.arange(_RAILS)
    return (
        (order[:, None] * _RAILS + slots).ravel(),
        (np.roll(order, -1)[:, None] * _RAILS + slots).ravel(),
    )


def mean_share(routing: Routing, connections: int, split: Split = "static") -> float:
    """Return what a chip's link carries on average, of its rate, while all rings run."""
    a, b = scattered(CHIPS // _RAILS)
    flows = route_transfers(
        pod(CHIPS), a, b, Rules(routing=routing, connections=connections, split=split)
    )
    rates = fair_rates(flows.links, flows.rates).reshape(len(a), -1)
    edge = rates.sum(axis=1) if split == "dynamic" else rates.min(axis=1) * rates.shape[1]
    return float(edge.mean() / _node().nics[0].rate)


def all_to_alls(chips: int, rails: Rails = "optimized") -> Teams:
    """Return the all-to-alls of 64 chips on 8 nodes each, 1 GB per chip."""
    wiring = pod(chips, rails)
    nodes = np.random.default_rng(1).permutation(chips // _RAILS).reshape(-1, 8)
    members = (nodes[:, :, None] * _RAILS + np.arange(_RAILS)).reshape(-1, 64)
    a = np.repeat(members[:, :, None], 64, axis=2).ravel()
    b = np.repeat(members[:, None, :], 64, axis=1).ravel()
    team = np.repeat(np.arange(len(members)), 64 * 64)
    apart = a != b
    return Teams(
        wiring, a[apart], b[apart], np.full(int(apart.sum()), 1e9 / 64), team[apart],
        Rules(routing=Routing.SPRAY),
    )  # fmt: skip


def _all_to_all_s(rails: Rails) -> float:
    return float((1.0 / all_to_alls(8192, rails).paces()).max())


def _gain() -> float:
    one, many = (mean_share(Routing.ECMP, n, "dynamic") for n in (1, 16))
    return many / one - 1


def _cost() -> float:
    whole, apart = (
        design(Wanted(node=_node(), chips=CHIPS, switch=parts().switch("51.2T-400G"),
                      rails=rails)).price
        for rails in ("optimized", "only")
    )  # fmt: skip
    return apart / whole - 1


PUBLISHED: dict[str, tuple[str, Callable[[], float]]] = {
    "one connection, ECMP": (
        "70 % of a link (Baidu AIPod), 84.5 % (elsewhere)",
        lambda: mean_share(Routing.ECMP, 1, "dynamic"),
    ),
    "16 connections, split by room": (
        "95 % (Baidu, with placement), 88 % (hash by queue pair)",
        lambda: mean_share(Routing.ECMP, 16, "dynamic"),
    ),
    "adaptive": ("–", lambda: mean_share(Routing.ADAPTIVE, 1, "dynamic")),
    "flowlet": ("97 %", lambda: mean_share(Routing.FLOWLET, 1, "dynamic")),
    "16 connections against one": ("up to +40 % (Meta, queue-pair scaling)", _gain),
    "rails apart: all-to-all": (
        "+8.2 to +11.2 % (Wang et al., Rail-only)",
        lambda: _all_to_all_s("only") / _all_to_all_s("optimized") - 1,
    ),
    "rails apart: cost": ("−38 to −77 % (the same)", _cost),
}
