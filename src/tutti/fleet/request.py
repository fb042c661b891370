"""What a job asks for, what it is given, and what it holds while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tutti.errors import InputError


@dataclass(frozen=True, slots=True)
class Shape:
    """Nodes that a job can run on: how many of which pools, and how fast it is there."""

    nodes: tuple[tuple[str, int], ...]  # pool, how many
    chips_per_node: int | None = None  # None: whole nodes
    pace: float = 1.0  # seconds of the job's work that pass in a second

    def __post_init__(self) -> None:
        if not self.nodes or any(count < 1 for _, count in self.nodes):
            raise ValueError("a job runs on at least one node")
        if len({pool for pool, _ in self.nodes}) < len(self.nodes):
            raise ValueError("a pool is named twice")
        if not (self.pace > 0 and math.isfinite(self.pace)):
            raise ValueError(f"a pace of {self.pace:g}; give a number above 0")
        if self.chips_per_node is not None and self.chips_per_node < 1:
            raise ValueError(f"{self.chips_per_node} chips per node; give 1 or more")

    @property
    def num_nodes(self) -> int:
        """Nodes of all pools."""
        return sum(count for _, count in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """One job: its work, and the shapes that can do it, best first."""

    job: str
    seconds: float  # of work, at a pace of 1
    shapes: tuple[Shape, ...]
    priority: int = 0  # higher goes first
    tenant: str = ""
    estimate_s: float | None = None  # what its owner says; None: the truth
    checkpoint_s: float = 0.0  # work between checkpoints; 0: it makes none, and is never preempted
    restart_s: float = 0.0  # to save, stop, start and load again
    one_group: bool = False  # of the lowest tier, or not at all

    def __post_init__(self) -> None:
        if not self.shapes:
            raise InputError(f"job '{self.job}': no shape is given")
        for name in ("seconds", "checkpoint_s", "restart_s"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise InputError(f"job '{self.job}': '{name}' is {value:g}; give 0 or more")
        if self.estimate_s is not None and not self.estimate_s > 0:
            raise InputError(f"job '{self.job}': 'estimate_s' is {self.estimate_s:g}")

    @property
    def expected_s(self) -> float:
        """The work that its owner expects."""
        return self.seconds if self.estimate_s is None else self.estimate_s


@dataclass(frozen=True, slots=True)
class Allocation:
    """Chips of nodes: nodes counted over all pools, and a bit for each slot taken on each."""

    nodes: tuple[int, ...]
    slots: tuple[int, ...]
    shape: int = 0  # which of the request's

    @property
    def mask(self) -> int:
        """The nodes as bits."""
        mask = 0
        for node in self.nodes:
            mask |= 1 << node
        return mask


@dataclass(slots=True)
class Run:
    """A job on its chips; kept by the state machine alone."""

    request: JobRequest
    allocation: Allocation
    pace: float
    since: float  # when work goes on: after loading
    done: float  # work by then
    started: float
    expected_end: float
    stretch: float = 1.0  # of its steps, by the network
    stopping: bool = False  # told to stop at its next checkpoint
    target: Allocation | None = None  # of a move under way

    def work(self, now: float) -> float:
        """Return the work done by now."""
        if self.target is not None or now <= self.since:
            return self.done
        gained = (now - self.since) * self.pace / self.stretch
        return min(self.request.seconds, self.done + gained)

    def saved(self, now: float) -> float:
        """Return the work that a failure would leave."""
        step = self.request.checkpoint_s
        if step <= 0:
            return 0.0
        return max(self.done, math.floor(self.work(now) / step + 1e-9) * step)

    def left_s(self, now: float) -> float:
        """Return the seconds until its work is done, as it goes now."""
        waits = max(0.0, self.since - now)
        return waits + (self.request.seconds - self.work(now)) * self.stretch / self.pace

    def until_checkpoint_s(self, now: float) -> float:
        """Return the seconds until its next checkpoint."""
        step = self.request.checkpoint_s
        work = self.work(now)
        following = (math.floor(work / step + 1e-9) + 1) * step
        waits = max(0.0, self.since - now)
        return waits + (min(following, self.request.seconds) - work) * self.stretch / self.pace
