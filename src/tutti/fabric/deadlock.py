"""Cyclic buffer dependencies: whether links that pause each other can wait in a circle.

With pauses (PFC) a full link stops the links that feed it. Link a *depends* on link b where some
route enters a switch by a and leaves it by b. Where these dependencies have a cycle, all of it can
stand still for ever; routes that only go up and then down have none. Routes come from a wiring,
or from the tables of real switches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from tutti.document import Place, build_fields
from tutti.errors import InputError
from tutti.fabric.naming import link_name
from tutti.fabric.wiring import Integers, Wiring


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleCheck:
    """What was looked at, and a cycle if there is one: links, each waiting for the next."""

    links: int
    dependencies: int
    cycle: tuple[str, ...]


def check_wiring(wiring: Wiring, bounces: Sequence[int] = ()) -> CycleCheck:
    """Look for cycles among the routes of a wiring: up to where ends meet, then down.

    `bounces` are leaves that send back up what they cannot deliver, as fast reroutes do.
    """
    pairs = [pair for pair in _wiring_dependencies(wiring) if pair.size]
    for leaf in bounces:
        if not 0 <= leaf < wiring.num_switches[0]:
            last = wiring.num_switches[0] - 1
            raise InputError(f"leaf {leaf} is not among 0-{last}; nothing can bounce there")
        for layer in wiring.layers[:1]:
            each = layer.ways * layer.cables
            own = (leaf * each + np.arange(each))[None, :]
            pairs.append(_product(layer.down + own, layer.up + own))
    edges = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0), dtype=np.int64)
    cycle = find_cycle(edges, wiring.num_links)
    return CycleCheck(
        links=wiring.num_links,
        dependencies=edges.shape[1],
        cycle=tuple(link_name(wiring, link) for link in cycle),
    )


def _product(into: Integers, out: Integers) -> Integers:
    """Return every pair of one row of `into` and the same row of `out`."""
    rows, left = into.shape
    right = out.shape[1]
    a = np.broadcast_to(into[:, :, None], (rows, left, right)).ravel()
    b = np.broadcast_to(out[:, None, :], (rows, left, right)).ravel()
    return np.stack([a, b])


def _wiring_dependencies(wiring: Wiring) -> Iterator[Integers]:
    """Yield (from, to) of links that follow each other at a switch, tier by tier."""
    ports = np.arange(wiring.num_ports)
    for leaf in np.unique(wiring.port_leaf):
        own = ports[wiring.port_leaf == leaf][None, :]
        yield _product(own, own + wiring.num_ports)
        if wiring.layers:
            layer = wiring.layers[0]
            each = layer.ways * layer.cables
            up = (layer.up + leaf * each + np.arange(each))[None, :]
            yield _product(own, up)
            yield _product(up - layer.up + layer.down, own + wiring.num_ports)
    for tier, layer in enumerate(wiring.layers):
        below = _cables_below(wiring, tier)
        for switch, cables in below.items():
            into, out = layer.up + cables[None, :], layer.down + cables[None, :]
            each = layer.ways * layer.cables
            turned = _product(cables[None, :], cables[None, :])
            turned = turned[:, turned[0] // each != turned[1] // each]  # nothing goes back
            yield turned + np.array([[layer.up], [layer.down]])
            if tier + 1 < len(wiring.layers):
                above = wiring.layers[tier + 1]
                wide = above.ways * above.cables
                rising = (switch * wide + np.arange(wide))[None, :]
                yield _product(into, above.up + rising)
                yield _product(above.down + rising, out)


def _cables_below(wiring: Wiring, tier: int) -> dict[int, Integers]:
    """Return, by switch of the tier above a layer, the cables of the layer that reach it."""
    layer, per_group = wiring.layers[tier], wiring.switches_per_group
    low = np.arange(layer.switches)
    group, x = np.divmod(low, per_group[tier])
    merged = tier == 0 and per_group[0] != wiring.lanes
    column = x % wiring.lanes if merged else x
    first = wiring.group_parent[tier][group] * per_group[tier + 1] + column * layer.ways
    way = np.arange(layer.ways)
    owner = np.repeat((first[:, None] + way[None, :]).ravel(), layer.cables)
    order = np.argsort(owner, kind="stable")
    switches, starts = np.unique(owner[order], return_index=True)
    return dict(zip(switches.tolist(), np.split(order, starts[1:]), strict=True))


def find_cycle(edges: Integers, size: int) -> list[int]:
    """Return the nodes of a cycle, in order; none: empty."""
    if not edges.shape[1]:
        return []
    graph = sparse.csr_matrix(
        (np.ones(edges.shape[1], dtype=np.int8), (edges[0], edges[1])), shape=(size, size)
    )
    count, label = connected_components(graph, directed=True, connection="strong")
    loops = edges[0][edges[0] == edges[1]]
    if len(loops):
        return [int(loops[0])]
    if count == size:
        return []
    sizes = np.bincount(label)
    inside = label == int(np.flatnonzero(sizes > 1)[np.argmin(sizes[sizes > 1])])
    at = int(np.flatnonzero(inside)[0])
    seen: dict[int, int] = {}
    path: list[int] = []
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        following = graph.indices[graph.indptr[at] : graph.indptr[at + 1]]
        at = int(following[inside[following]][0])
    return path[seen[at] :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Routes of real switches: where hosts hang, and each switch's next hops by destination."""

    hosts: Mapping[str, str]
    routes: Mapping[str, Mapping[str, tuple[str, ...]]]

    @classmethod
    def read(cls, value: object, name: str) -> Tables:
        """Build tables from their written form; what names nothing known is refused."""
        tables = build_fields(cls, value, Place(name))
        known = {*tables.hosts.values(), *tables.routes}
        for switch, table in tables.routes.items():
            for host, ways in table.items():
                if host not in tables.hosts:
                    raise InputError(f"{name}: {switch} has a route to unknown host '{host}'")
                for way in ways:
                    if way not in known and way != host:
                        raise InputError(f"{name}: {switch} sends {host} to unknown '{way}'")
        return tables


def check_tables(tables: Tables) -> CycleCheck:
    """Look for holes, loops and cyclic dependencies in switches' routing tables."""
    names: dict[tuple[str, str], int] = {}
    edges: set[tuple[int, int]] = set()
    for host, home in tables.hosts.items():
        starts = [(other, leaf) for other, leaf in tables.hosts.items() if other != host]
        _require_no_loop(tables, host)
        todo, done = [*starts], set()
        while todo:
            link = todo.pop()
            if link in done:
                continue
            done.add(link)
            at = names.setdefault(link, len(names))
            for way in _next(tables, link[1], host, home):
                out = (link[1], way)
                edges.add((at, names.setdefault(out, len(names))))
                if way != host:
                    todo.append(out)
    table = np.array(sorted(edges), dtype=np.int64).reshape(-1, 2).T
    labels = list(names)
    cycle = find_cycle(table, len(names))
    return CycleCheck(
        links=len(names),
        dependencies=len(edges),
        cycle=tuple(" → ".join(labels[link]) for link in cycle),
    )


def _next(tables: Tables, switch: str, host: str, home: str) -> Sequence[str]:
    if switch == home:
        return (host,)
    ways = tables.routes.get(switch, {}).get(host, ())
    if not ways:
        raise InputError(f"{switch} has no route to {host}, but is on the way to it")
    return ways


def _require_no_loop(tables: Tables, host: str) -> None:
    """Refuse routes that send what is for a host in a circle."""
    home = tables.hosts[host]
    switches = sorted({*tables.routes, *tables.hosts.values()})
    number = {switch: i for i, switch in enumerate(switches)}
    edges = [
        (number[switch], number[way])
        for switch in switches
        if switch != home
        for way in tables.routes.get(switch, {}).get(host, ())
        if way in number
    ]
    cycle = find_cycle(np.array(edges, dtype=np.int64).reshape(-1, 2).T, len(switches))
    if cycle:
        around = " → ".join(switches[i] for i in (*cycle, cycle[0]))
        raise InputError(
            f"what is for {host} goes in a circle: {around}; the routes of one of them are wrong"
        )
