"""What is watched while a generation runs: pulses, for hangs; times of steps, for slow chips."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from tutti.diagnose.slow import SlowRanks, Verdict
from tutti.elastic.agent import Agent, process_state
from tutti.elastic.events import Phase
from tutti.elastic.hangs import Observed, find_hang
from tutti.elastic.membership import Membership
from tutti.ranks.rank_places import Seats, class_of
from tutti.schedule.instruction import Lane
from tutti.schedule.schedule import build_schedule
from tutti.train.run.planning import Job

LOOK_S = 0.25  # between two looks at the pulses


class HangWatch:
    """Looks at the pulses of a generation that runs, and ends whoever keeps the others waiting."""

    def __init__(self, job: Job, agent: Agent, after_s: float) -> None:
        self._job, self._agent = job, agent
        self._after_s = after_s
        self._next, self._judged = 0.0, 0

    def __call__(self, members: Membership) -> None:
        """Look, every so often."""
        now = time.monotonic()
        if now < self._next or members.phase is not Phase.RUNNING:
            return
        self._next = now + LOOK_S
        if self._judged == members.generation:
            return
        readings = self._agent.pulses()
        ranks = list[Observed]()
        for seat in members.seats:
            found = readings.get(seat.chip)
            if found is None or found.generation != members.generation:
                return
            ranks.append(
                Observed(
                    chip=seat.chip,
                    reading=found,
                    state=process_state(found.process),
                    instruction=self._instruction(seat.rank, found.instruction),
                )
            )
        source = members.source
        first = (source.step if source is not None else 0) + 1
        hang = find_hang(
            ranks, now_ns=time.monotonic_ns(), after_s=self._after_s + self._step_s,
            first_step=first,
        )  # fmt: skip
        if hang is not None:
            self._judged = members.generation
            self._agent.kill(hang.chip, members.seats[hang.rank].process, hang.why)

    @functools.cached_property
    def _step_s(self) -> float:
        """Seconds that a step should take; twice that is not yet a hang."""
        return 2 * self._job.predicted().step_seconds

    @functools.cached_property
    def _lists(self) -> list[list[str]]:
        plan = self._job.plan
        schedule, seats = build_schedule(plan), Seats(plan, self._job.spec)
        return [
            [str(entry) for entry in schedule.classes[class_of(schedule, seats[rank])].instructions]
            for rank in range(plan.num_ranks)
        ]

    def _instruction(self, rank: int, index: int) -> str:
        words = self._lists[rank] if rank < len(self._lists) else []
        return words[index] if 0 <= index < len(words) else ""


class SlowWatch:
    """Compares what the ranks of a generation compute with the plan, their past and each other."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._generation, self._ranks = 0, SlowRanks(())

    def step(self, members: Membership, number: int, compute_s: Sequence[float]) -> list[Verdict]:
        """Take a step of a generation; return what changed."""
        if self._generation != members.generation:
            self._generation = members.generation
            whole = len(compute_s) == len(self._expected)
            self._ranks = SlowRanks(self._expected if whole else [1.0] * len(compute_s))
        return self._ranks.step(number, compute_s)

    @functools.cached_property
    def _expected(self) -> list[float]:
        """Seconds that each rank of the job's plan should compute in a step."""
        found = self._job.predicted()
        seats = Seats(self._job.plan, self._job.spec)
        classes = []
        for rank_class, costs in zip(
            found.schedule.classes, found.priced.costs.classes, strict=True
        ):
            pairs = zip(rank_class.instructions, costs.seconds.tolist(), strict=True)
            classes.append(sum(s for entry, s in pairs if entry.lane is Lane.COMPUTE))
        return [
            classes[class_of(found.schedule, seats[rank])]
            for rank in range(self._job.plan.num_ranks)
        ]
