"""What the next generation is: the plan for the chips that are there, and its state's source.

The plan that was decided on, or the one at hand, where all its chips are there; else what is left
of it. The files of plans lie in the run's folder, so that ranks read what was decided.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tutti.elastic.events import Phase, Settle, Settled, Unsettled
from tutti.elastic.journal import FOLDER, Entry
from tutti.elastic.known_chips import all_kept, all_reports
from tutti.elastic.membership import Membership
from tutti.elastic.sources import Past, find_source
from tutti.hardware.topology import Position
from tutti.launch.identity import used_chips
from tutti.observe.folder import CHECKPOINTS
from tutti.plan.files import load_plan, save_plan
from tutti.plan.plan import Plan
from tutti.search.replan.surviving_plan import surviving_plan
from tutti.train.checkpoint.folders import complete_folders, resolve
from tutti.train.checkpoint.manifest import read_manifest
from tutti.train.run.planning import Job
from tutti.train.run.starting import Resume, which_checkpoint
from tutti.units import many


class Settler:
    """Answers `Settle` for one job."""

    def __init__(self, job: Job, *, resume: Resume, started: bool = False) -> None:
        self._job, self._resume = job, resume
        self._past: dict[int, Past] = {}
        self._plans: dict[str, Plan] = {}
        self.current = job.plan  # of the generation at hand
        self.target: Plan | None = None  # that was decided on
        self._begun = started  # a generation of this run has trained: checkpoints are its own
        self.closing = ""  # why the generation at hand only saves
        self._deaths: dict[str, list[float]] = {}  # when processes of a chip ended

    def restore(self, entries: Sequence[Entry]) -> None:
        """Take the generations of a job whose controller was lost."""
        folder = self._job.config.folder
        for entry in entries:
            if entry.phase != Phase.ENTERING:
                continue
            if entry.plan not in self._plans:
                self._plans[entry.plan] = load_plan(folder / entry.plan)
            self.current = self._plans[entry.plan]
            self._past[entry.generation] = Past(plan=self.current, chips=entry.ranks)
        self._begun = True

    def died(self, chip: str) -> None:
        """Take note that a process of a chip ended."""
        self._deaths.setdefault(chip, []).append(time.monotonic())

    def forgive(self, place: str) -> None:
        """Forget how often the processes of a place ended."""
        for chip in list(self._deaths):
            if chip == place or chip.startswith(f"{place}/"):
                del self._deaths[chip]

    def bad(self) -> set[str]:
        """Return the chips whose processes end too often to be given a seat."""
        elastic = self._job.config.elastic
        assert elastic is not None
        since, most = time.monotonic() - 3600.0, elastic.restarts_per_hour
        return {
            chip for chip, times in self._deaths.items() if sum(at > since for at in times) > most
        }

    def __call__(self, question: Settle, members: Membership) -> Settled | Unsettled:
        """Return the next generation, or why there is none."""
        job = self._job
        assert job.config.elastic is not None
        bad, least = self.bad(), job.config.elastic.min_chips
        chips_left = [chip for chip in question.chips if chip not in bad]
        but = (
            f" ({many(len(bad), 'chip')} failed too often: {', '.join(sorted(bad))})" if bad else ""
        )
        self.closing = ""
        too_few = f"{many(len(chips_left), 'chip')} left{but}, elastic.min_chips is {least}"
        if len(chips_left) < least and question.last and self._plan(set(chips_left)) is not None:
            self.closing = too_few  # what they hold is saved, and then the job is given up
        elif len(chips_left) < least:
            return Unsettled(question.request, too_few)
        absent = [str(c) for c in used_chips(job.plan) if str(c) not in chips_left]
        if not self._past and absent and not question.last:
            return Unsettled(
                question.request, f"the job begins when all chips are there; not yet: {absent[0]}"
            )
        plan = self._plan(set(chips_left))
        if plan is None:
            wanted = len(used_chips(job.plan))
            return Unsettled(
                question.request,
                f"{many(len(chips_left), 'chip')} of {wanted} left{but}, and the model does not "
                "run on them under what is left of the plan",
            )
        chips = tuple(str(chip) for chip in used_chips(plan))
        self._learn(members)
        source = find_source(
            question.left,
            all_reports(members),
            self._past,
            job.spec,
            self._checkpoint(),
            all_kept(members),
        )
        name = self._saved(plan)
        if plan != self.current or but:
            under = "a new plan" if plan == self.target else "what is left of the plan"
            text = f"{source.text}; {many(len(chips), 'chip')} under {under}{but}"
            source = msgspec.structs.replace(source, text=text)
        self._past[members.generation + 1] = Past(plan=plan, chips=chips)
        self.current, self.target = plan, None
        return Settled(question.request, chips, name, source)

    def can_do_without(self, place: str, chips: Sequence[str]) -> bool:
        """Tell whether the job can go on without the chips of a place."""
        left = {chip for chip in chips if chip != place and not chip.startswith(f"{place}/")}
        return self._plan(left - self.bad()) is not None

    def _learn(self, members: Membership) -> None:
        """Only what was entered counts as past; what was asked for and not entered does not."""
        for generation in [g for g in self._past if g > members.generation]:
            del self._past[generation]

    def _plan(self, chips: set[str]) -> Plan | None:
        job = self._job
        for plan in (self.target, self.current):
            if plan is not None and {str(chip) for chip in used_chips(plan)} <= chips:
                return plan
        lost = frozenset(chip for chip in _all_chips(job) if str(chip) not in chips)
        for plan in (self.current, job.plan):
            left = surviving_plan(plan, job.spec, job.cluster, lost=lost)
            if left is not None:
                return left
        return None

    def _saved(self, plan: Plan) -> str:
        for name, known in self._plans.items():
            if known == plan:
                return name
        folder = self._job.config.folder
        name = f"{FOLDER}/plan-{len(self._plans)}.json"
        (folder / FOLDER).mkdir(exist_ok=True)
        save_plan(plan, folder / name)
        self._plans[name] = plan
        return name

    def _checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint that belongs to this run."""
        folder = self._job.config.folder / CHECKPOINTS
        if self._resume is not False and not self._begun:
            self._begun = True
            path = resolve(folder, which_checkpoint(self._resume))[0]
            return read_manifest(path).progress.step
        self._begun = True
        steps = [read_manifest(path).progress.step for path in complete_folders(folder)]
        return max(steps, default=None)


def _all_chips(job: Job) -> list[Position]:
    return [
        Position(pool.name, node, slot)
        for pool in job.cluster.pools
        for node in range(pool.nodes)
        for slot in range(pool.node.num_chips)
    ]
