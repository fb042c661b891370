"""Wires: the ways out of a node, and what each is called.

Chips of a node that share their NICs share a wire. It is called by its node, "pool/node", or, where
chips of a node have NICs of their own, by the first chip of those that share it: "pool/node/slot".
"""

from __future__ import annotations

from dataclasses import replace

from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind, CrossLink
from tutti.hardware.pool import Pool
from tutti.hardware.topology import HOST_FORWARD_NIC_FRACTION, Position


def wire_of(cluster: Cluster, chip: Position) -> str:
    """Return the name of the wire that a chip sends through."""
    shared = _sharing(cluster.pool(chip.pool), chip.slot)
    node = f"{chip.pool}/{chip.node}"
    whole = len(shared) == cluster.pool(chip.pool).node.num_chips
    return node if whole else f"{node}/{shared[0]}"


def chips_of_wire(cluster: Cluster, name: str) -> tuple[Position, ...]:
    """Return the chips that send through a wire; of "pool/node" all that the node has."""
    pool_name, *numbers = name.split("/")
    if len(numbers) not in (1, 2) or not all(n.isascii() and n.isdecimal() for n in numbers):
        raise InputError(f"'{name}' is no wire; write it as pool/node, or pool/node/slot")
    pool, place = cluster.pool(pool_name), [int(n) for n in numbers]
    chip = Position(pool_name, place[0], (place[1:] or [0])[0])
    cluster.link(chip, chip)  # says what does not exist
    slots = _sharing(pool, chip.slot) if place[1:] else range(pool.node.num_chips)
    return tuple(Position(pool_name, chip.node, slot) for slot in slots)


def _sharing(pool: Pool, slot: int) -> list[int]:
    node = pool.node
    own = node.nics_of(slot)
    return [other for other in range(node.num_chips) if node.nics_of(other) == own]


def scaled_link(link: CrossLink, home: Pool, away: Pool, factor: float) -> CrossLink:
    """Return a link at a share of its bandwidth; more than its NICs' rate is a ValueError."""
    if link.bandwidth is not None:
        return replace(link, bandwidth=link.bandwidth * factor)
    forwarded = link.kind is CrossKind.HOST_FORWARDED
    fraction = link.nic_fraction or (HOST_FORWARD_NIC_FRACTION if forwarded else 1.0)
    if forwarded:  # the copies through the host may be what limits it
        rate = min(home.node.nic_rate(0), away.node.nic_rate(0))
        copies = min(home.node.host.device_bandwidth, away.node.host.device_bandwidth)
        fraction = min(fraction, copies / rate) if rate else fraction
    if fraction * factor > 1:
        raise ValueError(
            f"the link would pass its NICs' rate; the factor is {1 / fraction:.3g} at most"
        )
    return replace(link, nic_fraction=fraction * factor)
