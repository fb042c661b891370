"""Capacity questions: "what if eight more H100 came", "what if node 3 died", as a changed cluster.

A question is a comma-separated list of changes, applied from left to right; node numbers are those
of the cluster as it stands before the first of them:

    +8xH100           whole nodes of a chip: the pool that has it grows, else a new pool comes
    -8xH100           whole nodes of the one pool with that chip go, the last first
    +2 nodes a800     -2 nodes a800     nodes of a pool come or go at its end
    -node 3           -node a800/3      one node goes, counted over all pools, or inside one
    -pool v100        a pool goes
    slow a800 0.8     a800*0.8          a pool is measured at a fraction of its speed
    link a800 p800 0.5                  the bandwidth between two pools changes
    -chip a800/0/3                      and other changes of single places: `single_changes`

Nodes of a pool are numbered 0…n-1, so that those behind a lost one move up; `Change.moved` says
which node became which. A leaf switch joins nodes by number: after a loss in the middle the model
of the fabric is that of a pool that was cabled with one node less.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tutti.document import Place
from tutti.errors import InputError, hint
from tutti.hardware import library as catalog
from tutti.hardware.chip import Chip
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossLink
from tutti.hardware.library import Library
from tutti.hardware.pool import Pool
from tutti.hardware.topology import Position, default_cross_link
from tutti.hardware.wires import scaled_link
from tutti.search.question.cluster_parts import ClusterParts
from tutti.search.question.single_changes import PLACE, NodePlace, SingleChanges
from tutti.units import many

_FORMS = (
    "+8xH100, -8xH100, +2 nodes POOL, -2 nodes POOL, -node 3, -node POOL/3, -pool POOL, "
    "slow POOL 0.8, link POOL POOL 0.5, -chip POOL/3/0, slow POOL/3[/0] 0.7, wire POOL/3 0.5, "
    "link POOL/3 POOL/4 0.5"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The cluster after a change; nodes that are lost are not in `moved`.

    Where single chips or wires change, the cluster is that of `parts`.
    """

    cluster: Cluster
    moved: Mapping[NodePlace, NodePlace]
    words: str
    parts: ClusterParts | None = None
    lost: frozenset[Position] = frozenset()  # single chips


@dataclass(slots=True)
class _Draft:
    """A cluster while it is being changed: per pool the numbers its nodes had, None for new."""

    before: Cluster
    pools: dict[str, Pool]
    nodes: dict[str, list[int | None]]
    links: list[CrossLink]
    singles: SingleChanges
    words: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, cluster: Cluster) -> _Draft:
        return cls(
            before=cluster,
            singles=SingleChanges(cluster),
            pools={pool.name: pool for pool in cluster.pools},
            nodes={pool.name: list(range(pool.nodes)) for pool in cluster.pools},
            links=list(cluster.fabric.links),
        )

    def pool(self, name: str, part: str) -> Pool:
        """Return a pool that is still there, in any spelling of its name."""
        for known in self.pools.values():
            if known.name.casefold() == name.casefold():
                return known
        raise _error(part, f"no pool '{name}'; {hint(name, self.pools)}")

    def remove(self, name: str) -> None:
        """Take a pool out, with the links that name it."""
        del self.pools[name], self.nodes[name]
        self.links = [link for link in self.links if name not in link.pools]


def change_cluster(cluster: Cluster, text: str) -> Change:
    """Return the cluster that a question such as "+8xH100, -node 3" asks about."""
    parts = [part.strip() for part in text.replace("×", "x").replace("−", "-").split(",")]
    if not any(parts):
        raise InputError(f"what-if: nothing is changed; write one or several of {_FORMS}")
    draft = _Draft.of(cluster)
    for part in filter(None, parts):
        _apply(draft, part)
    return _finished(draft, text)


def _error(part: str, message: str) -> InputError:
    return InputError(f"what-if: '{part}': {message}")


def _apply(draft: _Draft, part: str) -> None:
    for pattern, change in _CHANGES:
        match = re.fullmatch(pattern, part, re.IGNORECASE)
        if match is not None:
            change(draft, part, *match.groups())
            return
    raise _error(part, f"is no change; write it like one of {_FORMS}")


def _finished(draft: _Draft, text: str) -> Change:
    words = ", ".join(draft.words)
    pools = tuple(p.of_nodes(draft.nodes[p.name]) for p in draft.pools.values())
    if not pools:
        raise _error(text, f"nothing would be left of '{draft.before.name}'")
    before = draft.before
    try:
        cluster = replace(
            before,
            summary=f"{before.name} with this change: {words}",
            pools=pools,
            fabric=replace(before.fabric, links=tuple(draft.links)),
        )
    except ValueError as error:  # what the cluster itself forbids, such as nodes without a NIC
        raise _error(text, str(error)) from None
    moved = {
        (pool, old): (pool, new)
        for pool, olds in draft.nodes.items()
        for new, old in enumerate(olds)
        if old is not None
    }
    try:
        alike = replace(cluster, summary=before.summary) == before
        parts = draft.singles.parts(before if alike else cluster, moved)
    except InputError as error:
        raise _error(text, str(error)) from None
    if parts is None:
        return Change(cluster=cluster, moved=moved, words=words)
    summary = f"{before.name} with this change: {words}"
    parts = replace(parts, cluster=replace(parts.cluster, summary=summary))
    return Change(
        cluster=parts.cluster, moved=moved, words=words, parts=parts,
        lost=frozenset(draft.singles.lost),
    )  # fmt: skip


# --- nodes that come -------------------------------------------------------------------------


def _add_chips(draft: _Draft, part: str, count: str, name: str) -> None:
    chip, library = _chip(draft, name, part)
    holders = [pool for pool in draft.pools.values() if pool.chip.name == chip.name]
    if len(holders) == 1:
        pool = holders[0]
        nodes = _whole_nodes(int(count), pool, part)
        _grow(draft, pool, nodes)
        return
    node = library.node_for(chip)
    pool = _new_pool(draft, Pool(name=_free_name(draft, chip), node=node), part)
    nodes = _whole_nodes(int(count), pool, part)
    try:
        draft.pools[pool.name] = replace(pool, nodes=nodes)
    except ValueError as error:
        raise _error(part, str(error)) from None
    draft.nodes[pool.name] = [None] * nodes
    draft.words.append(f"+{count} {chip.name} as pool '{pool.name}' ({_nodes(nodes)} {node.name})")


def _new_pool(draft: _Draft, pool: Pool, part: str) -> Pool:
    """Refuse a pool whose chips could reach no other node."""
    if draft.pools and not pool.node.all_reach_a_nic:
        raise _error(
            part,
            f"the node type '{pool.node.name}' has no NICs, so its chips would reach nobody; "
            "describe the pool in the cluster file",
        )
    return pool


def _chip(draft: _Draft, name: str, part: str) -> tuple[Chip, Library]:
    """Look a chip up among the cluster's own definitions and those that ship."""
    shipped = catalog.shipped()
    chips = {pool.chip.name: pool.chip for pool in draft.before.pools}
    nodes = {pool.node.name: pool.node for pool in draft.before.pools}
    # The cluster's own come first, both in order and in what a name means.
    library = Library({**chips, **shipped.chips, **chips}, {**nodes, **shipped.nodes, **nodes})
    return library.chip(name, Place("what-if", (f"'{part}'", "chip"))), library


def _whole_nodes(count: int, pool: Pool, part: str) -> int:
    size = pool.node.num_chips
    nodes, rest = divmod(count, size)
    if rest or not nodes:
        near = [str(n * size) for n in (nodes, nodes + 1) if n]
        message = f"a node of type '{pool.node.name}' has {size} chips; give {' or '.join(near)}"
        raise _error(part, message)
    return nodes


def _free_name(draft: _Draft, chip: Chip) -> str:
    base, number = chip.name.casefold(), 2
    name = base
    while name in draft.pools:
        name, number = f"{base}-{number}", number + 1
    return name


def _add_nodes(draft: _Draft, part: str, count: str, name: str) -> None:
    pool = draft.pool(name, part)
    if not int(count):
        raise _error(part, "adds no node; give 1 or more")
    _grow(draft, pool, int(count))


def _grow(draft: _Draft, pool: Pool, nodes: int) -> None:
    draft.nodes[pool.name] += [None] * nodes
    chips = nodes * pool.node.num_chips
    draft.words.append(f"+{_nodes(nodes)} in pool '{pool.name}' ({chips} {pool.chip.name})")


def _nodes(count: int) -> str:
    return many(count, "node")


# --- nodes that go ---------------------------------------------------------------------------


def _drop_chips(draft: _Draft, part: str, count: str, name: str) -> None:
    chip, _ = _chip(draft, name, part)
    holders = [pool for pool in draft.pools.values() if pool.chip.name == chip.name]
    if len(holders) != 1:
        named = " and ".join(f"'{pool.name}'" for pool in holders) or "no pool"
        raise _error(part, f"{named} has {chip.name}; write it as '-2 nodes POOL'")
    _drop_nodes(draft, part, str(_whole_nodes(int(count), holders[0], part)), holders[0].name)


def _drop_nodes(draft: _Draft, part: str, count: str, name: str) -> None:
    pool, number = draft.pool(name, part), int(count)
    held = draft.nodes[pool.name]
    if not 0 < number <= len(held):
        raise _error(part, f"pool '{pool.name}' has {_nodes(len(held))}; give 1 to {len(held)}")
    del held[len(held) - number :]
    draft.words.append(f"-{_nodes(number)} of pool '{pool.name}'")
    if not held:
        draft.remove(pool.name)


def _drop_pool_node(draft: _Draft, part: str, name: str, number: str) -> None:
    pool, node = draft.pool(name, part), int(number)
    held = draft.nodes[pool.name]
    if node not in held:
        before = {known.name: known.nodes for known in draft.before.pools}.get(pool.name, 0)
        if node < before:
            raise _error(part, f"node {node} of pool '{pool.name}' is gone already")
        remedy = f"it has nodes 0-{before - 1}" if before else "it is new; give '-N nodes POOL'"
        raise _error(part, f"no node {node} in pool '{pool.name}'; {remedy}")
    held.remove(node)
    draft.words.append(f"-node {pool.name}/{node}")
    if not held:
        draft.remove(pool.name)


def _drop_node(draft: _Draft, part: str, number: str) -> None:
    index, rest = int(number), int(number)
    for pool in draft.before.pools:
        if rest < pool.nodes:
            if pool.name not in draft.pools:
                raise _error(part, f"node {index} was of pool '{pool.name}', which is gone already")
            _drop_pool_node(draft, part, pool.name, str(rest))
            return
        rest -= pool.nodes
    last = draft.before.num_nodes - 1
    raise _error(part, f"no node {index}; '{draft.before.name}' has nodes 0-{last} over all pools")


def _drop_pool(draft: _Draft, part: str, name: str) -> None:
    pool = draft.pool(name, part)
    draft.remove(pool.name)
    draft.words.append(f"-pool '{pool.name}'")


# --- speeds ----------------------------------------------------------------------------------


def _slow(draft: _Draft, part: str, name: str, text: str) -> None:
    """Scale what a pool's chips sustain.

    The chip keeps its name, by which calibrations are found, unless another pool has the same
    chip at full speed: then it needs a name of its own, and carries the old one as an alias.
    """
    pool, factor = draft.pool(name, part), _factor(text, part)
    chip, node = pool.chip, pool.node
    sustained = chip.sustained * factor
    if sustained > 1:
        most = 1 / chip.sustained
        raise _error(part, f"{chip.name} would pass its peak; the factor is {most:.3g} at most")
    others = [other for other in draft.pools.values() if other.name != pool.name]
    note = f"what-if: at {factor:g} of its speed. {chip.note}".strip()
    slow = replace(chip, sustained=sustained, note=note)
    node_name = node.name
    if any(other.chip.name == chip.name for other in others):
        slow = replace(slow, name=f"{chip.name}-at-{factor:g}", aliases=(chip.name, *chip.aliases))
    if any(other.node.name == node.name for other in others):
        node_name = f"{node.name}-at-{factor:g}"
    draft.pools[pool.name] = replace(pool, node=replace(node, name=node_name, chip=slow))
    draft.words.append(f"pool '{pool.name}' at {factor:g} of its speed")


def _factor(text: str, part: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        raise _error(part, f"'{text}' is no factor; write it like 0.8") from None
    if not 0 < factor < float("inf"):
        raise _error(part, f"the factor is {text}; give a number above 0, such as 0.8")
    return factor


def _relink(draft: _Draft, part: str, first: str, second: str, text: str) -> None:
    home, away = draft.pool(first, part), draft.pool(second, part)
    factor = _factor(text, part)
    if home.name == away.name:
        raise _error(part, f"names pool '{home.name}' twice; a link joins two pools")
    written = [link for link in draft.links if link.joins(home.name, away.name)]
    link = written[0] if written else default_cross_link(home, away)
    changed = _scaled(link, home, away, factor, part)
    draft.links = [old for old in draft.links if old is not link] + [changed]
    draft.words.append(f"link '{home.name}'-'{away.name}' at {factor:g} of its bandwidth")


def _scaled(link: CrossLink, home: Pool, away: Pool, factor: float, part: str) -> CrossLink:
    try:
        return scaled_link(link, home, away, factor)
    except ValueError as error:
        raise _error(part, str(error)) from None


# --- single places ---------------------------------------------------------------------------


def _single(draft: _Draft, part: str, *given: str) -> None:
    """Change a chip, a wire, or the link between two."""
    kind = part.removeprefix("-").split()[0].casefold()
    try:
        if kind == "chip":
            draft.words.append(draft.singles.drop(given[0]))
            return
        factor = _factor(given[-1], part)
        if kind == "slow":
            draft.words.append(draft.singles.slow(given[0], factor))
        else:
            draft.words.append(draft.singles.slow_wire(given[:-1], factor))
    except InputError as error:
        text = str(error)
        raise error if text.startswith("what-if:") else _error(part, text) from None


_NAME, _NUMBER = r"([^\s/*]+)", r"(\d{1,9})"
_CHANGES: tuple[tuple[str, Callable[..., None]], ...] = (
    (rf"\+\s*{_NUMBER}\s*x\s*{_NAME}", _add_chips),
    (rf"-\s*{_NUMBER}\s*x\s*{_NAME}", _drop_chips),
    (rf"\+\s*{_NUMBER}\s+nodes?\s+{_NAME}", _add_nodes),
    (rf"-\s*{_NUMBER}\s+nodes?\s+{_NAME}", _drop_nodes),
    (rf"-\s*node\s+{_NUMBER}", _drop_node),
    (rf"-\s*node\s+{_NAME}/{_NUMBER}", _drop_pool_node),
    (rf"-\s*pool\s+{_NAME}", _drop_pool),
    (rf"-\s*chip\s+({_NAME[1:-1]}/{_NUMBER[1:-1]}/{_NUMBER[1:-1]})", _single),
    (rf"slow\s+{PLACE}\s+(\S+)", _single),
    (rf"wire\s+{PLACE}\s+(\S+)", _single),
    (rf"link\s+{PLACE}\s+{PLACE}\s+(\S+)", _single),
    (rf"slow\s+{_NAME}\s+(\S+)", _slow),
    (rf"{_NAME}\s*\*\s*(\S+)", _slow),
    (rf"link\s+{_NAME}\s+{_NAME}\s+(\S+)", _relink),
)
