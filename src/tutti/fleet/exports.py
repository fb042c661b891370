"""A cluster's topology in the words of other schedulers.

Slurm: `topology.conf` (tree or block) and `topology.yaml`; Kueue: Topology, flavors per pool,
queues and node labels; Volcano: HyperNodes; and a CSV of hosts. A group is one switch there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from tutti.errors import InputError, hint
from tutti.fleet.chips import Grounds
from tutti.fleet.host_names import NamedHost
from tutti.hardware.cluster import Cluster
from tutti.hardware.host_names import short_names

LABEL = "topology.tutti"  # prefix of node labels: LABEL/leaf, LABEL/spine, LABEL/pool
HOST_LABEL = "kubernetes.io/hostname"
KUEUE_VERSIONS = ("v1beta2", "v1beta1")
_DEVICES = {"nvidia": "nvidia.com/gpu", "huawei": "huawei.com/Ascend910", "amd": "amd.com/gpu"}


class Tree:
    """Groups of every tier with their names, and the hosts of each leaf group."""

    def __init__(self, cluster: Cluster, hosts: Sequence[NamedHost]) -> None:
        self.cluster, self.hosts = cluster, list(hosts)
        grounds = Grounds.of(cluster)
        self.tiers = [tier.name for tier in cluster.fabric.tiers]
        first = dict(zip(grounds.pool_names, grounds.first, strict=True))
        node = [first[host.pool] + host.node for host in self.hosts]
        lower = [[groups[n] for n in node] for groups in grounds.node_group]
        # numbers without gaps, in the order of hosts: a group of a part keeps no number of a whole
        self.groups = [_renumbered(groups) for groups in lower] + [[0] * len(node)]

    def name(self, tier: int, group: int) -> str:
        """Return a group's name: "leaf3"; of the top tier there is one."""
        return self.tiers[tier] if tier == len(self.tiers) - 1 else f"{self.tiers[tier]}{group}"

    def leaves(self) -> dict[str, list[str]]:
        """Return the hosts of each group of the lowest tier."""
        hosts_of: dict[str, list[str]] = {}
        for host, group in zip(self.hosts, self.groups[0], strict=True):
            hosts_of.setdefault(self.name(0, group), []).append(host.name)
        return hosts_of

    def children(self, tier: int) -> dict[str, list[str]]:
        """Return the groups below each group of a tier above the lowest."""
        members: dict[str, dict[str, None]] = {}
        for own, below in zip(self.groups[tier], self.groups[tier - 1], strict=True):
            members.setdefault(self.name(tier, own), {})[self.name(tier - 1, below)] = None
        return {name: list(below) for name, below in members.items()}

    def path(self, index: int) -> dict[str, str]:
        """Return the groups of a host, by the names of the tiers, highest first."""
        return {
            self.tiers[tier]: self.name(tier, self.groups[tier][index])
            for tier in reversed(range(len(self.tiers)))
        }


def _renumbered(groups: list[int]) -> list[int]:
    known: dict[int, int] = {}
    return [known.setdefault(group, len(known)) for group in groups]


def slurm_tree(cluster: Cluster, hosts: Sequence[NamedHost], api: str = "") -> str:
    """Return topology.conf for topology/tree."""
    del api
    tree = Tree(cluster, hosts)
    lines = [f"# {cluster.name}: TopologyPlugin=topology/tree"]
    lines += [f"SwitchName={name} Nodes={short_names(own)}" for name, own in tree.leaves().items()]
    for tier in range(1, len(tree.tiers)):
        for name, below in tree.children(tier).items():
            lines.append(f"SwitchName={name} Switches={short_names(below)}")
    return "\n".join(lines) + "\n"


def block_sizes(sizes: Sequence[int]) -> list[int]:
    """Return Slurm's planning sizes: the smallest block, doubled as long as blocks hold it."""
    doubled = [min(sizes)]
    while 2 * doubled[-1] <= sum(sizes):
        doubled.append(2 * doubled[-1])
    return doubled


def slurm_block(cluster: Cluster, hosts: Sequence[NamedHost], api: str = "") -> str:
    """Return topology.conf for topology/block."""
    del api
    leaves = Tree(cluster, hosts).leaves()
    lines = [f"# {cluster.name}: TopologyPlugin=topology/block"]
    lines += [f"BlockName={name} Nodes={short_names(own)}" for name, own in leaves.items()]
    sizes = block_sizes([len(own) for own in leaves.values()])
    return "\n".join(lines) + f"\nBlockSizes={','.join(map(str, sizes))}\n"


def slurm_yaml(cluster: Cluster, hosts: Sequence[NamedHost], api: str = "") -> str:
    """Return topology.yaml: the tree by default, and the blocks of it."""
    del api
    tree = Tree(cluster, hosts)
    leaves = tree.leaves()
    switches = [{"switch": name, "nodes": short_names(own)} for name, own in leaves.items()]
    for tier in range(1, len(tree.tiers)):
        switches += [
            {"switch": name, "children": short_names(below)}
            for name, below in tree.children(tier).items()
        ]
    blocks = [{"block": name, "nodes": short_names(own)} for name, own in leaves.items()]
    sizes = block_sizes([len(own) for own in leaves.values()])
    return _yaml([[
        {"topology": "tree", "cluster_default": True, "tree": {"switches": switches}},
        {"topology": "block", "cluster_default": False,
         "block": {"block_sizes": sizes, "blocks": blocks}},
    ]])  # fmt: skip


def kueue(cluster: Cluster, hosts: Sequence[NamedHost], api: str = "v1beta2") -> str:
    """Return a Topology, a flavor per pool, a queue over all of them, and the nodes' labels."""
    if api not in KUEUE_VERSIONS:
        raise InputError(f"--api: '{api}'; {hint(api, KUEUE_VERSIONS)}")
    tree, version = Tree(cluster, hosts), f"kueue.x-k8s.io/{api}"
    name = object_name(cluster.name)
    flavors_of = object_names([pool.name for pool in cluster.pools])
    levels = [{"nodeLabel": f"{LABEL}/{tier}"} for tier in reversed(tree.tiers[:-1])]
    documents: list[Any] = [
        {"apiVersion": version, "kind": "Topology", "metadata": {"name": name},
         "spec": {"levels": [*levels, {"nodeLabel": HOST_LABEL}]}},
    ]  # fmt: skip
    by_device: dict[str, list[dict[str, Any]]] = {}
    for pool in cluster.pools:
        documents.append({
            "apiVersion": version, "kind": "ResourceFlavor",
            "metadata": {"name": flavors_of[pool.name]},
            "spec": {"nodeLabels": {f"{LABEL}/pool": pool.name}, "topologyName": name},
        })  # fmt: skip
        device = _DEVICES.get(pool.chip.vendor.casefold(), f"{pool.chip.vendor.lower()}.com/chip")
        by_device.setdefault(device, []).append({
            "name": flavors_of[pool.name],
            "resources": [{"name": device, "nominalQuota": pool.num_chips}],
        })  # fmt: skip
    documents.append({
        "apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": name},
        "spec": {"namespaceSelector": {}, "resourceGroups": [
            {"coveredResources": [device], "flavors": flavors}
            for device, flavors in by_device.items()
        ]},
    })  # fmt: skip
    documents.append({
        "apiVersion": version, "kind": "LocalQueue",
        "metadata": {"name": name, "namespace": "default"}, "spec": {"clusterQueue": name},
    })  # fmt: skip
    return _yaml([*documents, *node_labels(tree)])


def object_name(text: str) -> str:
    """Return a name as Kubernetes wants it: lower case, digits, `-` and `.` inside."""
    plain = re.sub(r"[^a-z0-9.]+", "-", text.lower())
    return re.sub(r"-*\.[-.]*", ".", plain).strip("-.")[:253].strip("-.") or "cluster"


def object_names(texts: Sequence[str]) -> dict[str, str]:
    """Return a name for each text, no two alike; of those that would be, the later are numbered."""
    labels: dict[str, str] = {}
    plain = [object_name(text) for text in texts]
    taken = set(plain)
    for text, name in zip(texts, plain, strict=True):
        chosen, number = name, 1
        while chosen in labels.values() or (number > 1 and chosen in taken):
            number += 1
            end = f"-{number}"
            chosen = name[: 253 - len(end)].rstrip("-.") + end
        labels[text] = chosen
    return labels


def node_labels(tree: Tree) -> list[dict[str, Any]]:
    """Return every node with the labels that say where it hangs: `kubectl apply --server-side`."""
    entries = []
    for index, host in enumerate(tree.hosts):
        path = {f"{LABEL}/{tier}": group for tier, group in tree.path(index).items()}
        path.pop(f"{LABEL}/{tree.tiers[-1]}")
        entries.append({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": host.name, "labels": {f"{LABEL}/pool": host.pool, **path}},
        })  # fmt: skip
    return entries


def volcano(cluster: Cluster, hosts: Sequence[NamedHost], api: str = "") -> str:
    """Return HyperNodes, tier 1 the lowest."""
    del api
    tree = Tree(cluster, hosts)
    documents = [_hyper_node(name, 1, "Node", own) for name, own in tree.leaves().items()]
    for tier in range(1, len(tree.tiers)):
        documents += [
            _hyper_node(name, tier + 1, "HyperNode", below)
            for name, below in tree.children(tier).items()
        ]
    return _yaml(documents)


def _hyper_node(name: str, tier: int, kind: str, members: Sequence[str]) -> dict[str, Any]:
    return {
        "apiVersion": "topology.volcano.sh/v1alpha1", "kind": "HyperNode",
        "metadata": {"name": name},
        "spec": {"tier": tier, "members": [
            {"type": kind, "selector": {"exactMatch": {"name": member}}} for member in members
        ]},
    }  # fmt: skip


def host_table(cluster: Cluster, hosts: Sequence[NamedHost], api: str = "") -> str:
    """Return a CSV: host, pool, and the groups from the top down."""
    del api
    tree = Tree(cluster, hosts)
    lines = [",".join(["host", "pool", *reversed(tree.tiers)])]
    for index, host in enumerate(tree.hosts):
        lines.append(",".join([host.name, host.pool, *tree.path(index).values()]))
    return "\n".join(lines) + "\n"


def _yaml(documents: Sequence[Any]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False, explicit_start=True, width=1000)


Export = Callable[[Cluster, Sequence[NamedHost], str], str]
EXPORTS: Mapping[str, Export] = {
    "slurm-tree": slurm_tree,
    "slurm-block": slurm_block,
    "slurm-yaml": slurm_yaml,
    "kueue": kueue,
    "volcano": volcano,
    "hosts": host_table,
}
