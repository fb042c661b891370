"""Drawn cases of the queue model, and what the detector of pauses says of them.

Storms (a host that takes little, or a NIC that stops its switch for nothing), incast whose pauses
spread to others, three switches that wait for each other in a circle, and healthy bursts. The
detector sees counters of ports alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from tutti.diagnose.fabric.pauses import PauseFinding, find_pauses
from tutti.fabric.port_counters import changes
from tutti.fabric.queues import QueueFlow, QueueNetwork, QueueRules

KINDS = ("storm", "incast", "deadlock", "bursts")
_LINE = 12.5e9  # bytes per second: 100 Gb/s
_WATCHED_S = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """A case, what it was, and what was found."""

    kind: str
    seed: int
    origin: tuple[str, ...]  # what must be named; of a circle in any order
    findings: tuple[PauseFinding, ...]
    victims: tuple[tuple[str, ...], ...] = ()  # links of flows elsewhere that got too little

    @property
    def right(self) -> bool:
        """Whether kind and origin were named, and nothing else was accused."""
        if self.kind == "bursts":
            return not self.findings
        wanted = {"storm": "storm", "incast": "congestion", "deadlock": "circular wait"}[self.kind]
        if len(self.findings) != 1 or self.findings[0].kind != wanted:
            return False
        named = self.findings[0]
        waiting = {*named.victims}
        return {*self.origin} == {*named.origin} and all(waiting & {*v} for v in self.victims)


def run_case(kind: str, seed: int) -> CaseResult:
    """Draw a case, run it, and let the detector judge its last two milliseconds."""
    dice = random.Random(f"{kind} {seed}")
    return {"storm": _storm, "incast": _incast, "deadlock": _deadlock, "bursts": _bursts}[kind](
        dice, seed
    )


class _Clos:
    """A drawn network of leaves and spines."""

    def __init__(self, dice: random.Random) -> None:
        self.leaves, self.hosts = dice.randint(3, 6), dice.randint(3, 6)
        self.spines = dice.randint(2, 4)
        self.dice = dice
        self.links: dict[tuple[str, str], float] = {}
        up = _LINE * self.hosts / self.spines
        for leaf in range(self.leaves):
            for spine in range(self.spines):
                self._both(f"leaf {leaf}", f"spine {spine}", up)
            for host in range(self.hosts):
                self._both(f"leaf {leaf}", f"host {leaf * self.hosts + host}", _LINE)

    def _both(self, a: str, b: str, rate: float) -> None:
        self.links[a, b] = self.links[b, a] = rate

    def leaf(self, host: int) -> str:
        return f"leaf {host // self.hosts}"

    def path(self, a: int, b: int) -> tuple[str, ...]:
        if self.leaf(a) == self.leaf(b):
            return (f"host {a}", self.leaf(a), f"host {b}")
        spine = f"spine {self.dice.randrange(self.spines)}"
        return (f"host {a}", self.leaf(a), spine, self.leaf(b), f"host {b}")

    def background(self, avoid: int) -> list[QueueFlow]:
        """Return light traffic between other hosts."""
        count = self.leaves * self.hosts
        others = [host for host in range(count) if host != avoid]
        self.dice.shuffle(others)
        return [
            QueueFlow(path=self.path(a, b), rate=self.dice.uniform(0.05, 0.25) * _LINE)
            for a, b in pairwise(others)
        ]

    def into(self, target: int, count: int) -> list[int]:
        """Return hosts on other leaves."""
        all_ = range(self.leaves * self.hosts)
        return self.dice.sample([h for h in all_ if self.leaf(h) != self.leaf(target)], count)


def _watch(network: QueueNetwork, before_s: float = 3e-3) -> tuple[PauseFinding, ...]:
    before = network.run(before_s)
    after = network.run(_WATCHED_S)
    return tuple(find_pauses(changes(before, after, _WATCHED_S)[0]))


def _storm(dice: random.Random, seed: int) -> CaseResult:
    clos = _Clos(dice)
    target = dice.randrange(clos.leaves * clos.hosts)
    senders = clos.into(target, dice.randint(2, 4))
    flows = [QueueFlow(path=clos.path(a, target), rate=_LINE / 2) for a in senders]
    network = QueueNetwork(clos.links, [*flows, *clos.background(target)])
    network.run(1e-3)
    if dice.random() < 0.5:
        network.storm(clos.leaf(target), f"host {target}")
    else:
        network.take(f"host {target}", dice.uniform(0.02, 0.2) * _LINE)
    origin = (f"{clos.leaf(target)} → host {target}",)
    return CaseResult(kind="storm", seed=seed, origin=origin, findings=_watch(network))


def _incast(dice: random.Random, seed: int) -> CaseResult:
    """Many send to one without slowing down; one neighbour of theirs sends elsewhere."""
    clos = _Clos(dice)
    target = dice.randrange(clos.leaves * clos.hosts)
    senders = clos.into(target, dice.randint(5, min(8, (clos.leaves - 1) * clos.hosts)))
    flows = [QueueFlow(path=clos.path(a, target)) for a in senders]
    flows += clos.background(target)
    network = QueueNetwork(clos.links, flows, QueueRules(dcqcn=False))
    network.run(3e-3)
    before = network.delivered_bytes
    findings = _watch(network, before_s=0.0)
    victims = [
        tuple(f"{a} → {b}" for a, b in pairwise(flow.path))
        for flow, old, new in zip(flows, before, network.delivered_bytes, strict=True)
        if flow.path[-1] != f"host {target}" and new - old < 0.7 * flow.rate * _WATCHED_S
    ]
    origin = (f"{clos.leaf(target)} → host {target}",)
    return CaseResult(
        kind="incast", seed=seed, origin=origin, findings=findings, victims=tuple(victims)
    )


def _deadlock(dice: random.Random, seed: int) -> CaseResult:
    """Every host sends two switches around a ring of three; a short stall of a host fills it."""
    links: dict[tuple[str, str], float] = {}
    for a in range(3):
        b, rate = (a + 1) % 3, _LINE * dice.uniform(0.8, 1.0)
        links[f"switch {a}", f"switch {b}"] = links[f"switch {b}", f"switch {a}"] = rate
        for host in (f"host {a}", f"other {a}"):
            links[f"switch {a}", host] = links[host, f"switch {a}"] = _LINE
    flows = [
        QueueFlow(
            path=(f"{kind} {a}", f"switch {a}", f"switch {(a + 1) % 3}", f"switch {(a + 2) % 3}",
                  f"{kind} {(a + 2) % 3}"),
        )
        for a in range(3)
        for kind in ("host", "other")
    ]  # fmt: skip
    network = QueueNetwork(links, flows, QueueRules(dcqcn=False))
    for host in dice.sample(["host 0", "host 1", "host 2"], dice.randint(1, 3)):
        network.take(host, 1.0)
    network.run(dice.uniform(3e-4, 6e-4))
    for number in range(3):
        network.take(f"host {number}", 2 * _LINE)
    origin = tuple(f"switch {a} → switch {(a + 1) % 3}" for a in range(3))
    return CaseResult(kind="deadlock", seed=seed, origin=origin, findings=_watch(network))


def _bursts(dice: random.Random, seed: int) -> CaseResult:
    """Short incasts with time between them, senders that heed marks, and light traffic."""
    clos = _Clos(dice)
    target = dice.randrange(clos.leaves * clos.hosts)
    flows = clos.background(target)
    for burst in range(dice.randint(2, 5)):
        start = 3e-3 + burst * 4e-4 + dice.uniform(0, 1e-4)
        flows += [
            QueueFlow(path=clos.path(a, target), start_s=start, stop_s=start + 3e-5)
            for a in clos.into(target, dice.randint(3, 5))
        ]
    return CaseResult(
        kind="bursts", seed=seed, origin=(), findings=_watch(QueueNetwork(clos.links, flows))
    )
