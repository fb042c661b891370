"""Rounds: who meets whom, so that slow NICs and slow links can be told apart quickly. Pure.

In round b host i meets host i xor 2ᵇ, all pairs at once. A slow NIC is slow with everybody, a slow
link between two hosts that are quick with others. After ⌈log₂N⌉ rounds those that look slow meet
hosts that are known to be good, once; that decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SLOW = 0.88  # of the expected rate; below, something is slow
_FEW = 5  # rounds
Pair = tuple[int, int]
Round = tuple[Pair, ...]


def pairing_rounds(hosts: int) -> list[Round]:
    """Return ⌈log₂N⌉ rounds of disjoint pairs; a host whose partner is missing rests."""
    bits = max(0, (hosts - 1).bit_length())
    return [
        tuple((i, i ^ (1 << b)) for i in range(hosts) if i < i ^ (1 << b) < hosts)
        for b in range(bits)
    ]


def all_pairs(hosts: int) -> list[Round]:
    """Return rounds in which every host meets every other: a tournament."""
    count = hosts + hosts % 2
    ring = list(range(count))
    rounds = []
    for _ in range(count - 1):
        pairs = ((ring[i], ring[-1 - i]) for i in range(count // 2))
        rounds.append(tuple(sorted((min(p), max(p)) for p in pairs if max(p) < hosts)))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def edge_rounds(edges: Iterable[Pair]) -> list[Round]:
    """Return rounds of disjoint pairs that hold all edges: each takes the first that is free."""
    rounds: list[list[Pair]] = []
    busy: list[set[int]] = []
    for a, b in sorted({(min(e), max(e)) for e in edges if e[0] != e[1]}):
        at = next((k for k, hosts in enumerate(busy) if a not in hosts and b not in hosts), None)
        if at is None:
            rounds.append([])
            busy.append(set())
            at = len(rounds) - 1
        rounds[at].append((a, b))
        busy[at] |= {a, b}
    return [tuple(pairs) for pairs in rounds]


@dataclass(frozen=True, slots=True)
class Suspects:
    """Who looks slow after the rounds, and who meets whom to decide it."""

    nics: tuple[int, ...]
    links: tuple[Pair, ...]
    confirming: Round
    unmet: tuple[int, ...]  # there was no known-good host left to meet


def suspects(hosts: int, rates: Mapping[Pair, float]) -> Suspects:
    """Return whom the rounds cast doubt on; rates are shares of what was expected of each pair."""
    own = _by_host(hosts, rates)
    # with few rounds a good host may meet slow ones only: it becomes a suspect, and is cleared
    slow = {h for h in range(hosts) if own[h] and _best(own[h]) < SLOW}
    links = [p for p, rate in rates.items() if rate < SLOW and not slow.intersection(p)]
    met: set[int] = set()
    confirming: list[Pair] = []
    for pair in links:
        if not met & set(pair):
            confirming.append(pair)
            met |= set(pair)
    good = sorted(
        (h for h in range(hosts) if h not in slow and own[h] and h not in met),
        key=lambda h: -_best(own[h]),
    )
    unmet = []
    for host in sorted(slow):
        partner = next((g for g in good if _pair(host, g) not in rates), None)
        partner = partner if partner is not None else (good[0] if good else None)
        if partner is None:
            unmet.append(host)
            continue
        good.remove(partner)
        confirming.append(_pair(host, partner))
    return Suspects(tuple(sorted(slow)), tuple(links), tuple(sorted(confirming)), tuple(unmet))


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What the rounds came to: hosts whose NIC is slow, links that are; each with its share."""

    nics: Mapping[int, float]
    links: Mapping[Pair, float]
    either: tuple[tuple[int, ...], ...] = ()  # sets of hosts of which one is slow, or their link


def judge(
    hosts: int,
    rates: Mapping[Pair, float],
    doubted: Suspects,
    confirmed: Mapping[Pair, float],
) -> Verdicts:
    """Return which NICs and links are slow, after the confirming round."""
    if hosts == 2:
        pair, rate = next(iter(rates.items()), ((0, 1), 1.0))
        low = min([rate, *confirmed.values()]) < SLOW
        return Verdicts({}, {}, (pair,) if low and max([rate, *confirmed.values()]) < SLOW else ())
    own = _by_host(hosts, rates)
    doubted_nics = set(doubted.nics)
    nics = {
        host: statistics.median([rate, *own[host]])
        for pair, rate in confirmed.items()
        if rate < SLOW
        for host in pair
        if host in doubted_nics
    }
    links = {}
    for pair in doubted.links:
        again = confirmed.get(pair)
        if not nics.keys() & set(pair) and (again is None or again < SLOW):
            links[pair] = min(rates[pair], again if again is not None else rates[pair])
    # pairs with a suspect that was cleared: what was slow there was the other end, or the link
    for pair, rate in rates.items():
        if rate < SLOW and doubted_nics & set(pair) and not nics.keys() & set(pair):
            links.setdefault(pair, rate)
    left = tuple((host,) for host in doubted.unmet if host not in nics)
    return Verdicts(nics, links, left)


def _best(rates: Sequence[float]) -> float:
    """Return what a host reached with quick ones: the best rate, of many the best two."""
    top = sorted(rates)[-2 if len(rates) > _FEW else -1 :]
    return statistics.fmean(top)


def _by_host(hosts: int, rates: Mapping[Pair, float]) -> list[list[float]]:
    own: list[list[float]] = [[] for _ in range(hosts)]
    for (a, b), rate in rates.items():
        own[a].append(rate)
        own[b].append(rate)
    return own


def _pair(a: int, b: int) -> Pair:
    return (min(a, b), max(a, b))


def twice_the_median(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Return whom DLRover's check calls a straggler: whoever takes twice the median of all."""
    middle = statistics.median(seconds.values())
    return tuple(sorted(host for host, took in seconds.items() if took > 2 * middle))


def measured_rates(
    rounds: Sequence[Round], measure: Mapping[Pair, float], expected: Mapping[Pair, float]
) -> dict[Pair, float]:
    """Return the shares of what was expected of each pair that met."""
    return {
        pair: measure[pair] / expected[pair]
        for pairs in rounds
        for pair in pairs
        if pair in measure and expected.get(pair, 0.0) > 0
    }
