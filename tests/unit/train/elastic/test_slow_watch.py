"""Chips and wires that change in a run of 500 steps of 5 % noise: one switch each, and back."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.train_job import write_job
from tests.unit.train.elastic.test_adapt import Searched, members
from tutti.elastic.events import Change
from tutti.elastic.membership import Membership
from tutti.hardware.cluster import Cluster
from tutti.train.elastic import adapt
from tutti.train.elastic.adapt import Adapter
from tutti.train.elastic.better_plan import Proposal
from tutti.train.elastic.next_generation import Settler
from tutti.train.elastic.slow_watch import SlowWatch, WireWatch
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import Job, prepare

CLUSTER = """
name: wires
summary: hosts of one chip
pools:
  - {{name: box, chip: A800, chips_per_node: 1, nodes: {hosts}}}
"""
STEPS, RATE = 500, 12.5e6


class Run:
    """What a leader does with the times of steps, without processes."""

    def __init__(self, job: Job, cluster: Cluster, chance: random.Random) -> None:
        self.chance, self.job = chance, job
        hosts = cluster.num_chips
        chips = tuple(f"box/{n}/0" for n in range(hosts))
        self.members: Membership = members(*chips, seats=chips, generation=1)
        self.settler = Settler(job, resume=False)
        self.adapter = Adapter(job, self.settler, lambda _phase, _text: None)
        self.adapter._asked = adapt.Situation(frozenset(chips))
        self.adapter._known = {self.adapter._asked.key: job.plan}
        self.wires = WireWatch(SimpleNamespace(cluster=cluster))  # type: ignore[arg-type]
        self.chips = SlowWatch(job)
        self.chips._expected = lambda _plan: [1.0] * hosts  # type: ignore[method-assign]
        self.bytes = [chance.uniform(1e6, 5e6) for _ in range(hosts)]
        self.switches: list[int] = []
        self.plans = 0

    def noise(self) -> float:
        return max(self.chance.gauss(1.0, 0.05), 0.5)

    def step(self, number: int, slow_chip: dict[int, float], slow_wire: dict[int, float]) -> None:
        hosts = len(self.bytes)
        told = []
        for home, size in enumerate(self.bytes):
            away = (home + 1) % hosts
            factor = max(slow_wire.get(home, 1.0), slow_wire.get(away, 1.0))
            told.append((home, away, size, size / RATE * factor * self.noise()))
        compute = [slow_chip.get(n, 1.0) * self.noise() for n in range(hosts)]
        own = self.adapter
        for chip in self.chips.step(self.members, self.settler.current, own.slow, number, compute):
            own.became(self.members.seats[chip.rank].chip, chip.factor)
        for wire in self.wires.step(self.members, own.slow_wires, number, 1.0, told):
            own.wire_became(wire.ends, wire.factor)
        own.took(number, 1.0)
        for _ in range(2):
            if isinstance(own.look(self.members), Change):
                self.switches.append(number)
                assert self.settler.target is not None
                self.settler.current, self.settler.target = self.settler.target, None
                self.members = replace(self.members, generation=self.members.generation + 1)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    config = TrainConfig.load(write_job(tmp_path) / "train.yaml")
    monkeypatch.setattr(adapt, "STILL_S", 0.0)
    given = {"plan": str(tmp_path / "larger.json"), "steps": 2000, "elastic": {}}
    made = prepare(with_changes(config, given))

    class Better(Searched):
        count = 0

        def answer(self) -> Any:
            Better.count += 1
            (line,) = made.plan.pipelines
            other = replace(line, micro_batches=line.micro_batches + Better.count)
            plan = replace(made.plan, pipelines=(other,))
            return Proposal(plan=plan, step_s=0.8, staying_s=1.0, movement_s=0.1, words="")

    monkeypatch.setattr(adapt, "Search", Better)
    return made


def run_of(job: Job, tmp_path: Path, chance: random.Random) -> Run:
    path = tmp_path / "wires.yaml"
    path.write_text(CLUSTER.format(hosts=chance.randint(3, 6)), encoding="utf-8")
    return Run(job, Cluster.load(str(path)), chance)


@pytest.mark.parametrize("seed", range(6))
def test_noise_changes_no_plan(job: Job, tmp_path: Path, seed: int) -> None:
    run = run_of(job, tmp_path, random.Random(seed))
    for step in range(1, STEPS + 1):
        run.step(step, {}, {})
    assert run.switches == []


@pytest.mark.parametrize("what", ["chip", "wire"])
@pytest.mark.parametrize("seed", range(6))
def test_a_change_is_one_switch_and_its_end_another(
    job: Job, tmp_path: Path, what: str, seed: int
) -> None:
    chance = random.Random(seed)
    run = run_of(job, tmp_path, chance)
    begins, ends = chance.randint(30, 200), chance.randint(260, 450)
    host = chance.randrange(len(run.bytes))
    for step in range(1, STEPS + 1):
        slow = {host: 2.0 if what == "wire" else 1.5} if begins <= step < ends else {}
        run.step(step, slow if what == "chip" else {}, slow if what == "wire" else {})
    first, second = run.switches
    assert 0 <= first - begins <= 10
    assert 0 <= second - ends <= 10
    assert run.settler.current == job.plan, "the first plan is back"
    assert (run.adapter.slow, run.adapter.slow_wires) == ({}, {})


def test_what_slows_twice_is_slower_by_both_and_well_only_when_it_is(
    job: Job, tmp_path: Path
) -> None:
    run = run_of(job, tmp_path, random.Random(7))
    known = []
    for step in range(1, 201):
        factor = 1.0 if step < 20 else 2.0 if step < 80 else 4.0 if step < 140 else 1.0
        run.step(step, {}, {0: factor})
        known.append(run.adapter.slow_wires.get(("box/0",), 1.0))
    assert known[70] == pytest.approx(2.0, rel=0.1)
    assert known[130] == pytest.approx(4.0, rel=0.2)
    assert known[-1] == 1.0
