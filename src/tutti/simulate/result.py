"""What a simulated step tells: times, idle lanes and why, the critical path, memory.

Everything is derived from the start and end of each instruction and from the one that it waited
for last; what costs time to derive is derived when first asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from tutti.cost.plan.simulator_inputs import FloatArray, StepCosts
from tutti.schedule.instruction import Instruction, Op
from tutti.schedule.listing import OPS, Integers
from tutti.simulate.labels import ClassLabel, labels_of
from tutti.simulate.memory import MemoryCurve, memory_curve
from tutti.simulate.program import Program, Track
from tutti.units import bytes_text


class IdleReason(StrEnum):
    """What a compute lane waits for."""

    COMMUNICATION = "exposed communication"  # the network, and nothing else
    COPY = "exposed copies"  # between host and chip
    BUBBLE = "bubble"  # other ranks' compute


IDLE_REASONS = tuple(IdleReason)

# How compute time is split where the costs bring no breakdown of their own.
PASSES: dict[str, tuple[Op, ...]] = {
    "forward": (Op.FORWARD,),
    "backward": (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT),
    "recompute": (Op.RECOMPUTE,),
    "optimizer": (Op.STEP,),
}


class PathEntry(NamedTuple):
    """One instruction of the critical path; the next one starts when it ends."""

    rank_class: int
    instruction: int  # in the class's list
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class ClassResult:
    """The step as one class of ranks sees it; `compute` and `idle` add up to the step."""

    num_ranks: int
    step_seconds: float
    occupied: Callable[[Track], float]  # seconds in which anything runs on a track
    compute: Mapping[str, float]  # busy compute seconds by category
    idle: Mapping[IdleReason, float]  # idle compute seconds by reason
    peak_bytes: float
    static_bytes: float

    @functools.cached_property
    def busy_seconds(self) -> dict[Track, float]:
        """Busy time of every track."""
        return {track: self.occupied(track) for track in Track}

    @property
    def idle_seconds(self) -> dict[Track, float]:
        """Idle time of every track."""
        return {track: self.step_seconds - busy for track, busy in self.busy_seconds.items()}

    @functools.cached_property
    def idle_compute_seconds(self) -> float:
        """Idle time of the compute lane, for whatever reason."""
        return self.step_seconds - self.occupied(Track.COMPUTE)

    @property
    def idle_share(self) -> float:
        """Idle share of the compute lane."""
        return self.idle_compute_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def bubble_seconds(self) -> float:
        """Time in which compute waits for other ranks' compute."""
        return self.idle[IdleReason.BUBBLE]

    @property
    def bubble_share(self) -> float:
        """Share of the step that is bubble."""
        return self.bubble_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def exposed_communication_seconds(self) -> float:
        """Time in which compute waits for the network and for nothing else."""
        return self.idle[IdleReason.COMMUNICATION]


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulationResult:
    """One simulated step; arrays run over all instructions of all classes (`program.offsets`)."""

    program: Program
    costs: StepCosts
    start: FloatArray
    end: FloatArray
    binding: Integers
    idle: FloatArray  # class × IDLE_REASONS, seconds

    @functools.cached_property
    def step_seconds(self) -> float:
        """When the last instruction ends."""
        return float(self.end.max(initial=0.0))

    @property
    def num_classes(self) -> int:
        """Number of classes of ranks."""
        return len(self.costs.classes)

    def timeline(self, index: int) -> tuple[FloatArray, FloatArray]:
        """Return start and end of each instruction of a class."""
        span = self.program.span(index)
        return self.start[span], self.end[span]

    def instruction(self, entry: PathEntry) -> Instruction:
        """Return the instruction that an entry of the critical path stands for."""
        return self.program.schedule.classes[entry.rank_class].instructions[entry.instruction]

    def memory(self, index: int) -> MemoryCurve:
        """Return the memory over time of a class's ranks."""
        return self._curves[index]

    @functools.cached_property
    def _curves(self) -> tuple[MemoryCurve, ...]:
        return tuple(memory_curve(*self.timeline(i), c) for i, c in enumerate(self.costs.classes))

    @functools.cached_property
    def critical_indices(self) -> list[int]:
        """The critical path as flat indices, first instruction first."""
        if not self.program.size:
            return []
        path = []
        at = int(np.argmax(self.end))
        while at >= 0:
            path.append(at)
            at = int(self.binding[at])
        return path[::-1]

    @functools.cached_property
    def critical_path(self) -> list[PathEntry]:
        """The chain of instructions, each waiting for the one before, that the step lasts."""
        return [
            PathEntry(*self.program.place(i), float(self.start[i]), float(self.end[i]))
            for i in self.critical_indices
        ]

    @functools.cached_property
    def critical_seconds(self) -> dict[str, float]:
        """The critical path's seconds by kind of instruction, longest first."""
        path = np.array(self.critical_indices, dtype=np.int64)
        spent = np.bincount(
            self.program.op[path],
            weights=self.end[path] - self.start[path],
            minlength=len(OPS),
        )
        by_operation = {op.value: float(s) for op, s in zip(OPS, spent, strict=True) if s > 0}
        return dict(sorted(by_operation.items(), key=lambda item: -item[1]))

    @functools.cached_property
    def classes(self) -> tuple[ClassResult, ...]:
        """The step as each class sees it."""
        return tuple(self._class_result(i) for i in range(self.num_classes))

    def _class_result(self, index: int) -> ClassResult:
        return ClassResult(
            num_ranks=self.program.schedule.classes[index].num_ranks,
            step_seconds=self.step_seconds,
            occupied=functools.partial(self._occupied, index),
            compute=self._compute(index),
            idle=dict(zip(IDLE_REASONS, self.idle[index].tolist(), strict=True)),
            peak_bytes=self.memory(index).peak_bytes,
            static_bytes=self.costs.classes[index].static_bytes,
        )

    def _occupied(self, index: int, track: Track) -> float:
        start, end = self.timeline(index)
        chosen = self.program.track[self.program.span(index)] == track
        return union_seconds(start[chosen], end[chosen])

    def _compute(self, index: int) -> dict[str, float]:
        costs = self.costs.classes[index]
        span = self.program.span(index)
        if costs.breakdown is not None:
            chosen = np.flatnonzero(self.program.track[span] == Track.COMPUTE)
            names = self.costs.categories
            seconds = costs.by_category(chosen, len(names))
            return dict(zip(names, seconds.tolist(), strict=True))
        spent = np.bincount(self.program.op[span], weights=costs.seconds, minlength=len(OPS))
        return {
            name: float(sum(spent[OPS.index(op)] for op in ops)) for name, ops in PASSES.items()
        }

    @property
    def idle_share(self) -> float:
        """Idle share of all chips' compute lanes; the sum over all reasons."""
        return sum(map(self.share, IDLE_REASONS))

    def share(self, reason: IdleReason) -> float:
        """Return the share of all chips' compute time that is lost to one reason."""
        total = sum(c.num_ranks for c in self.classes) * self.step_seconds
        lost = sum(c.num_ranks * c.idle[reason] for c in self.classes)
        return lost / total if total else 0.0

    def warnings(self, labels: tuple[ClassLabel, ...] | None = None) -> list[str]:
        """Return what a reader must know: memory that does not fit, or does not add up."""
        warnings: list[str] = []
        labels = labels_of(self.program.schedule) if labels is None else labels
        for index, label in enumerate(labels):
            curve = self.memory(index)
            peak = curve.peak_bytes if label.peak_bytes is None else label.peak_bytes
            if label.limit_bytes is not None and peak > label.limit_bytes:
                warnings.append(
                    f"{label.name}: needs {bytes_text(peak)} of "
                    f"{bytes_text(label.limit_bytes)} per chip"
                )
            slack = 1e-9 * curve.peak_bytes + 1.0
            if curve.least_bytes < curve.static_bytes - slack:
                warnings.append(f"{label.name}: more memory is given back than was taken")
            elif abs(curve.final_bytes - curve.static_bytes) > slack:
                left = bytes_text(curve.final_bytes - curve.static_bytes)
                warnings.append(f"{label.name}: {left} are still in use when the step is over")
        return warnings


def union_seconds(start: FloatArray, end: FloatArray) -> float:
    """Return how long at least one of the intervals lasts."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    begins, ends = start[order], end[order]
    covered = np.maximum.accumulate(ends)
    begins[1:] = np.maximum(begins[1:], covered[:-1])
    return float(np.maximum(ends - begins, 0.0).sum())
