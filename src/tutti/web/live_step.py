"""A real step laid over the simulated one: from the rings of a run, or from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tutti.cost.plan.sources import Sources
from tutti.errors import InputError, TuttiError
from tutti.files import read_file
from tutti.hardware.profile import Profile
from tutti.observe.folder import PLAN_FILE, RINGS, RUN_FILE, trace_name
from tutti.observe.ring import Kind, RingReading, read_rings
from tutti.observe.ring_export import spans
from tutti.plan.files import load_plan
from tutti.plan.plan import Plan, RankMap
from tutti.ranks.rank_places import class_at
from tutti.report.binary import Pack
from tutti.report.overlay import overlay_timeline
from tutti.simulate.estimate import estimate
from tutti.simulate.measured import MeasuredRank, MeasuredStep, read_measured
from tutti.simulate.program import Track
from tutti.simulate.result import SimulationResult
from tutti.web.watched import Document, missing

MOST_RANKS = 512  # more classes and ranks than a timeline is read with


class SimulatedPlan:
    """A run's plan, simulated once, with the profiles that the run was planned with."""

    def __init__(self, folder: Path) -> None:
        self.plan = load_plan(folder / PLAN_FILE)
        self.result: SimulationResult = estimate(self.plan, sources=_sources(folder)).result
        self.map = RankMap(self.plan)

    def class_of(self, rank: int) -> int:
        """Return to which class of equal ranks a rank belongs."""
        return class_at(self.result.program.schedule, self.map.place(rank))


def _sources(folder: Path) -> Sources:
    try:
        document: Any = read_file(folder / RUN_FILE)
        names = document["job"].get("chip_profiles") or ()
        return Sources(profiles=tuple(Profile.find(str(name)) for name in names))
    except (TuttiError, KeyError, TypeError, AttributeError):
        return Sources()  # a profile that is gone: the catalog's figures


def steps_of(folder: Path) -> list[int]:
    """Return the steps that have a trace."""
    known = (p.stem.rpartition("-")[2] for p in folder.glob(trace_name("*")))
    return sorted(int(text) for text in known if text.isdecimal())


def step_view(folder: Path, simulated: SimulatedPlan, asked: str) -> Document:
    """Return the timelines of a step: a traced one, or the newest whole one of the rings."""
    traced = steps_of(folder)
    try:
        if asked.isdecimal() and int(asked) in traced:
            step = read_measured(folder / trace_name(int(asked)), simulated.result.program)
            source = trace_name(int(asked))
        else:
            step, source = newest_step(simulated, read_rings(folder / RINGS)[0]), RINGS
    except InputError as error:
        if not traced:
            return missing(f"no step to draw: {error}")
        step = read_measured(folder / trace_name(traced[-1]), simulated.result.program)
        source = trace_name(traced[-1])
    arrays = Pack()
    section = overlay_timeline(simulated.result, step, arrays)
    return {
        "step": step.step,
        "source": source,
        "traced": traced,
        "real_s": step.step_seconds,
        "simulated_s": simulated.result.step_seconds,
        "intro": section.intro,
        "body": section.body,
        "data": dict(section.data),
        "arrays": arrays.directory,
        "packed": arrays.text(),
    }


def newest_step(simulated: SimulatedPlan, rings: list[RingReading]) -> MeasuredStep:
    """Return the last step that all ranks' rings hold from begin to end."""
    plan = simulated.plan
    if not rings:
        raise InputError("the run has no rings")
    if len(rings) > MOST_RANKS:
        rings = rings[:MOST_RANKS]
    whole = set.intersection(*(_whole_steps(ring) for ring in rings))
    if not whole:
        raise InputError("the rings hold no step from begin to end")
    step = max(whole)
    begins = {ring.rank: _begin(ring, step) for ring in rings}
    first = min(begins.values())
    ranks = [_measured(simulated, plan, ring, step, first) for ring in rings]
    return MeasuredStep(step=step, ranks=tuple(ranks), clock="clocks of the hosts, as they are")


def _whole_steps(ring: RingReading) -> set[int]:
    began = {e.step for e in ring.events if e.kind is Kind.STEP}
    return began & {e.step for e in ring.events if e.kind is Kind.STEP_END}


def _begin(ring: RingReading, step: int) -> int:
    begins = (e.time_ns for e in ring.events if e.kind is Kind.STEP and e.step == step)
    return max(begins) + ring.clock_ns


def _measured(
    simulated: SimulatedPlan, plan: Plan, ring: RingReading, step: int, first: int
) -> MeasuredRank:
    own = simulated.class_of(ring.rank)
    program = simulated.result.program
    span = program.span(own)
    count = span.stop - span.start
    if count != len(ring.instructions) or ring.rank >= plan.num_ranks:
        raise InputError("the rings are of another plan")
    start, end, waited = (np.zeros(count) for _ in range(3))
    beside = program.track[span] != Track.COMPUTE
    zero = first - ring.clock_ns
    for one in spans(ring):
        if one.step != step or one.end_ns is None:
            continue
        begin_s, end_s = (one.begin_ns - zero) / 1e9, (one.end_ns - zero) / 1e9
        if one.waits:
            waited[one.instruction] += end_s - begin_s
        else:
            start[one.instruction] = begin_s
        # what goes over the network is over when the wait for it is
        if not one.waits or beside[one.instruction]:
            end[one.instruction] = max(end[one.instruction], end_s)
    begin = _begin(ring, step)
    over = max(e.time_ns for e in ring.events if e.kind is Kind.STEP_END and e.step == step)
    return MeasuredRank(
        rank=ring.rank, rank_class=own, pool=simulated.map.place(ring.rank).chip.pool,
        shift_s=(begin - first) / 1e9, step_s=(over + ring.clock_ns - begin) / 1e9,
        start=start, end=np.maximum(end, start), waited=waited, parts={},
    )  # fmt: skip
