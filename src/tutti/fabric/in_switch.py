"""An all-reduce that the switches do (SHARP): every chip sends once and receives the sum once.

Each leaf adds up what its chips send and passes one stream on; a spine does so for its leaves. The
stream is spread over as many trees as there are ways, so that all links of a switch carry a share.
Against a ring, which sends everything twice, a chip's link carries half.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tutti.errors import InputError
from tutti.fabric.failures import Failures
from tutti.fabric.replay import Replay
from tutti.fabric.wiring import Floats, Wiring
from tutti.hardware.topology import Position


def in_switch_all_reduce(
    chips: Sequence[Position],
    wiring: Wiring,
    num_bytes: float,
    *,
    failures: Failures | None = None,
    efficiency: float = 1.0,
) -> Replay:
    """Return how an all-reduce of `num_bytes` goes that switches add up on its way."""
    if not wiring.fabric.in_switch_reduction:
        raise InputError(
            f"cluster '{wiring.cluster.name}': its switches add nothing up; say "
            "'in_switch_reduction: true' of the fabric if they do"
        )
    rates = (wiring.rates if failures is None else failures.rates(wiring)) * efficiency
    load, height = _loads(chips, wiring, num_bytes)
    used = load > 0
    if (rates[used] <= 0).any():
        raise InputError("a switch on the way up has no link left; no tree joins these chips")
    seconds = float((load[used] / rates[used]).max(initial=0.0))
    latency = 2 * wiring.fabric.tiers[height].latency_s if len(chips) > 1 else 0.0
    total = seconds + latency
    size = len(chips)
    return Replay(
        seconds=total, latency_s=latency,
        bus_bandwidth=2 * (size - 1) / size * num_bytes / total if total > 0 else 0.0,
        slowest_flow=num_bytes / seconds if seconds > 0 else np.inf, flows=int(used.sum()),
    )  # fmt: skip


def _loads(chips: Sequence[Position], wiring: Wiring, num_bytes: float) -> tuple[Floats, int]:
    """Return the bytes on each link, and the tier at which all are added up."""
    load = np.zeros(wiring.num_links)
    if len(chips) < 2:
        return load, 0
    numbers = np.array([wiring.chip(chip) for chip in chips], dtype=np.int64)
    ports = wiring.chip_ports[numbers]
    if (ports[:, 0] < 0).any():
        raise InputError("a chip without a NIC takes part; switches cannot add up what it has")
    each = num_bytes / (ports >= 0).sum(axis=1)
    for column in range(ports.shape[1]):
        there = ports[:, column] >= 0
        np.add.at(load, ports[there, column], each[there])
        np.add.at(load, wiring.num_ports + ports[there, column], each[there])
    leaves = np.unique(wiring.port_leaf[ports[ports >= 0]])
    if len(leaves) == wiring.lanes or not wiring.layers:
        return load, 0
    groups = np.unique(leaves // wiring.switches_per_group[0])
    bundles = leaves
    for index, layer in enumerate(wiring.layers):
        share = num_bytes / (wiring.fabric.planes if index == 0 else wiring.lanes)
        load[layer.bundle_up + bundles] += share
        load[layer.bundle_down + bundles] += share
        groups = np.unique(wiring.group_parent[index][groups])
        if len(groups) == 1:
            return load, index + 1
        lanes = np.arange(wiring.lanes)
        bundles = (groups[:, None] * wiring.lanes + lanes[None, :]).ravel()
    return load, len(wiring.layers)
