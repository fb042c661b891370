"""The ledger: reports of pretended agents in, verdicts out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tutti.diagnose.fabric.likelihood import Blame
from tutti.diagnose.fabric.probe_ledger import ProbeLedger, ProbeVerdict, _directed
from tutti.errors import InputError

HOSTS = {f"h{n}": f"10.0.{n // 2}.{n % 2 + 1}" for n in range(6)}
SWITCHES = {f"9.0.0.{n}": f"leaf {n}" for n in range(3)} | {
    f"9.1.0.{n}": f"spine {n}" for n in range(2)
}
PORTS = (7071, 7072)  # over spine 0, over spine 1

Lost = Callable[[str, str, int, int], bool]  # link's ends and the probe's number


class _Network:
    """Agents on 6 hosts, 3 leaves, 2 spines, in step; each half second they send and report."""

    def __init__(self, lost: Lost = lambda *_: False) -> None:
        self.lost = lost
        self.ledger = ProbeLedger(HOSTS, SWITCHES)
        self.now, self.last = 0.0, [-1] * 6
        self.stopped: set[int] = set()
        self.answering = True
        self.skew_us = [0] * 6
        self.queue_us: dict[str, int] = {}
        self.rate: dict[str, float] = {}
        self.overflowed: set[int] = set()
        self.late: set[int] = set()

    @staticmethod
    def nodes(a: int, b: int, port: int) -> list[str]:
        if a // 2 == b // 2:
            return [f"h{a}", f"leaf {a // 2}", f"h{b}"]
        return [f"h{a}", f"leaf {a // 2}", f"spine {port - 7071}", f"leaf {b // 2}", f"h{b}"]

    def links(self, a: int, b: int, port: int) -> list[tuple[str, str]]:
        nodes = self.nodes(a, b, port)
        return list(pairwise(nodes))

    def pairs(self, own: int) -> list[tuple[int, int]]:
        return [
            (p, q) for p in range(6) if p != own for q in PORTS[: 1 if p // 2 == own // 2 else 2]
        ]

    def step(self) -> None:
        self.now += 0.5
        sending = [n for n in range(6) if n not in self.stopped]
        for own in sending:
            self.last[own] += 2
        by_name = {name: address for address, name in SWITCHES.items()}
        for own in sending:
            report: dict[str, Any] = {
                "host": f"h{own}", "got": [], "delays_us": [], "trains": [], "paths": [],
                "sent": [[p, q, self.last[own]] for p, q in self.pairs(own)],
                "overflowed": own in self.overflowed, "late": own in self.late,
                "answered": sorted(self.stopped) if self.answering else [],
            }  # fmt: skip
            for p, q in self.pairs(own):
                hops = [by_name[name] for name in self.nodes(own, p, q)[1:-1]]
                report["paths"].append([p, q, hops])
                if p not in sending:
                    continue
                links, first = self.links(p, own, q), self.last[p] - 1
                mask = sum(
                    1 << i
                    for i in range(2)
                    if not any(self.lost(*link, first + i) for link in links)
                )
                if mask:
                    report["got"].append([p, q, first, mask])
                    late = sum(self.queue_us.get(" → ".join(link), 0) for link in links)
                    skew = self.skew_us[own] - self.skew_us[p]
                    report["delays_us"].append([p, q, 100 + late + skew])
                    rate = min(self.rate.get(" → ".join(link), 1e6) for link in links)
                    report["trains"].append([p, q, rate, 100 + late + skew])
            self.ledger.take(report, self.now)

    def run(self, seconds: float, judged_s: float = 1.0) -> ProbeVerdict:
        """Let time pass; a verdict is asked for each half second of the last `judged_s`."""
        found = ProbeVerdict()
        for left in reversed(range(round(2 * seconds))):
            self.step()
            if left < 2 * judged_s:
                found = self.ledger.verdict(self.now)
        return found


def test_a_healthy_network_is_not_blamed_whatever_its_clocks_say() -> None:
    network = _Network()
    network.skew_us = [0, 5_000_000, -3_000_000, 7, 0, 0]
    found = network.run(10)
    assert found.paths == 6 * (4 * 2 + 1)
    assert found == ProbeVerdict(paths=found.paths)


def test_a_black_hole_is_named_with_its_direction_within_three_seconds() -> None:
    network = _Network()
    network.run(6)
    network.lost = lambda a, b, _: (a, b) == ("spine 1", "leaf 2")
    found = network.run(2.5)
    assert [one.parts for one in found.down] == [("spine 1 → leaf 2",)]
    assert found.accused == found.down
    network.lost = lambda *_: False
    assert not network.run(14).accused


def test_a_cut_cable_is_named_as_one() -> None:
    network = _Network()
    network.run(6)
    network.lost = lambda a, b, _: {a, b} == {"spine 1", "leaf 2"}
    assert [one.parts for one in network.run(2.5).down] == [("leaf 2 ↔ spine 1",)]


def test_a_direction_is_named_before_its_cable() -> None:
    """Where nothing went the other way, both explain the same."""
    one = Blame(parts=("a → b", "a ↔ b", "c"), chance=1.0, gain=20.0, trials=9, bad=9)
    assert _directed(one).parts == ("a → b", "c")
    assert _directed(replace(one, parts=("a ↔ b",))).parts == ("a ↔ b",)


def test_seldom_loss_and_a_slow_link_are_named() -> None:
    network = _Network(lambda a, b, n: (a, b) == ("leaf 0", "spine 1") and n % 8 == 3)
    network.rate["spine 0 → leaf 1"] = 2.5e5
    found = network.run(12)
    assert [one.parts for one in found.lossy] == [("leaf 0 → spine 1",)]
    assert [one.parts for one in found.slow] == [("spine 0 → leaf 1",)]
    assert not found.down


def test_loss_where_queues_are_full_is_congestion() -> None:
    network = _Network()
    network.run(6)
    network.queue_us["leaf 0 → spine 1"] = 20_000
    network.lost = lambda a, b, n: (a, b) == ("leaf 0", "spine 1") and n % 8 == 3
    found = network.run(12, judged_s=12)
    assert found.congested == ("leaf 0 → spine 1",)
    assert not found.accused


@pytest.mark.parametrize("answering", [True, False])
def test_a_stopped_host_is_no_broken_link(answering: bool) -> None:
    network = _Network()
    network.run(8)
    network.stopped, network.answering = {3}, answering
    found = network.run(8)
    assert (found.stalled, found.gone) == ((("h3",), ()) if answering else ((), ("h3",)))
    assert not found.accused
    network.stopped = set()
    network.overflowed = {3}  # what was sent meanwhile did not fit
    network.run(1)
    network.overflowed = set()
    found = network.run(4)
    assert not found.accused
    assert not found.stalled


def test_an_agent_that_begins_anew_has_lost_nothing_and_is_watched_again() -> None:
    network = _Network()
    network.run(8)
    network.last[2] = -1
    assert not network.run(4, judged_s=4).accused
    network.lost = lambda a, b, _: (a, b) == ("h2", "leaf 1")
    assert [one.parts for one in network.run(3).down] == [("h2 → leaf 1",)]


def test_probes_to_a_host_that_has_not_begun_to_listen_are_no_losses() -> None:
    network = _Network()
    network.stopped = {3}
    network.run(1.5)
    network.stopped = set()
    assert not network.run(4, judged_s=4).accused


def test_some_loss_at_a_late_agent_is_no_links_but_loss_of_nearly_all_is() -> None:
    network = _Network(lambda a, b, n: "h3" in (a, b) and n % 3 == 0)
    network.late = {3}
    verdict = network.run(20)
    assert not verdict.accused
    assert verdict.late == ("h3",)
    network.late = set()
    assert any("h3" in part for one in network.run(20).lossy for part in one.parts)
    network = _Network(lambda a, b, n: (a, b) == ("spine 1", "leaf 1") and n > 40)
    network.late = set(range(6))
    network.run(12)
    assert [one.parts for one in network.run(6).down] == [("spine 1 → leaf 1",)]


def test_a_report_counts_from_when_its_sockets_were_read() -> None:
    """The report was made before the probe was sent, and came after it was due."""
    ledger = ProbeLedger({"a": "10.0.0.1", "b": "10.0.0.2"}, {})
    skew = 5000.0

    def tell(host: str, now: float, read_at: float, sent: int, got: int) -> None:
        other = 1 if host == "a" else 0
        ledger.take(
            {
                "host": host, "paths": [[other, 7071, ["x"]]], "trains": [], "answered": [],
                "sent": [[other, 7071, sent]], "got": [[other, 7071, 0, (1 << got) - 1]],
                "delays_us": [], "overflowed": False, "read_at": read_at + skew,
            },
            now,
        )  # fmt: skip

    for step in range(8):  # settled from 2 s on; what is sent has come by the next report
        now = 0.5 * step
        tell("a", now, now, 10 * step, 10 * step)
        tell("b", now, now, 10 * step, 10 * step)
    for step in range(1, 20):  # b's reports are held up for a second: they name what came by then
        now = 4.0 + 0.5 * step
        tell("a", now, now, 100 + 10 * step, 100 + 10 * step)
        tell("b", now, now - 1.0, 100 + 10 * step, 100 + 10 * (step - 2) + 1)
        assert not ledger.verdict(now).accused


def test_what_is_no_report_is_refused() -> None:
    ledger = ProbeLedger(HOSTS, SWITCHES)
    for bad in ({}, {"host": "nobody"}, {"host": "h0", "paths": [[1]]}):
        with pytest.raises(InputError, match="not a report"):
            ledger.take(bad, 0.0)
    with pytest.raises(InputError, match="names host 99"):
        ledger.take({"host": "h0", "paths": [[99, 7071, []]]}, 0.0)
