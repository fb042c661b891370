"""What a group's edges are made of: measured links of the Profile, else NIC rates, else a guess."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tutti.collective import Edge, Group
from tutti.comm.places import Topology
from tutti.cost.network.group_links import GroupLinks, Wire
from tutti.hardware.profile import LinkFigure, Profile

# Until somebody measures: what one process gets out of shared memory and of a 10 Gbit/s NIC.
_ISLAND = Wire(latency_s=100e-6, bandwidth=2e9)
_FABRIC = Wire(latency_s=250e-6, bandwidth=1.1e9)
_GOODPUT = 0.97  # of a NIC's rate, after headers


def link_name(edge: Edge) -> str:
    """Return what the Profile calls an edge."""
    return f"comm {edge.value}"


def comm_links(group: Group, topology: Topology, profile: Profile | None = None) -> GroupLinks:
    """Return the group with the wires of its edges and the NIC rates of its ranks."""
    known = [topology.places[rank].bandwidth for rank in group.ranks]
    nominal = known if all(known) else [_FABRIC.bandwidth] * group.size
    fabric = Wire(latency_s=_FABRIC.latency_s, bandwidth=min(nominal) * _GOODPUT)
    links = GroupLinks(
        group=group,
        wires=((Edge.ISLAND, _ISLAND), (Edge.RAIL, fabric), (Edge.CROSS, fabric)),
        nodes=len({topology.places[rank].host for rank in group.ranks}),
        rates=tuple(rate * _GOODPUT for rate in nominal),
    )
    return links if profile is None else measured_links(links, profile.links)


def nominal_links(links: GroupLinks) -> GroupLinks:
    """Return assumed links with the NICs' full rates, headers and all: what bounds count with."""
    return replace(links, rates=tuple(rate / _GOODPUT for rate in links.rates))


def measured_links(links: GroupLinks, figures: Iterable[LinkFigure]) -> GroupLinks:
    """Return the links with measured figures in the place of what was assumed."""
    found = {figure.kind: figure for figure in figures}
    wires = dict(links.wires)
    for edge in Edge:
        figure = found.get(link_name(edge))
        if figure is not None:
            wires[edge] = Wire(latency_s=figure.latency_s, bandwidth=figure.bandwidth)
    rail = found.get(link_name(Edge.RAIL)) or found.get(link_name(Edge.CROSS))
    rates = links.rates
    if rail is not None:
        nominal = min(rates) / _GOODPUT
        share = min(1.0, rail.bandwidth / nominal) / _GOODPUT
        rates = tuple(rate * share for rate in rates)
    return replace(links, wires=tuple(wires.items()), rates=rates)
