"""Our manifests against what the published definitions of Kueue and Volcano allow.

Facts of config/components/crd/bases (kueue.x-k8s.io: topologies, resourceflavors) and of
config/crd/volcano/bases (topology.volcano.sh: hypernodes), read there: required keys, lengths,
patterns, counts, and the rules that are written beside them. Unknown keys are dropped silently by
the server, so that they are refused here.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tutti.document import Place
from tutti.fleet.exports import EXPORTS, object_name, object_names
from tutti.fleet.host_names import named_hosts
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped_cluster_names

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])"
)
VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
HOST = "kubernetes.io/hostname"


def check_name(text: str) -> None:
    assert NAME.fullmatch(text), text
    assert len(text) <= 253


def check_labels(labels: dict[str, str]) -> None:
    for key, value in labels.items():
        assert LABEL.fullmatch(key), key
        assert VALUE.fullmatch(value), value
        assert len(value) <= 63


def check_topology(spec: dict[str, Any]) -> None:
    assert set(spec) == {"levels"}
    labels = [level["nodeLabel"] for level in spec["levels"]]
    assert all(set(level) == {"nodeLabel"} for level in spec["levels"])
    assert 1 <= len(labels) <= 8
    assert len(set(labels)) == len(labels)
    assert HOST not in labels[:-1]  # only at the lowest level
    assert all(LABEL.fullmatch(label) and len(label) <= 316 for label in labels)


def check_flavor(spec: dict[str, Any]) -> None:
    assert set(spec) == {"nodeLabels", "topologyName"}
    assert 1 <= len(spec["nodeLabels"]) <= 8  # at least one where a topology is named
    check_labels(spec["nodeLabels"])
    check_name(spec["topologyName"])


def check_hyper_node(spec: dict[str, Any]) -> None:
    assert set(spec) == {"tier", "members"}
    assert isinstance(spec["tier"], int)
    assert spec["tier"] >= 0
    assert spec["members"]
    for member in spec["members"]:
        assert set(member) == {"type", "selector"}
        assert member["type"] in ("Node", "HyperNode")
        assert set(member["selector"]) == {"exactMatch"}  # exactly one way to select
        check_name(member["selector"]["exactMatch"]["name"])


CHECKS = {"Topology": check_topology, "ResourceFlavor": check_flavor, "HyperNode": check_hyper_node}


def check_all(cluster: Cluster) -> None:
    hosts = named_hosts(cluster, None)
    for kind, api in (("kueue", "v1beta2"), ("kueue", "v1beta1"), ("volcano", "")):
        documents = list(yaml.safe_load_all(EXPORTS[kind](cluster, hosts, api)))
        names = {(one["kind"], one["metadata"]["name"]) for one in documents}
        assert len(names) == len(documents)
        for one in documents:
            check_name(one["metadata"]["name"])
            check_labels(one["metadata"].get("labels", {}))
            if one["kind"] in CHECKS:
                CHECKS[one["kind"]](one["spec"])
            if one["kind"] == "ResourceFlavor":
                assert ("Topology", one["spec"]["topologyName"]) in names
            if one["kind"] == "ClusterQueue":
                for group in one["spec"]["resourceGroups"]:
                    for flavor in group["flavors"]:
                        assert ("ResourceFlavor", flavor["name"]) in names
                        held = [resource["name"] for resource in flavor["resources"]]
                        assert held == group["coveredResources"]


SMALL = [name for name in shipped_cluster_names() if Cluster.load(name).num_chips <= 1100]


@pytest.mark.parametrize("name", SMALL)
def test_example_clusters_keep_to_the_published_limits(name: str) -> None:
    check_all(Cluster.load(name))


def test_a_cluster_name_becomes_the_name_of_an_object() -> None:
    check_all(Cluster.from_document({
        "name": "Our_Cluster.new+1",
        "pools": [{"name": "a800", "node": "HGX-A800", "nodes": 4}],
        "fabric": {"tiers": [{"name": "leaf", "nodes": 2}, {"name": "spine"}]},
    }, Place("our.yaml")))  # fmt: skip


@given(st.text(max_size=300))
def test_any_text_becomes_a_name(text: str) -> None:
    check_name(object_name(text))


def test_pools_with_like_names_are_two_flavors() -> None:
    """Kubernetes has no upper case and no `_`: what is left of two names may be one."""
    names = ["A_1", "A-1", "a-1-2", "\u534e\u4e3a", "\u6602\u817e", "x" * 300, "X" * 300]
    found = object_names(names)
    assert found["A_1"] == "a-1"
    assert len(set(found.values())) == len(names)
    for name in found.values():
        check_name(name)
    document = {
        "name": "c", "fabric": {"tiers": [{"name": "leaf", "nodes": 2}, {"name": "spine"}]},
        "pools": [{"name": n, "node": "HGX-H800", "nodes": 2} for n in ("A_1", "A-1")],
    }  # fmt: skip
    cluster = Cluster.from_document(document, Place("c"))
    documents = yaml.safe_load_all(EXPORTS["kueue"](cluster, named_hosts(cluster, None), "v1beta2"))
    queue = next(one for one in documents if one["kind"] == "ClusterQueue")
    flavors = queue["spec"]["resourceGroups"][0]["flavors"]
    assert [one["name"] for one in flavors] == ["a-1", "a-1-2"]
