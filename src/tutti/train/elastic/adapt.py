"""When a running job takes another plan: chips came or went, chips or wires became slow or well.

Whenever the chips that could train are others than those that a plan was last looked for, one is
looked for beside the training (`better_plan`, in a process of its own). All switch to it after a
step if it pays back in the time that is left; what was decided is said in words, with its figures.
A situation is asked about once, so noise changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tutti.diagnose.slow_wires import Ends
from tutti.elastic.events import Change, Event, Phase
from tutti.elastic.known_chips import all_reports
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Standing
from tutti.launch.identity import used_chips
from tutti.plan.plan import Plan
from tutti.search.question.cluster_parts import Wires
from tutti.train.elastic.better_plan import Proposal, Search
from tutti.train.elastic.next_generation import Settler
from tutti.train.run.planning import Job
from tutti.units import many, seconds_text

STILL_S = 0.5  # that a situation must have lasted: hosts come chip by chip
LEAST_GAIN = 0.03  # of a step's time; less is within what forecasts err by
PAUSE_S = 2.0  # of a switch, as long as none was measured
MARGIN = 1.5  # times its cost that a switch must save

Say = Callable[[str, str], None]  # phase, words
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Situation:
    """What a plan is looked for."""

    chips: frozenset[str]
    slow: Mapping[str, float] = field(default_factory=dict)  # times as long as they should take
    slow_wires: Wires = field(default_factory=dict)  # a wire, or the two that a link joins

    @property
    def key(self) -> tuple[object, ...]:
        """What tells situations apart."""
        slow = sorted((chip, round(factor, 1)) for chip, factor in self.slow.items())
        wires = sorted((ends, round(factor, 1)) for ends, factor in self.slow_wires.items())
        return (self.chips, tuple(slow), tuple(wires))

    def words(self, before: Situation) -> str:
        """Say what is other than before."""
        parts = []
        come, gone = self.chips - before.chips, before.chips - self.chips
        if come:
            parts.append(f"{', '.join(sorted(come))} came")
        if gone:
            parts.append(f"{', '.join(sorted(gone))} went")
        for chip, factor in sorted(self.slow.items()):
            if before.slow.get(chip) != factor:
                parts.append(f"{chip} takes {factor:.2f} times as long")
        parts += [f"{chip} is well again" for chip in sorted(before.slow) if chip not in self.slow]
        for ends, factor in sorted(self.slow_wires.items()):
            if before.slow_wires.get(ends) != factor:
                parts.append(f"{in_words(ends)} takes {factor:.2f} times as long")
        well = [ends for ends in sorted(before.slow_wires) if ends not in self.slow_wires]
        parts += [f"{in_words(ends)} is well again" for ends in well]
        return ", ".join(parts)


def in_words(ends: Ends) -> str:
    """Return what a wire, or the link between two, is called."""
    return f"the wire of {ends[0]}" if len(ends) == 1 else f"the link {ends[0]} – {ends[1]}"


class Adapter:
    """Decides when a job changes its plan."""

    def __init__(self, job: Job, settler: Settler, say: Say) -> None:
        assert job.config.elastic is not None
        self._job, self._settler, self._say = job, settler, say
        self._mode = job.config.elastic.replan
        first = frozenset(str(chip) for chip in used_chips(job.plan))
        self.slow: dict[str, float] = {}
        self.slow_wires: dict[Ends, float] = {}
        self._known: dict[tuple[object, ...], Plan] = {Situation(first).key: job.plan}
        self._asked = Situation(first)  # the last that was looked at
        self._seen, self._since = self._asked, 0.0
        self._search: Search | None = None
        self._wanted = False  # by somebody, whatever the situation
        self._offer: tuple[Plan, str] | None = None  # for the situation, until somebody takes it
        self.step, self.step_s, self.pause_s = 0, 0.0, PAUSE_S

    def ask(self) -> None:
        """Take the plan that was offered, or look for one now, as somebody wants."""
        self._wanted = True

    def became(self, chip: str, factor: float) -> None:
        """Take note that a chip is slow, or with a factor of 1 that it is well."""
        _note(self.slow, chip, factor)

    def wire_became(self, ends: Ends, factor: float) -> None:
        """Take note that a wire, or the link between two, is slow or well."""
        _note(self.slow_wires, ends, factor)

    def forgive(self, place: str) -> None:
        """Forget that chips and wires of a place were slow."""
        for chip in [chip for chip in self.slow if _is_in(chip, place)]:
            del self.slow[chip]
        for ends in list(self.slow_wires):
            if any(_is_in(end, place) for end in ends):
                del self.slow_wires[ends]

    def took(self, step: int, seconds: float) -> None:
        """Take a step: how far the run is, and how long steps take."""
        self.step = step
        self.step_s = seconds if not self.step_s else 0.8 * self.step_s + 0.2 * seconds

    def look(self, members: Membership) -> Event | None:
        """Look at the situation; return the change to make, if one pays."""
        if members.phase is not Phase.RUNNING:
            return None
        situation = self._situation(members)
        now = time.monotonic()
        if situation.key != self._seen.key:
            self._seen, self._since, self._offer = situation, now, None
        same = situation.key == self._asked.key
        if self._search is not None and same:
            return self._found()
        if (same and not self._wanted) or now < self._since + STILL_S:
            return None
        self.close()  # what is still looked for is of a situation that is over
        why = situation.words(self._asked) or "asked to"
        self._asked = situation
        return self._begin(situation, why)

    def close(self) -> None:
        """End a search that is under way."""
        if self._search is not None:
            self._search.close()
            self._search = None

    # --- what there is ---------------------------------------------------------------------------

    def _situation(self, members: Membership) -> Situation:
        """Return the chips that could train now: those that do, and those that are ready."""
        seated = {seat.chip for seat in members.seats}
        reports = all_reports(members)
        ready = {
            chip
            for chip in members.chips()
            if chip in seated or reports[chip].standing is Standing.IDLE
        }
        bad = self._settler.bad()
        chips = frozenset(ready - bad)
        slow = {chip: factor for chip, factor in self.slow.items() if chip in chips}
        wires = {
            ends: factor
            for ends, factor in self.slow_wires.items()
            if all(any(_is_in(chip, end) for chip in chips) for end in ends)
        }
        return Situation(chips, slow, wires)

    def _begin(self, situation: Situation, why: str) -> Event | None:
        known = None if self._wanted else self._known.get(situation.key)
        if known is None and self._mode == "never":
            # one that came back is taken back, also while some chip is called slow
            plan = self._known.get(Situation(situation.chips).key)
            known = plan if plan != self._settler.current else None
        wanted, self._wanted = self._wanted, False
        if wanted and self._offer is not None:
            return self._take(*self._offer)
        if known is not None:
            if known == self._settler.current:
                return None
            return self._propose(known, f"{why}: the plan that was found for these chips before")
        if self._mode == "never":
            self._say("stays", f"{why}: no plan is looked for (elastic.replan: never)")
            return None
        self._say(
            "looking", f"{why}: a plan for {many(len(situation.chips), 'chip')} is looked for"
        )
        self._search = Search(
            self._job, self._settler.current, situation.chips, situation.slow, situation.slow_wires
        )
        self._why = why
        return None

    def _found(self) -> Event | None:
        assert self._search is not None
        answer = self._search.answer()
        if answer is None:
            return None
        self._search.close()
        self._search = None
        if isinstance(answer, str):
            self._say("stays", f"{self._why}: {answer}")
            return None
        pays, words = self.judge(answer)
        if not pays:
            self._say("stays", f"{self._why}: {words}")
            self._known[self._asked.key] = self._settler.current
            return None
        self._known[self._asked.key] = answer.plan
        return self._propose(answer.plan, f"{self._why}: {words}")

    def _propose(self, plan: Plan, words: str) -> Event | None:
        """Take a plan, or offer it where somebody wants to be asked."""
        if self._mode == "ask":
            self._offer = plan, words
            self._say("could", f"{words}; `tutti job replan RUN` takes it")
            return None
        return self._take(plan, words)

    def _take(self, plan: Plan, words: str) -> Event:
        self._settler.target, self._offer = plan, None
        self._say("replanned", words)
        return Change(words)

    def judge(self, answer: Proposal) -> tuple[bool, str]:
        """Tell whether a proposal pays in the time that is left, and say so with its figures."""
        left = max(self._job.config.steps - self.step, 0)
        staying = answer.staying_s
        # a forecast of the plan at hand that is off is off by as much for the other
        scale = self.step_s / staying if staying and self.step_s else 1.0
        new_s = answer.step_s * scale
        if staying is None:
            return True, f"{seconds_text(new_s)} per step; the plan at hand cannot go on"
        now_s = staying * scale
        gain = 1 - new_s / now_s
        cost = answer.movement_s + self.pause_s
        saved = left * (now_s - new_s)
        figures = (
            f"{seconds_text(new_s)} per step instead of {seconds_text(now_s)}, "
            f"{many(left, 'step')} left: saves {seconds_text(max(saved, 0.0))} for a pause of "
            f"{seconds_text(cost)}"
        )
        if gain < LEAST_GAIN:
            return False, f"nothing better than {seconds_text(now_s)} per step was found"
        if saved < MARGIN * cost:
            return False, f"{figures}, which does not pay"
        return True, figures


def _note(factors: dict[Part, float], part: Part, factor: float) -> None:
    if factor > 1.0:
        factors[part] = factor
    else:
        factors.pop(part, None)


def _is_in(part: str, place: str) -> bool:
    return part == place or part.startswith(f"{place}/")
