"""The topology in other schedulers' files, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from tutti.errors import InputError
from tutti.fabric.wiring import wire
from tutti.fleet.chips import Grounds
from tutti.fleet.exports import EXPORTS, block_sizes
from tutti.fleet.host_names import named_hosts
from tutti.fleet.imports import cluster_from, read_places, with_places
from tutti.hardware.cluster import Cluster
from tutti.hardware.host_names import short_names, split_names

ENDINGS = {"slurm-tree": ".conf", "slurm-block": ".conf", "hosts": ".csv"}


def exported(cluster: Cluster, to: str, folder: Path) -> Path:
    path = folder / f"topology{ENDINGS.get(to, '.yaml')}"
    path.write_text(EXPORTS[to](cluster, named_hosts(cluster, None), "v1beta2"))
    return path


def same_groups(one: Sequence[int], other: Sequence[int]) -> bool:
    pairs = set(zip(one, other, strict=True))
    return len(pairs) == len(set(one)) == len(set(other))


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *(("oversubscribed", to) for to in EXPORTS if to != "slurm-block"),  # blocks are one tier
        ("E1536", "slurm-block"),
        ("small-mixed", "slurm-yaml"),
        ("small-mixed", "kueue"),
    ],
)
def test_what_is_exported_comes_back_with_the_same_wiring(
    name: str, to: str, tmp_path: Path
) -> None:
    cluster = Cluster.load(name)
    path = exported(cluster, to, tmp_path)
    places = read_places(path)
    again = with_places(cluster, named_hosts(cluster, None), places, path.name)
    before, after = (np.sort(wire(one).rates) for one in (cluster, again))
    assert np.allclose(before[before > 0], after[after > 0])
    ours, theirs = Grounds.of(cluster), Grounds.of(again)
    for tier in range(len(ours.node_group)):
        assert same_groups(ours.node_group[tier], theirs.node_group[tier])


def test_slurm_reads_names_in_short() -> None:
    names = ["gpu-0007", "gpu-0008", "gpu-0010", "login", "b1"]
    assert short_names(names) == "login,gpu-[0007-0008,0010],b1"
    assert sorted(split_names(short_names(names))) == sorted(names)
    assert block_sizes([64, 64, 46]) == [46, 92]


def test_the_tree_of_a_cluster() -> None:
    cluster = Cluster.load("oversubscribed").only({"h800": range(20), "a100": (0, 1)})
    text = EXPORTS["slurm-tree"](cluster, named_hosts(cluster, None), "")
    assert "SwitchName=leaf0 Nodes=h800-[0000-0007]\n" in text
    assert "SwitchName=core Switches=spine[0-2]\n" in text


@pytest.mark.parametrize("api", ["v1beta2", "v1beta1"])
def test_kueue_knows_pools_levels_and_labels(api: str) -> None:
    cluster = Cluster.load("oversubscribed")
    found = list(yaml.safe_load_all(EXPORTS["kueue"](cluster, named_hosts(cluster, None), api)))
    kinds = [one["kind"] for one in found]
    assert kinds[:5] == [
        "Topology",
        "ResourceFlavor",
        "ResourceFlavor",
        "ClusterQueue",
        "LocalQueue",
    ]
    assert {one["apiVersion"] for one in found[:5]} == {f"kueue.x-k8s.io/{api}"}
    assert [level["nodeLabel"] for level in found[0]["spec"]["levels"]] == [
        "topology.tutti/spine", "topology.tutti/leaf", "kubernetes.io/hostname",
    ]  # fmt: skip
    quotas = [flavor["resources"][0]["nominalQuota"]
              for flavor in found[3]["spec"]["resourceGroups"][0]["flavors"]]  # fmt: skip
    assert quotas == [256, 64]
    assert len(found) == 5 + 40


def test_volcano_has_tiers_from_the_leaves_up() -> None:
    cluster = Cluster.load("oversubscribed")
    found = list(yaml.safe_load_all(EXPORTS["volcano"](cluster, named_hosts(cluster, None), "")))
    assert [one["spec"]["tier"] for one in found] == [1] * 5 + [2] * 3 + [3]
    assert found[-1]["spec"]["members"][0] == {
        "type": "HyperNode", "selector": {"exactMatch": {"name": "spine0"}},
    }  # fmt: skip


TREE = "SwitchName=l0 Nodes=h[0-1]\nSwitchName=l1 Nodes=h[2-3]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TREE, None),
        (TREE + "SwitchName=s Switches=l[0-1]\n", None),
        (TREE + "SwitchName=s Switches=l[0-2]\n", "switch 's' has 'l2' below it, which is not"),
        (TREE + "SwitchName=s Switches=l0\n", "orphan: 'l1' is under nothing"),
        (TREE + "SwitchName=a Switches=l0\nSwitchName=b Switches=l1\n", "orphans: 'a' and 'b'"),
        (TREE + "SwitchName=a Switches=l[0-1],b\nSwitchName=b Switches=a\n", "in a circle"),
        (
            TREE + "SwitchName=a Switches=l0\nSwitchName=b Switches=l[0-1]\n",
            "'l0' hangs on 'a' and",
        ),
        ("SwitchName=l0 Nodes=h0\nSwitchName=l1 Nodes=h0\n", "host 'h0' hangs on 'l0' and 'l1'"),
        ("SwitchName=l0 Nodes=h0\nSwitchName=l0 Nodes=h1\n", "line 2: 'l0' stands twice"),
        ("SwitchName=l0 Nodes=h0 Switches=s\nSwitchName=s Switches=l0\n", "nodes and switches"),
        ("SwitchName=l0 Nodes=h[0-3\n", "'h[0-3': a bracket is not closed"),
        ("SwitchName=l0 Nodes=h[3-0]\n", "write ranges like"),
        ("SwitchName=l0\n", "'l0' has neither nodes nor switches"),
    ],
)
def test_topology_conf_with_mistakes(text: str, said: str | None, tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(text)
    if said is None:
        found = cluster_from(read_places(path), "c", ["HGX-H800"], [], path.name)
        assert found.pool("nodes").leaves.numbers == (0, 0, 1, 1)
        return
    with pytest.raises(InputError, match=re.escape(said)):
        read_places(path)


def test_hosts_that_the_cluster_lacks_and_hosts_that_hang_nowhere(tmp_path: Path) -> None:
    cluster = Cluster.load("oversubscribed")
    hosts = named_hosts(cluster, None)
    path = exported(cluster, "hosts", tmp_path)
    text = path.read_text()
    path.write_text(text.replace("h800-0003,", "h800-x3,"))
    with pytest.raises(InputError, match="host 'h800-x3' is none of 'oversubscribed'"):
        with_places(cluster, hosts, read_places(path), path.name)
    path.write_text("\n".join(line for line in text.splitlines() if "h800-0003" not in line))
    with pytest.raises(InputError, match="orphan: host 'h800-0003' hangs on no switch"):
        with_places(cluster, hosts, read_places(path), path.name)
    path.write_text("host,leaf\na,\n")
    with pytest.raises(InputError, match="line 2: 'leaf' is missing"):
        read_places(path)


def test_leaves_of_one_name_under_two_spines_are_two(tmp_path: Path) -> None:
    path = tmp_path / "hosts.csv"
    path.write_text("host,core,spine,leaf\na,G,P1,S1\nb,G,P2,S1\nc,G,P1,S2\nd,G,P1,S1\ne,G,P2,S3\n")
    found = cluster_from(read_places(path), "c", ["HGX-H800"], [1, 4], path.name)
    assert [tier.nodes for tier in found.fabric.tiers] == [2, 4, None]
    assert found.fabric.tiers[2].oversubscription == 4
    assert found.pool("nodes").leaves.numbers == (0, 2, 1, 0, 3)
