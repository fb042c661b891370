"""Rounds of pairs: slow chips, NICs and links of simulated clusters, told apart."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.diagnose.cluster.answer import check_finding
from tutti.diagnose.cluster.chips import ChipReading, slow_chips
from tutti.diagnose.cluster.rounds import (
    Pair,
    Verdicts,
    all_pairs,
    edge_rounds,
    judge,
    pairing_rounds,
    suspects,
    twice_the_median,
)

NOISE = 0.03


class Cluster:
    """Hosts whose NICs and links run at shares of their rate, and are measured with noise."""

    def __init__(self, hosts: int, seed: int, nics: int = 0, links: int = 0) -> None:
        self.hosts, self.random = hosts, random.Random(seed)
        self.nics = {
            h: self.random.uniform(0.4, 0.7) for h in self.random.sample(range(hosts), nics)
        }
        healthy = [p for r in pairing_rounds(hosts) for p in r if not set(p) & set(self.nics)]
        chosen = self.random.sample(healthy, min(links, len(healthy)))
        self.links = {pair: self.random.uniform(0.4, 0.7) for pair in chosen}
        self.rounds = 1  # each chip alone

    def measure(self, pairs: tuple[Pair, ...]) -> dict[Pair, float]:
        self.rounds += 1
        used = [h for p in pairs for h in p]
        assert len(used) == len(set(used)), "a host meets two at once"
        return {
            (a, b): min(self.nics.get(a, 1.0), self.nics.get(b, 1.0), self.links.get((a, b), 1.0))
            * self.random.gauss(1, NOISE)
            for a, b in pairs
        }

    def check(self) -> Verdicts:
        rates: dict[Pair, float] = {}
        for pairs in pairing_rounds(self.hosts):
            rates |= self.measure(pairs)
        doubted = suspects(self.hosts, rates)
        return judge(self.hosts, rates, doubted, self.measure(doubted.confirming))


def right(cluster: Cluster) -> bool:
    found = cluster.check()
    assert cluster.rounds == 2 + math.ceil(math.log2(cluster.hosts))
    return set(found.nics) == set(cluster.nics) and set(found.links) == set(cluster.links)


@pytest.mark.parametrize(
    "hosts", [8, 16, 64, 256, *(pytest.param(n, marks=pytest.mark.slow) for n in (1024, 4096))]
)
def test_slow_nics_and_links_are_told_apart(hosts: int) -> None:
    trials = 100 if hosts <= 16 else 25 if hosts <= 64 else 5 if hosts <= 256 else 1
    cases: list[Callable[[int], Cluster]] = [
        lambda seed: Cluster(hosts, seed),
        lambda seed: Cluster(hosts, seed, nics=1),
        lambda seed: Cluster(hosts, seed, links=1),
        lambda seed: Cluster(hosts, seed, nics=max(1, hosts // 16), links=max(1, hosts // 16)),
    ]
    won = sum(right(make(seed)) for make in cases for seed in range(trials))
    assert won >= 0.99 * trials * len(cases)


@pytest.mark.parametrize("hosts", [16, 64, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_quarter_of_all_nics_may_be_slow(hosts: int) -> None:
    trials = 30 if hosts <= 64 else 4
    made = [Cluster(hosts, seed, nics=hosts // 4) for seed in range(trials)]
    won = sum(set(cluster.check().nics) == set(cluster.nics) for cluster in made)
    assert won >= 0.99 * trials


def test_of_two_hosts_it_cannot_be_told_which() -> None:
    found = Cluster(2, 1, nics=1).check()
    assert found.either == ((0, 1),)
    answer = check_finding([], found, ["a", "b"])
    assert answer.where.hosts == ("a", "b")
    assert "cannot be told which" in answer.cause
    assert check_finding([], Cluster(2, 1).check(), ["a", "b"]).healthy


def test_hosts_whose_chips_were_not_read() -> None:
    found = check_finding([], Cluster(4, 1).check(), list("abcd"))
    assert found.cause == "NICs and links of 4 hosts are as quick as they should be"
    both = check_finding(mixed(1.0, 1)[:1], Cluster(4, 1).check(), list("abcd"))
    assert both.cause.endswith("should be, and so are the NICs and links of 4 hosts")


@given(hosts=st.integers(1, 40))
def test_everybody_meets_everybody_once(hosts: int) -> None:
    met = [pair for pairs in all_pairs(hosts) for pair in pairs]
    assert len(met) == len(set(met)) == hosts * (hosts - 1) // 2
    for pairs in all_pairs(hosts):
        assert len({h for p in pairs for h in p}) == 2 * len(pairs)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=60))
def test_edges_are_coloured(edges: list[Pair]) -> None:
    rounds = edge_rounds(edges)
    wanted = {(min(e), max(e)) for e in edges if e[0] != e[1]}
    assert {p for pairs in rounds for p in pairs} == wanted
    for pairs in rounds:
        assert len({h for p in pairs for h in p}) == 2 * len(pairs)
    degree = max((sum(h in e for e in wanted) for h in range(21)), default=0)
    assert len(rounds) <= max(0, 2 * degree - 1)


def mixed(slow: float, seed: int, *, off: float = 1.0) -> list[ChipReading]:
    """Four quick and four slow kinds, 2.5 apart; one quick chip is `slow` times as slow."""
    noise = random.Random(seed)
    return [
        ChipReading(
            name=f"host{i}/chip 0", kind="fast" if i < 4 else "old",
            seconds={"products": due * off * noise.gauss(1, 0.01) * (slow if i == 1 else 1.0)},
            expected={"products": due},
        )
        for i in range(8)
        for due in [0.01 if i < 4 else 0.025]
    ]  # fmt: skip


def test_a_mixed_cluster_beside_the_rule_of_twice_the_median() -> None:
    for seed in range(20):
        for factor in (1.2, 1.5):
            found = slow_chips(mixed(factor, seed))
            assert [chip.name for chip in found] == ["host1/chip 0"]
        assert slow_chips(mixed(1.0, seed)) == []
    quick, old = 0.01, 0.025
    seconds = dict.fromkeys(range(6), quick) | {1: 1.5 * quick, 6: old, 7: old}
    assert twice_the_median(seconds) == (6, 7)  # the healthy old chips, and not the slow one


def test_a_profile_of_another_driver_alarms_nobody_and_is_said() -> None:
    readings = mixed(1.0, 1, off=1.4)
    assert slow_chips(readings) == []
    assert "1.4" in check_finding(readings, None, []).notes[0]


def test_one_chip_is_held_against_its_profile() -> None:
    alone = mixed(1.5, 1)[1:2]
    found = check_finding(alone, None, [])
    assert (found.component.value, found.where.hosts) == ("chip", ("host1",))
    assert "its Profile" in found.cause
    unknown = [ChipReading(name="h/chip 0", kind="X1", seconds={"products": 1.0}, expected={})]
    lacking = check_finding(unknown, None, [])
    assert lacking.exit_code == 2
    assert "no Profile has X1" in lacking.notes[0]
    assert "--profile" in lacking.next_steps[0]


def test_a_wrong_product_goes_before_everything() -> None:
    bad = ChipReading(
        name="h/chip 3", kind="k", seconds={}, expected={}, wrong="multiplies wrongly"
    )
    found = check_finding([*mixed(1.5, 1), bad], None, [])
    assert found.where.devices == ("chip 3",)
    assert found.confidence > 0.9
