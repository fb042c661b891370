"""Pools and clusters: what a person owns, as a file and as frozen facts.

A cluster file names pools of equal nodes, the fabric between them, storage, prices and watts; it
may define chips and node types of its own. `Cluster.load` reads it or an example by its bare name.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import yaml

from tutti import files
from tutti.document import AtLeast, AtMost, Place, build_fields, plain, plain_fields, shown
from tutti.errors import InputError, hint
from tutti.hardware import library as catalog
from tutti.hardware.chip import Chip, Dtype, check_name
from tutti.hardware.fabric import CrossLink, Fabric
from tutti.hardware.leaves import named_leaves
from tutti.hardware.library import Library, refuse_unknown
from tutti.hardware.node import NodeType, node_document, trimmed
from tutti.hardware.node_list import check_chosen
from tutti.hardware.pool import Pool
from tutti.hardware.storage import Storage
from tutti.hardware.topology import Link, Position, default_cross_link, link_between

NodeCount = Annotated[int, AtLeast(1), AtMost(1_000_000)]
Price = Annotated[float, AtLeast(0), AtMost(1e9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything that may take part in one job."""

    name: str
    summary: str = ""
    pools: tuple[Pool, ...]
    fabric: Fabric = field(default_factory=Fabric)
    storage: Storage = field(default_factory=Storage)
    currency: str = "USD"

    def __post_init__(self) -> None:
        check_name(self.name, "cluster")
        if not self.pools:
            raise ValueError("'pools' is empty; a cluster needs at least one pool of nodes")
        names = [pool.name for pool in self.pools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two pools are called '{name}'; give each its own name")
        self._check_definitions()
        self._check_links(names)
        self._check_leaves()

    def _check_definitions(self) -> None:
        nodes: dict[str, NodeType] = {}
        chips: dict[str, Chip] = {}
        for pool in self.pools:
            if nodes.setdefault(pool.node.name, pool.node) != pool.node:
                raise ValueError(f"two different node types are called '{pool.node.name}'")
            if chips.setdefault(pool.chip.name, pool.chip) != pool.chip:
                raise ValueError(f"two different chips are called '{pool.chip.name}'")

    def _check_links(self, names: list[str]) -> None:
        seen: set[frozenset[str]] = set()
        for link in self.fabric.links:
            for name in link.pools:
                if name not in names:
                    raise ValueError(f"fabric: a link names pool '{name}'; {hint(name, names)}")
            if frozenset(link.pools) in seen:
                raise ValueError(f"fabric: two links join '{link.pools[0]}' and '{link.pools[1]}'")
            seen.add(frozenset(link.pools))
        for index, home in enumerate(self.pools):
            for away in self.pools[index + 1 :]:
                link = self.cross_link(home.name, away.name)
                for pool in (home, away):
                    if link.bandwidth is None and not pool.node.all_reach_a_nic:
                        raise ValueError(
                            f"'{home.name}' and '{away.name}' cannot meet: pool '{pool.name}' has "
                            "chips without a NIC; add 'nics', or a link with 'bandwidth'"
                        )

    def _check_leaves(self) -> None:
        most = self.fabric.tiers[0].nodes
        held: Counter[int] = Counter()
        for pool in self.pools:
            held.update(pool.leaves.numbers)
        for leaf, nodes in sorted(held.items()):
            if most is not None and nodes > most:
                raise ValueError(
                    f"leaf {leaf} is named by {nodes} nodes, but tier "
                    f"'{self.fabric.tiers[0].name}' joins {most}; spread them, or raise 'nodes'"
                )
        for tier in self.fabric.tiers[:1]:
            for pool in self.pools:
                fastest = max((nic.rate for nic in pool.node.nics), default=0.0)
                port = fastest / self.fabric.planes
                if tier.port_rate is not None and port > tier.port_rate * (1 + 1e-9):
                    raise ValueError(
                        f"pool '{pool.name}' has NIC ports of {port * 8e-9:g} Gb/s, but the ports "
                        f"of tier '{tier.name}' run at {tier.port_rate * 8e-9:g} Gb/s"
                    )

    # --- files ---------------------------------------------------------------------------

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str] | Cluster) -> Cluster:
        """Read a cluster file, or the example of that name; a cluster is returned as it is."""
        if isinstance(path_or_name, Cluster):
            return path_or_name
        text = os.fspath(path_or_name)
        if "\0" in text:
            raise InputError("the name of a cluster file holds a zero byte")
        path = Path(text)
        is_name = path.name == text and path.suffix not in (".yaml", ".yml", ".json")
        if is_name and not path.is_file():
            return cls.from_document(catalog.shipped_cluster(text), Place(text))
        return cls.from_document(files.read_file(path), Place(path.name))

    @classmethod
    def from_document(cls, value: object, place: Place) -> Cluster:
        """Build a cluster from its written form, with the chips and nodes it defines."""
        if isinstance(value, Cluster):
            return value
        if value is None:
            raise place.error("is empty; a cluster file needs 'name' and 'pools'")
        if not isinstance(value, dict):
            raise place.error(f"expected a mapping with 'name' and 'pools', found {shown(value)}")
        refuse_unknown(value, cls, ("chips", "nodes"), place)
        rest = {key: item for key, item in value.items() if key not in ("chips", "nodes")}
        library = catalog.shipped().with_definitions(value.get("chips"), value.get("nodes"), place)
        pools = rest.get("pools")
        if isinstance(pools, list):
            here = place.key("pools")
            rest["pools"] = [
                _resolve_pool(pool, here.item(index, pool), library)
                for index, pool in enumerate(pools)
            ]
        return build_fields(cls, rest, place)

    def to_document(self, *, embed: bool = False) -> dict[str, Any]:
        """Return the written form; `embed` writes every definition out, also those that ship."""
        shipped = catalog.shipped()
        chips: dict[str, Chip] = {}
        nodes: dict[str, NodeType] = {}
        for pool in self.pools:
            own_chip = embed or shipped.chips.get(pool.chip.name) != pool.chip
            if own_chip:
                chips[pool.chip.name] = pool.chip
            if own_chip or shipped.nodes.get(pool.node.name) != pool.node:
                nodes[pool.node.name] = pool.node
        written = plain_fields(self)
        written["pools"] = [{**plain_fields(pool), "node": pool.node.name} for pool in self.pools]
        head: dict[str, Any] = {
            key: written.pop(key) for key in ("name", "summary") if key in written
        }
        if chips:
            head["chips"] = [plain(chip) for chip in chips.values()]
        if nodes:
            head["nodes"] = [node_document(node) for node in nodes.values()]
        return head | written

    def save(self, path: Path) -> None:
        """Write a cluster file, JSON or YAML by its ending, as a whole or not at all."""
        written = self.to_document()
        if path.suffix == ".json":
            text = json.dumps(written, indent=2, ensure_ascii=False) + "\n"
        else:
            text = yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=100)
        files.write_text(path, text)

    def fingerprint(self) -> str:
        """Return a short hash over all facts, so that a changed catalog changes it too."""
        return files.fingerprint(self.to_document(embed=True))

    # --- questions -----------------------------------------------------------------------

    def pool(self, name: str) -> Pool:
        """Return the pool of that name."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        names = [pool.name for pool in self.pools]
        raise InputError(f"cluster '{self.name}' has no pool '{name}'; {hint(name, names)}")

    @property
    def num_chips(self) -> int:
        """Chips in all pools."""
        return sum(pool.num_chips for pool in self.pools)

    @property
    def num_nodes(self) -> int:
        """Nodes in all pools."""
        return sum(pool.nodes for pool in self.pools)

    @property
    def memory_bytes(self) -> float:
        """Device memory of all chips."""
        return sum(pool.num_chips * pool.chip.memory_bytes for pool in self.pools)

    def peak_flops(self, dtype: Dtype, *, fallback: bool = False) -> float:
        """Return the dense peak of all chips, the denominator of MFU."""
        return sum(pool.peak_flops(dtype, fallback=fallback) for pool in self.pools)

    @property
    def price_per_hour(self) -> float | None:
        """What all chips cost in an hour; None unless every pool has a price."""
        prices = [p.price_per_chip_hour for p in self.pools]
        if any(price is None for price in prices):
            return None
        return sum(p.num_chips * (p.price_per_chip_hour or 0.0) for p in self.pools)

    @property
    def watts(self) -> float | None:
        """Watts of all chips; None unless every pool's are known."""
        if any(pool.chip_watts is None for pool in self.pools):
            return None
        return sum(pool.num_chips * (pool.chip_watts or 0.0) for pool in self.pools)

    def cross_link(self, first: str, second: str) -> CrossLink:
        """Return the link between two pools: as written, or by the default rule."""
        home, away = self.pool(first), self.pool(second)
        for link in self.fabric.links:
            if link.joins(first, second):
                return link
        return default_cross_link(home, away)

    def link(self, first: Position, second: Position) -> Link:
        """Return how two chips reach each other."""
        return link_between(self, Position(*first), Position(*second))

    def only(self, nodes: Mapping[str, Sequence[int]]) -> Cluster:
        """Return the part of it that some nodes are, each in its place on the fabric.

        Nodes are numbered anew, in the order given; pools without any are left out, and so are
        the links to them.
        """
        for name, chosen in nodes.items():
            check_chosen(self.pool(name), chosen)
        kept = {name: tuple(chosen) for name, chosen in nodes.items() if chosen}
        if not kept:
            raise InputError(f"no node of '{self.name}' is chosen; name one, such as 'a800/0'")
        places = dict(zip((p.name for p in self.pools), named_leaves(self.fabric, self.pools),
                          strict=True))  # fmt: skip
        return replace(
            self,
            pools=tuple(
                replace(pool, leaves=places[pool.name]).of_nodes(kept[pool.name])
                for pool in self.pools
                if pool.name in kept
            ),
            fabric=replace(self.fabric, links=tuple(
                link for link in self.fabric.links if all(name in kept for name in link.pools)
            )),
        )  # fmt: skip


def _resolve_pool(value: object, place: Place, library: Library) -> object:
    """Replace the name of a node type, or of a chip, by the node type itself."""
    if not isinstance(value, dict):
        return value
    short = ("chip", "chips_per_node")
    refuse_unknown(value, Pool, short, place)
    rest = {key: item for key, item in value.items() if key not in short}
    if "node" in value and "chip" in value:
        raise place.error("give 'node' or 'chip', not both; 'chip' picks its usual node type")
    if "node" in value:
        node = library.node(value["node"], place.key("node"))
    elif "chip" in value:
        node = library.node_for(library.chip(value["chip"], place.key("chip")))
    else:
        raise place.error("'node' is missing; name a node type, or a 'chip' for its usual node")
    wanted = value.get("chips_per_node", node.num_chips)
    if type(wanted) is not int or wanted < 1:
        where = place.key("chips_per_node")
        raise where.value_error(f"is {shown(wanted)}; expected a whole number of at least 1")
    if wanted > node.num_chips:
        where = place.key("chips_per_node")
        raise where.value_error(
            f"is {wanted}, but node type '{node.name}' has {node.num_chips}; "
            "define a larger one under 'nodes'"
        )
    if wanted < node.num_chips:
        node = trimmed(node, wanted, f"{node.name}-first{wanted}")
    return {**rest, "node": node}
