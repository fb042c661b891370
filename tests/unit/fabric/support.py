"""Clusters of a few leaves and spines."""

from __future__ import annotations

from typing import Any

from tutti.document import Place
from tutti.fabric.wiring import Wiring, wire
from tutti.hardware.cluster import Cluster

RATE = 50e9  # of the NICs below


def clos(nodes: int = 16, *, tiers: int = 3, **fabric: Any) -> Wiring:
    """Return a wiring of 8-chip nodes: leaf groups of 4, pods of 8, then all."""
    levels: list[dict[str, Any]] = [
        {"name": "leaf", "nodes": 4}, {"name": "spine", "nodes": 8, "latency_s": "4 us"},
        {"name": "core", "latency_s": "6 us"},
    ]  # fmt: skip
    levels = levels[:tiers]
    levels[-1] = {key: value for key, value in levels[-1].items() if key != "nodes"}
    over = fabric.pop("oversubscription", {})
    for level in levels:
        level.update(over.get(level["name"], {}))
    document = {
        "name": "clos",
        "pools": [{"name": "h", "node": "HGX-H800", "nodes": nodes}],
        "fabric": {"rail_optimized": True, "tiers": levels} | fabric,
    }
    return wire(Cluster.from_document(document, Place("clos.yaml")))
