"""Bytes of serving over links: the stream between stages, keys and values between engines."""

from __future__ import annotations

from typing import NamedTuple

from tutti.cost.network.group_links import link_of
from tutti.cost.network.program_choice import Efficiency
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import LinkKind, Position

_INSIDE = (LinkKind.SELF, LinkKind.ISLAND, LinkKind.NODE)


class TransferWire(NamedTuple):
    """A way between chips: start-up, and seconds per byte of the whole transfer."""

    latency_s: float
    byte_s: float

    def seconds(self, num_bytes: float) -> float:
        """Return how long so many bytes take."""
        return self.latency_s + num_bytes * self.byte_s


def wire_between(
    cluster: Cluster,
    first: Position,
    second: Position,
    *,
    lanes: int = 1,
    efficiency: Efficiency | None = None,
) -> TransferWire:
    """Return the way between two chips; `lanes` chips of both sides send side by side."""
    efficiency = efficiency or Efficiency()
    link = link_of(cluster, first, second)
    inside = link.kind in _INSIDE
    share = efficiency.island if inside else efficiency.fabric
    rate = (link.bandwidth if lanes == 1 else lanes * link.contended_bandwidth) * share
    extra = efficiency.startup_s if inside else efficiency.hop_s
    return TransferWire(link.latency_s + extra, 1.0 / rate)
