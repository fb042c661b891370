"""One engine of a deployment under simulation: its lanes run the engine's own `Scheduler`.

Where the chip is given its next step before the one under way has ended, that step knows nothing of
requests that came since: they wait for the one after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tutti.batching import Request, Scheduler
from tutti.batching.events import Tokens
from tutti.batching.repeated_decodes import NOTHING, Ahead, ahead, leap
from tutti.batching.request import Sequence
from tutti.batching.router import PROMPT_WEIGHT
from tutti.batching.step import Step
from tutti.cost.serving.engine_prices import EnginePrices
from tutti.cost.serving.step_load import StepLoad, chunk_pairs, load_of

F64 = NDArray[np.float64]
TOKEN = 1  # what every step samples


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the deployment."""

    index: int
    arrived_s: float
    prompt: int
    output: int
    came_s: float = -1.0  # to the engine that has it
    began_s: float = -1.0  # its first step on a prefill engine
    first_s: float = -1.0
    finished_s: float = -1.0
    left: bool = False  # an engine that is not simulated went on with it


@dataclass(slots=True, eq=False)
class AlikeSteps:
    """Steps of one of several lanes that its scheduler is told of when all of them are over."""

    left: Ahead
    begun: int = 0

    def next_load(self) -> StepLoad:
        """Return the next step: it reads as many keys more as it has rows."""
        left, rows = self.left, self.left.rows
        keys, pairs = float(left.keys + self.begun * rows), 0.0
        if left.chunk:
            pairs = chunk_pairs(left.start + self.begun * left.chunk, left.chunk)
        self.begun += 1
        return StepLoad(rows + left.chunk, rows, rows, (keys,), (pairs,))


@dataclass(slots=True, eq=False)
class Lane:
    """A scheduler and the step of it that is under way."""

    scheduler: Scheduler
    number: int = 0
    jobs: dict[int, tuple[Job, float]] = field(default_factory=dict)  # by request, with its work
    silent: dict[int, Job] = field(default_factory=dict)  # by sequence: no token has come
    step: Step | None = None
    ends: F64 | None = None  # of steps that are alike, which are made at once
    several: Ahead = NOTHING  # these
    alike: AlikeSteps | None = None  # of several lanes: which are made one by one
    under_way: bool = False  # a step passes the stages
    settled: bool = False  # it is one of those that are alike, and the scheduler knows its tokens
    due: int = 0  # the number of the event that ends what is under way
    began_s: float = 0.0  # the step that is under way; of steps that are alike, the last
    late: list[tuple[Job, Request]] = field(default_factory=list)  # since the next step was made
    work: float = 0.0  # tokens of the requests that it has
    waited_s: float = 0.0  # when somebody waited for it last


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step as it was simulated."""

    engine: int
    lane: int
    begins_s: float
    ends_s: float
    tokens: int
    rows: int


@dataclass(slots=True)
class Used:
    """What an engine did, summed up."""

    busy_s: list[float]  # of each stage
    steps: int = 0
    tokens: int = 0
    rows: int = 0  # decodes
    preemptions: int = 0
    stowed_pages: int = 0
    fetched_pages: int = 0
    most_pages: int = 0


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What an engine did, when all is over."""

    group: int  # its pipeline
    used: Used
    waited_s: float  # until when somebody waited for each of its lanes


class SimulatedEngine:
    """Takes requests, makes steps, says when they end."""

    def __init__(self, number: int, group: int, prices: EnginePrices, *, prefix: bool) -> None:
        self.number, self.group, self.prices = number, group, prices
        settings = prices.settings(prefix=prefix)
        self._windows = prices.windows
        asked = prices.prices() if settings.host_pages else None
        self.lanes = [Lane(Scheduler(settings, asked), number) for number in range(prices.lanes)]
        self._free = [0.0] * len(prices.stages)
        self._leapt = 0.0  # since when steps that are alike are under way
        self.work = 0.0  # tokens of the requests that it has
        self.used = Used([0.0] * len(prices.stages))

    def take(self, job: Job, tokens: tuple[int, ...], most_new: int, now: float) -> Lane:
        """Give a request to the lane that has least to do."""
        lane = min(self.lanes, key=lambda lane: lane.work)
        self._settle(lane)
        request = Request(id=job.index, prompt=tokens, most_new=most_new)
        work = len(tokens) * PROMPT_WEIGHT + most_new
        lane.jobs[job.index] = (job, work)
        lane.work += work
        self.work += work
        job.came_s = now
        if self.prices.launches_ahead and (lane.step is not None or lane.ends is not None):
            lane.late.append((job, request))
        else:
            _enter(lane, job, request)
        return lane

    def record(self) -> EngineRecord:
        """Return what it did."""
        return EngineRecord(self.group, self.used, min(lane.waited_s for lane in self.lanes))

    @staticmethod
    def held(lane: Lane) -> tuple[int, int]:
        """Return how many requests wait for a lane, and how many have a slot."""
        return len(lane.scheduler.waiting) + len(lane.late), lane.scheduler.slots.settled

    def next_free(self) -> float:
        """Return when the first stage can take a step."""
        return self._free[0]

    @property
    def _leaps(self) -> bool:
        return len(self.lanes) == 1 and self._windows == (None,)

    @property
    def _repeats(self) -> bool:
        return len(self.lanes) > 1 and self._windows == (None,)

    def begin(self, lane: Lane, now: float) -> TimedStep | None:
        """Start a lane's next step, or many that are alike; None if it has nothing to do."""
        while lane.late and lane.late[0][0].came_s <= lane.began_s:
            _enter(lane, *lane.late.pop(0))
        if self._leaps and not lane.late:
            several = ahead(lane.scheduler)
            if several.steps > 1:
                return self._begin_leap(lane, now, several)
        if self._repeats:
            if lane.alike is None and (left := ahead(lane.scheduler, prompts=True)).steps > 1:
                lane.alike = AlikeSteps(left)
            if lane.alike is not None:
                return self._passed(lane, now, lane.alike.next_load())
        step = lane.scheduler.next_step()
        if step is None and lane.late:  # nothing was under way any more when they came
            while lane.late:
                _enter(lane, *lane.late.pop(0))
            step = lane.scheduler.next_step()
        if step is None:
            return None
        lane.step, lane.began_s = step, now
        for beginning in step.begins:
            job = lane.silent.get(beginning.sequence.id)
            if job is not None and job.began_s < 0:
                job.began_s = now
        timed = self._passed(lane, now, load_of(step, self._windows, imports=self.prices.imports))
        self._note_pages(lane)
        return timed

    def _passed(self, lane: Lane, now: float, load: StepLoad) -> TimedStep:
        """Let a step pass the stages."""
        lane.under_way = True
        ends, begins = now, now
        seconds = self.prices.stage_seconds(load)
        wires = (*self.prices.wire_seconds(load), 0.0)
        for stage, (taken, sent) in enumerate(zip(seconds, wires, strict=True)):
            ends = max(ends, self._free[stage]) + taken
            self._free[stage] = ends
            ends += sent
            self.used.busy_s[stage] += taken
        if len(wires) > 1:  # what was sampled goes back to the first stage
            ends += self.prices.wires[0].latency_s
        used = self.used
        used.steps += 1
        used.tokens += load.tokens
        used.rows += load.rows
        used.stowed_pages += load.stows
        used.fetched_pages += load.fetches
        return TimedStep(self.number, lane.number, begins, ends, load.tokens, load.rows)

    def _begin_leap(self, lane: Lane, now: float, several: Ahead) -> TimedStep:
        """Time steps that are alike: each reads as many keys more as it has rows."""
        steps, rows, keys = several.steps, several.rows, several.keys

        def seconds(keys: float) -> float:
            return self.prices.step_seconds(StepLoad(rows, rows, rows, (keys,), (0.0,)))

        first, second = seconds(keys), seconds(keys + rows)
        count = np.arange(1, steps + 1)
        self._leapt, lane.several = now, several
        lane.ends = now + first * count + (second - first) * (count * (count - 1) / 2.0)
        return TimedStep(self.number, 0, now, float(lane.ends[-1]), rows * steps, rows * steps)

    def interrupt(self, lane: Lane, now: float) -> float | None:
        """Let steps that are alike end with the one under way; return when, if that is sooner."""
        ends = lane.ends
        if ends is None:
            return None
        made = int(np.searchsorted(ends, now, side="left")) + 1
        made += self.prices.launches_ahead  # the next one is made already
        if made >= len(ends):
            return None
        lane.ends = ends[:made]
        return float(ends[made - 1])

    def _end_leap(self, lane: Lane, now: float) -> None:
        assert lane.ends is not None
        steps = len(lane.ends)
        lane.began_s = float(lane.ends[-2]) if steps > 1 else self._leapt
        lane.ends = None
        used, rows = self.used, lane.several.rows
        leap(lane.scheduler, lane.several, steps, TOKEN)
        used.steps += steps
        used.tokens += rows * steps
        used.rows += rows * steps
        load = StepLoad(rows, rows, rows, (0.0,), (0.0,))
        parts = self.prices.stage_seconds(load)
        whole = now - self._leapt
        for stage, part in enumerate(parts):
            used.busy_s[stage] += whole * part / sum(parts)
        self._note_pages(lane)

    def _settle(self, lane: Lane) -> None:
        """Let a lane's scheduler know of the steps that were alike; one may be under way."""
        if lane.alike is None:
            return
        leap(lane.scheduler, lane.alike.left, lane.alike.begun, TOKEN)
        lane.alike, lane.settled = None, lane.under_way
        self._note_pages(lane)

    def _note_pages(self, lane: Lane) -> None:
        scheduler = lane.scheduler
        held = scheduler.settings.usable_pages - scheduler.pool.available
        self.used.most_pages = max(self.used.most_pages, held)

    def end(self, lane: Lane, now: float) -> list[Job]:
        """Take the tokens of a lane's step; return the jobs that ended with it."""
        if lane.ends is not None:
            self._end_leap(lane, now)
            return []
        lane.under_way = False
        if lane.alike is not None:
            if lane.alike.begun == lane.alike.left.steps:
                self._settle(lane)
            return []
        if lane.settled:
            lane.settled = False
            return []
        step = lane.step
        assert step is not None
        lane.step = None
        count = len(step.sample_slots)
        got = lane.scheduler.receive(
            Tokens(step.number, np.full(count, TOKEN, np.int32), np.zeros(count, np.int8))
        )
        if lane.silent:
            heard = lane.silent.keys() & set(got.sequences.tolist())
            for name in heard:
                job = lane.silent.pop(name)
                if job.first_s < 0:
                    job.first_s = now
        return [self._ended(lane, sequence, now) for sequence in got.finished]

    def _ended(self, lane: Lane, sequence: Sequence, now: float) -> Job:
        job, work = lane.jobs.pop(sequence.request.id)
        self.used.preemptions += sequence.preemptions
        lane.work -= work
        self.work -= work
        job.finished_s = now
        return job


def _enter(lane: Lane, job: Job, request: Request) -> None:
    """Let a lane's scheduler know of a request."""
    (sequence,) = lane.scheduler.arrive(request)
    lane.silent[sequence.id] = job
