"""Capacity questions: each form, the mapping of nodes, and an answer to every mistake."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.search.question.renumbering import renumbered, renumbering_text
from tutti.search.question.what_if import change_cluster

FEW = settings(max_examples=max(20, settings.default.max_examples // 5))


@pytest.fixture(scope="module")
def cluster():
    return Cluster.load("B1024")


def nodes(cluster):
    return {pool.name: pool.nodes for pool in cluster.pools}


def test_a_new_chip_comes_as_a_pool_of_its_usual_nodes(cluster):
    change = change_cluster(cluster, "+16xH100")
    pool = change.cluster.pool("h100")
    assert (pool.node.name, pool.nodes, pool.chip.name) == ("HGX-H100", 2, "H100")
    assert change.cluster.num_chips == cluster.num_chips + 16
    assert len(change.moved) == cluster.num_nodes
    assert change.words == "+16 H100 as pool 'h100' (2 nodes HGX-H100)"
    assert change.cluster.fingerprint() != cluster.fingerprint()


def test_a_known_chip_grows_its_pool(cluster):
    change = change_cluster(cluster, "+8xA800")
    assert nodes(change.cluster) == {"a800": 65, "p800": 32, "ascend": 16}
    assert ("a800", 64) not in change.moved.values()
    assert nodes(change_cluster(cluster, "+32 x 910b2c").cluster)["ascend"] == 18  # an alias
    assert nodes(change_cluster(cluster, "+1 node A800").cluster)["a800"] == 65
    assert nodes(change_cluster(cluster, "+2 nodes p800").cluster)["p800"] == 34


def test_a_chip_of_two_pools_comes_as_a_third():
    pools = [{"name": "a800", "chip": "A800"}, {"name": "old", "chip": "A800"}]
    two = Cluster.from_document({"name": "two", "pools": pools}, Place("two"))
    assert nodes(change_cluster(two, "+8xA800").cluster) == {"a800": 1, "old": 1, "a800-2": 1}


def test_nodes_behind_a_lost_one_move_up(cluster):
    change = change_cluster(cluster, "-node 3")
    assert nodes(change.cluster)["a800"] == 63
    assert ("a800", 3) not in change.moved
    assert change.moved["a800", 2] == ("a800", 2)
    assert change.moved["a800", 4] == ("a800", 3)
    assert change.moved["p800", 5] == ("p800", 5)
    assert change_cluster(cluster, "-node 64").words == "-node p800/0"
    assert (
        change_cluster(cluster, "-node p800/0").cluster
        == change_cluster(cluster, "-node 64").cluster
    )


def test_the_new_numbers_are_said():
    pools = [{"name": "a", "node": "HGX-A800", "nodes": 6}, {"name": "b", "chip": "V100-32"}]
    many = Cluster.from_document({"name": "many", "pools": pools}, Place("many"))
    one = change_cluster(many, "-node a/2").moved
    assert renumbering_text(one) == "a/3-5 → a/2-4"
    assert renumbered(one) == {"a/3": "a/2", "a/4": "a/3", "a/5": "a/4"}
    two = change_cluster(many, "-node a/1,-node a/4").moved
    assert renumbering_text(two) == "a/2-3 → a/1-2, a/5 → a/3"
    assert renumbering_text(change_cluster(many, "-node a/5").moved) == ""


def test_node_numbers_are_those_of_before(cluster):
    change = change_cluster(cluster, "-node 3, -node 5,-node a800/4")
    gone = {("a800", 3), ("a800", 4), ("a800", 5)}
    assert not gone & set(change.moved)
    assert change.moved["a800", 6] == ("a800", 3)
    assert change.cluster.pool("a800").nodes == 61


def test_nodes_and_pools_go(cluster):
    change = change_cluster(cluster, "-2 nodes ascend")
    assert nodes(change.cluster)["ascend"] == 14
    everywhere = {(pool, node) for pool, count in nodes(cluster).items() for node in range(count)}
    assert everywhere - set(change.moved) == {("ascend", 14), ("ascend", 15)}
    assert change_cluster(cluster, "-32xAscend-910B2C") == change
    without = change_cluster(cluster, "-pool ascend").cluster
    assert nodes(without) == {"a800": 64, "p800": 32}
    assert [link.pools for link in without.fabric.links] == [("a800", "p800")]
    last = change_cluster(Cluster.load("S16"), "-node v100/0").cluster
    assert nodes(last) == {"a800": 1}


def test_a_slow_pool_sustains_less_under_its_own_name(cluster):
    for text in ("slow a800 0.8", "a800*0.8", "A800 * 0.8"):
        change = change_cluster(cluster, text)
        chip, before = change.cluster.pool("a800").chip, cluster.pool("a800").chip
        assert chip.sustained == pytest.approx(0.8 * before.sustained)
        assert chip.name == before.name  # calibrations are found by it
        assert chip.peak_flops(Dtype.BF16) == before.peak_flops(Dtype.BF16)
        again = Cluster.from_document(change.cluster.to_document(), Place("again"))
        assert again == change.cluster


def test_one_of_two_equal_pools_that_is_slow_gets_a_chip_of_its_own():
    pools = [{"name": "new", "chip": "A800"}, {"name": "old", "chip": "A800"}]
    two = Cluster.from_document({"name": "two", "pools": pools}, Place("two"))
    slow = change_cluster(two, "old*0.5").cluster
    assert [pool.chip.name for pool in slow.pools] == ["A800", "A800-at-0.5"]
    assert slow.pool("old").chip.aliases[0] == "A800"
    assert Cluster.from_document(slow.to_document(), Place("again")) == slow


def test_a_link_changes_its_bandwidth(cluster):
    for pools in (("a800", "p800"), ("a800", "ascend")):
        first, second = (Position(pool, 0, 0) for pool in pools)
        half = change_cluster(cluster, f"link {pools[0]} {pools[1]} 0.5").cluster
        before, after = cluster.link(first, second), half.link(first, second)
        assert after.bandwidth == pytest.approx(before.bandwidth / 2)
        assert after.host_forwarded == before.host_forwarded
        assert len(half.fabric.links) == len(cluster.fabric.links)
    laptop = Cluster.load("laptop")
    twice = change_cluster(laptop, "link slow fast 2").cluster
    pair = Position("fast", 0, 0), Position("slow", 0, 0)
    assert twice.link(*pair).bandwidth == 2 * laptop.link(*pair).bandwidth


def test_a_link_that_the_file_leaves_out_is_written():
    pools = [{"name": "a", "chip": "A800"}, {"name": "k", "chip": "Kunlun-P800"}]
    cluster = Cluster.from_document({"name": "two", "pools": pools}, Place("two"))
    slower = change_cluster(cluster, "link k a 0.1").cluster
    pair = Position("a", 0, 0), Position("k", 0, 0)
    ratio = slower.link(*pair).bandwidth / cluster.link(*pair).bandwidth
    assert ratio == pytest.approx(0.1)


def test_changes_follow_each_other(cluster):
    change = change_cluster(cluster, "-pool ascend, slow p800 0.9, +8xH100")
    assert nodes(change.cluster) == {"a800": 64, "p800": 32, "h100": 1}
    assert change.words.count(",") == 2


MISTAKES = {
    "": "nothing is changed",
    "more chips": "is no change; write it like one of",
    "+12xH100": r"'HGX-H100' has 8 chips; give 8 or 16",
    "+4xH100": "give 8$",
    "+8xH10": r"did you mean 'H100'\?",
    "-8xH100": "no pool has H100",
    "+2 nodes a80": r"no pool 'a80'; did you mean 'a800'\?",
    "+0 nodes a800": "adds no node",
    "-65 nodes a800": "has 64 nodes; give 1 to 64",
    "-node 112": "no node 112; 'B1024' has nodes 0-111",
    "-node a800/64": "no node 64 in pool 'a800'; it has nodes 0-63",
    "-node 3, -node 3": "node 3 of pool 'a800' is gone already",
    "-pool ascend, -node 111": "was of pool 'ascend', which is gone already",
    "-pool v100": "no pool 'v100'; known: a800, ascend, p800",
    "-pool a800, -pool p800, -pool ascend": "nothing would be left",
    "slow a800 fast": "'fast' is no factor",
    "slow a800 0": "give a number above 0",
    "slow a800 nan": "give a number above 0",
    "slow a800 2": "would pass its peak; the factor is",
    "link a800 a800 0.5": "names pool 'a800' twice",
    "link a800 p800 2": "the factor is 1 at most",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_answered_in_one_line(cluster, text):
    with pytest.raises(InputError) as caught:
        change_cluster(cluster, text)
    message = str(caught.value)
    assert message.startswith("what-if: ")
    assert "\n" not in message
    assert re.search(MISTAKES[text], message)


@FEW
@given(st.sets(st.integers(0, 111), min_size=1, max_size=111))
def test_every_surviving_node_is_found_again(gone):
    cluster = Cluster.load("B1024")
    change = change_cluster(cluster, ", ".join(f"-node {node}" for node in gone))
    assert len(change.moved) == cluster.num_nodes - len(gone) == change.cluster.num_nodes
    assert len(set(change.moved.values())) == len(change.moved)
    for pool in change.cluster.pools:
        kept = [new for (name, _), (_, new) in sorted(change.moved.items()) if name == pool.name]
        assert kept == list(range(pool.nodes))
