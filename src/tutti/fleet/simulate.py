"""A fleet driven by a trace: the state machine's instructions carried out in simulated time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tutti.fleet import events
from tutti.fleet.chips import Fleet, Grounds
from tutti.fleet.events import Event, Instruction
from tutti.fleet.machine import SolvedNetwork
from tutti.fleet.policy import Policy
from tutti.fleet.request import Allocation, JobRequest
from tutti.fleet.scheduler import Scheduler

Report = Callable[[int, int], None]  # jobs done, of how many
_EVERY = 256  # jobs between two reports


@dataclass(frozen=True, slots=True)
class Spell:
    """A job on some chips, for a while."""

    start: float
    end: float
    allocation: Allocation


@dataclass(slots=True)
class JobHistory:
    """What became of one job."""

    request: JobRequest
    submit: float
    start: float = -1.0
    end: float = -1.0
    spells: list[Spell] = field(default_factory=list)
    network_s: float = 0.0  # by which the network made its steps longer
    moves: int = 0
    preempted: int = 0
    lost: int = 0

    @property
    def wait_s(self) -> float:
        """Seconds until it began."""
        return self.start - self.submit

    @property
    def completion_s(self) -> float:
        """Seconds from its coming to its end."""
        return self.end - self.submit


@dataclass(slots=True)
class History:
    """What became of all."""

    grounds: Grounds
    policy: Policy
    jobs: dict[str, JobHistory]
    used_chip_s: float = 0.0  # while jobs came
    fragmented_s: float = 0.0  # share of free nodes outside the best group × seconds
    free_s: float = 0.0  # seconds in which at least one node was free
    waiting_s: float = 0.0  # seconds in which somebody waited
    waiting_used_chip_s: float = 0.0  # chips in use in those
    last_submit: float = 0.0
    end: float = 0.0
    num_events: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdowns:
    """Nodes that fail and come back, at random times."""

    node_mtbf_s: float
    repair_s: float = 4 * 3600.0
    seed: int = 0


class Simulation:
    """One trace under one policy."""

    def __init__(
        self,
        grounds: Grounds,
        policy: Policy,
        requests: Sequence[tuple[float, JobRequest]],
        *,
        network: SolvedNetwork | None = None,
        breakdowns: Breakdowns | None = None,
    ) -> None:
        self.machine = Scheduler(grounds, policy, network)
        self.network, self.breakdowns = network, breakdowns
        self.history = History(grounds, policy, {})
        self._heap: list[tuple[float, int, int, Event, int]] = []
        self._number = itertools.count()
        self._version: dict[str, int] = {}
        self._place: dict[str, tuple[float, Allocation]] = {}
        self._stretch: dict[str, tuple[float, float]] = {}
        self._left = len(requests)
        self._chance = random.Random(breakdowns.seed if breakdowns else 0)
        self.history.last_submit = max((time for time, _ in requests), default=0.0)
        for time, request in requests:
            self._at(time, 4, events.Submit(time, request))
        if breakdowns is not None:
            for node in range(grounds.num_nodes):
                self._next_failure(node, 0.0)

    def run(self, report: Report | None = None) -> History:
        """Go on until all jobs are done."""
        whole, last = self._left, self._left
        before = 0.0
        while self._left and self._heap:
            time, _, _, event, version = heapq.heappop(self._heap)
            if version >= 0 and self._version.get(event.job, 0) != version:  # type: ignore[union-attr]
                continue
            self._account(before, time)
            before = time
            self._happen(event)
            if report is not None and last - self._left >= _EVERY:
                last = self._left
                report(whole - self._left, whole)
        self.history.end = before
        return self.history

    def _at(self, time: float, rank: int, event: Event, job: str | None = None) -> None:
        version = -1 if job is None else self._version.get(job, 0)
        heapq.heappush(self._heap, (time, rank, next(self._number), event, version))

    def _account(self, before: float, now: float) -> None:
        seconds = now - before
        if seconds <= 0:
            return
        fleet, history = self.machine.fleet, self.history
        if now <= history.last_submit:
            history.used_chip_s += fleet.used_chips * seconds
        if len(self.machine.queue):
            history.waiting_s += seconds
            history.waiting_used_chip_s += fleet.used_chips * seconds
        share = fragmentation(fleet)
        if share is not None:
            history.free_s += seconds
            history.fragmented_s += share * seconds

    def _happen(self, event: Event) -> None:
        histories, now = self.history.jobs, event.time
        self.history.num_events += 1
        match event:
            case events.Submit(request=request):
                histories[request.job] = JobHistory(request, now)
            case events.Finish(job=job):
                self._leave(job, now)
                histories[job].end = now
                self._left -= 1
            case events.Stopped(job=job) | events.Moved(job=job):
                self._leave(job, now)
            case events.Fail(node=node):
                self._at(now + self._repair_s(), 3, events.Repair(now + self._repair_s(), node))
            case events.Repair(node=node):
                self._next_failure(node, now)
        done = self.machine.handle(event)
        if isinstance(event, events.Moved):
            self._enter(event.job, now)
        for one in done:
            self._carry_out(one, now)
        changed = isinstance(event, events.Finish | events.Moved | events.Stopped | events.Fail)
        if self.network is not None and (changed or any(isinstance(o, events.Start) for o in done)):
            self._pace(now)

    def _carry_out(self, one: Instruction, now: float) -> None:
        histories = self.history.jobs
        match one:
            case events.Start(job=job):
                if histories[job].start < 0:
                    histories[job].start = now
                self._enter(job, now)
            case events.Preempt(job=job, seconds=seconds):
                histories[job].preempted += 1
                if seconds < self.machine.running[job].left_s(now):
                    self._again(job)
                    self._at(now + seconds, 1, events.Stopped(now + seconds, job), job)
            case events.Move(job=job, seconds=seconds):
                histories[job].moves += 1
                self._again(job)
                self._at(now + seconds, 1, events.Moved(now + seconds, job), job)
            case events.Lost(job=job):
                histories[job].lost += 1
                self._leave(job, now)
                self._again(job)
            case events.Stay(job=job):
                self._finish_at(job, now)

    def _enter(self, job: str, now: float) -> None:
        self._place[job] = (now, self.machine.running[job].allocation)
        self._finish_at(job, now)

    def _leave(self, job: str, now: float) -> None:
        """Write down where a job was, and what the network took."""
        since, allocation = self._place.pop(job)
        self.history.jobs[job].spells.append(Spell(since, now, allocation))
        self._count_network(job, now)

    def _count_network(self, job: str, now: float, stretch: float | None = None) -> None:
        since, before = self._stretch.pop(job, (now, 1.0))
        self.history.jobs[job].network_s += (now - since) * (1.0 - 1.0 / before)
        if stretch is not None:
            self._stretch[job] = (now, stretch)

    def _again(self, job: str) -> None:
        self._version[job] = self._version.get(job, 0) + 1

    def _finish_at(self, job: str, now: float) -> None:
        self._again(job)
        end = now + self.machine.running[job].left_s(now)
        self._at(end, 0, events.Finish(end, job), job)

    def _pace(self, now: float) -> None:
        assert self.network is not None
        for job, stretch in self.network.solve(self.machine).items():
            self._count_network(job, now, stretch)
            self.machine.handle(events.Paced(now, job, stretch))
            run = self.machine.running[job]
            if not run.stopping and run.target is None:
                self._finish_at(job, now)

    def _repair_s(self) -> float:
        return self.breakdowns.repair_s if self.breakdowns else 0.0

    def _next_failure(self, node: int, now: float) -> None:
        assert self.breakdowns is not None
        time = now + self._chance.expovariate(1.0 / self.breakdowns.node_mtbf_s)
        self._at(time, 2, events.Fail(time, node))


def fragmentation(fleet: Fleet) -> float | None:
    """Return the share of free whole nodes that the roomiest group lacks; None: nothing is free.

    0: as many as a group can hold lie in one group. Only whole nodes count.
    """
    grounds = fleet.grounds
    free = 0
    for pool, size in enumerate(grounds.sizes):
        free |= fleet.free(pool, size)
    if not free:
        return None
    if not grounds.tiers:
        return 0.0
    possible = min(free.bit_count(), grounds.largest)
    best = 0
    for mask in grounds.groups:
        best = max(best, (free & mask).bit_count())
        if best == possible:
            return 0.0
    return 1.0 - best / possible
