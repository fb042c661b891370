from __future__ import annotations

import pytest

from tests.support.launching import crossed_plan, plan_of
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.host_names import expand_names
from tutti.launch.hosts import dns_label, find_components
from tutti.plan.check import embedded_cluster
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica


def test_hosts_that_are_started_alike_are_one_component() -> None:
    plan = crossed_plan()
    found = find_components(plan, embedded_cluster(plan))
    assert [str(component) for component in found] == [
        "a100: 1 host × 8 A100-80",  # holds rank 0
        "h100: 1 host × 4 H100",
        "a100-2: 1 host × 6 A100-80",
        "p800: 1 host × 8 Kunlun-P800",
    ]
    assert [host.name for component in found for host in component.hosts] == [
        "a100/1", "h100/0", "a100/0", "p800/0",
    ]  # fmt: skip
    assert [component.first for component in found] == [0, 1, 2, 3]
    assert [component.is_partial for component in found] == [False, True, True, False]


def test_the_host_of_rank_0_is_the_first_of_its_component() -> None:
    pools = [{"name": "a", "chip": "A100-80", "nodes": 3}]
    cluster = Cluster.from_document({"name": "a", "pools": pools}, Place("a"))
    chips = ChipSet.of("a/2/0-7", "a/0/0-7", "a/1/0-7")
    plan = plan_of(cluster, [[Replica(chips=chips, tp=2, count=12)]])
    (component,) = find_components(plan, cluster)
    assert [host.name for host in component.hosts] == ["a/2", "a/0", "a/1"]


def test_a_node_of_several_hosts_has_an_agent_on_each() -> None:
    pools = [{"name": "rack", "node": "NVL72-GB200"}]
    cluster = Cluster.from_document({"name": "rack", "pools": pools}, Place("rack"))
    node = cluster.pools[0].node
    width = node.num_chips // node.hosts
    assert node.hosts > 1
    chips = ChipSet.of(f"rack/0/0-{2 * width - 1}")
    plan = plan_of(cluster, [[Replica(chips=chips, tp=2, count=width)]])
    (component,) = find_components(plan, cluster)
    assert [host.name for host in component.hosts] == [
        f"rack/0/0-{width - 1}",
        f"rack/0/{width}-{2 * width - 1}",
    ]
    assert tuple(component.devices) == tuple(range(width))  # each host counts its chips from 0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu0", ["gpu0"]),
        ("gpu[0-2]", ["gpu0", "gpu1", "gpu2"]),
        ("gpu[08-10,20].example", ["gpu08.example", "gpu09.example", "gpu10.example",
                                   "gpu20.example"]),
    ],
)  # fmt: skip
def test_ranges_of_names(text: str, names: list[str]) -> None:
    assert expand_names(text) == names


@pytest.mark.parametrize("text", ["gpu[2-1]", "gpu[a-b]", "gpu[]", "gpu[0-]", "gpu[0-999999999]"])
def test_ranges_that_mean_nothing(text: str) -> None:
    with pytest.raises(InputError, match="hosts: 'gpu"):
        expand_names(text)


def test_names_for_the_network() -> None:
    assert dns_label("Llama-3.2_1B") == "llama-3-2-1b"
    assert dns_label("70b") == "x70b"
