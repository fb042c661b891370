"""What joins nodes: switch tiers, rails, links between pools.

Nodes of one pool share leaves in the order of their numbers; pools meet at the top tier. Facts
only: how a pair of chips is connected is worked out in `topology`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from tutti.document import Above, AtLeast, AtMost, BytesPerSecond, Count, Seconds

Oversubscription = Annotated[float, AtLeast(1), AtMost(1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One layer of switches, bottom to top."""

    name: str
    nodes: Count | None = None
    """Nodes that one group of this tier joins; left out at the top: all of them."""
    oversubscription: Oversubscription = 1.0
    """Bandwidth offered from below ÷ bandwidth carried by this tier; 1 is non-blocking."""
    latency_s: Seconds = 2e-6
    """One way, end to end, for a message that turns around at this tier."""
    ports: Count | None = None
    """Of one switch; left out: as many as it takes."""
    port_rate: BytesPerSecond | None = None
    """Of one port; left out: what the tier carries, spread evenly."""
    parallel_links: Count = 1
    """Cables between one switch of this tier and each one below it."""

    def __post_init__(self) -> None:
        if self.ports is not None and self.ports < 2:
            raise ValueError(f"tier '{self.name}': a switch of {self.ports} port joins nothing")


class Routing(StrEnum):
    """How a switch, or a sender, chooses among equal ways up."""

    SPRAY = "spray"  # packet by packet, evenly: what prices assume where nothing is said
    ECMP = "ecmp"  # a hash of each connection's five numbers, another one in each switch
    POLARISED = "polarised"  # the same hash in all switches: choices repeat themselves
    SOURCE_PORT = "source_port"  # senders pick ports whose paths others leave alone
    FLOWLET = "flowlet"  # a connection hashes anew after each pause
    ADAPTIVE = "adaptive"  # each switch takes the way that is least used


class CrossKind(StrEnum):
    """How chips of two pools reach each other."""

    DIRECT = "direct"
    HOST_FORWARDED = "host_forwarded"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossLink:
    """The way between two pools.

    Bandwidth per chip and direction is `bandwidth`, or `nic_fraction` of the slower NIC.
    """

    pools: tuple[str, str]
    kind: CrossKind = CrossKind.DIRECT
    bandwidth: BytesPerSecond | None = None
    nic_fraction: Annotated[float, Above(0), AtMost(1)] | None = None
    latency_s: Seconds | None = None
    """One way, end to end; left out: the fabric's, plus the copies when host-forwarded."""
    same_host: bool = False
    """Both pools sit in one machine; nothing crosses a network."""

    def __post_init__(self) -> None:
        if self.pools[0] == self.pools[1]:
            raise ValueError(f"'pools' names '{self.pools[0]}' twice; it joins two pools")
        if self.bandwidth is not None and self.nic_fraction is not None:
            raise ValueError("give 'bandwidth' or 'nic_fraction', not both")
        if self.same_host and self.bandwidth is None:
            raise ValueError("'same_host' needs 'bandwidth', for no NIC lies between")

    def joins(self, first: str, second: str) -> bool:
        """Tell whether this is the link between two pools, in either order."""
        return set(self.pools) == {first, second}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The network between nodes."""

    tiers: tuple[Tier, ...] = (Tier(name="switch"),)
    rail_optimized: bool = False
    """NIC i of every node hangs on leaf i: the same rail meets at the leaf, others above it."""
    rail_only: bool = False
    """Rails never meet, not even above the leaves: who sends to another rail hops inside a node."""
    planes: Count = 1
    """Separate fabrics that every NIC has a port in; each port has its share of the NIC's rate."""
    routing: Routing = Routing.SPRAY
    connections: Count = 1
    """Connections between each pair of chips that talk."""
    in_switch_reduction: bool = False
    """Switches add up what passes through them (SHARP)."""
    links: tuple[CrossLink, ...] = ()

    def __post_init__(self) -> None:
        if self.rail_only and not self.rail_optimized:
            raise ValueError("'rail_only' needs 'rail_optimized: true'")
        if not self.tiers:
            raise ValueError("'tiers' is empty; leave it out for one non-blocking switch")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise ValueError(f"two tiers have one name among {', '.join(names)}")
        below = 1
        for index, tier in enumerate(self.tiers):
            if tier.nodes is None and index + 1 < len(self.tiers):
                raise ValueError(f"tier '{tier.name}' lacks 'nodes'; only the top may leave it out")
            if tier.nodes is not None and tier.nodes < below:
                raise ValueError(
                    f"tier '{tier.name}' joins {tier.nodes} nodes, fewer than the {below} "
                    "below it; list tiers from the leaf upwards"
                )
            below = tier.nodes or below

    @property
    def top(self) -> Tier:
        """The tier at which pools meet."""
        return self.tiers[-1]

    @property
    def oversubscribed(self) -> bool:
        """Whether a tier lets less through than what hangs below it."""
        return any(tier.oversubscription > 1.0 for tier in self.tiers)

    def oversubscription_to(self, index: int) -> float:
        """Return the product of oversubscriptions on the way up to a tier."""
        product = 1.0
        for tier in self.tiers[: index + 1]:
            product *= tier.oversubscription
        return product
