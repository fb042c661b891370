"""Hosts of a cluster by name: from a CSV or launch facts, else pool-0000 and so on."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tutti import files
from tutti.errors import InputError, hint
from tutti.hardware.cluster import Cluster
from tutti.hardware.host_names import expand_names


@dataclass(frozen=True, slots=True)
class NamedHost:
    """One machine: its name, and which node of which pool it is (or is part of)."""

    name: str
    pool: str
    node: int


def named_hosts(cluster: Cluster, path: Path | None) -> list[NamedHost]:
    """Return the hosts of all nodes in their order, those of a node side by side."""
    if path is None:
        names = {pool.name: _usual(pool.name, pool.nodes * pool.node.hosts)
                 for pool in cluster.pools}  # fmt: skip
    elif path.suffix in (".yaml", ".yml", ".json"):
        names = _from_facts(cluster, path)
    else:
        names = _from_table(cluster, path)
    named: list[NamedHost] = []
    for pool in cluster.pools:
        wanted = pool.nodes * pool.node.hosts
        given = names.get(pool.name, [])
        if len(given) != wanted:
            where = "the names" if path is None else path.name
            raise InputError(
                f"{where}: {len(given)} hosts of pool '{pool.name}', but the cluster has {wanted}"
            )
        named += [
            NamedHost(name, pool.name, at // pool.node.hosts) for at, name in enumerate(given)
        ]
    name, times = Counter(host.name for host in named).most_common(1)[0]
    if times > 1:
        raise InputError(f"{path.name if path else 'hosts'}: '{name}' is named {times} times")
    return named


def _usual(pool: str, count: int) -> list[str]:
    width = max(4, len(str(count - 1)))
    return [f"{pool}-{number:0{width}}" for number in range(count)]


def _from_facts(cluster: Cluster, path: Path) -> dict[str, list[str]]:
    """Read `pools: {NAME: {hosts: […]}}` of a launch file; the rest is not looked at."""
    value = files.read_file(path)
    pools = value.get("pools") if isinstance(value, dict) else None
    if not isinstance(pools, dict):
        raise InputError(f"{path.name}: no 'pools'; name the hosts of each pool under it")
    known = [pool.name for pool in cluster.pools]
    by_pool: dict[str, list[str]] = {}
    for name, facts in pools.items():
        if name not in known:
            raise InputError(f"{path.name}: no pool '{name}'; {hint(str(name), known)}")
        hosts = facts.get("hosts") if isinstance(facts, dict) else None
        if hosts:
            by_pool[name] = [each for text in hosts for each in expand_names(str(text))]
    return by_pool


def _from_table(cluster: Cluster, path: Path) -> dict[str, list[str]]:
    """Read a CSV with the column `host`, and `pool` where there are several."""
    reader = csv.DictReader(files.read_text(path).splitlines())
    columns = reader.fieldnames or []
    if "host" not in columns:
        raise InputError(f"{path.name}: no column 'host'; found {', '.join(columns) or 'nothing'}")
    known = [pool.name for pool in cluster.pools]
    by_pool: dict[str, list[str]] = {}
    for number, row in enumerate(reader, start=2):
        pool = (row.get("pool") or known[0]).strip()
        if pool not in known:
            raise InputError(f"{path.name}: line {number}: no pool '{pool}'; {hint(pool, known)}")
        if not (row["host"] or "").strip():
            raise InputError(f"{path.name}: line {number}: 'host' is missing")
        by_pool.setdefault(pool, []).append(row["host"].strip())
    return by_pool
