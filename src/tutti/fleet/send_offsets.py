"""Jobs that send in turns: what their periods become where they share links, and by which offset.

A job computes for a while, then sends for as long as the network takes, and so on. While several
send, each goes at the pace that max-min fairness leaves it (`fabric.shares`), no faster than alone.
Followed event by event over some periods; nothing is assumed of how they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutti.fabric.shares import fair_paces
from tutti.fabric.wiring import Floats, Integers

PERIODS = 24  # that each job is followed for
_WARM = 6  # of them, before periods are counted
_MOST, _LEAST = 8, 3  # times as many of the shortest job's; periods of the longest even then
_LONGEST = 50  # times the shortest period; longer ones are followed as if they were this long
_GRID = 24  # offsets that are tried, in parts of a period
_WORTH = 0.005  # a smaller gain than this share of the periods is none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rhythm:
    """One job's step: seconds of computing, then seconds of sending when nobody is in the way."""

    compute_s: float
    send_s: float
    links: Integers  # that it loads
    demand: Floats  # bytes per second on each of them, while it sends at its own pace
    felt: float = 1.0  # seconds of step per second of longer sending; the rest hides

    @property
    def period_s(self) -> float:
        """Of a step, alone."""
        return self.compute_s + self.send_s

    def slowed_s(self, slower: float) -> float:
        """Return the period where sending takes so many times longer; never less than it sends."""
        sending = self.send_s * max(1.0, slower)
        return sending + computing_s(self.compute_s, self.felt, sending - self.send_s)


def computing_s(compute_s: float, felt: float, longer_s: float) -> float:
    """Return the computing left to do after sending so much longer: what hides is done by then."""
    return max(compute_s - (1.0 - felt) * longer_s, 0.0)


class _Paces:
    """The pace of each job that sends, for every set of them that came up."""

    def __init__(self, jobs: Sequence[Rhythm], rates: Floats) -> None:
        self._jobs, self._rates = jobs, rates
        self._known: dict[int, list[float]] = {}

    def of(self, sending: int) -> list[float]:
        """Return the paces of the jobs whose bits are set, in order; 1 is as fast as alone."""
        if sending not in self._known:
            chosen = [job for i, job in enumerate(self._jobs) if sending >> i & 1]
            first = len(self._rates)
            own = [np.append(job.links, first + i) for i, job in enumerate(chosen)]
            weights = [np.append(job.demand, 1.0) for job in chosen]
            offsets = np.concatenate([[0], np.cumsum([len(links) for links in own])])
            rates = np.concatenate([self._rates, np.ones(len(chosen))])
            paces = fair_paces(
                offsets.astype(np.int64), np.concatenate(own).astype(np.int32),
                np.concatenate(weights), rates,
            )  # fmt: skip
            self._known[sending] = [min(1.0, float(pace)) for pace in paces]
        return self._known[sending]


def periods(
    jobs: Sequence[Rhythm], rates: Floats, offsets: Sequence[float] | None = None
) -> list[float]:
    """Return the mean period of every job beside the others; `offsets` are their first starts."""
    return _followed(jobs, _Paces(jobs, rates), offsets or [0.0] * len(jobs))


def _followed(jobs: Sequence[Rhythm], paces: _Paces, offsets: Sequence[float]) -> list[float]:
    count = len(jobs)
    sending = 0
    jobs, scales = _shortened(jobs)
    due = [
        offset / scale + job.compute_s
        for job, offset, scale in zip(jobs, offsets, scales, strict=True)
    ]
    left = [0.0] * count  # seconds of sending, at its own pace
    began = [0.0] * count  # to send
    turns = [0] * count
    first, counted_from, last = [0.0] * count, [0.0] * count, [0.0] * count
    now = 0.0
    everybody = (1 << count) - 1
    while min(turns) < PERIODS and (max(turns) < _MOST * PERIODS or min(turns) < _LEAST):
        active = [i for i in range(count) if sending >> i & 1]
        rates = dict(zip(active, paces.of(sending), strict=True)) if sending else {}
        soonest = min((due[i] for i in range(count) if not sending >> i & 1), default=np.inf)
        for i, pace in rates.items():
            soonest = min(soonest, now + left[i] / pace if pace > 0 else np.inf)
        for i, pace in rates.items():
            left[i] -= (soonest - now) * pace
        now = float(soonest)
        for i in range(count):
            bit = 1 << i
            if sending & bit:
                if left[i] > 1e-12 * jobs[i].period_s:
                    continue
                sending &= everybody ^ bit
                turns[i] += 1
                longer = now - began[i] - jobs[i].send_s
                due[i] = now + computing_s(jobs[i].compute_s, jobs[i].felt, longer)
                last[i] = now
                if turns[i] == 1:
                    first[i] = now
                if turns[i] == _WARM:
                    counted_from[i] = now
            elif due[i] <= now:
                sending |= bit
                left[i], began[i] = jobs[i].send_s, now
    lasting = []
    for i in range(count):
        if turns[i] > _WARM:
            lasting.append((last[i] - counted_from[i]) / (turns[i] - _WARM))
        else:  # among many steps of others each of its own is like the next
            lasting.append((last[i] - first[i]) / (turns[i] - 1))
    # counted from the end of one sending to that of another, a first one held back looks short
    return [
        max(one, job.period_s) * scale
        for one, job, scale in zip(lasting, jobs, scales, strict=True)
    ]


def _shortened(jobs: Sequence[Rhythm]) -> tuple[list[Rhythm], list[float]]:
    """Return jobs with periods not too far apart, and how many times longer they really are.

    Sending that lasts for many steps of the others meets them alike, for however many.
    """
    allowed = _LONGEST * min(job.period_s for job in jobs)
    scales = [max(1.0, job.period_s / allowed) if allowed > 0 else 1.0 for job in jobs]
    return [
        replace(job, compute_s=job.compute_s / scale, send_s=job.send_s / scale)
        for job, scale in zip(jobs, scales, strict=True)
    ], scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """When jobs should begin their steps, and what that does."""

    seconds: tuple[float, ...]  # after the first of them
    before: tuple[float, ...]  # periods if all begin at once
    after: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The share of their periods that is saved, on average."""
        pairs = zip(self.before, self.after, strict=True)
        return sum(1.0 - after / before for before, after in pairs) / len(self.before)

    @property
    def helps(self) -> bool:
        """Whether it is worth the trouble."""
        return self.gain > _WORTH


def propose_offsets(jobs: Sequence[Rhythm], rates: Floats) -> Offsets:
    """Return the best offsets found: one job after the other, over a grid of its period.

    Begun from all at once, and from turns, which are kept where nothing on the grid is better.
    """
    paces = _Paces(jobs, rates)
    chosen = [0.0] * len(jobs)
    before = _followed(jobs, paces, chosen)

    def cost(offsets: Sequence[float]) -> float:
        beside = _followed(jobs, paces, offsets)
        return sum(period / job.period_s for period, job in zip(beside, jobs, strict=True))

    best, by_turns = cost(chosen), _by_turns(jobs)
    if (least := cost(by_turns)) < best - 1e-9:
        best, chosen = least, by_turns
    for _ in range(2):
        for i in range(1, len(jobs)):
            for part in range(_GRID):
                tried = list(chosen)
                tried[i] = part * jobs[i].period_s / _GRID
                if (least := cost(tried)) < best - 1e-9:
                    best, chosen = least, tried
    after = _followed(jobs, paces, chosen)
    return Offsets(seconds=tuple(chosen), before=tuple(before), after=tuple(after))


def _by_turns(jobs: Sequence[Rhythm]) -> list[float]:
    """Return when jobs begin so that each first sends after those before it.

    What is left of the shortest period lies between them in equal parts: the farther apart, the
    later jitter makes them meet.
    """
    shortest = min(job.period_s for job in jobs)
    between = max(0.0, shortest - sum(job.send_s for job in jobs)) / len(jobs)
    starts, free = [], jobs[0].compute_s
    for job in jobs:
        starts.append(free - job.compute_s)
        free += job.send_s + between
    first = min(starts)
    return [start - first for start in starts]
