"""What a group's edges are made of: measured links of the Profile, else NIC rates, else a guess.

A job may have a Profile of each kind of chip. Chips of one kind go by theirs; among unlike chips
every edge is as slow as that of the slowest, and nobody has measured programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from tutti.collective import Edge, Group
from tutti.comm.places import Topology
from tutti.cost.network.group_links import GroupLinks, Wire
from tutti.hardware.profile import CollectiveTime, LinkFigure, Profile

# Until somebody measures: what one process gets out of shared memory and of a 10 Gbit/s NIC.
_ISLAND = Wire(latency_s=100e-6, bandwidth=2e9)
_FABRIC = Wire(latency_s=250e-6, bandwidth=1.1e9)
_GOODPUT = 0.97  # of a NIC's rate, after headers


def link_name(edge: Edge) -> str:
    """Return what the Profile calls an edge."""
    return f"comm {edge.value}"


Profiles = Profile | Mapping[str, Profile]  # of all chips, or of each kind by its name


class Measured:
    """What a job's Profiles say of links and programs, group by group."""

    def __init__(self, profiles: Profiles | None) -> None:
        self._profiles = {} if profiles is None else profiles

    def fingerprint(self) -> str:
        """Return a hash that is equal on all ranks that choose by the same figures."""
        known = self._profiles
        kinds = {"": known} if isinstance(known, Profile) else known
        text = repr([(chip, p.links, p.collectives) for chip, p in sorted(kinds.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def of(self, chips: Iterable[str]) -> tuple[tuple[LinkFigure, ...], tuple[CollectiveTime, ...]]:
        """Return the links and the programs of a group with chips of these kinds."""
        if isinstance(self._profiles, Profile):
            return self._profiles.links, self._profiles.collectives
        kinds = sorted(set(chips))
        if any(chip not in self._profiles for chip in kinds):
            return (), ()
        known = [self._profiles[chip] for chip in kinds]
        if len(known) == 1:
            return known[0].links, known[0].collectives
        return tuple(_slowest(profile.links for profile in known)), ()


def _slowest(links: Iterable[tuple[LinkFigure, ...]]) -> Iterator[LinkFigure]:
    """Yield the kinds of links that all have, each as slow as the slowest."""
    first, *others = ({link.kind: link for link in own} for own in links)
    for kind in first:
        if all(kind in other for other in others):
            alike = [first[kind], *(other[kind] for other in others)]
            yield LinkFigure(
                kind=kind,
                latency_s=max(link.latency_s for link in alike),
                bandwidth=min(link.bandwidth for link in alike),
            )


def comm_links(group: Group, topology: Topology, figures: Iterable[LinkFigure] = ()) -> GroupLinks:
    """Return the group with the wires of its edges and the NIC rates of its ranks.

    `figures` are measured links, which go before rates and guesses.
    """
    known = [topology.places[rank].bandwidth for rank in group.ranks]
    nominal = known if all(known) else [_FABRIC.bandwidth] * group.size
    fabric = Wire(latency_s=_FABRIC.latency_s, bandwidth=min(nominal) * _GOODPUT)
    links = GroupLinks(
        group=group,
        wires=((Edge.ISLAND, _ISLAND), (Edge.RAIL, fabric), (Edge.CROSS, fabric)),
        nodes=len({topology.places[rank].host for rank in group.ranks}),
        rates=tuple(rate * _GOODPUT for rate in nominal),
    )
    return measured_links(links, figures)


def nominal_links(links: GroupLinks) -> GroupLinks:
    """Return assumed links with the NICs' full rates, headers and all: what bounds count with."""
    return replace(links, rates=tuple(rate / _GOODPUT for rate in links.rates))


def measured_links(links: GroupLinks, figures: Iterable[LinkFigure]) -> GroupLinks:
    """Return the links with measured figures in the place of what was assumed."""
    by_kind = {figure.kind: figure for figure in figures}
    wires = dict(links.wires)
    for edge in Edge:
        figure = by_kind.get(link_name(edge))
        if figure is not None:
            wires[edge] = Wire(latency_s=figure.latency_s, bandwidth=figure.bandwidth)
    rail = by_kind.get(link_name(Edge.RAIL)) or by_kind.get(link_name(Edge.CROSS))
    rates = links.rates
    if rail is not None:
        nominal = min(rates) / _GOODPUT
        share = min(1.0, rail.bandwidth / nominal) / _GOODPUT
        rates = tuple(rate * share for rate in rates)
    return replace(links, wires=tuple(wires.items()), rates=rates)
