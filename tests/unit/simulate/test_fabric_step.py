"""Plans on a fabric: all their traffic is there, takes what it should, slows others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tutti.cli import main
from tutti.collective import Operation
from tutti.document import Place
from tutti.errors import InputError
from tutti.fabric.failures import Failures
from tutti.fabric.naming import link_name, tier_of
from tutti.fabric.paths import Rules
from tutti.fabric.wiring import wire
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import Routing
from tutti.models.load import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.edits import each_replica
from tutti.plan.files import save_plan
from tutti.plan.job import Job
from tutti.plan.plan import Plan
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.report.fabric import utilisation, write_fabric_page
from tutti.simulate.estimate import estimate
from tutti.simulate.fabric_step import IN_SWITCH, plans_on_fabric, stall
from tutti.simulate.plan_traffic import plan_traffic


def cluster(oversubscription: float = 1.0) -> Cluster:
    document = {
        "name": "pods",
        "pools": [{"name": "h", "node": "HGX-H800", "nodes": 8}],
        "fabric": {
            "rail_optimized": True,
            "tiers": [{"name": "leaf", "nodes": 2},
                      {"name": "spine", "oversubscription": oversubscription, "latency_s": "4 us"}],
        },
    }  # fmt: skip
    return Cluster.from_document(document, Place("pods.yaml"))


def plan(on: Cluster, degrees: str = "shard=1,tp=8,pp=2,sp=1") -> Plan:
    job = Job(sequence_length=2048, global_batch=32)
    return uniform_plan(load_model("llama-2-7b"), on, job, Degrees.parse(degrees))


def on_nodes(whole: Plan, offset: int) -> Plan:
    """Return a plan of 4 nodes on those from `offset`, every other one."""
    place = {node: offset + 2 * node for node in range(4)}
    stages = tuple(
        each_replica(stage, lambda replica: replace(replica, chips=ChipSet.from_ids(
            chip._replace(node=place[chip.node]) for chip in replica.chips)))
        for stage in whole.pipelines[0].stages
    )  # fmt: skip
    return replace(whole, pipelines=(replace(whole.pipelines[0], stages=stages),))


def test_all_tensor_positions_send_and_every_byte_of_a_boundary() -> None:
    on = cluster()
    found, wiring = estimate(plan(on)), wire(on)
    traffic = plan_traffic(found, wiring)
    gradients = [one for one in traffic if one.name.startswith("gradients")]
    assert {one.groups for one in gradients} == {8}
    assert {one.ranks for one in gradients} == {4}
    chips = {int(c) for one in gradients for f in one.flights for c in f.sources}
    assert chips == set(range(64))
    sends = [one for one in traffic if one.program == "send"]
    assert len(sends) == 2  # activations and gradients
    per_micro_batch = plan(on).pipelines[0].micro_batch * 2048 * 4096 * 2
    assert {one.num_bytes for one in sends} == {per_micro_batch}
    for one in traffic:
        assert all(len(at) for at in one.instructions.values())


def test_a_tied_table_travels_between_the_stages_that_hold_it() -> None:
    on = cluster()
    job = Job(sequence_length=1024, global_batch=32)
    tied = uniform_plan(load_model("llama-3.2-1b"), on, job, Degrees.parse("tp=2,pp=4"))
    traffic = plan_traffic(estimate(tied), wire(on))
    tables = [one for one in traffic if one.name.startswith("tied table")]
    assert tables
    for one in tables:
        flight = one.flights[0]
        assert len(flight.sources) == 16  # chips of a stage, each with its own
        assert not set(flight.sources.tolist()) & set(flight.targets.tolist())


def test_a_non_blocking_fabric_takes_what_is_priced_and_a_hashed_one_longer() -> None:
    on = cluster()
    found, wiring = estimate(plan(on)), wire(on)
    traffic = plan_traffic(found, wiring)
    spread = plans_on_fabric(["one"], [found], [traffic], wiring)[0]
    hashed = plans_on_fabric(
        ["one"], [found], [traffic], wiring, rules=Rules(routing=Routing.ECMP)
    )[0]
    assert spread.alone_s == pytest.approx(spread.priced_s, rel=0.03)
    assert spread.together_s == spread.alone_s <= hashed.alone_s
    slow = {id(one.traffic): one for one in hashed.sent}
    assert any(slow[id(one.traffic)].alone_s > 1.2 * one.alone_s for one in spread.sent)
    for one in spread.sent:
        assert one.alone_s <= one.shared_s * (1 + 1e-9)
        assert one.bytes_by_link.sum() > 0
    links, shares, width = utilisation([hashed], wiring, wiring.rates)
    assert shares.shape == (len(links), 20)
    assert 0 < shares.max() <= 1.0 + 1e-6
    assert width == pytest.approx(hashed.together_s / 20)
    assert all(" → " in link_name(wiring, link) for link in links)
    assert {tier_of(wiring, link) for link in links} >= {"NICs out", "NICs in", "leaf–spine up"}


def test_plans_beside_each_other_cost_each_other_where_they_share_links() -> None:
    on = cluster(oversubscription=4.0)
    half = Cluster.from_document(
        {**on.to_document(), "pools": [{"name": "h", "node": "HGX-H800", "nodes": 4}]}, Place("4")
    )
    small = plan(half)
    whole = plan(on)
    pair = [
        replace(on_nodes(small, offset), cluster=whole.cluster, idle=ChipSet.from_ids(
            chip for chip in _all_chips() if chip.node % 2 != offset))
        for offset in (0, 1)
    ]  # fmt: skip
    wiring = wire(on)
    found = [estimate(one) for one in pair]
    traffic = [plan_traffic(one, wiring) for one in found]
    results = plans_on_fabric(["even", "odd"], found, traffic, wiring)
    for result in results:
        assert result.together_s > result.alone_s
    with pytest.raises(InputError, match="even and odd both use chip h/0/0"):
        plans_on_fabric(["even", "odd"], found[:1] * 2, traffic[:1] * 2, wiring)


def _all_chips() -> list[Any]:
    from tutti.hardware.topology import Position

    return [Position("h", node, slot) for node in range(8) for slot in range(8)]


def test_a_failed_spine_stalls_connections_and_slows_the_rest() -> None:
    on = cluster()
    found, wiring = estimate(plan(on)), wire(on)
    traffic = plan_traffic(found, wiring)
    gone = Failures.parse(wiring, ["spine 0"])
    rules = Rules.of(wiring)
    seconds, hit = stall(traffic, wiring, rules, gone)
    assert seconds == 1.0
    assert hit > 0
    before, after = (
        plans_on_fabric(["one"], [found], [traffic], wiring, failures=failures)[0]
        for failures in (None, gone)
    )
    assert after.alone_s > before.alone_s
    assert np.isfinite(after.alone_s)


def test_the_command_line_writes_a_page(tmp_path: Path, capfd: Any) -> None:
    path, page = tmp_path / "plan.json", tmp_path / "fabric.html"
    save_plan(plan(cluster()), path)
    words = ["fabric", "simulate", str(path)]
    main.app([*words, "--routing", "ecmp", "--html", str(page)], standalone_mode=False)
    assert "plan: step" in capfd.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "The busiest links over the step" in text
    assert "leaf–spine up" in text
    main.app([*words, "--json", "--fail", "spine 1", "--connections", "2"], standalone_mode=False)
    document = json.loads(capfd.readouterr().out)
    assert document["plans"][0]["step_seconds"] > 0
    assert {one["program"] for one in document["plans"][0]["traffic"]} >= {"send"}
    other = tmp_path / "other.json"
    save_plan(plan(cluster(2.0)), other)
    far = tmp_path / "far.json"
    save_plan(plan(replace(cluster(), name="pits")), far)
    for arguments, said in (
        ([str(far)], "far.json is a plan for cluster 'pits', plan.json for 'pods'"),
        ([str(other)], "other.json and plan.json are plans for two clusters"),
        ([str(path)], "both use chip h/0/0"), (["--routing", "ecpm"], "did you mean 'ecmp'"),
        (["--routing", "best"], "--routing 'best'"), (["--split", "half"], "--split"),
        (["--connections", "0"], "at least 1"), (["--fail", "spine 77"], "spine 77 is not among"),
        (["--fail", *[f"spine {0}"], "--fail", "spine 1"], "have no path left"),
        (["--seed", "-1"], "--seed"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            main.app([*words, *arguments, "--routing", "ecmp"]
                     if "--routing" not in arguments else [*words, *arguments],
                     standalone_mode=False)  # fmt: skip


def test_the_page_of_two_plans_names_both(tmp_path: Path) -> None:
    on = cluster()
    found, wiring = estimate(plan(on)), wire(on)
    traffic = plan_traffic(found, wiring)
    result = plans_on_fabric(["one"], [found], [traffic], wiring)[0]
    write_fabric_page(
        tmp_path / "two.html", [result, replace(result, name="two")], wiring, wiring.rates, "spray"
    )
    assert "one beside two" in (tmp_path / "two.html").read_text(encoding="utf-8")


def test_switches_that_add_up_halve_what_gradients_take() -> None:
    """Gradients of 4 copies, one NIC per rail: a ring sends 2·3/4 of the bytes, a tree all once."""
    on = cluster(oversubscription=2.0)
    found, wiring = estimate(plan(on, "tp=8,pp=2,sp=1")), wire(on)
    traffic = plan_traffic(found, wiring)
    rings, trees = (
        plans_on_fabric(["one"], [found], [traffic], wiring, in_switch=adds)[0]
        for adds in (False, True)
    )
    assert {one.program for one in rings.sent} == {one.traffic.program for one in rings.sent}
    added = [one for one in trees.sent if one.program == IN_SWITCH]
    assert {one.traffic.operation for one in added} == {Operation.ALL_REDUCE}
    before = {id(one.traffic): one for one in rings.sent}
    efficiency, nic = added[0].traffic.efficiency, 50e9
    for one in added:
        # copies lie on every leaf of two nodes, one of each stage: 2:1 leaves a NIC's rate
        by_hand = one.traffic.num_bytes / (nic * efficiency.fabric)
        waits = one.whole.latency_s + 2 * efficiency.hop_s
        assert one.alone_s == pytest.approx(by_hand + waits, rel=1e-9)
        assert one.alone_s < before[id(one.traffic)].alone_s
        assert one.bus_bandwidth > before[id(one.traffic)].bus_bandwidth
    assert added
    assert trees.together_s < rings.together_s
