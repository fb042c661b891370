"""When a plan is looked for, and whether it is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.train_job import write_job
from tutti.elastic.events import Change, Phase
from tutti.elastic.hosts import Host
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Report, Seat, Standing, Status
from tutti.train.elastic import adapt
from tutti.train.elastic.adapt import Adapter
from tutti.train.elastic.better_plan import Proposal
from tutti.train.elastic.next_generation import Settler
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import Job, prepare

BOTH = ("fast/0/0", "fast/0/1")


class Searched:
    """A search that answers at once."""

    asked: list[tuple[frozenset[str], dict[str, float]]] = []  # noqa: RUF012
    wires: Any = None
    result: Any = None

    def __init__(self, job: Job, running: Any, chips: Any, slow: Any, wires: Any) -> None:
        Searched.asked.append((chips, dict(slow)))
        Searched.wires = dict(wires)

    def answer(self) -> Any:
        return Searched.result

    def close(self) -> None:
        pass


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    config = TrainConfig.load(write_job(tmp_path) / "train.yaml")
    monkeypatch.setattr(adapt, "Search", Searched)
    monkeypatch.setattr(adapt, "STILL_S", 0.0)
    Searched.asked, Searched.result = [], None
    given = {"plan": str(tmp_path / "larger.json"), "steps": 1000, "elastic": {}}
    return prepare(with_changes(config, given))


def members(*chips: str, seats: tuple[str, ...] = BOTH, **changes: Any) -> Membership:
    reports = tuple(
        Report(chip=c, process=1, standing=Standing.RUNNING if c in seats else Standing.IDLE)
        for c in chips
    )
    status = Status(job="job", host="here", incarnation=1, number=1, reports=reports)
    seated = tuple(
        Seat(rank=n, chip=c, host="here", process=1, incarnation=1) for n, c in enumerate(seats)
    )
    made = Membership(
        job="job", phase=Phase.RUNNING, hosts=(("here", Host(status=status)),), seats=seated
    )
    return replace(made, **changes)


def adapter(job: Job, said: list[str]) -> Adapter:
    return Adapter(job, Settler(job, resume=False), lambda phase, text: said.append(phase))


def proposal(job: Job, step_s: float, staying_s: float | None) -> Proposal:
    (line,) = job.plan.pipelines
    plan = replace(job.plan, pipelines=(replace(line, micro_batches=line.micro_batches * 2),))
    return Proposal(plan=plan, step_s=step_s, staying_s=staying_s, movement_s=0.1, words="")


def test_nothing_is_looked_for_while_nothing_changes(job: Job) -> None:
    said: list[str] = []
    own = adapter(job, said)
    for _ in range(5):
        assert own.look(members(*BOTH)) is None
    assert (said, Searched.asked) == ([], [])


def test_a_slow_chip_is_looked_at_once_and_the_plan_taken_if_it_pays(job: Job) -> None:
    said: list[str] = []
    own = adapter(job, said)
    own.took(10, 1.0)
    own.slow["fast/0/1"] = 1.5
    assert own.look(members(*BOTH)) is None
    assert Searched.asked == [(frozenset(BOTH), {"fast/0/1": 1.5})]
    Searched.result = proposal(job, 0.8, 1.0)
    change = own.look(members(*BOTH))
    assert isinstance(change, Change)
    assert "fast/0/1 takes 1.50 times as long: 800 ms per step instead of 1 s" in change.why
    own.slow["fast/0/1"] = 1.53  # noise
    assert own.look(members(*BOTH)) is None
    assert said == ["looking", "replanned"]
    del own.slow["fast/0/1"]
    own._settler.current = Searched.result.plan
    assert isinstance(own.look(members(*BOTH)), Change)  # known from before: at once
    assert len(Searched.asked) == 1


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (("fast/0",), "the wire of fast/0 takes 2.00 times as long"),
        (("fast/0", "slow/0"), "the link fast/0 – slow/0 takes 2.00 times as long"),
    ],
)
def test_a_slow_wire_is_looked_at_and_forgiven(job: Job, ends: tuple[str, ...], words: str) -> None:
    own = adapter(job, [])
    own.took(10, 1.0)
    all_chips = (*BOTH, "slow/0/0", "slow/0/1")
    assert own.look(members(*all_chips, seats=all_chips)) is None
    asked = len(Searched.asked)
    own.wire_became(ends, 2.0)
    assert own.look(members(*all_chips, seats=all_chips)) is None
    assert len(Searched.asked) == asked + 1
    assert Searched.wires == {ends: 2.0}
    Searched.result = proposal(job, 0.8, 1.0)
    change = own.look(members(*all_chips, seats=all_chips))
    assert isinstance(change, Change)
    assert words in change.why
    own.forgive("fast")
    assert own.slow_wires == {}


def test_a_wire_whose_chips_all_went_is_no_matter(job: Job) -> None:
    own = adapter(job, [])
    own.wire_became(("slow/0",), 2.0)
    assert own.look(members(*BOTH)) is None
    assert Searched.asked == []


@pytest.mark.parametrize(
    ("step", "new_s", "words"),
    [(10, 0.99, "nothing better"), (995, 0.8, "does not pay"), (10, 1.2, "nothing better")],
)
def test_what_does_not_pay_is_not_taken(job: Job, step: int, new_s: float, words: str) -> None:
    own = adapter(job, [])
    own.took(step, 1.0)
    pays, why = own.judge(proposal(job, new_s, 1.0))
    assert not pays
    assert words in why


def test_a_forecast_that_is_off_is_scaled_by_what_was_measured(job: Job) -> None:
    own = adapter(job, [])
    own.took(0, 3.0)
    assert "2 s per step instead of 3 s" in own.judge(proposal(job, 1.0, 1.5))[1]


def test_asking_and_never(job: Job) -> None:
    assert job.config.elastic is not None
    said: list[str] = []
    for mode, phases in (("never", ["stays"]), ("ask", ["looking", "could"])):
        config = replace(job.config, elastic=replace(job.config.elastic, replan=mode))
        said.clear()
        own = adapter(replace(job, config=config), said)
        own.took(1, 1.0)
        Searched.result = proposal(job, 0.5, 1.0)
        own.slow["fast/0/1"] = 2.0
        assert own.look(members(*BOTH)) is None
        assert own.look(members(*BOTH)) is None
        assert said == phases


def test_without_looking_who_comes_back_is_taken_back_though_another_is_slow(job: Job) -> None:
    assert job.config.elastic is not None
    config = replace(job.config, elastic=replace(job.config.elastic, replan="never"))
    said: list[str] = []
    own = adapter(replace(job, config=config), said)
    own.took(1, 1.0)
    own._settler.current = proposal(job, 0.5, 1.0).plan  # of what is left
    own.slow["fast/0/0"] = 1.4
    assert isinstance(own.look(members(*BOTH)), Change)
    assert own._settler.target == job.plan
    assert said == ["replanned"]
    assert Searched.asked == []


def test_an_offered_plan_is_taken_when_somebody_says_so(job: Job) -> None:
    assert job.config.elastic is not None
    config = replace(job.config, elastic=replace(job.config.elastic, replan="ask"))
    said: list[str] = []
    own = adapter(replace(job, config=config), said)
    own.took(1, 1.0)
    Searched.result = proposal(job, 0.5, 1.0)
    own.slow["fast/0/1"] = 2.0
    own.look(members(*BOTH))
    assert own.look(members(*BOTH)) is None
    own.ask()
    assert isinstance(own.look(members(*BOTH)), Change)
    assert own._settler.target == Searched.result.plan
    assert said == ["looking", "could", "replanned"]
    assert len(Searched.asked) == 1, "it was not looked for again"
    own._settler.current = Searched.result.plan
    own.slow.clear()
    assert own.look(members(*BOTH)) is None, "the way back is offered, too"
    assert said[-1] == "could"


def test_a_newcomer_is_waited_for_until_it_is_ready(job: Job) -> None:
    own = adapter(job, [])
    starting = members(*BOTH, "fast/0/2", seats=BOTH)
    status = starting.hosts[0][1].status
    reports = tuple(
        Report(chip=r.chip, process=1, standing=Standing.STARTING) if r.chip == "fast/0/2" else r
        for r in status.reports
    )
    host = Host(status=Status(job="job", host="here", incarnation=1, number=1, reports=reports))
    assert own.look(replace(starting, hosts=(("here", host),))) is None
    assert Searched.asked == []
    own.look(starting)
    assert Searched.asked == [(frozenset({*BOTH, "fast/0/2"}), {})]
