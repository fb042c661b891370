"""Traces of real steps: each rank's spans, gathered after the step, written by rank 0.

Only the steps that are asked for cost anything, and that after they were timed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from tutti.comm import Communicator
from tutti.observe.folder import trace_name
from tutti.ranks.clocks import Offset, clock_offsets, kernel_name
from tutti.ranks.rank_places import class_of
from tutti.schedule.instruction import Op
from tutti.simulate.measured import (
    CollectiveRun,
    MeasuredRank,
    MeasuredStep,
    run_from_document,
    settled,
    write_measured,
)
from tutti.simulate.program import Program
from tutti.train.engine.engine import Engine
from tutti.train.engine.recorder import Spans
from tutti.train.run.rank_context import RankContext
from tutti.units import seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """What one rank sends to rank 0."""

    rank: int
    rank_class: int
    pool: str
    kernel: str
    spans: Spans
    parts: dict[str, float]
    sources: dict[tuple[int, str], tuple[int, ...]]
    emulated: bool
    programs: tuple[CollectiveRun, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """Return plain values."""
        spans = self.spans
        return {
            "rank": self.rank,
            "rank_class": self.rank_class,
            "pool": self.pool,
            "kernel": self.kernel,
            "spans": {
                "start": spans.start.tolist(),
                "end": spans.end.tolist(),
                "step_s": spans.step_s,
                "began": spans.began,
                "waited": spans.waited.tolist(),
            },
            "parts": self.parts,
            "sources": [[unit, what, list(ranks)] for (unit, what), ranks in self.sources.items()],
            "emulated": self.emulated,
            "programs": [asdict(run) for run in self.programs],
        }

    @classmethod
    def from_document(cls, value: dict[str, Any]) -> RankSpans:
        """Read what `to_document` wrote."""
        spans: dict[str, Any] = {
            name: np.asarray(column, dtype=np.float64) if isinstance(column, list) else column
            for name, column in value["spans"].items()
        }
        sources = {(unit, what): tuple(ranks) for unit, what, ranks in value["sources"]}
        programs = tuple(run_from_document(run) for run in value["programs"])
        read = {"spans": Spans(**spans), "sources": sources, "programs": programs}
        return cls(**{**value, **read})


class Programs(Protocol):
    """What counts the collective programs that a rank's groups run."""

    def forget_programs(self) -> None:
        """Count what runs anew from now on."""

    def programs(self) -> tuple[CollectiveRun, ...]:
        """Return what ran in the groups of which this rank is the first."""


class Tracer:
    """Gathers and writes the steps that a run is to trace."""

    def __init__(
        self,
        context: RankContext,
        engine: Engine,
        links: Programs,
        control: Communicator,
        program: Program,
    ) -> None:
        """Trace an engine's steps; `program` is the compiled schedule of its plan."""
        self._context, self._engine, self._links = context, engine, links
        self._control, self._program = control, program
        self._steps = frozenset(context.config.measure.trace_steps)

    def announce(self, first: int, last: int) -> None:
        """Say which steps of `first`…`last` will not be traced although asked for."""
        missed = sorted(step for step in self._steps if not first < step <= last)
        if missed and self._context.rank == 0:
            numbers = ", ".join(map(str, missed))
            text = f"measure.trace_steps: this run has no step {numbers}"
            self._context.warn(f"{text}; it goes from {first + 1} to {last}")

    def wants(self, number: int) -> bool:
        """Tell whether a step is to be traced; one that will be begins to count its programs."""
        if number in self._steps:
            self._links.forget_programs()
        return number in self._steps

    def step(self, number: int) -> None:
        """Write the step that is just over; all ranks call this."""
        own = rank_spans(self._engine, self._links.programs())
        kernels = self._control.gather_values(own.kernel)
        assert kernels is not None
        offsets = clock_offsets(self._control, kernels)
        gathered = self._control.gather_values(own.to_document(), root=0)
        if gathered is not None:
            self._write(number, [RankSpans.from_document(value) for value in gathered], offsets)
        # or the next step of the others would hold rank 0's writing as bubble
        self._control.barrier().wait()

    def _write(self, number: int, gathered: list[RankSpans], offsets: dict[str, Offset]) -> None:
        path = self._context.config.folder / trace_name(number)
        measured = settled(self._program, joined(number, gathered, offsets))
        write_measured(path, self._program, measured)
        self._context.say(f"trace of step {number}: {path}")


def rank_spans(engine: Engine, programs: tuple[CollectiveRun, ...] = ()) -> RankSpans:
    """Return the step that an engine ran last, with the programs of its collectives."""
    moves = {(e.start, e.what) for e in engine.instructions if e.op is Op.RECEIVE}
    return RankSpans(
        rank=engine.seat.rank,
        rank_class=class_of(engine.schedule, engine.seat),
        pool=engine.seat.place.chip.pool,
        kernel=kernel_name(),
        spans=engine.recorder.spans(),
        parts=asdict(engine.recorder.times()),
        sources={(u, w.value): engine.boundaries.sources(u, w) for u, w in moves},
        emulated=engine.accelerator.name == "emulated",
        programs=programs,
    )


def joined(step: int, ranks: list[RankSpans], offsets: dict[str, Offset]) -> MeasuredStep:
    """Return the step of all ranks on rank 0's clock, from when the first of them began."""
    begun = [own.spans.began - offsets[own.kernel].seconds for own in ranks]
    first = min(begun)
    measured = []
    for own, began in zip(ranks, begun, strict=True):
        shift, spans = began - first, own.spans
        measured.append(
            MeasuredRank(
                rank=own.rank,
                rank_class=own.rank_class,
                pool=own.pool,
                shift_s=shift,
                step_s=spans.step_s,
                start=spans.start + shift,
                end=spans.end + shift,
                waited=spans.waited,
                parts=own.parts,
                sources=own.sources,
            )
        )
    return MeasuredStep(
        step=step,
        ranks=tuple(measured),
        collectives=tuple(run for own in ranks for run in own.programs),
        clock=_clock(offsets),
        emulated=any(own.emulated for own in ranks),
    )


def _clock(offsets: dict[str, Offset]) -> str:
    if len(offsets) == 1:
        return "all ranks share one host's clock"
    worst = max(offset.error_s for offset in offsets.values())
    return (
        f"clocks of {len(offsets)} hosts, laid over each other by round trips; "
        f"wrong by at most {seconds_text(worst)}"
    )
