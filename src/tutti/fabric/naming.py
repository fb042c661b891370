"""What links are called, for people."""

from __future__ import annotations

from tutti.fabric.failures import above
from tutti.fabric.wiring import Wiring


def link_name(wiring: Wiring, link: int) -> str:
    """Return both ends of a link, in the direction in which it carries."""
    tiers = [tier.name for tier in wiring.fabric.tiers]
    if link < 2 * wiring.num_ports:
        port = link % wiring.num_ports
        ends = [_host(wiring, port), f"{tiers[0]} {int(wiring.port_leaf[port])}"]
        return " → ".join(ends if link < wiring.num_ports else reversed(ends))
    for tier, layer in enumerate(wiring.layers):
        for first, bundle, up in (
            (layer.up, layer.bundle_up, True),
            (layer.down, layer.bundle_down, False),
        ):
            if first <= link < first + layer.num_links:
                low, at = divmod(link - first, layer.ways * layer.cables)
                ends = [
                    f"{tiers[tier]} {low}",
                    f"{tiers[tier + 1]} {above(wiring, tier, low)[at // layer.cables]}",
                ]
                return " → ".join(ends if up else reversed(ends))
            if bundle <= link < bundle + layer.bundle_down - layer.bundle_up:
                who = f"{tiers[tier]} {link - bundle}" if tier == 0 else (
                    f"{tiers[tier]}s of pod {(link - bundle) // wiring.lanes}"
                )  # fmt: skip
                ends = [who, f"all {tiers[tier + 1]}s"]
                return " → ".join(ends if up else reversed(ends))
    return _inside(wiring, link)


def tier_of(wiring: Wiring, link: int) -> str:
    """Return where a link lies: "leaf–spine up" and the like."""
    tiers = [tier.name for tier in wiring.fabric.tiers]
    if link < 2 * wiring.num_ports:
        return "NICs out" if link < wiring.num_ports else "NICs in"
    for tier, layer in enumerate(wiring.layers):
        count = layer.bundle_down - layer.bundle_up
        if layer.up <= link < layer.bundle_down + count:
            up = link < layer.down or layer.bundle_up <= link < layer.bundle_down
            return f"{tiers[tier]}–{tiers[tier + 1]} {'up' if up else 'down'}"
    return "inside nodes" if link < wiring.num_links else "between pools"


def _host(wiring: Wiring, port: int) -> str:
    chips = (wiring.chip_ports == port).any(axis=1).nonzero()[0]
    return f"NIC of {wiring.position(int(chips[0]))}"


def _inside(wiring: Wiring, link: int) -> str:
    if link >= wiring.num_links:
        return "between pools"
    at = (link - wiring.island_out) % (2 * wiring.num_chips)
    way = "out of" if at < wiring.num_chips else "into"
    return f"{way} {wiring.position(at % wiring.num_chips)}"
