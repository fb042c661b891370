"""Where hosts hang, read from other schedulers' files: switches, blocks, labels, a CSV.

Every host gets a path of groups, lowest first. Groups of the same name under different parents are
different ones. Hosts without a switch, switches in a circle, and switches that nobody has are said.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tutti import files
from tutti.errors import InputError, hint
from tutti.fleet.exports import LABEL
from tutti.fleet.host_names import NamedHost
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import Fabric, Tier
from tutti.hardware.host_names import split_names
from tutti.hardware.leaves import Leaves
from tutti.hardware.library import shipped
from tutti.hardware.pool import Pool

_WORD = re.compile(r"(\w+)\s*=\s*(\S+)")
_KNOWN_LABELS = (  # of others, from the top down
    "cloud.provider.com/topology-block",
    "cloud.provider.com/topology-rack",
)


@dataclass(frozen=True, slots=True)
class HostPlace:
    """A host, its pool where that is said, and the groups that it is in, lowest first."""

    host: str
    path: tuple[str, ...]
    pool: str = ""


def read_places(path: Path) -> list[HostPlace]:
    """Read any of the known files; what it is shows in its text."""
    text = files.read_text(path)
    if re.search(r"^\s*(SwitchName|BlockName)\s*=", text, re.IGNORECASE | re.MULTILINE):
        return _from_conf(text, path.name)
    if path.suffix == ".csv" or re.match(r"\s*host\s*,", text):
        return _from_table(text, path.name)
    documents = _documents(text, path)
    if any(isinstance(one, list) for one in documents):
        return _from_topologies([one for one in documents if isinstance(one, list)], path.name)
    nodes = _nodes(documents)
    if nodes:
        return _from_labels(nodes, path.name)
    hyper = [d for d in documents if isinstance(d, dict) and d.get("kind") == "HyperNode"]
    if hyper:
        return _from_hyper_nodes(hyper, path.name)
    raise InputError(
        f"{path.name}: no topology is found in it; known are Slurm's topology.conf and "
        "topology.yaml, nodes with labels (kubectl get nodes -o yaml), HyperNodes, and a CSV "
        "with the column 'host'"
    )


def _documents(text: str, path: Path) -> list[Any]:
    try:
        return [json.loads(text)] if path.suffix == ".json" else list(yaml.safe_load_all(text))
    except (json.JSONDecodeError, yaml.YAMLError, RecursionError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"{path.name}: cannot be read ({first})") from None


# --- Slurm -----------------------------------------------------------------------------------


def _from_conf(text: str, name: str) -> list[HostPlace]:
    """Read SwitchName=… Nodes=… Switches=… lines, or BlockName=… Nodes=…."""
    below: dict[str, list[str]] = {}
    hosts: dict[str, list[str]] = {}
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), start=1):
        words = {key.lower(): value for key, value in _WORD.findall(line.split("#", 1)[0])}
        switch = words.get("switchname") or words.get("blockname")
        if switch is None:
            continue
        if switch in below or switch in hosts:
            raise InputError(f"{name}: line {number}: '{switch}' stands twice")
        if "nodes" in words and "switches" in words:
            raise InputError(
                f"{name}: line {number}: '{switch}' has nodes and switches; give each switch one"
            )
        if "nodes" in words:
            hosts[switch] = split_names(words["nodes"])
        elif "switches" in words:
            below[switch] = split_names(words["switches"])
        else:
            raise InputError(f"{name}: line {number}: '{switch}' has neither nodes nor switches")
    return _placed(hosts, below, name)


def _from_topologies(documents: Sequence[list[Any]], name: str) -> list[HostPlace]:
    """Read topology.yaml: its tree if it has one, else its blocks."""
    listed = [one for document in documents for one in document if isinstance(one, dict)]
    for one in sorted(listed, key=lambda one: not one.get("cluster_default")):
        below: dict[str, list[str]] = {}
        hosts: dict[str, list[str]] = {}
        kind, key, label = (
            ("tree", "switches", "switch") if "tree" in one else ("block", "blocks", "block")
        )
        part = one.get(kind)
        entries = part.get(key) if isinstance(part, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, dict) or label not in entry:
                raise InputError(f"{name}: an entry of '{key}' has no '{label}'")
            if "nodes" in entry and "children" in entry:
                raise InputError(f"{name}: '{entry[label]}' has nodes and children; give one")
            if "nodes" in entry:
                hosts[str(entry[label])] = split_names(str(entry["nodes"]))
            else:
                below[str(entry[label])] = split_names(str(entry.get("children", "")))
        if hosts:
            return _placed(hosts, below, name)
    raise InputError(f"{name}: neither a tree with switches nor blocks are found in it")


def _placed(
    hosts: Mapping[str, list[str]], below: Mapping[str, list[str]], name: str
) -> list[HostPlace]:
    """Follow every host upwards."""
    parent: dict[str, str] = {}
    for switch, children in below.items():
        for child in children:
            if child not in below and child not in hosts:
                known = [*below, *hosts]
                raise InputError(
                    f"{name}: switch '{switch}' has '{child}' below it, which is not described; "
                    f"{hint(child, known)}"
                )
            if child in parent:
                raise InputError(
                    f"{name}: '{child}' hangs on '{parent[child]}' and on '{switch}'; one is enough"
                )
            parent[child] = switch
    owner: dict[str, str] = {}
    places: list[HostPlace] = []
    for switch, names in hosts.items():
        path = _way_up(switch, parent, name)
        for host in names:
            if host in owner:
                raise InputError(f"{name}: host '{host}' hangs on '{owner[host]}' and '{switch}'")
            owner[host] = switch
            places.append(HostPlace(host, path))
    for switch in parent:
        _way_up(switch, parent, name)
    depths = {len(place.path) for place in places}
    if len(depths) > 1:
        low = min(places, key=lambda place: len(place.path))
        raise InputError(
            f"{name}: orphan: '{low.path[-1]}' is under nothing, while others are "
            f"{max(depths)} levels deep"
        )
    tops = {place.path[-1] for place in places}
    if below and len(tops) > 1:
        first, second = sorted(tops)[:2]
        raise InputError(
            f"{name}: orphans: '{first}' and '{second}' are under nothing; join them by a switch"
        )
    return places


def _way_up(switch: str, parent: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return a switch and all above it; a circle is refused."""
    path = [switch]
    while path[-1] in parent:
        above = parent[path[-1]]
        if above in path:
            raise InputError(f"{name}: switches in a circle: {' → '.join([*path, above])}")
        path.append(above)
    return tuple(path)


# --- Kubernetes --------------------------------------------------------------------------------


def _nodes(documents: Sequence[Any]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    for one in documents:
        if isinstance(one, dict) and one.get("kind") in ("List", "NodeList"):
            nodes += _nodes(one.get("items") or [])
        elif isinstance(one, dict) and one.get("kind") == "Node":
            nodes.append(one)
    return nodes


def _from_labels(nodes: Sequence[dict[str, Any]], name: str) -> list[HostPlace]:
    """Read labels LABEL/TIER; which tier is above which shows in how many groups it has."""
    labels = []
    for node in nodes:
        meta = node.get("metadata") or {}
        labels.append((str(meta.get("name", "")), dict(meta.get("labels") or {})))
    keys = [key for key in labels[0][1] if key.startswith(f"{LABEL}/") and key != f"{LABEL}/pool"]
    keys = keys or [key for key in _KNOWN_LABELS if key in labels[0][1]]
    if not keys and f"{LABEL}/pool" in labels[0][1]:  # one switch joins them all
        return [
            HostPlace(host, ("all",), str(own.get(f"{LABEL}/pool", ""))) for host, own in labels
        ]
    if not keys:
        raise InputError(f"{name}: node '{labels[0][0]}' has no label '{LABEL}/…'; see its labels")
    rows = []
    for host, own in labels:
        missing = [key for key in keys if key not in own]
        if missing:
            raise InputError(f"{name}: node '{host}' has no label '{missing[0]}'")
        rows.append((host, {key: str(own[key]) for key in keys}, str(own.get(f"{LABEL}/pool", ""))))
    return _by_columns(rows, keys)


def _from_hyper_nodes(documents: Sequence[dict[str, Any]], name: str) -> list[HostPlace]:
    hosts: dict[str, list[str]] = {}
    below: dict[str, list[str]] = {}
    for one in documents:
        own = str((one.get("metadata") or {}).get("name", ""))
        for member in (one.get("spec") or {}).get("members") or ():
            chosen = (member.get("selector") or {}).get("exactMatch") or {}
            if "name" not in chosen:
                raise InputError(f"{name}: HyperNode '{own}': only exactMatch members can be read")
            kind = hosts if member.get("type") == "Node" else below
            kind.setdefault(own, []).append(str(chosen["name"]))
            if own in hosts and own in below:
                raise InputError(f"{name}: HyperNode '{own}' has nodes and HyperNodes; give one")
    return _placed(hosts, below, name)


# --- a table -----------------------------------------------------------------------------------


def _from_table(text: str, name: str) -> list[HostPlace]:
    """Read host, perhaps pool, and a column per tier, in any order."""
    reader = csv.DictReader(text.splitlines())
    columns = [column for column in reader.fieldnames or () if column]
    if "host" not in columns:
        raise InputError(f"{name}: no column 'host'; found {', '.join(columns) or 'nothing'}")
    keys = [column for column in columns if column not in ("host", "pool", "node")]
    if not keys:
        raise InputError(f"{name}: no column says where hosts hang, such as 'leaf'")
    rows, seen = [], set()
    for number, row in enumerate(reader, start=2):
        values = {key: (row.get(key) or "").strip() for key in ["host", *keys]}
        for key, value in values.items():
            if not value:
                raise InputError(f"{name}: line {number}: '{key}' is missing")
        if values["host"] in seen:
            raise InputError(f"{name}: line {number}: host '{values['host']}' stands twice")
        seen.add(values["host"])
        rows.append((values["host"], {key: values[key] for key in keys},
                     (row.get("pool") or "").strip()))  # fmt: skip
    if not rows:
        raise InputError(f"{name}: names no host")
    return _by_columns(rows, keys)


def _by_columns(
    rows: Sequence[tuple[str, Mapping[str, str], str]], keys: Sequence[str]
) -> list[HostPlace]:
    """Order columns by how many groups they make, most lowest; names count within their parents."""
    # at equal numbers, the column that stands further left is the higher one, as people write them
    order = sorted(
        keys, key=lambda key: (len({v[key] for _, v, _ in rows}), keys.index(key)), reverse=True
    )
    places = []
    for host, values, pool in rows:
        path = tuple(
            "/".join(values[key] for key in reversed(order[at:])) for at in range(len(order))
        )
        places.append(HostPlace(host, path, pool))
    return places


# --- clusters ----------------------------------------------------------------------------------


def _fabric_of(
    places: Sequence[HostPlace], oversubscription: Sequence[float]
) -> tuple[Fabric, list[int]]:
    """Return tiers that hold all groups, and the leaf number of every host."""
    paths = [place.path for place in places]
    if len({path[-1] for path in paths}) > 1:
        paths = [(*path, "top") for path in paths]  # whatever is above them
    depth = len(paths[0])
    numbers: list[dict[str, int]] = [{} for _ in range(depth)]  # of groups inside their parents
    counts: dict[str, int] = defaultdict(int)
    most = [1] * depth
    for path in dict.fromkeys(paths):
        for tier in range(depth - 1):
            key, above = _key(path, tier), _key(path, tier + 1)
            if key not in numbers[tier]:
                numbers[tier][key] = counts[above]
                counts[above] += 1
                most[tier + 1] = max(most[tier + 1], counts[above])
    hosts: dict[str, int] = defaultdict(int)
    for path in paths:
        hosts[path[0]] += 1
    size = [max(hosts.values())]
    for tier in range(1, depth):
        size.append(size[-1] * most[tier])
    leaves = []
    for path in paths:
        offset = sum(numbers[t][_key(path, t)] * size[t] for t in range(depth - 1))
        leaves.append(offset // size[0])
    names = ("leaf", "spine", "core", *(f"tier{n}" for n in range(4, depth + 1)))[:depth]
    ratios = [1.0, *oversubscription, *([1.0] * depth)]
    tiers = tuple(
        Tier(name=names[t], nodes=size[t] if t < depth - 1 else None, oversubscription=ratios[t])
        for t in range(depth)
    )
    return Fabric(tiers=tiers, rail_optimized=True), leaves


def _key(path: tuple[str, ...], tier: int) -> str:
    return "\0".join(path[tier:])


def cluster_from(
    places: Sequence[HostPlace],
    name: str,
    nodes: Sequence[str],
    oversubscription: Sequence[float],
    source: str,
) -> Cluster:
    """Return a cluster of these hosts; `nodes` are node types: one for all, or POOL=TYPE."""
    types = dict(text.partition("=")[::2] if "=" in text else ("", text) for text in nodes)
    if not types:
        raise InputError(f"{source}: does not say what the hosts are; name it with --node TYPE")
    fabric, leaves = _fabric_of(places, oversubscription)
    by_pool: dict[str, list[int]] = defaultdict(list)
    for place, leaf in zip(places, leaves, strict=True):
        by_pool[place.pool or "nodes"].append(leaf)
    known = shipped().nodes
    pools = []
    for pool, own in by_pool.items():
        wanted = types.get(pool, types.get("", ""))
        if not wanted:
            raise InputError(f"--node: none for pool '{pool}'; give {pool}=TYPE")
        if wanted not in known:
            raise InputError(f"--node: '{wanted}'; {hint(wanted, known)}")
        flat = len(fabric.tiers) == 1
        pools.append(Pool(name=pool, node=known[wanted], nodes=len(own),
                          leaves=Leaves(() if flat else tuple(own))))  # fmt: skip
    try:
        return Cluster(name=name, pools=tuple(pools), fabric=fabric)
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None


def with_places(
    cluster: Cluster, hosts: Sequence[NamedHost], places: Sequence[HostPlace], source: str
) -> Cluster:
    """Return a cluster whose nodes hang where a file says; its own tiers keep their figures."""
    known = {host.name: host for host in hosts}
    by_name = {place.host: place for place in places}
    for place in places:
        if place.host not in known:
            raise InputError(
                f"{source}: host '{place.host}' is none of '{cluster.name}'; "
                f"{hint(place.host, known)}"
            )
    missing = [host.name for host in hosts if host.name not in by_name]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{source}: orphan: host '{missing[0]}'{more} hangs on no switch there")
    ordered = [by_name[host.name] for host in hosts]
    fabric, leaves = _fabric_of(ordered, ())
    own = cluster.fabric.tiers
    if len(fabric.tiers) != len(own):
        raise InputError(
            f"{source}: has {len(fabric.tiers)} levels of switches, but '{cluster.name}' has "
            f"{len(own)} tiers ({', '.join(tier.name for tier in own)})"
        )
    tiers = tuple(replace(mine, nodes=read.nodes) for mine, read in zip(own, fabric.tiers,
                                                                       strict=True))  # fmt: skip
    leaf_of: dict[tuple[str, int], int] = {}
    for host, leaf in zip(hosts, leaves, strict=True):
        if leaf_of.setdefault((host.pool, host.node), leaf) != leaf:
            raise InputError(f"{source}: hosts of node {host.pool}/{host.node} hang apart")
    flat = len(tiers) == 1
    return replace(
        cluster,
        fabric=replace(cluster.fabric, tiers=tiers),
        pools=tuple(
            replace(pool, leaves=Leaves(
                () if flat else tuple(leaf_of[pool.name, node] for node in range(pool.nodes))
            ))
            for pool in cluster.pools
        ),
    )  # fmt: skip
