"""The queue: who goes first. Who has waited longer than the policy's patience goes before all."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tutti.fleet.policy import Order, Policy
from tutti.fleet.request import JobRequest

_FADED = 500.0  # half-lives after which shares are counted anew, so that no number grows too large


@dataclass(slots=True, eq=False)
class Waiting:
    """A job in the queue, perhaps with work behind it."""

    request: JobRequest
    submitted: float
    number: int  # in the order of coming
    done: float = 0.0
    runs: int = 0
    spread_since: float | None = None  # since when it waits for a group though it could start
    left_s: float = field(init=False)  # what its owner expects still, at a pace of 1

    def __post_init__(self) -> None:
        left = max(0.0, self.request.expected_s - self.done)
        self.left_s = left + (self.request.restart_s if self.runs else 0.0)


class Queue:
    """Waiting jobs in a policy's order."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.jobs: dict[str, Waiting] = {}
        self._sorted: dict[str, list[tuple[tuple[float, ...], Waiting]]] = {}  # by tenant
        self._by_age: deque[Waiting] = deque()
        self._usage: dict[str, float] = {}
        self._epoch = 0.0

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, one: Waiting) -> None:
        """Put a job in."""
        self.jobs[one.request.job] = one
        lane = self._sorted.setdefault(self._lane(one), [])
        bisect.insort(lane, (self._key(one), one), key=lambda entry: entry[0])
        if not self._by_age or self._by_age[-1].number < one.number:
            self._by_age.append(one)
        else:  # a job that comes back
            self._by_age = deque(sorted((*self._by_age, one), key=lambda entry: entry.number))

    def remove(self, one: Waiting) -> None:
        """Take a job out."""
        del self.jobs[one.request.job]
        lane = self._sorted[self._lane(one)]
        at = bisect.bisect_left(lane, self._key(one), key=lambda entry: entry[0])
        del lane[at]
        if not lane:
            del self._sorted[self._lane(one)]
        while self._by_age and self.jobs.get(self._by_age[0].request.job) is not self._by_age[0]:
            self._by_age.popleft()

    def _lane(self, one: Waiting) -> str:
        return one.request.tenant if self.policy.order is Order.FAIR else ""

    def _key(self, one: Waiting) -> tuple[float, ...]:
        if self.policy.order is Order.PRIORITY:
            return (-one.request.priority, one.number)
        if self.policy.order is Order.SHORTEST:
            return (one.request.expected_s, one.number)
        return (one.number,)

    def in_order(self, now: float) -> Iterator[Waiting]:
        """Yield all jobs, first the one that goes first; the queue must not change meanwhile."""
        old = self._impatient(now)
        yield from old
        seen = set(map(id, old))
        lanes = sorted(self._sorted, key=lambda tenant: (self._usage.get(tenant, 0.0), tenant))
        for lane in lanes:
            for _, one in self._sorted[lane]:
                if not seen or id(one) not in seen:
                    yield one

    def _impatient(self, now: float) -> list[Waiting]:
        if self.policy.order is Order.FIFO:
            return []
        latest = now - self.policy.patience_s
        ready = itertools.takewhile(lambda one: one.submitted <= latest, self._by_age)
        return [one for one in ready if self.jobs.get(one.request.job) is one]

    def charge(self, tenant: str, chip_seconds: float, now: float) -> None:
        """Count what a tenant is given; what is older counts less."""
        if self.policy.order is not Order.FAIR:
            return
        ages = (now - self._epoch) / self.policy.half_life_s
        if ages > _FADED:
            self._usage = {name: used * 2.0**-ages for name, used in self._usage.items()}
            self._epoch = now
            ages = 0.0
        self._usage[tenant] = self._usage.get(tenant, 0.0) + chip_seconds * 2.0**ages
