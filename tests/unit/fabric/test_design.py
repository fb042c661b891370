"""Designs: counted by hand, and wired as designed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.cli import main
from tutti.errors import InputError
from tutti.fabric.design import RAILS, Wanted, alternatives, design, most_nodes
from tutti.fabric.parts import parts
from tutti.fabric.wiring import wire
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import Routing
from tutti.hardware.library import shipped

NODE = shipped().nodes["HGX-H100"]
SWITCH = parts().switch("51.2T-400G")


def wanted(chips: int, **more: Any) -> Wanted:
    return Wanted(node=NODE, chips=chips, **{"switch": SWITCH} | more)


def test_an_aipod_of_16384_chips() -> None:
    found = design(wanted(16_384, tiers=3))
    leaf, spine, core = found.levels
    assert (SWITCH.ports, leaf.down, leaf.up) == (128, 64, 64)
    assert leaf.nodes * NODE.num_chips == 512  # 8 leaves of 64
    assert (found.groups, leaf.switches, found.pods) == (32, 256, 4)
    assert (spine.switches, core.switches, core.parallel) == (256, 128, 32)
    assert core.switches * SWITCH.ports == spine.switches * spine.up
    assert (found.host_cables, found.fabric_cables) == (16_384, 32_768)
    assert found.hops == 5
    losses = {one.part: one for one in found.losses}
    assert (losses["leaf"].share, losses["leaf"].chips) == (1.0, 64)
    assert losses["spine"].share == 1 / 64
    assert losses["core"].share == 1 / 128


def test_rails_apart_and_two_planes_need_a_tier_less() -> None:
    whole = design(wanted(16_384))
    apart = design(wanted(16_384, rails="only"))
    planes = design(wanted(16_384, planes=2))
    assert [len(one.levels) for one in (whole, apart, planes)] == [3, 2, 2]
    assert apart.price < whole.price
    assert {one.part: one.share for one in planes.losses}["leaf"] == 0.5


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 700), rails=st.sampled_from(RAILS), planes=st.sampled_from([1, 2, 4]),
    over=st.sampled_from([1.0, 1.5, 2.0, 3.0, 7.0]),
    switch=st.sampled_from([one.name for one in parts().switches]),
)  # fmt: skip
def test_what_is_designed_can_be_wired(
    nodes: int, rails: str, planes: int, over: float, switch: str
) -> None:
    try:
        asked = wanted(8 * nodes, rails=rails, planes=planes, oversubscription=over,
                       switch=parts().switch(switch))  # fmt: skip
        found = design(asked)
    except InputError:
        return
    assert found.oversubscription <= over * (1 + 1e-9)
    ports = asked.switch.ports
    assert all(level.down + level.up <= ports for level in found.levels)
    cluster = found.cluster("made", routing=Routing.ECMP, connections=2)
    wiring = wire(cluster)
    assert wiring.num_switches == tuple(level.switches for level in found.levels)
    for layer, level in zip(wiring.layers, found.levels, strict=False):
        assert layer.num_links == level.switches * level.up


@pytest.mark.parametrize(
    ("chips", "more", "said"),
    [
        (163_840, {"tiers": 2}, r"2 tiers of 128 × 400 Gb/s switches join 8,192 chips at most; "
         "what works: 3 tiers or 8,192 chips"),
        (1_310_720, {}, "join 524,288 chips at most; what works: rails 'only' or 524,288 chips"),
        (800, {"tiers": 1}, "1 tier of .* join no rails; what works: 2 tiers or rails 'only'"),
        (9, {}, "9 chips are no whole nodes of 8; ask for 16 or 8"),
        (16, {"tiers": 7}, "7 tiers: fabrics of 1 to 3"),
        (16, {"oversubscription": 0.5}, "oversubscription 0.5"),
        (16, {"switch": parts().switch("12.8T-200G")}, "NICs' ports run at 400 Gb/s, the switch's"),
        (0, {}, "a design of 0 chips: give 1 or more"),
        (16, {"planes": 0}, "a design of 0 planes"),
    ],
)  # fmt: skip
def test_what_nothing_satisfies_is_one_line(chips: int, more: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        design(wanted(chips, **more))
    assert "\n" not in str(raised.value)


def test_alternatives_are_of_other_kinds_and_reach_as_far() -> None:
    asked = wanted(4096)
    found = alternatives(asked)
    assert len({one.label for one in found}) == len(found) > 8
    assert [one.price for one in found] == sorted(one.price for one in found)
    for one in found:
        assert most_nodes(one.wanted, len(one.levels)) >= asked.nodes


def test_every_figure_of_the_parts_has_a_source() -> None:
    for switch in parts().switches:
        assert set(switch.sources) == {"ports", "price", "watts", "latency_s"}
    for one in (parts().optics, parts().fibre, parts().copper):
        assert one.sources
    assert replace(SWITCH, ports=64).text == "64 × 400 Gb/s"


def test_the_command_line_writes_a_cluster_file(tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "pod.yaml"
    main.app(["fabric", "design", "--chips", "1024", "-o", str(path), "--json",
              "--connections", "4"], standalone_mode=False)  # fmt: skip
    document = json.loads(capfd.readouterr().out)
    assert (document["groups"], document["chips_per_group"]) == (2, 512)
    cluster = Cluster.load(path)
    assert cluster.num_chips == 1024
    assert (cluster.fabric.routing, cluster.fabric.connections) == (Routing.ECMP, 4)
    main.app(["fabric", "design", "--chips", "1024", "--nic-rate", "200 Gb/s"],
             standalone_mode=False)  # fmt: skip
    assert "groups of 1,024 chips" in capfd.readouterr().out
    for arguments, said in (
        (["--rails", "twice"], "--rails 'twice'"), (["--node", "HGX-H10"], "no node type"),
        (["--routing", "random"], "--routing"), (["--nic-rate", "fast"], "--nic-rate"),
        (["-o", "x.txt"], "ends in .yaml or .json"), (["--connections", "0"], "at least 1"),
        (["--nic-rate", "0 Gb/s"], "with its unit"), (["--nic-rate", "1600"], "with its unit"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            main.app(["fabric", "design", "--chips", "1024", *arguments], standalone_mode=False)
