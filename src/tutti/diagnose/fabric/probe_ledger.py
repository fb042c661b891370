"""Probe ledger: reports of agents in, trials of paths and a verdict out. Pure: the caller's clock.

A probe counts as lost when its sender said that it left, its receiver reported well after that, and
did not name it. A host that reports nothing loses nothing: what was sent to it is unknown. Where
most paths over a link have late probes, its queue is full: some loss and slow trains there are
congestion, not a broken link, and are not held against anybody; loss of nearly all is. Delays are
held against the path's own least delay, so that clocks may differ. A late prober is no lossy link:
reports count from when their sockets were read, by the least delay of the host's reports; while
agents say that they run late, some loss and slow trains from and to them are not held against
anybody, either.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from tutti.diagnose.fabric.likelihood import Blame, PathTrials, blame
from tutti.errors import InputError

LONG_S, SHORT_S = 12.0, 2.5  # what is looked back at, for seldom and for certain loss
_TRAINS_S = 5.0
SILENT_S = 2.0
_GONE_S = 5.0  # a silent host's kernel has had time to answer
_UNSURE_S = 1.0  # after a host's first report: probes sent before it listened are no losses
_GRACE_S = 0.4  # from a sender's report to a receiver's that must name its probes
_QUEUED_US = 4000  # above a path's least delay: something stands in a queue
_QUEUE_S = 2.0  # how long a late probe tells of a queue
_LATE_BACKGROUND, _LATE_ENOUGH, _BUSY = 0.02, 6.0, 0.5
_EXCUSED_S = 4.0  # before a queue is seen to be full, and after
_IDLE_US = 1500  # a train that began later than this shared its way
_LEAST_KEPT_S = 30.0  # of a path's least delay: clocks drift
_SLOW = 0.45  # of what paths of the same length carry
_LOSS_BACKGROUND, _RATE_BACKGROUND = 0.001, 0.05
_LATE_S = 2.0  # after an agent said that it ran late: loss there is no link's
_ENOUGH = 12.0  # log-likelihood: 1 in 160,000
_CERTAIN = 0.5  # lost in the short run: the link is down, or a black hole

N = TypeVar("N", int, float)
Key = tuple[int, int, int]  # source, target, source port


@dataclass(slots=True)
class _Trials:
    at: float
    sent: int
    lost: int
    excused: bool = False


@dataclass(slots=True)
class _Path:
    hops: tuple[str, ...] | None = None
    links: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()  # links, cables (a link and its way back), switches
    told: deque[tuple[float, int]] = field(default_factory=deque)  # when, sent up to
    due: int = -1  # sequences up to here are settled
    came: set[int] = field(default_factory=set)
    trials: deque[_Trials] = field(default_factory=deque)
    rates: deque[tuple[float, float]] = field(default_factory=deque)
    least: deque[tuple[float, int]] = field(default_factory=deque)  # when, delay: rising
    lost_at: float = -1e9
    heard_at: float = -1e9
    queued_at: float = -1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeVerdict:
    """Who is to blame, and what cannot be judged."""

    down: tuple[Blame, ...] = ()
    lossy: tuple[Blame, ...] = ()
    slow: tuple[Blame, ...] = ()
    stalled: tuple[str, ...] = ()  # hosts that report nothing, though their kernels answer
    gone: tuple[str, ...] = ()  # hosts of which nothing comes: they or their links
    late: tuple[str, ...] = ()  # hosts whose agents run late: some loss there is no link's
    congested: tuple[str, ...] = ()  # links whose queues are full
    paths: int = 0

    @property
    def accused(self) -> tuple[Blame, ...]:
        """All links and switches that are blamed."""
        return (*self.down, *self.lossy, *self.slow)


class ProbeLedger:
    """What all agents have told."""

    def __init__(self, hosts: Mapping[str, str], switches: Mapping[str, str]) -> None:
        self._hosts, self._switches = list(hosts), dict(switches)
        self._paths: dict[Key, _Path] = defaultdict(_Path)
        self._into: dict[int, set[Key]] = defaultdict(set)
        self._reported: dict[int, float] = {}
        self._answered: dict[int, float] = {}
        self._unsure: dict[int, float] = {}  # until when what a host does not name may be unknown
        self._late: dict[int, float] = {}  # when an agent last said so
        self._behind: dict[int, deque[tuple[float, float]]] = defaultdict(deque)  # as _Path.least
        self._began: float | None = None
        self._blamed: set[tuple[str, ...]] = set()

    def take(self, report: Mapping[str, Any], now: float) -> None:
        """Take one report; what is not one is refused."""
        try:
            own = self._hosts.index(report["host"])
            self._take(own, report, now)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise InputError(f"not a report of an agent ({error})") from None

    def _take(self, own: int, report: Mapping[str, Any], now: float) -> None:
        self._began = now if self._began is None else self._began
        if now - self._reported.get(own, -1e9) > SILENT_S:
            self._unsure[own] = now + _UNSURE_S
        self._reported[own] = now
        for peer, port, hops in report["paths"]:
            self._path(own, peer, port)
            self._lead((own, peer, port), tuple(hops))
        for source, port, first, mask in report["got"]:
            path = self._path(source, own, port)
            path.came.update(first + i for i in range(int(mask).bit_length()) if mask >> i & 1)
        for source, port, delay in report["delays_us"]:
            self._delay(self._path(source, own, port), delay, now)
        if report["overflowed"] or report.get("late", False):
            self._late[own] = now
        for source, port, rate, began in report["trains"]:
            path = self._path(source, own, port)
            on_time = not (self._is_late(own, now) or self._is_late(source, now))
            if on_time and path.least and began - path.least[0][1] < _IDLE_US:
                path.rates.append((now, rate))
        read_at = now if "read_at" not in report else self._when(own, report["read_at"], now)
        self._settle(own, read_at, now, unknown=report["overflowed"] or now < self._unsure[own])
        for peer, port, last in report["sent"]:
            path = self._path(own, peer, port)
            if last < (path.told[-1][1] if path.told else path.due):  # the agent has begun anew
                path.told.clear()
                path.came.clear()
                path.due = -1
            if last > (path.told[-1][1] if path.told else path.due):
                path.told.append((now, last))
        for peer in report["answered"]:
            self._answered[peer] = now

    def forget(self) -> None:
        """Hold nothing of the past against anybody: what was broken has been mended."""
        for path in self._paths.values():
            path.trials.clear()
            path.rates.clear()

    def _path(self, source: int, target: int, port: int) -> _Path:
        key = (source, target, port)
        if key not in self._paths:
            if not (0 <= source < len(self._hosts) and 0 <= target < len(self._hosts)):
                raise InputError(f"a report names host {max(source, target)}; the file has fewer")
            self._into[target].add(key)
        return self._paths[key]

    def _is_late(self, host: int, now: float) -> bool:
        return now - self._late.get(host, -1e9) < _LATE_S

    def _when(self, host: int, read_at: float, now: float) -> float:
        """Return when an agent read its sockets, at the latest, by the clock of who collects."""
        behind = self._behind[host]
        if behind and now - read_at < behind[0][1] - _LEAST_KEPT_S:  # a clock that begins anew
            behind.clear()
        return read_at + _least(behind, now - read_at, now)

    @staticmethod
    def _delay(path: _Path, delay: int, now: float) -> None:
        path.heard_at = now
        if delay - _least(path.least, delay, now) > _QUEUED_US:
            path.queued_at = now

    def _settle(self, target: int, read_at: float, now: float, *, unknown: bool) -> None:
        """Judge the probes that a receiver's report must have named."""
        for key in self._into[target]:
            path = self._paths[key]
            late = self._is_late(target, now) or self._is_late(key[0], now)
            while path.told and path.told[0][0] <= read_at - _GRACE_S:
                _, last = path.told.popleft()
                sent = range(path.due + 1, last + 1)
                if path.due >= 0 and not unknown:
                    lost = sum(sequence not in path.came for sequence in sent)
                    path.trials.append(_Trials(now, len(sent), lost, late))
                    path.lost_at = now if lost else path.lost_at
                path.came = {sequence for sequence in path.came if sequence > last}
                path.due = last
            while path.trials and path.trials[0].at < now - LONG_S:
                path.trials.popleft()
            while path.rates and path.rates[0][0] < now - LONG_S:
                path.rates.popleft()

    def _lead(self, key: Key, hops: tuple[str, ...]) -> None:
        """Note over which switches a path leads."""
        path = self._paths[key]
        if path.hops == hops:
            return
        on_the_way = (self._switches.get(hop, hop) for hop in hops if hop != "?")
        names = [self._hosts[key[0]], *on_the_way, self._hosts[key[1]]]
        cables = [" ↔ ".join(sorted(ends)) for ends in pairwise(names)]
        path.hops = hops
        path.links = tuple(f"{a} → {b}" for a, b in pairwise(names))
        path.parts = tuple(dict.fromkeys((*path.links, *cables, *names[1:-1])))

    def _known(self) -> Iterator[_Path]:
        return (path for path in self._paths.values() if path.hops is not None)

    def verdict(self, now: float) -> ProbeVerdict:
        """Say who is to blame now, and was when this was last asked: first losses mislead."""
        accusation = self._verdict(now)
        before = self._blamed
        accusation = replace(
            accusation,
            down=tuple(map(_directed, accusation.down)),
            lossy=tuple(map(_directed, accusation.lossy)),
            slow=tuple(map(_directed, accusation.slow)),
        )
        self._blamed = {b.parts for b in accusation.accused}
        return replace(
            accusation,
            down=tuple(b for b in accusation.down if b.parts in before),
            lossy=tuple(b for b in accusation.lossy if b.parts in before),
            slow=tuple(b for b in accusation.slow if b.parts in before),
        )

    def _verdict(self, now: float) -> ProbeVerdict:
        answering = {n for n, at in self._answered.items() if now - at < SILENT_S + 1.0}
        congested = self._excuse(now)
        down = [b for b in self._losses(now - SHORT_S, excuse=False) if b.chance >= _CERTAIN]
        named = {part for one in down for part in one.parts}
        lossy = [b for b in self._losses(now - LONG_S) if not named.intersection(b.parts)]
        usual = self._usual()
        slow = self._slow(now - _TRAINS_S, usual)
        named |= {part for one in slow for part in one.parts}
        slow += [b for b in self._slow(now - LONG_S, usual) if not named.intersection(b.parts)]
        return ProbeVerdict(
            down=tuple(down),
            lossy=tuple(lossy),
            slow=tuple(slow),
            stalled=tuple(self._hosts[n] for n in self._silent(now, SILENT_S) if n in answering),
            gone=tuple(self._hosts[n] for n in self._silent(now, _GONE_S) if n not in answering),
            late=tuple(name for n, name in enumerate(self._hosts) if self._is_late(n, now)),
            congested=congested,
            paths=sum(1 for _ in self._known()),
        )

    def _excuse(self, now: float) -> tuple[str, ...]:
        """Return the links whose queues are full, and hold nothing against them and their paths."""
        if all(now - path.queued_at >= _QUEUE_S for path in self._paths.values()):
            return ()
        late = [
            PathTrials(parts=path.links, trials=1, bad=now - path.queued_at < _QUEUE_S)
            for path in self._known()
            if now - path.heard_at < _QUEUE_S
        ]
        queues = blame(late, background=_LATE_BACKGROUND, enough=_LATE_ENOUGH, most=len(late))
        full = {link for one in queues for link in one.parts}
        # a slow link's own trains make some probes late, other traffic makes most of them late
        busy = {link for one in queues if one.chance >= _BUSY for link in one.parts}
        for path in self._known() if full else ():
            if full.isdisjoint(path.links):
                continue
            for one in path.trials:
                one.excused |= one.at > now - _EXCUSED_S
            if busy.isdisjoint(path.links):
                continue
            while path.rates and path.rates[-1][0] > now - _EXCUSED_S:
                path.rates.pop()
        return tuple(sorted(full))

    def _silent(self, now: float, least_s: float) -> list[int]:
        if self._began is None or now - self._began < 3 * SILENT_S:
            return []
        last = max(self._reported.values())
        return [
            n
            for n in range(len(self._hosts))
            if last - self._reported.get(n, self._began) > least_s
        ]

    def _losses(self, since: float, *, excuse: bool = True) -> list[Blame]:
        trials: list[PathTrials] = []
        if all(path.lost_at < since for path in self._paths.values()):
            return []
        for path in self._known():
            recent = [t for t in path.trials if t.at >= since and not (excuse and t.excused)]
            trials.append(
                PathTrials(
                    parts=path.parts,
                    trials=sum(one.sent for one in recent),
                    bad=sum(one.lost for one in recent),
                )
            )
        return blame(trials, background=_LOSS_BACKGROUND, enough=_ENOUGH)

    def _usual(self) -> dict[int, float]:
        """Return the middle rate of trains, by how many hops they took."""
        by_length: dict[int, list[float]] = defaultdict(list)
        for path in self._known():
            if path.rates:
                by_length[len(path.hops or ())] += [rate for _, rate in path.rates]
        return {length: statistics.median(rates) for length, rates in by_length.items()}

    def _slow(self, since: float, usual: Mapping[int, float]) -> list[Blame]:
        """Hold trains against those over paths of as many hops."""
        trials = []
        for path in self._known():
            if not path.rates:
                continue
            reference = _SLOW * usual[len(path.hops or ())]
            recent = [rate for at, rate in path.rates if at >= since]
            bad = sum(rate < reference for rate in recent)
            trials.append(PathTrials(parts=path.parts, trials=len(recent), bad=bad))
        return blame(trials, background=_RATE_BACKGROUND, enough=_ENOUGH)


def _least(kept: deque[tuple[float, N]], value: N, now: float) -> N:
    """Take one more value, and return the least of the last seconds."""
    while kept and kept[-1][1] >= value:
        kept.pop()
    kept.append((now, value))
    while kept[0][0] < now - _LEAST_KEPT_S:
        kept.popleft()
    return kept[0][1]


def _directed(one: Blame) -> Blame:
    """Leave a cable out where one of its directions explains the same."""
    cables = {" ↔ ".join(sorted(part.split(" → "))) for part in one.parts if " → " in part}
    return replace(one, parts=tuple(part for part in one.parts if part not in cables))
