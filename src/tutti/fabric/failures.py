"""Failures: which links and switches are gone, said in words, and what is left of the rates.

Written "spine 3", "leaf 2 - spine 7" (all cables between them), or a chip's NICs "a800/0/3".
Switches of a tier are counted from 0 over the whole fabric. A switch sees at once that a link of
its own is gone and takes another way up (milliseconds); that a way *down* is gone further on must
first be told from switch to switch (seconds).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.errors import InputError, hint
from tutti.fabric.wiring import Floats, Integers, Wiring
from tutti.hardware.topology import Position

REROUTE_UP_S = 5e-3
REROUTE_DOWN_S = 1.0
_FORMS = "'spine 3', 'leaf 2 - spine 7' or a chip such as 'a800/0/3'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Links that are gone, by number; bundles lose their part."""

    names: tuple[str, ...]
    links: tuple[int, ...]

    @classmethod
    def parse(cls, wiring: Wiring, texts: list[str]) -> Failures:
        """Read what is gone."""
        gone: list[int] = []
        for text in texts:
            gone += _links_of(wiring, text)
        return cls(names=tuple(texts), links=tuple(sorted(set(gone))))

    def alive(self, wiring: Wiring) -> npt.NDArray[np.bool_]:
        """Return which links are left."""
        alive = np.ones(wiring.num_links, dtype=np.bool_)
        alive[list(self.links)] = False
        return alive

    def rates(self, wiring: Wiring) -> Floats:
        """Return what all links carry now; a bundle what its links left carry."""
        rates = np.where(self.alive(wiring), wiring.rates, 0.0)
        for index, layer in enumerate(wiring.layers):
            groups = layer.bundle_down - layer.bundle_up
            for first, bundle in ((layer.up, layer.bundle_up), (layer.down, layer.bundle_down)):
                part = rates[first : first + layer.num_links]
                rates[bundle : bundle + groups] = part.reshape(groups, -1).sum(axis=1)
            del index
        return rates

    def stalls(self, wiring: Wiring, healthy: npt.NDArray[np.int32]) -> tuple[float, int]:
        """Return for how long flows stand still, and how many, given their paths before.

        Who loses a link upwards waits for the switch below it; downwards for the routes.
        """
        gone = np.asarray(self.links, dtype=np.int64)
        hit = np.isin(healthy, gone)
        down = np.isin(healthy, gone[_is_down(wiring, gone)])
        if down.any():
            return REROUTE_DOWN_S, int(hit.any(axis=1).sum())
        return (REROUTE_UP_S if hit.any() else 0.0), int(hit.any(axis=1).sum())


def _is_down(wiring: Wiring, links: Integers) -> npt.NDArray[np.bool_]:
    down = np.zeros(len(links), dtype=np.bool_)
    for layer in wiring.layers:
        down |= (links >= layer.down) & (links < layer.down + layer.num_links)
    return down | ((links >= wiring.num_ports) & (links < 2 * wiring.num_ports))


def _links_of(wiring: Wiring, text: str) -> list[int]:
    if "/" in text:
        chip = wiring.chip(_existing(wiring, text))
        ports = [int(port) for port in wiring.chip_ports[chip] if port >= 0]
        return ports + [wiring.num_ports + port for port in ports]
    ends = [part.strip() for part in re.split(r"\s+-\s+|\s*–\s*", text)]
    if len(ends) == 2:
        first, second = sorted(_switch(wiring, end, text) for end in ends)
        return _between(wiring, first, second, text)
    if len(ends) != 1:
        raise InputError(f"--fail '{text}': write it as {_FORMS}")
    return _all_of(wiring, *_switch(wiring, text, text))


def _existing(wiring: Wiring, text: str) -> Position:
    position = Position.parse(text)
    wiring.cluster.link(position, position)  # says what does not exist
    return position


def _switch(wiring: Wiring, text: str, whole: str) -> tuple[int, int]:
    """Return tier and number of a switch."""
    parts = re.fullmatch(r"(.+?)\s*(\d{1,9})", text)
    tiers = [tier.name for tier in wiring.fabric.tiers]
    if parts is None or parts[1] not in tiers:
        name = parts[1] if parts else text
        raise InputError(f"--fail '{whole}': no tier '{name}'; {hint(name, tiers)}")
    tier, number = tiers.index(parts[1]), int(parts[2])
    if number >= (count := wiring.num_switches[tier]):
        raise InputError(f"--fail '{whole}': {parts[1]} {number} is not among 0-{count - 1}")
    return tier, number


def above(wiring: Wiring, tier: int, switch: int) -> list[int]:
    """Return the switches that hang above a switch, way by way."""
    layer, per_group = wiring.layers[tier], wiring.switches_per_group
    group, x = divmod(switch, per_group[tier])
    column = x % wiring.lanes if tier == 0 and per_group[0] != wiring.lanes else x
    parent = int(wiring.group_parent[tier][group])
    first = parent * per_group[tier + 1] + column * layer.ways
    return list(range(first, first + layer.ways))


def _between(wiring: Wiring, low: tuple[int, int], high: tuple[int, int], text: str) -> list[int]:
    if high[0] != low[0] + 1 or high[1] not in (reached := above(wiring, *low)):
        raise InputError(f"--fail '{text}': no link joins these two switches")
    layer = wiring.layers[low[0]]
    first = (low[1] * layer.ways + reached.index(high[1])) * layer.cables
    return [base + first + c for base in (layer.up, layer.down) for c in range(layer.cables)]


def _all_of(wiring: Wiring, tier: int, number: int) -> list[int]:
    """Return every link at a switch."""
    links: list[int] = []
    if tier < len(wiring.layers):
        layer = wiring.layers[tier]
        each = layer.ways * layer.cables
        for base in (layer.up, layer.down):
            links += range(base + number * each, base + (number + 1) * each)
    if tier == 0:
        ports = np.flatnonzero(wiring.port_leaf == number)
        return links + ports.tolist() + (ports + wiring.num_ports).tolist()
    below = wiring.layers[tier - 1]
    for switch in range(below.switches):
        reached = above(wiring, tier - 1, switch)
        if reached[0] <= number <= reached[-1]:
            links += _between(wiring, (tier - 1, switch), (tier, number), "")
    return links
