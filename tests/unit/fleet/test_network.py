"""Jobs on one fabric: rhythms, offsets, what a placement costs."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.document import Place
from tutti.fleet.chips import Grounds
from tutti.fleet.network import Habit, Pattern, SharedNetwork
from tutti.fleet.policy import Policy
from tutti.fleet.request import JobRequest, Shape
from tutti.fleet.send_offsets import Rhythm, periods, propose_offsets
from tutti.fleet.simulate import Simulation
from tutti.hardware.cluster import Cluster

LINK = np.array([0])


def rhythm(compute: float, send: float, demand: float = 1.0) -> Rhythm:
    return Rhythm(compute_s=compute, send_s=send, links=LINK, demand=np.array([demand]))


def test_one_job_alone_keeps_its_period() -> None:
    assert periods([rhythm(3, 1)], np.ones(1)) == pytest.approx([4.0])


def test_two_that_send_at_once_share_and_two_that_do_not_do_not() -> None:
    jobs = [rhythm(3, 1), rhythm(3, 1)]
    assert periods(jobs, np.ones(1)) == pytest.approx([5.0, 5.0])  # each sends at half its pace
    assert periods(jobs, np.ones(1), [0.0, 1.5]) == pytest.approx([4.0, 4.0])
    assert periods(jobs, np.full(1, 2.0)) == pytest.approx([4.0, 4.0])  # room for both


def test_a_job_that_sends_all_the_time_is_slowed_by_what_the_other_takes() -> None:
    """Work is conserved: the link is full, so that both together send one byte per second."""
    busy, other = periods([rhythm(0, 1), rhythm(3, 1)], np.ones(1))
    assert 1 / busy + 1 / other == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("times", [3, 40, 400, 4000])
def test_long_steps_feel_many_short_ones_of_another(times: int) -> None:
    """Whoever sends half of the time halves the pace of the other for a half, or more, of it."""
    long, short = periods([rhythm(times, times), rhythm(0.5, 0.5)], np.ones(1))
    assert 1.25 * 2 * times <= long <= 1.51 * 2 * times
    assert 1.1 <= short <= 1.5
    # the link is never asked for less than one of them wants: what both send fits into the time
    assert times / long + 0.5 / short <= 1.0 + 1e-6


def test_no_job_is_faster_beside_others_than_alone() -> None:
    # the second one's first sending is held back, its last is not: between them lies less
    timings = [(2.79, 1.888, 0.914), (4.968, 1.737, 0.0), (1.0, 0.0, 0.0), (6811.0, 1e-9, 1.0)]
    jobs = [
        Rhythm(compute_s=computing, send_s=sending, links=np.array([0]), demand=np.ones(1), felt=f)
        for computing, sending, f in timings
    ]
    together = periods(jobs, np.array([1.247]))
    assert all(period >= job.period_s for period, job in zip(together, jobs, strict=True))
    assert together[0] > 1.01 * jobs[0].period_s


def test_equal_jobs_that_fill_a_link_together_are_offered_turns() -> None:
    third = [rhythm(2, 1)] * 3
    offsets = propose_offsets(third, np.ones(1))
    assert offsets.before == pytest.approx((5.0,) * 3)
    assert offsets.after == pytest.approx((3.0,) * 3)


def test_offsets_are_proposed_where_they_help() -> None:
    found = propose_offsets([rhythm(3, 1), rhythm(3, 1)], np.ones(1))
    assert found.helps
    assert found.before == pytest.approx((5.0, 5.0))
    assert found.after == pytest.approx((4.0, 4.0))
    assert 1.0 <= found.seconds[1] <= 3.0
    crowded = propose_offsets([rhythm(0.2, 1), rhythm(0.2, 1)], np.ones(1))
    assert crowded.gain < 0.1  # they want more than there is, whenever they begin
    assert not propose_offsets([rhythm(3, 1), rhythm(3, 1)], np.full(1, 2.0)).helps


def spined(oversubscription: float, nodes: int = 16) -> Grounds:
    return Grounds.of(Cluster.from_document({
        "name": "spined", "pools": [{"name": "a", "node": "HGX-A800", "nodes": nodes}],
        "fabric": {"rail_optimized": True, "tiers": [
            {"name": "leaf", "nodes": 4}, {"name": "spine", "oversubscription": oversubscription},
        ]},
    }, Place("spined")))  # fmt: skip


def asked(name: str, nodes: int = 4, seconds: float = 1000.0) -> JobRequest:
    return JobRequest(job=name, seconds=seconds, shapes=(Shape((("a", nodes),)),))


@pytest.mark.parametrize(("pattern", "spread"), [("ring", 1.0), ("all_to_all", 1.44)])
def test_what_a_spine_costs_follows_from_the_pattern(pattern: str, spread: float) -> None:
    """All to all over four leaves: 12 of 15 bytes cross a spine that lets a quarter through.

    A ring along the wire has one NIC of four in either direction at each leaf: there is room.
    """
    network = SharedNetwork(spined(4.0), usual=Habit(share=0.2, pattern=Pattern(pattern)))
    together, apart = 0b1111, 0b1000100010001
    assert network.stretch(asked("j"), together) == pytest.approx(1.0)
    lone = network.stretch(asked("j"), apart)
    assert lone == pytest.approx(1.0)  # its leaves' uplinks are its alone
    two_by_two = 0b1100110011001100
    assert network.stretch(asked("j", 8), two_by_two) >= lone
    full = network.stretch(asked("j", 16), (1 << 16) - 1)
    assert full == pytest.approx(spread, rel=0.01)


def test_jobs_stretch_each_other_only_where_links_are_short() -> None:
    def ends(oversubscription: float) -> list[float]:
        grounds = spined(oversubscription)
        habit = Habit(share=0.4, pattern=Pattern.ALL_TO_ALL)
        requests = [(0.0, asked("a", 8)), (0.0, asked("b", 8))]
        history = Simulation(
            grounds, Policy.parse("fifo/random"), requests,
            network=SharedNetwork(grounds, usual=habit),
        ).run()  # fmt: skip
        return [history.jobs[name].end for name in "ab"]

    assert ends(1.0) == pytest.approx([1000.0, 1000.0])
    assert min(ends(4.0)) > 1100.0


@pytest.mark.parametrize("felt", [0.0, 0.1, 0.5, 1.0])
def test_a_job_slowed_takes_what_following_it_shows(felt: float) -> None:
    """Sending fills 0.9 s of a step of 1 s: at half its pace its bytes alone need 1.8 s."""
    job = Rhythm(compute_s=0.1, send_s=0.9, links=LINK, demand=np.ones(1), felt=felt)
    assert job.slowed_s(2.0) == pytest.approx(periods([job], np.full(1, 0.5))[0])
    assert job.slowed_s(2.0) >= 1.8
    assert job.slowed_s(0.5) == pytest.approx(job.period_s)


def test_jobs_that_share_a_narrow_spine_are_offered_turns_and_others_are_not() -> None:
    apart, other = 0b0000_0000_0001_0001, 0b0000_0000_0010_0010
    usual = Habit(step_s=10.0, share=0.3, pattern=Pattern.ALL_TO_ALL)
    narrow = SharedNetwork(spined(8.0), usual=usual)
    ((later, saves),) = narrow.turns({"a": apart, "b": other, "c": 0b1 << 15})
    assert set(later) == {"a", "b"}
    assert min(later.values()) == 0.0 < max(later.values())
    assert saves > 0.05
    assert SharedNetwork(spined(1.0), usual=usual).turns({"a": apart, "b": other}) == []
    habits = {"a": usual, "b": Habit(step_s=7.0, share=0.3, pattern=Pattern.ALL_TO_ALL)}
    assert SharedNetwork(spined(8.0), habits).turns({"a": apart, "b": other}) == []
