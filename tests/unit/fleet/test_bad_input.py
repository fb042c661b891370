"""What a fleet refuses, each in one line; a node that fails while its job moves."""

from __future__ import annotations

import re

import pytest

from tests.support.fleet_machine import Spread, small_cluster
from tutti.errors import InputError
from tutti.fleet import events
from tutti.fleet.chips import Fleet, Grounds
from tutti.fleet.placing import place_now
from tutti.fleet.policy import Policy
from tutti.fleet.request import Allocation, JobRequest, Shape
from tutti.fleet.scheduler import Scheduler

GROUNDS = Grounds.of(small_cluster())  # 11 nodes of 8 in groups of 4, 4 and 3


def job(name: str, nodes: int, seconds: float = 1000.0, **others: object) -> JobRequest:
    shape = Shape((("p0", nodes),))
    return JobRequest(job=name, seconds=seconds, shapes=(shape,), **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "quotas", "said"),
    [
        (job("a", 12), {}, "job 'a': asks for 12 nodes of pool 'p0', which has 11"),
        (job("a", 5, one_group=True), {}, "the largest has 4 of pool 'p0'; ask for 4, or for no"),
        (job("a", 3, tenant="t"), {"t": 16}, "needs 24 chips, but the quota of 't' is 16"),
        (
            JobRequest(job="a", seconds=1, shapes=(Shape((("p1", 1),)),)),
            {},
            "job 'a': no pool 'p1'; ",
        ),
        (
            JobRequest(job="a", seconds=1, shapes=(Shape((("p0", 1),), 9),)),
            {},
            "asks for 9 chips of a node, but those of pool 'p0' have 8",
        ),
    ],
)
def test_jobs_that_can_never_start(request_: JobRequest, quotas: dict[str, int], said: str) -> None:
    machine = Scheduler(GROUNDS, Policy(quotas=quotas))
    with pytest.raises(InputError, match=re.escape(said)):
        machine.handle(events.Submit(0.0, request_))


def test_what_cannot_happen_is_refused() -> None:
    machine = Scheduler(GROUNDS, Policy())
    machine.handle(events.Submit(5.0, job("a", 1)))
    for event, said in (
        (events.Submit(5.0, job("a", 1)), "job 'a' comes twice"),
        (events.Finish(5.0, "b"), "no job 'b' runs"),
        (events.Submit(4.0, job("c", 1)), "an event of 4 s comes after one of 5 s"),
        (events.Fail(5.0, 11), "no node 11; the fleet has nodes 0-10"),
        (events.Repair(5.0, 3), "node p0/3 is not down"),
        (events.Moved(5.0, "a"), "job 'a' is not being moved"),
        (events.Resize(5.0, "a", (Shape((("p0", 2),)),)), "job 'a' makes no checkpoints"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            machine.handle(event)
    with pytest.raises(InputError, match="0 chips; no job could ever start"):
        Policy(quotas={"t": 0})
    with pytest.raises(InputError, match="did you mean 'tightest'"):
        Policy.parse("fifo/tigthest")


def test_two_jobs_on_one_chip_are_refused() -> None:
    fleet = Fleet(GROUNDS)
    fleet.take("a", Allocation((3,), (0b11,)), 10.0)
    with pytest.raises(InputError, match=re.escape("job 'b': chips of node p0/3 are not free (a)")):
        fleet.take("b", Allocation((3,), (0b10,)), 10.0)
    fleet.take("b", Allocation((3,), (0b100,)), 10.0)


def moving() -> Scheduler:
    """Return a fleet in which job 'm' is being moved together, onto nodes of the first group."""
    machine = Scheduler(GROUNDS, Policy.parse("fifo/tightest/move"), Spread(GROUNDS))
    for name, nodes in (("x", 2), ("y", 3), ("z", 3)):
        machine.handle(events.Submit(0.0, job(name, nodes, 50.0)))
    machine.handle(events.Submit(0.0, job("m", 3, checkpoint_s=10.0, restart_s=5.0)))
    assert GROUNDS.spread(machine.running["m"].allocation.mask) > 1
    said = machine.handle(events.Finish(50.0, "x"))
    for name in ("y", "z"):
        if machine.running["m"].target is None:
            said = machine.handle(events.Finish(50.0, name))
    assert [type(one) for one in said] == [events.Move]
    return machine


def test_a_node_that_fails_while_its_job_moves() -> None:
    machine = moving()
    run = machine.running["m"]
    assert run.target is not None
    new = next(n for n in run.target.nodes if n not in run.allocation.nodes)
    said = machine.handle(events.Fail(52.0, new))
    assert said == [events.Stay("m", run.allocation)]
    assert run.work(52.0) == 50.0  # nothing is lost
    machine = moving()
    run = machine.running["m"]
    old = next(n for n in run.allocation.nodes)
    said = machine.handle(events.Fail(52.0, old))
    assert said[0] == events.Lost("m", 50.0)
    assert isinstance(said[-1], events.Start)  # at once, on what is free
    assert machine.running["m"].done == 50.0


def test_why_jobs_wait_is_said() -> None:
    wanted = [job("a", 6), job("b", 4), job("c", 2), job("d", 1, 50.0)]
    found = place_now(GROUNDS, Policy(), wanted, busy=range(3), busy_s=60.0)
    assert [one.allocation is not None for one in found] == [True, False, False, True]
    assert [one.why for one in found] == [
        "no fewer groups hold 6 nodes",
        "1 of 4 nodes of 'p0' are free; promised in 60 s",
        "1 of 2 nodes of 'p0' are free",
        "one node",
    ]
    found = place_now(GROUNDS, Policy(), wanted[:3], busy=range(3), busy_s=60.0)
    assert found[2].why == "enough nodes are free, but kept for 'b'"
