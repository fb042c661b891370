"""Random lives of a fleet: events by chance, and what must hold after every one of them."""

from __future__ import annotations

import functools
import random
from collections import Counter

from tutti.document import Place
from tutti.fleet import events
from tutti.fleet.chips import Grounds
from tutti.fleet.policy import Order, Policy
from tutti.fleet.request import JobRequest, Shape
from tutti.fleet.scheduler import Scheduler
from tutti.hardware.cluster import Cluster


def small_cluster(nodes: int = 11, group: int = 4, pools: int = 1, tiers: int = 2) -> Cluster:
    names = ["leaf", "spine", "core"][:tiers]
    sizes: list[int | None] = [*[group, 2 * group][: tiers - 1], None]
    return Cluster.from_document(
        {
            "name": "small",
            "pools": [
                {"name": f"p{i}", "node": ("HGX-A800", "HGX-H800")[i], "nodes": nodes - i}
                for i in range(pools)
            ],
            "fabric": {
                "tiers": [
                    {"name": name} | ({} if size is None else {"nodes": size})
                    for name, size in zip(names, sizes, strict=True)
                ],
            },
        },
        Place("small"),
    )


class Spread:
    """A network in which every further group costs a quarter more."""

    def __init__(self, grounds: Grounds) -> None:
        self.grounds = grounds

    def stretch(self, request: JobRequest, mask: int) -> float:
        return 1.0 + 0.25 * (self.grounds.spread(mask) - 1)


class Life:
    """One fleet, driven by chance; owners never expect less than the truth."""

    def __init__(self, seed: int, policy: Policy, grounds: Grounds, *, failures: bool) -> None:
        self.chance = random.Random(seed)
        self.failures = failures
        self.grounds = grounds
        self.machine = Scheduler(grounds, policy, Spread(grounds))
        self.now = 0.0
        self.due: dict[str, tuple[float, events.Event]] = {}  # what happens to a running job next
        self.promised: dict[str, float] = {}
        self.said: list[object] = []
        self.submitted: dict[str, JobRequest] = {}
        self.done: set[str] = set()
        self.started: set[str] = set()
        # Promises are kept where nobody comes who goes first, and nothing fails, moves or is
        # preempted; a promise of a group is kept only where it still pays back.
        self.disturbed = policy.wait or policy.order is not Order.FIFO

    def request(self, number: int) -> JobRequest:
        pools = self.grounds.pool_names
        whole = self.chance.random() < 0.6
        counts = [self.chance.choice([1, 1, 2, 3, 5, 8])]
        if self.chance.random() < 0.2:
            counts.append(max(1, counts[0] // 2))  # can also run on fewer
        chips = None if whole else self.chance.choice([1, 3, 4])
        shapes = tuple(
            Shape(((self.chance.choice(pools), count),), chips, count / counts[0])
            for count in counts
        )
        if len(pools) > 1 and self.chance.random() < 0.2:
            shapes = (Shape(tuple((pool, 2) for pool in pools), None),)
        seconds = self.chance.choice([5.0, 20.0, 100.0, 400.0])
        return JobRequest(
            job=f"j{number}", seconds=seconds, shapes=shapes,
            priority=self.chance.randrange(3), tenant=self.chance.choice("ab"),
            estimate_s=seconds * self.chance.choice([1.0, 1.0, 2.0]),
            checkpoint_s=self.chance.choice([0.0, 10.0]), restart_s=self.chance.choice([0.0, 3.0]),
        )  # fmt: skip

    def run(self, jobs: int) -> None:
        coming = 0
        while coming < jobs or self.machine.running or len(self.machine.queue):
            soonest = min(self.due.values(), key=lambda one: one[0], default=None)
            arrival = self.now + self.chance.choice([0.0, 1.0, 7.0, 40.0])
            if coming < jobs and (soonest is None or arrival < soonest[0]):
                self.now = arrival
                if self.failures and self.chance.random() < 0.15:
                    self.fail_or_repair()
                    continue
                request = self.request(coming)
                coming += 1
                self.submitted[request.job] = request
                self.tell(events.Submit(self.now, request))
            elif soonest is not None:
                self.now = soonest[0]
                self.tell(soonest[1])
            else:  # nothing runs and somebody waits: only for nodes that are down
                assert self.machine.fleet.down, "somebody waits though nothing is in the way"
                self.repair()

    def fail_or_repair(self) -> None:
        down = self.machine.fleet.down
        if down and self.chance.random() < 0.5:
            self.repair()
            return
        alive = [n for n in range(self.grounds.num_nodes) if not down >> n & 1]
        if len(alive) > 1:
            self.disturbed = True
            self.tell(events.Fail(self.now, self.chance.choice(alive)))

    def repair(self) -> None:
        down = self.machine.fleet.down
        self.tell(events.Repair(self.now, down.bit_length() - 1))

    def tell(self, event: events.Event) -> None:
        if isinstance(event, events.Finish | events.Stopped | events.Moved):
            del self.due[event.job]
        if isinstance(event, events.Finish):
            run = self.machine.running[event.job]
            assert abs(run.work(self.now) - run.request.seconds) < 1e-6, "work was lost"
            self.done.add(event.job)
        before = {job: run.work(self.now) for job, run in self.machine.running.items()}
        said = self.machine.handle(event)
        self.said.append((event, said))
        if isinstance(event, events.Moved):
            self.finish_later(event.job)
        for one in said:
            self.obey(one, before)
        self.check()

    def obey(self, one: events.Instruction, before: dict[str, float]) -> None:
        match one:
            case events.Start(job=job):
                if job in self.promised and not self.disturbed:
                    assert self.now <= self.promised[job] + 1e-6, "a promise was broken"
                self.started.add(job)
                self.finish_later(job)
            case events.Preempt(job=job, seconds=seconds):
                self.disturbed = True
                if seconds < self.machine.running[job].left_s(self.now):
                    self.due[job] = (self.now + seconds, events.Stopped(self.now + seconds, job))
            case events.Move(job=job, seconds=seconds):
                self.disturbed = True
                self.due[job] = (self.now + seconds, events.Moved(self.now + seconds, job))
            case events.Lost(job=job, saved=saved):
                step = self.submitted[job].checkpoint_s
                assert saved >= before[job] - (step or before[job]) - 1e-6, "too much was lost"
                self.due.pop(job)
            case events.Stay(job=job):
                self.finish_later(job)

    def finish_later(self, job: str) -> None:
        end = self.now + self.machine.running[job].left_s(self.now)
        self.due[job] = (end, events.Finish(end, job))

    def check(self) -> None:
        machine, fleet = self.machine, self.machine.fleet
        held: Counter[tuple[int, int]] = Counter()
        for job, allocations in fleet.held.items():
            for one in allocations:
                for node, slots in zip(one.nodes, one.slots, strict=True):
                    assert not fleet.down >> node & 1, f"{job} is on a node that is down"
                    for slot in range(16):
                        held[node, slot] += slots >> slot & 1
        assert max(held.values(), default=0) <= 1, "two jobs on one chip"
        free = sum(s.bit_count() for s in fleet.free_slots)
        assert free + sum(held.values()) == self.grounds.num_chips == free + fleet.used_chips
        for job, run in machine.running.items():
            shape = run.request.shapes[run.allocation.shape] if run.request is self.submitted[
                job] else None  # fmt: skip
            if shape is not None:  # a gang is whole
                assert len(run.allocation.nodes) == shape.num_nodes
        waiting = set(machine.queue.jobs)
        assert waiting.isdisjoint(machine.running)
        assert waiting | set(machine.running) | self.done == set(self.submitted)
        for promise in machine.promises:
            if len(self.submitted[promise.job].shapes) > 1:
                continue  # it may do better with another shape, and later
            known = self.promised.get(promise.job, float("inf"))
            self.promised[promise.job] = min(known, promise.start)


@functools.cache
def _grounds(pools: int, tiers: int) -> Grounds:
    return Grounds.of(small_cluster(pools=pools, tiers=tiers))


def live(seed: int, text: str, *, jobs: int = 30, failures: bool = True) -> Life:
    """Return a life that was lived to its end."""
    chance = random.Random(seed)
    grounds = _grounds(chance.choice([1, 2]), chance.choice([2, 3]))
    one = Life(seed, Policy.parse(text), grounds, failures=failures)
    one.run(jobs)
    return one
