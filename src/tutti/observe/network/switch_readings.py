"""Readings of switches' ports, from files of gNMI updates in JSON.

What gNMI clients write is a stream of JSON objects: `source`, `timestamp` (nanoseconds) and
`updates`, each with a path and values, of one leaf or of a subtree. A file of links says where each
port leads.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

from tutti import files, units
from tutti.document import Place, build_fields
from tutti.errors import InputError, hint
from tutti.fabric.port_counters import Link, PortCounters
from tutti.observe.network.driver_counters import counter_names

_TOGETHER_S = 0.5
_PORT = re.compile(r"\[(?:name|interface-id|port)=([^\]]+)\]|COUNTERS/([A-Za-z]+\d+(?:/\d+)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLinks:
    """Where the ports of each device lead; devices that are only led to are hosts."""

    links: Mapping[str, Mapping[str, str]]
    rate: str  # of every port

    @classmethod
    def load(cls, path: Path) -> PortLinks:
        """Read a file of links."""
        port_links = build_fields(cls, files.read_file(path), Place(path.name))
        if not port_links.links:
            raise InputError(f"{path.name}: 'links' names no device")
        port_links.bytes_per_s(path.name)
        return port_links

    def bytes_per_s(self, name: str = "links") -> float:
        """Return the ports' rate."""
        try:
            rate = units.parse(self.rate, "bytes/s")
        except ValueError as error:
            raise InputError(f"{name}: 'rate': {error}") from None
        if rate <= 0:
            raise InputError(f"{name}: 'rate' is {self.rate}; must be more than 0")
        return rate

    @property
    def hosts(self) -> set[str]:
        """What forwards nothing."""
        return {end for ports in self.links.values() for end in ports.values()} - set(self.links)


Counted = dict[str, float]  # by the names of the device's counters
Update = tuple[float, str, str, Counted]  # time, device, port, what it counted


def read_updates(path: Path) -> Iterator[Update]:
    """Yield time, device, port and what it counted, update by update."""
    text, decoder, at = files.read_text(path), json.JSONDecoder(), 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,[]":
            at += 1
        if at >= len(text):
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            line = text.count("\n", 0, at) + 1
            raise InputError(f"{path.name}:{line}: not JSON; is the file cut off?") from None
        yield from _updates(value, path.name)


def _updates(value: Any, name: str) -> Iterator[Update]:
    if not isinstance(value, dict) or "updates" not in value:
        return  # such as {"sync-response": true}
    try:
        seconds = int(value["timestamp"]) / 1e9
        device = str(value["source"]).rpartition(":")[0] or str(value["source"])
        for update in value["updates"]:
            port_path = _PORT.search(str(update.get("Path") or update.get("path") or ""))
            if port_path is None:
                continue
            counted: Counted = defaultdict(float)
            for path, inner in (update.get("values") or {}).items():
                _collect(str(path).rpartition("/")[2], inner, counted)
            if counted:
                yield seconds, device, port_path[1] or port_path[2], dict(counted)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{name}: not an update of gNMI ({error})") from None


def _collect(leaf: str, value: Any, counted: Counted) -> None:
    """Add up the known counters of a leaf or subtree."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _collect(str(name).rpartition(":")[2], inner, counted)
        return
    if any(pattern.fullmatch(leaf) for pattern in counter_names("switch").values()):
        counted[leaf] += float(value)


@dataclass(frozen=True, slots=True)
class Readings:
    """Every link's counters as last heard by some times, and whose clocks are far off."""

    series: list[tuple[float, dict[Link, PortCounters]]]
    clocks: dict[str, float]  # devices that are this many seconds ahead of most


def readings(links: PortLinks, paths: list[Path]) -> Readings:
    """Return the readings in the order of time, each when all devices have been heard again.

    Devices do not send at once, and their clocks need not agree: the first of each are taken as
    read together. One that has sent its last is waited for no more.
    """
    rate, known = links.bytes_per_s(), links.links
    updates = [update for path in paths for update in read_updates(path)]
    for _, device, _, _ in updates:
        if device not in known:
            raise InputError(f"the readings name '{device}'; {hint(device, known)}")
    updates = [update for update in updates if update[2] in known[update[1]]]  # others lead nowhere
    ahead, far = _ahead(updates)
    updates = sorted(
        ((seconds - ahead[device], device, port, counted)
         for seconds, device, port, counted in updates), key=lambda one: one[0]
    )  # fmt: skip
    last = {device: seconds for seconds, device, _, _ in updates}
    state: dict[Link, Counted] = {}
    series: list[tuple[float, dict[Link, PortCounters]]] = []
    heard: dict[str, float] = {}  # since the last reading: when first

    def close() -> None:
        at = max(heard.values())
        series.append((at, {link: _port(rate, values) for link, values in state.items()}))
        heard.clear()

    for seconds, device, port, counted in updates:
        over = heard and seconds - max(heard.values()) >= _TOGETHER_S
        if over and all(
            own in heard for own, until in last.items() if until >= min(heard.values())
        ):
            close()
        heard.setdefault(device, seconds)
        link = (device, known[device][port])
        state[link] = state.get(link, {}) | counted
    if heard:
        close()
    return Readings(series, far)


def _ahead(updates: list[Update]) -> tuple[dict[str, float], dict[str, float]]:
    """Return how much ahead of most each device's clock is; and where it is more than two readings.

    All devices are taken to have been read from the same moment on.
    """
    moments: dict[str, set[float]] = defaultdict(set)
    for seconds, device, _, _ in updates:
        moments[device].add(seconds)
    if not moments:
        return {}, {}
    usual = median_low(min(own) for own in moments.values())
    ahead = {device: min(own) - usual for device, own in moments.items()}
    steps = [b - a for own in moments.values() for a, b in pairwise(sorted(own))]
    step = max(median_low(steps), _TOGETHER_S) if steps else _TOGETHER_S
    return ahead, {device: by for device, by in sorted(ahead.items()) if abs(by) > 2 * step}


def _port(rate: float, counted: Counted) -> PortCounters:
    values_of = {
        figure: [value for leaf, value in counted.items() if pattern.fullmatch(leaf)]
        for figure, pattern in counter_names("switch").items()
    }
    paused = values_of["paused_microseconds"]
    return PortCounters(
        rate=rate,
        sent_bytes=sum(values_of["sent_bytes"]),
        paused_s=sum(paused) / 1e6 if paused else None,
        pause_frames=sum(values_of["pause_frames"]),
        marks=sum(values_of["marks"]),
        discards=sum(values_of["discards"]),
    )
