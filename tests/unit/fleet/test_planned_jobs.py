"""Jobs of a fleet that are plans: their own bytes, on whatever nodes they get."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.unit.simulate.test_fabric_step import cluster, plan
from tutti.cli import main
from tutti.document import Place
from tutti.errors import InputError
from tutti.fleet.chips import Grounds, bits
from tutti.fleet.network import SharedNetwork, fitting_shapes
from tutti.fleet.policy import Policy
from tutti.fleet.request import JobRequest, Shape
from tutti.fleet.send_offsets import Rhythm, periods
from tutti.fleet.simulate import Simulation
from tutti.hardware.cluster import Cluster
from tutti.plan.files import save_plan
from tutti.simulate.estimate import estimate
from tutti.simulate.step_traffic import StepTraffic, step_traffic

COMPACT, APART = 0b00001111, 0b01010101  # of eight nodes, two under each leaf


@cache
def steps() -> StepTraffic:
    return step_traffic("four", estimate(plan(cluster().only({"h": tuple(range(4))}))))


def asked(nodes: int = 4) -> JobRequest:
    return JobRequest(job="four", seconds=1.0, shapes=(Shape((("h", nodes),)),))


def test_all_bytes_between_nodes_are_there_and_some_hide() -> None:
    found = steps()
    assert found.nodes == tuple(("h", node) for node in range(4))
    assert (found.sources != found.targets).all()
    assert 0 < found.sending_s < found.step_s
    assert 0 <= found.felt <= 1
    assert found.num_bytes.sum() > 0


def test_on_its_own_nodes_a_step_takes_what_the_plan_says() -> None:
    network = SharedNetwork(Grounds.of(cluster()), {"four": steps()})
    assert network.stretch(asked(), COMPACT) == pytest.approx(1.0, abs=1e-6)
    rhythm = network.rhythm(steps(), COMPACT)
    assert rhythm.period_s == pytest.approx(steps().step_s)


def test_scattered_nodes_carry_more_over_the_spine_and_a_narrow_one_slows_the_step() -> None:
    def load(mask: int, oversubscription: float) -> tuple[float, float]:
        network = SharedNetwork(Grounds.of(cluster(oversubscription)), {"four": steps()})
        rhythm = network.rhythm(steps(), mask)
        return float((rhythm.demand * rhythm.send_s).sum()), network.stretch(asked(), mask)

    near, _ = load(COMPACT, 1.0)
    far, wide = load(APART, 1.0)
    assert far > near
    assert wide == pytest.approx(1.0, abs=1e-6)
    _, narrow = load(APART, 64.0)
    assert narrow > 1.0 + 0.01 * steps().felt


def test_bytes_do_not_depend_on_where_nodes_are() -> None:
    """Every byte that leaves one of a node's leaves crosses it up and down: bytes are conserved."""
    network = SharedNetwork(Grounds.of(cluster()), {"four": steps()})
    rhythm = network.rhythm(steps(), APART)  # every pair lies under different leaves
    carried = float((rhythm.demand * rhythm.send_s).sum())
    assert carried == pytest.approx(2 * float(steps().num_bytes.sum()))


def test_a_plan_for_other_nodes_is_refused() -> None:
    network = SharedNetwork(Grounds.of(cluster()), {"four": steps()})
    with pytest.raises(InputError, match=r"planned for 4 nodes of 'h', the job is given 2 nodes"):
        network.stretch(asked(2), 0b11)
    assert bits(COMPACT) == [0, 1, 2, 3]


def mixed(big: int = 4) -> Cluster:
    """Return a pool of nodes of four chips and one of nodes of eight, under leaves of two."""
    return Cluster.from_document({
        "name": "mixed", "pools": [
            {"name": "s", "node": "PCIe-4xT4", "nodes": 8},
            {"name": "h", "node": "HGX-H800", "nodes": big},
        ],
        "fabric": {"tiers": [{"name": "leaf", "nodes": 2}, {"name": "spine"}]},
    }, Place("mixed"))  # fmt: skip


def test_shapes_that_a_plan_does_not_fit_are_left_out_before_anything_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """32 chips are four nodes of eight or eight of four: the plan is for the first only."""
    shapes = (Shape((("s", 8),)), Shape((("h", 4),)))
    grounds = Grounds.of(mixed())
    assert fitting_shapes(grounds, steps(), shapes) == shapes[1:]
    with pytest.raises(InputError, match="planned for 4 nodes of 's', the job is given 8 nodes"):
        fitting_shapes(grounds, steps(), shapes[:1])
    with pytest.raises(InputError, match="sends from 8 chips of a node, those of pool 's' have 4"):
        fitting_shapes(grounds, steps(), (Shape((("s", 4),)),))
    file, trace, where = tmp_path / "four.json", tmp_path / "jobs.csv", tmp_path / "mixed.yaml"
    save_plan(plan(cluster().only({"h": tuple(range(4))})), file)
    trace.write_text("job,submit_s,duration_s,chips\na,0,600,32\nb,1,600,32\nc,2,60,8\n")
    mixed().save(where)
    said = ["fleet", "simulate", str(trace), str(where), "--policy", "fifo/contention"]
    main.app([*said, "--plan", f"[ab]={file}"], standalone_mode=False)
    assert "3 jobs" in capfd.readouterr().out
    with pytest.raises(InputError, match=r"--plan: job 'c': four is planned for 4 nodes"):
        main.app([*said, "--plan", f"c={file}"], standalone_mode=False)


def test_a_plan_over_two_pools_is_placed_pool_by_pool() -> None:
    one = steps()
    both = replace(
        one, nodes=(("h", 0), ("h", 1), ("s", 0), ("s", 1)),
        source_slots=one.source_slots % 4, target_slots=one.target_slots % 4,
    )  # fmt: skip
    grounds = Grounds.of(mixed())
    network = SharedNetwork(grounds, {"both": both})
    request = JobRequest(job="both", seconds=100.0, shapes=(Shape((("h", 2), ("s", 2))),))
    assert network.stretch(request, 0b11) == 1.0
    with pytest.raises(InputError, match="the job is given 3 nodes of 's'"):
        network.stretch(request, 0b111)
    policy = Policy.parse("fifo/contention")
    history = Simulation(grounds, policy, [(0.0, request)], network=network).run()
    assert history.jobs["both"].end >= 100.0


def test_an_idle_node_is_one_that_a_plan_asks_for() -> None:
    """Five nodes, of which four compute: the job asks for five."""
    on = cluster().only({"h": tuple(range(5))})
    found = step_traffic("five", estimate(plan(on, "dp=2,shard=1,tp=8,pp=2,sp=1")))
    assert found.nodes == tuple(("h", node) for node in range(5))
    assert found.sources.max() < 4
    network = SharedNetwork(Grounds.of(cluster()), {"four": found})
    assert network.stretch(asked(5), 0b11111) >= 1.0


def test_what_hides_behind_computing_is_not_felt() -> None:
    link = np.array([0])
    always = Rhythm(compute_s=0, send_s=1, links=link, demand=np.ones(1))
    for felt, period in ((0.0, 4.0), (0.5, 4.5), (1.0, 5.0)):  # at half its pace it sends for 2 s
        job = Rhythm(compute_s=3, send_s=1, links=link, demand=np.ones(1), felt=felt)
        assert periods([job, always], np.ones(1))[0] == pytest.approx(period)


def test_a_trace_of_plans(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = cluster(16.0)
    file = tmp_path / "four.json"
    save_plan(plan(whole.only({"h": tuple(range(4))})), file)
    trace = tmp_path / "jobs.csv"
    trace.write_text("job,submit_s,duration_s,nodes\nllama-a,0,600,4\nllama-b,1,600,4\nc,2,60,1\n")
    where = tmp_path / "pods.yaml"
    whole.save(where)
    said = [
        "fleet", "simulate", str(trace), str(where), "--policy", "fifo/random",
        "--plan", f"llama-*={file}",
    ]  # fmt: skip
    main.app(said, standalone_mode=False)
    assert "3 jobs" in capfd.readouterr().out
    with pytest.raises(InputError, match="no job is called 'bert'"):
        main.app([*said[:-1], f"bert={file}"], standalone_mode=False)
