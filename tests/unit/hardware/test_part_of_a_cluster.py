"""Some nodes of a cluster: places on the fabric stay; what is not there is refused."""

from __future__ import annotations

import itertools
import re

import pytest

from tutti.errors import InputError
from tutti.fabric.wiring import wire
from tutti.hardware.cluster import Cluster
from tutti.hardware.node_list import nodes_text, parse_nodes
from tutti.hardware.topology import Position


@pytest.mark.parametrize("name", ["oversubscribed", "E1536", "small-mixed", "H16384"])
def test_links_between_the_nodes_that_stay_are_those_of_the_whole(name: str) -> None:
    whole = Cluster.load(name)
    chosen = {pool.name: tuple(range(pool.nodes - 1, -1, -7)) for pool in whole.pools}
    part = whole.only(chosen)
    ends = [(pool, new, old) for pool, olds in chosen.items() for new, old in enumerate(olds)]
    ends = ends[:6] + ends[-6:]
    for (a, new_a, old_a), (b, new_b, old_b) in itertools.combinations(ends, 2):
        kept = part.link(Position(a, new_a, 0), Position(b, new_b, 0))
        assert kept == whole.link(Position(a, old_a, 0), Position(b, old_b, 0))


def test_the_leaf_groups_are_those_of_the_whole() -> None:
    whole = Cluster.load("oversubscribed")
    chosen = {"a100": (7, 0), "h800": (0, 15, 16, 31)}
    part = whole.only(chosen)
    assert [pool.nodes for pool in part.pools] == [4, 2]
    assert wire(part).num_ports == 6 * 8

    def group(cluster: Cluster, pool: str, node: int) -> int:
        wiring = wire(cluster)
        chip = wiring.chip(Position(pool, node, 0))
        return wiring.leaf_group(int(wiring.chip_ports[chip, 0]))

    same = [
        (group(whole, a, x) == group(whole, b, y), group(part, a, i) == group(part, b, j))
        for (a, i, x), (b, j, y) in itertools.combinations(
            [(p, i, n) for p, nodes in chosen.items() for i, n in enumerate(nodes)], 2
        )
    ]
    assert all(one == other for one, other in same)


def test_a_part_of_a_part_and_the_whole_of_it() -> None:
    whole = Cluster.load("E1536")
    part = whole.only({"a800": range(8, 16), "ascend": (3,)})
    assert [link.pools for link in part.fabric.links] == [("a800", "ascend")]
    again = part.only({"a800": (1, 0)})
    assert again.pool("a800").leaves.numbers == (0, 0)
    assert again == whole.only({"a800": (9, 8)})


def test_nodes_are_read_and_written_in_short() -> None:
    nodes = parse_nodes(["a800/0-3,7 p800/2", "a800/9"])
    assert nodes == {"a800": (0, 1, 2, 3, 7, 9), "p800": (2,)}
    assert nodes_text(nodes) == "a800/0-3,7,9 p800/2"
    assert parse_nodes([nodes_text(nodes)]) == nodes


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("a800", "'a800' names no nodes; write them as 'pool/0-3,7'"),
        ("a800/3-1", "3-1 runs backwards; write 1-3"),
        ("", "no nodes are named"),
        ("a80/1", "no pool 'a80'; did you mean 'a800'?"),
        ("a800/64", "no node 64 in pool 'a800'; it has nodes 0-63"),
        ("a800/3,3", "node a800/3 is named twice"),
    ],
)
def test_what_is_no_part_is_refused(nodes: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        Cluster.load("E1536").only(parse_nodes([nodes]))
