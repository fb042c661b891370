"""Published figures beside ours: the table in docs/concepts/network.md is made of these."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tutti.fabric.design import Wanted, design
from tutti.fabric.parts import parts
from tutti.fabric.paths import Rules, Split, route_transfers
from tutti.fabric.replay import Teams
from tutti.fabric.shares import fair_rates
from tutti.fabric.wiring import Wiring, wire
from tutti.hardware.fabric import Routing
from tutti.hardware.library import shipped

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "network.md"
NODE = shipped().nodes["HGX-H100"]
RATE = NODE.nics[0].rate


@functools.cache
def pod(chips: int, rails: str = "optimized") -> Wiring:
    made = design(Wanted(
        node=NODE, chips=chips, switch=parts().switch("51.2T-400G"), rails=rails,
        tiers=2 if rails == "only" else None,
    ))  # fmt: skip
    return wire(made.cluster("pod", routing=Routing.ECMP, connections=1))


def scattered(nodes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of eight rings, one per rail, over all nodes in random order."""
    order = np.random.default_rng(seed).permutation(nodes)
    slots = np.arange(8)
    return (
        (order[:, None] * 8 + slots).ravel(),
        (np.roll(order, -1)[:, None] * 8 + slots).ravel(),
    )


def mean_share(routing: Routing, connections: int, split: Split = "static") -> float:
    """Return what a chip's link carries on average, of its rate, while all rings run."""
    wiring = pod(16_384)
    a, b = scattered(2048)
    flows = route_transfers(
        wiring, a, b, Rules(routing=routing, connections=connections, split=split)
    )
    rates = fair_rates(flows.links, flows.rates).reshape(len(a), -1)
    edge = rates.sum(axis=1) if split == "dynamic" else rates.min(axis=1) * rates.shape[1]
    return float(edge.mean() / RATE)


def all_to_all_seconds(rails: str) -> float:
    """Return the seconds of all-to-alls of 64 chips, 8 nodes each, 1 GB per chip."""
    wiring = pod(8192, rails)
    nodes = np.random.default_rng(1).permutation(1024).reshape(-1, 8)
    chips = (nodes[:, :, None] * 8 + np.arange(8)).reshape(-1, 64)
    a = np.repeat(chips[:, :, None], 64, axis=2).ravel()
    b = np.repeat(chips[:, None, :], 64, axis=1).ravel()
    team = np.repeat(np.arange(len(chips)), 64 * 64)
    apart = a != b
    teams = Teams(
        wiring, a[apart], b[apart], np.full(int(apart.sum()), 1e9 / 64), team[apart],
        Rules(routing=Routing.SPRAY),
    )  # fmt: skip
    return float((1.0 / teams.paces()).max())


def gain() -> float:
    """Return how much more a link carries with 16 connections than with one."""
    one, many = (mean_share(Routing.ECMP, n, "dynamic") for n in (1, 16))
    return many / one - 1


def cost() -> float:
    """Return how much less rails that never meet cost."""
    whole, apart = (
        design(Wanted(node=NODE, chips=16_384, switch=parts().switch("51.2T-400G"),
                      rails=rails)).price
        for rails in ("optimized", "only")
    )  # fmt: skip
    return apart / whole - 1


FIGURES: dict[str, Callable[[], float]] = {
    "one connection, ECMP": lambda: mean_share(Routing.ECMP, 1, "dynamic"),
    "16 connections, split by room": lambda: mean_share(Routing.ECMP, 16, "dynamic"),
    "adaptive": lambda: mean_share(Routing.ADAPTIVE, 1, "dynamic"),
    "flowlet": lambda: mean_share(Routing.FLOWLET, 1, "dynamic"),
    "16 connections against one": gain,
    "rails apart: all-to-all": lambda: all_to_all_seconds("only")
    / all_to_all_seconds("optimized") - 1,
    "rails apart: cost": cost,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_the_page_says_what_is_computed(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    row = re.search(rf"^\| {re.escape(name)} \|[^|]*\| ([+−-]?[\d.]+) % \|", text, re.MULTILINE)
    assert row is not None
    assert float(row[1].replace("−", "-")) == pytest.approx(100 * FIGURES[name](), abs=0.06)
