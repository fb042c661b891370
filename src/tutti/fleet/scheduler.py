"""The state machine: what happens goes in, what to do about it comes out; no clock, no chance.

Gangs start whole or not at all. The first jobs that cannot start are promised a time and nodes;
others overtake them only where they leave those alone or are done by then. A job that a node took
down, or that was preempted, keeps its place in the order and the work that was saved.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

from tutti.errors import InputError
from tutti.fleet import events
from tutti.fleet.chips import Fleet, Grounds
from tutti.fleet.events import Event, Instruction
from tutti.fleet.impossible_jobs import check_request
from tutti.fleet.machine import Flat, Network
from tutti.fleet.moving import consider_moves, make_way
from tutti.fleet.placement import place
from tutti.fleet.policy import Placement, Policy
from tutti.fleet.preempting import make_room
from tutti.fleet.queue import Queue, Waiting
from tutti.fleet.request import Allocation, JobRequest, Run, Shape
from tutti.fleet.reservations import Promise, compact, earliest, kept_free

_WORTH = 0.5  # of what a job gains by a group it may wait for it: others wait along
TIGHTEST, CONTENTION = Placement.TIGHTEST, Placement.CONTENTION


class Scheduler:
    """A fleet under a policy."""

    def __init__(self, grounds: Grounds, policy: Policy, network: Network | None = None) -> None:
        self.grounds, self.policy = grounds, policy
        self.network: Network = network or Flat()
        self.fleet = Fleet(grounds)
        self.queue = Queue(policy)
        self.running: dict[str, Run] = {}
        self.promises: list[Promise] = []
        self.tenants: dict[str, int] = {}  # chips that each holds
        self._runs: dict[str, tuple[float, int, int]] = {}  # submitted, number, runs so far
        self._coming = itertools.count()
        self._chance = random.Random(policy.seed)
        self._freed = True  # since the last look at the whole queue
        # for shapes that found no nodes: how long a job may be at most that still might
        self._failed: dict[int, float] = {}
        self._checked: dict[int, tuple[Shape, ...]] = {}  # shapes that are known to fit
        self._now = 0.0

    # --- events --------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event in; return what is to be done."""
        if event.time < self._now:
            raise InputError(f"an event of {event.time:g} s comes after one of {self._now:g} s")
        self._now = event.time
        out: list[Instruction] = []
        match event:
            case events.Submit(request=request):
                self._submit(request, out)
                return out
            case events.Finish(job=job):
                self._end(self._run(job))
            case events.Cancel(job=job):
                self._cancel(job)
            case events.Stopped(job=job):
                run = self._run(job)
                self._end(run)
                self._again(run, run.work(event.time), out)
            case events.Moved(job=job):
                self._moved(self._run(job))
            case events.Fail(node=node):
                self._fail(node, out)
            case events.Repair(node=node):
                self._repair(node)
            case events.Resize(job=job, shapes=shapes):
                self._resize(job, shapes, out)
            case events.Paced(job=job, stretch=stretch):
                self._paced(self._run(job), stretch)
                return out
        self._freed = True
        self._look(out)
        return out

    def _run(self, job: str) -> Run:
        if job not in self.running:
            raise InputError(f"no job '{job}' runs; it waits, is done, or never came")
        return self.running[job]

    def _submit(self, request: JobRequest, out: list[Instruction]) -> None:
        if request.one_group or self.policy.quotas or id(request.shapes) not in self._checked:
            check_request(self.grounds, self.policy, request)
            self._checked[id(request.shapes)] = request.shapes
        if request.job in self._runs:
            raise InputError(f"job '{request.job}' comes twice")
        self._runs[request.job] = (self._now, next(self._coming), 0)
        one = Waiting(request, self._now, self._runs[request.job][1])
        self.queue.add(one)
        first = next(self.queue.in_order(self._now)) is one
        if first or self._freed or len(self.promises) < self.policy.reservations:
            self._look(out)
        elif self.policy.backfill:  # nothing was freed, so that nobody else can start
            self._try(one, out)
        if request.job in self.queue.jobs:
            until = next((p.start for p in self.promises if p.job == request.job), None)
            out.append(events.Wait(request.job, until))

    def _end(self, run: Run) -> None:
        """Take a job off its chips."""
        job = run.request.job
        held = list(self.fleet.held[job])
        for allocation in held:
            self.fleet.give(job, allocation)
        del self.running[job]
        self.tenants[run.request.tenant] -= _chips(run.allocation)

    def _again(self, run: Run, saved: float, out: list[Instruction]) -> None:
        """Put a job back in the queue, where it was."""
        submitted, number, runs = self._runs[run.request.job]
        self._runs[run.request.job] = (submitted, number, runs + 1)
        self.queue.add(Waiting(run.request, submitted, number, done=saved, runs=runs + 1))
        out.append(events.Wait(run.request.job, None))

    def _cancel(self, job: str) -> None:
        if job in self.queue.jobs:
            self.queue.remove(self.queue.jobs[job])
        else:
            self._end(self._run(job))

    def _moved(self, run: Run) -> None:
        job, target = run.request.job, run.target
        if target is None:
            raise InputError(f"job '{job}' is not being moved")
        for allocation in list(self.fleet.held[job]):
            self.fleet.give(job, allocation)
        self.fleet.take(job, target, run.expected_end)
        run.allocation, run.target, run.since = target, None, self._now

    def _fail(self, node: int, out: list[Instruction]) -> None:
        self._check_node(node)
        if self.fleet.down >> node & 1:
            raise InputError(f"node {self.grounds.node_name(node)} is down already")
        for job in sorted(self.fleet.fail(node)):
            run = self.running[job]
            if run.target is not None and node not in run.allocation.nodes:
                for allocation in self.fleet.held[job][1:]:
                    self.fleet.give(job, allocation)
                run.target, run.since = None, self._now + run.request.restart_s
                out.append(events.Stay(job, run.allocation))
                continue
            saved = run.done if run.target is not None else run.saved(self._now)
            self._end(run)
            out.append(events.Lost(job, saved))
            self._again(run, saved, out)

    def _repair(self, node: int) -> None:
        self._check_node(node)
        if not self.fleet.down >> node & 1:
            raise InputError(f"node {self.grounds.node_name(node)} is not down")
        self.fleet.repair(node)

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.grounds.num_nodes:
            raise InputError(f"no node {node}; the fleet has nodes 0-{self.grounds.num_nodes - 1}")

    def _resize(self, job: str, shapes: tuple[Shape, ...], out: list[Instruction]) -> None:
        if job in self.queue.jobs:
            one = self.queue.jobs[job]
            request = replace(one.request, shapes=shapes)
            check_request(self.grounds, self.policy, request)
            self.queue.remove(one)
            one.request = request
            self.queue.add(one)
            return
        run = self._run(job)
        request = replace(run.request, shapes=shapes)
        check_request(self.grounds, self.policy, request)
        if run.request.checkpoint_s <= 0:
            raise InputError(f"job '{job}' makes no checkpoints; it cannot be resized as it runs")
        run.request = request
        self.stop(run, out)

    def stop(self, run: Run, out: list[Instruction]) -> None:
        """Tell a job to stop at its next checkpoint."""
        if run.stopping or run.target is not None:
            return
        seconds = run.until_checkpoint_s(self._now)
        run.stopping = True
        run.expected_end = min(run.expected_end, self._now + seconds)
        self.fleet.expect(run.allocation, run.expected_end)
        out.append(events.Preempt(run.request.job, seconds))

    def _paced(self, run: Run, stretch: float) -> None:
        run.done = run.work(self._now)
        run.since = max(run.since, self._now)
        run.stretch = stretch
        if not run.stopping:
            left = max(0.0, run.request.expected_s - run.done) * stretch / run.pace
            run.expected_end = max(self._now, run.since) + left
        if run.target is None:
            self.fleet.expect(run.allocation, run.expected_end)
        self._freed = True  # promises follow from ends

    # --- the queue -----------------------------------------------------------------------

    def _look(self, out: list[Instruction]) -> None:
        """Go through the queue: start, promise, let others overtake."""
        self.promises.clear()
        self._failed.clear()
        started: list[Waiting] = []
        blocked, failed = 0, self._failed
        for one in self.queue.in_order(self._now):
            longest = failed.get(id(one.request.shapes))
            if (longest is None or one.left_s <= longest) and self._starts(one, out):
                started.append(one)
                continue
            blocked += 1
            if blocked == 1:
                first = one
            if not self.policy.backfill or blocked > self.policy.depth:
                break
            if not self.fleet.level[1] and len(self.promises) >= self.policy.reservations:
                break  # not a chip is free
        for one in started:
            self.queue.remove(one)
        self._freed = False
        if blocked and self.policy.preempt:
            make_room(self, first, out)
        if self.policy.move:
            consider_moves(self, self._now, out)

    def _try(self, one: Waiting, out: list[Instruction]) -> None:
        longest = self._failed.get(id(one.request.shapes))
        if (longest is None or one.left_s <= longest) and self._starts(one, out):
            self.queue.remove(one)

    def _starts(self, one: Waiting, out: list[Instruction]) -> bool:
        """Start a job if it can and should; else promise it a time while promises are left."""
        request = one.request
        best: tuple[float, int, int] | None = None  # its end, shape, nodes
        if self.policy.quotas and not self._within_quota(request):
            return False  # its own doing: nobody waits for it
        for number, shape in enumerate(request.shapes):
            mask = self._nodes_now(one, number)
            if mask:
                end = self._now + self._expected(one, shape.pace)
                if best is None or end < best[0]:
                    best = (end, number, mask)
        if best is not None and self._better_later(one, best, out):
            return request.job in self.running
        if best is not None:
            self._start(one, best[1], best[2], out)
            return True
        if len(self.promises) < self.policy.reservations:
            self._promise(one)
        elif not request.one_group:
            self._failed[id(request.shapes)] = self._shortest_failing(one)
        return False

    def _shortest_failing(self, one: Waiting) -> float:
        """Return how long a job may be at most that might find nodes where this one found none."""
        shapes = one.request.shapes
        for shape in shapes:
            for name, count in shape.nodes:
                pool = self.grounds.pool_names.index(name)
                if self.fleet.free(pool, self.fleet.chips_of(pool, shape)).bit_count() < count:
                    break
            else:  # there are enough, but for promises
                if len(shapes) == len(self.promises) == 1:
                    return (self.promises[0].start - self._now) * shape.pace
                return math.nextafter(one.left_s, 0.0)
        return -1.0

    def _expected(self, one: Waiting, pace: float) -> float:
        return one.left_s / pace

    def _nodes_now(self, one: Waiting, number: int) -> int:
        """Return free nodes for a shape that break no promise; 0: there are none."""
        request, fleet = one.request, self.fleet
        shape = request.shapes[number]
        chosen = 0
        end = self._now + one.left_s / shape.pace
        for name, count in shape.nodes:
            pool = self.grounds.pool_names.index(name)
            chips = fleet.chips_of(pool, shape)
            free = fleet.free(pool, chips)
            if free.bit_count() < count:
                return 0
            if self.promises:
                free &= ~kept_free(self.promises, request.job, end)
                if free.bit_count() < count:
                    return 0
            if request.one_group and self.grounds.tiers:
                rooms = [free & mask for mask in self.grounds.groups]
                rooms = [room for room in rooms if room.bit_count() >= count]
                if not rooms:
                    return 0
                free = min(rooms, key=int.bit_count)
            if shape.chips_per_node and self.policy.place in (TIGHTEST, CONTENTION):
                free = fleet.fullest(free, chips, count)
            chosen |= place(
                self.policy.place, free, count, self.grounds.tiers, self._chance,
                lambda mask: self.network.stretch(request, mask), self.grounds.border,
            )  # fmt: skip
        return chosen

    def _within_quota(self, request: JobRequest) -> bool:
        """Tell whether a tenant may have any of a job's shapes beside what it has."""
        most = self.policy.quotas.get(request.tenant)
        if most is None:
            return True
        wanted = max(
            sum(count * self.fleet.chips_of(self.grounds.pool_names.index(name), shape)
                for name, count in shape.nodes)
            for shape in request.shapes
        )  # fmt: skip
        return self.tenants.get(request.tenant, 0) + wanted <= most

    def _better_later(
        self, one: Waiting, best: tuple[float, int, int], out: list[Instruction]
    ) -> bool:
        """Tell whether a job had better wait, for a better shape or for a group; promise it that.

        Where a group has room at once, the job is started there.

        What it loses by running spread out is what the network says; what it waits for is what
        others are expected to end at.
        """
        request, (end, number, mask) = one.request, best
        for other in range(number):
            promise = self._earliest(one, other)
            if promise is not None and promise.end < end:
                self.promises.append(promise)
                return True
        shape = request.shapes[number]
        if not self.policy.wait or shape.num_nodes == 1 or len(shape.nodes) > 1:
            return False
        fewest = self.grounds.fewest(shape)
        if self.grounds.spread(mask) <= fewest:
            return False
        pool = self.grounds.pool_names.index(shape.nodes[0][0])
        found_at = compact(self.fleet, pool, self.fleet.chips_of(pool, shape), shape.num_nodes,
                           fewest, self.promises)  # fmt: skip
        if found_at is None:
            return False
        if found_at[0] <= self._now:  # it need not wait, only lie elsewhere
            self._start(one, number, found_at[1], out)
            return True
        here, there = (self.network.stretch(request, m) for m in (mask, found_at[1]))
        since = self._now if one.spread_since is None else one.spread_since
        loss = (end - self._now) * (here - there)
        if loss <= 0:
            return False
        if found_at[0] - since >= _WORTH * loss:
            if not self.policy.move or fewest > 1 or shape.chips_per_node:
                return False
            found_at = make_way(self, request, number, loss, self._now, out)
            if found_at is None:
                return False
        one.spread_since, start = since, max(self._now, found_at[0])
        self.promises.append(
            Promise(request.job, start, start + end - self._now, found_at[1], number)
        )
        return True

    def _earliest(self, one: Waiting, number: int) -> Promise | None:
        seconds = self._expected(one, one.request.shapes[number].pace)
        return earliest(self.fleet, one.request, number, self._now, seconds, self.promises)

    def _promise(self, one: Waiting) -> None:
        promises = [self._earliest(one, number) for number in range(len(one.request.shapes))]
        kept = [promise for promise in promises if promise is not None]
        if kept:
            self.promises.append(min(kept, key=lambda promise: promise.end))

    def _start(self, one: Waiting, number: int, mask: int, out: list[Instruction]) -> None:
        request = one.request
        shape = request.shapes[number]
        allocation = self.fleet.allocate(mask, shape, number)
        end = self._now + self._expected(one, shape.pace)
        self.fleet.take(request.job, allocation, end)
        chips = _chips(allocation)
        self.tenants[request.tenant] = self.tenants.get(request.tenant, 0) + chips
        self.queue.charge(request.tenant, chips * (end - self._now), self._now)
        self.running[request.job] = run = Run(
            request=request, allocation=allocation, pace=shape.pace, done=one.done,
            since=self._now + (request.restart_s if one.runs else 0.0), started=self._now,
            expected_end=end,
        )  # fmt: skip
        out.append(events.Start(request.job, allocation, run.left_s(self._now)))


def _chips(allocation: Allocation) -> int:
    return sum(slots.bit_count() for slots in allocation.slots)
