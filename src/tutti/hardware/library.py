"""What ships with the package, and what a user's file adds to it: chips, node types, clusters.

`Library` looks chips and node types up by name or alias. A definition may start from another with
`base: NAME` and change only some keys; a user's definition hides one of the same name that ships.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

from tutti import files
from tutti.document import Place, build, plain_fields, shown
from tutti.errors import InputError, hint
from tutti.hardware.chip import Chip
from tutti.hardware.node import Bridge, Host, NodeType, trimmed

# Keys of a definition that are merged with the base's instead of replacing them.
_MERGED = ("peak", "sources", "host")
_NOT_INHERITED = ("name", "aliases", "note", "source")


@dataclass(frozen=True, slots=True)
class Library:
    """Chips and node types by name."""

    chips: Mapping[str, Chip]
    nodes: Mapping[str, NodeType]

    def chip(self, name: object, place: Place) -> Chip:
        """Return a chip by name or alias; `place` is where the name was written."""
        if not isinstance(name, str):
            raise place.value_error(f"is {shown(name)}; expected the name of a chip")
        known = _by_any_name(self.chips)
        if name.casefold() not in known:
            spellings = [*self.chips, *(alias for c in self.chips.values() for alias in c.aliases)]
            raise place.value_error(f"is '{name}'; {hint(name, spellings)}")
        return known[name.casefold()]

    def node(self, name: object, place: Place) -> NodeType:
        """Return a node type by name."""
        if not isinstance(name, str):
            raise place.value_error(f"is {shown(name)}; expected the name of a node type")
        for known, node in self.nodes.items():
            if known.casefold() == name.casefold():
                return node
        raise place.value_error(f"is '{name}'; {hint(name, self.nodes)}")

    def node_for(self, chip: Chip) -> NodeType:
        """Return the usual node of a chip: the first that holds it, else eight on PCIe."""
        for node in self.nodes.values():
            if node.chip.name == chip.name:
                return node
        host = Host()
        return NodeType(
            name=f"PCIe-8x{chip.name}",
            chip=chip,
            num_chips=8,
            bridge=Bridge(bandwidth=host.device_bandwidth),
            host=host,
            source="assumed: no node type holds this chip",
        )

    def with_definitions(self, chips: object, nodes: object, place: Place) -> Library:
        """Return this library with the definitions of a user's file in front."""
        library, new_chips = self, dict[str, Chip]()
        for index, value in enumerate(_list(chips, place.key("chips"))):
            here = place.key("chips").item(index, value)
            refuse_unknown(value, Chip, ("base",), here)
            chip = build(Chip, _with_base(value, here, library.chip, "chip"), here)
            if chip.name in new_chips:
                raise here.error(f"the chip '{chip.name}' is defined twice")
            new_chips[chip.name] = chip
            library = Library({**new_chips, **_without(self.chips, *new_chips)}, self.nodes)
        library = Library(library.chips, _holding(self.nodes, new_chips))
        shipped_nodes, new_nodes = library.nodes, dict[str, NodeType]()
        for index, value in enumerate(_list(nodes, place.key("nodes"))):
            here = place.key("nodes").item(index, value)
            refuse_unknown(value, NodeType, ("base",), here)
            node = _build_node(value, here, library)
            if node.name in new_nodes:
                raise here.error(f"the node type '{node.name}' is defined twice")
            new_nodes[node.name] = node
            library = Library(library.chips, {**new_nodes, **_without(shipped_nodes, *new_nodes)})
        return library


def _holding(nodes: Mapping[str, NodeType], chips: Mapping[str, Chip]) -> dict[str, NodeType]:
    """Return node types with those chips put in that a user redefined under the same name."""
    return {
        name: replace(node, chip=chips[node.chip.name]) if node.chip.name in chips else node
        for name, node in nodes.items()
    }


def _by_any_name(chips: Mapping[str, Chip]) -> dict[str, Chip]:
    by_alias: dict[str, Chip] = {}
    for chip in chips.values():
        for alias in chip.aliases:
            by_alias.setdefault(alias.casefold(), chip)
    return by_alias | {name.casefold(): chip for name, chip in reversed(list(chips.items()))}


def _without(mapping: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in names}


def _list(value: object, place: Place) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise place.value_error(f"is {shown(value)}; expected a list")
    return value


def refuse_unknown(value: object, kind: type, extra: tuple[str, ...], place: Place) -> None:
    """Raise an InputError for a key that neither `kind` nor its short written form knows."""
    known = [*(f.name for f in fields(kind)), *extra]
    for key in value if isinstance(value, dict) else ():
        if key not in known:
            raise place.error(f"unknown key {shown(key)}; {hint(str(key), known)}")


def _with_base(value: Any, place: Place, find: Any, what: str) -> Any:
    """Return a definition with what it inherits from its `base` filled in."""
    if not isinstance(value, dict) or "base" not in value:
        return value
    base = plain_fields(find(value["base"], place.key("base")))
    if value.get("name") is None:
        raise place.error(f"a {what} with a 'base' needs a 'name' of its own")
    merged = _without(base, *_NOT_INHERITED)
    for key, item in value.items():
        if key == "base":
            continue
        inherited = merged.get(key)
        if key in _MERGED and isinstance(inherited, dict) and isinstance(item, dict):
            item = {**inherited, **item}
        if item is None:
            merged.pop(key, None)
        else:
            merged[key] = item
    return merged


def _build_node(value: object, place: Place, library: Library) -> NodeType:
    if not isinstance(value, dict):
        return build(NodeType, value, place)
    written = value
    if "base" in value:
        base = library.node(value["base"], place.key("base"))
        fewer = value.get("num_chips")
        if type(fewer) is int and 0 < fewer < base.num_chips:
            base = trimmed(base, fewer, base.name)
        written = _with_base(value, place, lambda *_: base, "node type")
        if "chip" not in value:
            written["chip"] = base.chip
    if "chip" in written and not isinstance(written["chip"], Chip):
        written = {**written, "chip": library.chip(written["chip"], place.key("chip"))}
    return build(NodeType, written, place)


# --- what ships ------------------------------------------------------------------------------

_FOLDER = resources.files("tutti.hardware") / "catalog"


def _shipped(*path: str) -> object:
    file = _FOLDER.joinpath(*path)
    return files.parse_yaml(file.read_text(encoding="utf-8"), file.name)


@functools.cache
def shipped() -> Library:
    """Return the chips and node types that ship with the package."""
    chips, nodes = _shipped("chips.yaml"), _shipped("nodes.yaml")
    return Library({}, {}).with_definitions(chips, nodes, Place("catalog"))


@functools.cache
def shipped_cluster_names() -> tuple[str, ...]:
    """Return the names of the example clusters, in natural order (S16 before S128)."""
    names = [f.name[:-5] for f in (_FOLDER / "clusters").iterdir() if f.name.endswith(".yaml")]
    return tuple(sorted(names, key=_natural))


def _natural(name: str) -> tuple[str, int, str]:
    head = name.rstrip("0123456789")
    return (head, int(name[len(head) :] or 0), name)


def shipped_cluster(name: str) -> object:
    """Return the written form of an example cluster; an InputError names the nearest."""
    for known in shipped_cluster_names():
        if known.casefold() == name.casefold():
            return _shipped("clusters", f"{known}.yaml")
    remedy = hint(name, shipped_cluster_names())
    raise InputError(f"no cluster '{name}': neither a file nor an example; {remedy}")
