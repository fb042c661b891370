"""The pulses of a generation that runs are watched: who keeps the others waiting is ended."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from tutti.diagnose.runs.live_hang import Observed, find_hang, stray_of
from tutti.elastic.controller import Controller
from tutti.elastic.events import Phase
from tutti.elastic.membership import Membership
from tutti.elastic.messages import ChipPulse
from tutti.observe.pulse import Activity, OpenOperation, Reading
from tutti.plan.plan import Plan
from tutti.ranks.rank_places import Seats, class_of
from tutti.schedule.schedule import build_schedule
from tutti.train.run.planning import Job

LOOK_S = 0.25  # between two looks at the pulses
FRESH_S = 1.0  # agents tell what their ranks do as long as none of them moves


class HangWatch:
    """Looks at the pulses of a generation that runs, and ends whoever keeps the others waiting."""

    def __init__(
        self, job: Job, controller: Controller, plan: Callable[[], Plan], after_s: float
    ) -> None:
        """Take what to look at; `plan` is the one of the generation at hand."""
        self._job, self._controller, self._plan = job, controller, plan
        self._words: tuple[Plan, list[list[str]]] | None = None
        self._after_s = after_s
        self._next, self._judged = 0.0, 0

    def __call__(self, members: Membership) -> None:
        """Look, every so often."""
        now = time.monotonic()
        if now < self._next or members.phase not in (Phase.RUNNING, Phase.LEAVING):
            return
        if members.phase is Phase.LEAVING and not members.gentle:
            return
        self._next = now + LOOK_S
        if self._judged == members.generation:
            return
        now_ns, ranks = time.monotonic_ns(), list[Observed]()
        for seat in members.seats:
            told_ns, pulse = self._controller.pulses.get(seat.chip, (0, None))
            if pulse is None or now_ns - told_ns > FRESH_S * 1e9:
                return  # something on its host moves
            if pulse.generation != members.generation:
                return
            ranks.append(self._observed(seat.rank, pulse, told_ns))
        source = members.source
        first = (source.step if source is not None else 0) + 1
        hang = find_hang(
            ranks, now_ns=now_ns, after_s=self._after_s + self._step_s,
            first_step=first,
        )  # fmt: skip
        if hang is not None:
            self._judged = members.generation
            self._controller.kill(members.seats[hang.rank], hang.why)

    def _observed(self, rank: int, pulse: ChipPulse, told_ns: int) -> Observed:
        reading = Reading(
            process=0,
            rank=rank,
            generation=pulse.generation,
            step=pulse.step,
            instruction=pulse.instruction,
            activity=Activity(pulse.activity),
            beats=0,
            beat_ns=told_ns - pulse.idle_ns,
            link_beats=0,
            link_beat_ns=told_ns - pulse.links_idle_ns,
            operations=tuple(OpenOperation(name, peers, 0) for name, peers in pulse.operations),
        )
        names = [name for name, _ in pulse.operations]
        return Observed(
            chip=pulse.chip,
            reading=reading,
            state=pulse.state,
            instruction=self._instruction(rank, pulse.instruction),
            call=pulse.call,
            stray=stray_of(names) if pulse.instruction >= 0 else "",
        )

    @functools.cached_property
    def _step_s(self) -> float:
        """Seconds that a step should take; twice that is not yet a hang."""
        return 2 * self._job.predicted().step_seconds

    def _instruction(self, rank: int, index: int) -> str:
        """Return an instruction of a rank in words."""
        plan = self._plan()
        if self._words is None or self._words[0] != plan:
            schedule, seats = build_schedule(plan), Seats(plan, self._job.spec)
            lists = [
                [str(e) for e in schedule.classes[class_of(schedule, seats[rank])].instructions]
                for rank in range(plan.num_ranks)
            ]
            self._words = (plan, lists)
        words = self._words[1][rank] if rank < len(self._words[1]) else []
        return words[index] if 0 <= index < len(words) else ""
