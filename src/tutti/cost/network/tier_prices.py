"""The price of a program's steps where tiers limit: what its phases put on ports and ways up.

A phase (`collective.phases`) takes as long as the busiest of what its transfers share: a chip's
native links, its ports, what a link between pools lets through, and per tier the ways up from (and
down to) each group of nodes. On shared links the whole plan's traffic counts (`Uplinks.crowds`),
and what the routing makes of them (`fabric.balance`). That is how flows share links when the edges
of a ring wait for each other, so that prices follow the replay of flows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tutti.collective import CollectiveProgram
from tutti.collective.layout import Layout
from tutti.collective.phases import Phase, phases
from tutti.cost.network.reach import Reach, Uplinks
from tutti.fabric.balance import balance
from tutti.fabric.wiring import Floats, Integers


class Shares(NamedTuple):
    """What of links a software stack makes use of, and what it takes to start a round."""

    inside: float
    outside: float
    inside_start_s: float
    outside_start_s: float


class StepPrices(NamedTuple):
    """Per step seconds per byte and of start-up; per byte what the busiest link carries in all."""

    steps: tuple[tuple[float, float], ...]
    busiest: float = 0.0

    def seconds(self, num_bytes: float, chunks: int) -> float:
        """The first chunk passes all steps, the others follow at the pace of the slowest."""
        steps = [per_byte * num_bytes / chunks + startup for per_byte, startup in self.steps]
        pace = max(max(steps, default=0.0), self.busiest * num_bytes / chunks)
        return sum(steps) + (chunks - 1) * pace


def tier_step_prices(program: CollectiveProgram, reach: Reach, shares: Shares) -> StepPrices:
    """Return the prices of a program's steps on a group with a reach."""
    layout = Layout.of(program, 5040 * max(1, program.group.size) * program.chunks)
    whole = layout.total / program.chunks
    prices: list[tuple[float, float]] = []
    carried: Floats | float = 0.0
    for index in range(len(program.steps)):
        per_byte = startup = 0.0
        for phase in phases(program, index, layout):
            if len(phase.sources):
                sizes = phase.elements.astype(np.float64) / whole
                busy = busy_seconds(reach, phase.sources, phase.targets, sizes, shares)
                carried = carried + busy
                per_byte += float(busy.max())
                startup += _startup(phase, reach, shares)
        prices.append((per_byte, startup))
    return StepPrices(tuple(prices), float(np.max(carried)))


def _startup(phase: Phase, reach: Reach, shares: Shares) -> float:
    if _native(reach, phase.sources, phase.targets).all():
        return shares.inside_start_s  # the island's own library
    return shares.outside_start_s * phase.rounds


def _native(reach: Reach, sources: Integers, targets: Integers) -> Integers:
    island = reach.islands[sources]
    native: Integers = (island == reach.islands[targets]) & (island >= 0)
    return native


def busy_seconds(
    reach: Reach, sources: Integers, targets: Integers, sizes: Floats, shares: Shares
) -> Floats:
    """Return for how long transfers between seats keep each thing busy that they share."""
    count = len(reach.nodes)
    near = reach.nodes[sources] == reach.nodes[targets]
    native = _native(reach, sources, targets)
    seconds = [
        np.bincount(ends[own], weights=sizes[own], minlength=count)
        / np.maximum(rates * share, 1e-300)
        for own, rates, share in (
            (native, reach.native, shares.inside), (near & ~native, reach.bridge, shares.outside),
        )
        for ends in (sources, targets)
    ]  # fmt: skip
    away = ~near
    a, b, size = sources[away], targets[away], sizes[away] / shares.outside
    for up in reach.uplinks:
        seconds += _uplink_seconds(reach, up, a, b, size)
    return np.concatenate([*seconds, *_capped_seconds(reach, a, b, size)])


def _uplink_seconds(
    reach: Reach, up: Uplinks, a: Integers, b: Integers, size: Floats
) -> list[Floats]:
    """Return how long the ways up from a tier's groups, and those down to them, are busy."""
    start, end = up.regions[a], up.regions[b]
    crossing = start != end
    regions, loads = len(up.rates), []
    switches = len(np.unique(start[crossing])) if up.links > 1 else 1
    for ends in (start[crossing], end[crossing]):
        load = np.bincount(ends, weights=size[crossing], minlength=regions) * up.crowds / up.rates
        if up.links > 1 and load.any():
            flows = np.bincount(ends, minlength=regions) * up.crowds
            shares = [
                balance(reach.routing, reach.connections, number, up.links, switches)
                for number in flows.tolist()
            ]
            load = load / np.array(shares)
        loads.append(load)
    return loads


def _capped_seconds(reach: Reach, a: Integers, b: Integers, size: Floats) -> list[Floats]:
    """Return how long chips take with what links between pools let through."""
    pools = len(reach.caps)
    if pools < 2 or not np.isfinite(reach.caps).any():
        return []
    each = size / reach.caps[reach.pools[a], reach.pools[b]]
    slots, seconds = len(reach.nodes) * pools, []
    for near, far in ((a, b), (b, a)):
        own = np.bincount(near * pools + reach.pools[far], weights=each, minlength=slots)
        seconds.append(own.astype(np.float64))
    return seconds
