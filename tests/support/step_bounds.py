"""Proven lower bounds for step times: no plan is faster.

The step is at least as long as any path through its dependencies. For each class
of ranks we take: its first micro-batch down to it, all its passes in their order up to its last
input gradient, that gradient's way back to the first stage, the weight pass there; or, if longer,
all its passes alone; then the norm and the slowest optimizer step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tutti.cost.plan.simulator_inputs import FloatArray, StepCosts
from tutti.plan.plan import chunks
from tutti.schedule.instruction import Instruction, Op, What
from tutti.schedule.schedule import RankClass, Schedule

_PASSES = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class LowerBound:
    """A step time that cannot be beaten, and the class of ranks that it comes from."""

    seconds: float
    rank_class: int


def lower_bound(schedule: Schedule, costs: StepCosts) -> LowerBound:
    """Return the bound for unequal stages (see above) from the lists and their costs."""
    best, owner = 0.0, 0
    for p in range(len(schedule.plan.pipelines)):
        members = [i for i, c in enumerate(schedule.classes) if c.pipeline == p]
        for index, seconds in _Paths(schedule, costs, p, members).bounds():
            if seconds > best:
                best, owner = seconds, index
    return LowerBound(best + _closing(schedule, costs), owner)


def _closing(schedule: Schedule, costs: StepCosts) -> float:
    """Return what follows all passes of all ranks: the norm, and behind it every step."""
    norm = step = 0.0
    for rank_class, given in zip(schedule.classes, costs.classes, strict=True):
        norm = max(norm, float(given.seconds[_where(rank_class, Op.CLIP_NORM)].sum()))
        step = max(step, float(given.seconds[_where(rank_class, Op.STEP)].sum()))
    return norm + step


def _where(rank_class: RankClass, op: Op) -> list[int]:
    return [i for i, entry in enumerate(rank_class.instructions) if entry.op is op]


class _Paths:
    """The ways of single micro-batches through the chunks of one pipeline.

    A micro-batch leaves a chunk when the slowest class of its stage has computed and sent it;
    all figures here are sums along dependencies, so none exceeds the real time.
    """

    def __init__(
        self, schedule: Schedule, costs: StepCosts, pipeline: int, members: list[int]
    ) -> None:
        self.path = chunks(schedule.plan.pipelines[pipeline])
        self.chunk_of = {u: k for k, c in enumerate(self.path) for u in range(c.start, c.stop)}
        self.by_stage: dict[int, list[int]] = defaultdict(list)
        for index in members:
            self.by_stage[schedule.classes[index].stage].append(index)
        self.lists = {index: schedule.classes[index].instructions for index in members}
        self.seconds = {index: costs.classes[index].seconds for index in members}
        self.passes: dict[tuple[int, Op, int, int], float] = defaultdict(float)
        self.moves: dict[tuple[int, Op, What, int, int], float] = {}
        self.lowest_weights: dict[tuple[int, int], float] = {}
        for index in members:
            self._collect(index)

    def _collect(self, index: int) -> None:
        for entry, seconds in zip(self.lists[index], self.seconds[index].tolist(), strict=True):
            if entry.op in (Op.SEND, Op.RECEIVE):
                key = (index, entry.op, entry.what, entry.start, entry.micro_batch)
                self.moves[key] = seconds
            elif entry.op in (Op.FORWARD, Op.BACKWARD_INPUT):
                chunk = self.chunk_of[entry.start]
                self.passes[index, entry.op, chunk, entry.micro_batch] += seconds
            elif entry.op is Op.BACKWARD_WEIGHT and entry.start == 0:
                self.lowest_weights[index, entry.micro_batch] = seconds

    def _hop(self, what: What, unit: int, micro_batch: int, ready: dict[int, float]) -> float:
        """Return when the slowest of the sending classes has sent."""
        return max(
            at + self.moves.get((index, Op.SEND, what, unit, micro_batch), 0.0)
            for index, at in ready.items()
        )

    def _enter(
        self, stage: int, what: What, unit: int, micro_batch: int, arrived: float
    ) -> dict[int, float]:
        return {
            index: arrived + self.moves.get((index, Op.RECEIVE, what, unit, micro_batch), 0.0)
            for index in self.by_stage[stage]
        }

    def _after(
        self, ready: dict[int, float], op: Op, chunk: int, micro_batch: int
    ) -> dict[int, float]:
        return {
            index: at + self.passes[index, op, chunk, micro_batch] for index, at in ready.items()
        }

    def down(self, index: int, chunk: int, micro_batch: int) -> float:
        """Return the earliest moment at which a class can begin a micro-batch's chunk."""
        ready = dict.fromkeys(self.by_stage[self.path[0].stage], 0.0)
        for k in range(chunk):
            ready = self._after(ready, Op.FORWARD, k, micro_batch)
            unit, stage = self.path[k + 1].start, self.path[k + 1].stage
            if stage != self.path[k].stage:
                sent = self._hop(What.ACTIVATIONS, unit, micro_batch, ready)
                ready = self._enter(stage, What.ACTIVATIONS, unit, micro_batch, sent)
        return ready[index]

    def back(self, index: int, chunk: int, micro_batch: int) -> float:
        """Return how long the step goes on, at least, behind a chunk's input gradient."""
        ready = {index: 0.0}
        for k in range(chunk, 0, -1):
            unit, stage = self.path[k].start, self.path[k - 1].stage
            if stage != self.path[k].stage:
                sent = self._hop(What.GRADIENTS, unit, micro_batch, ready)
                ready = self._enter(stage, What.GRADIENTS, unit, micro_batch, sent)
            ready = self._after(ready, Op.BACKWARD_INPUT, k - 1, micro_batch)
        return max(at + self.lowest_weights[i, micro_batch] for i, at in ready.items())

    def bounds(self) -> list[tuple[int, float]]:
        """Return each class's bound on the end of all passes."""
        return [(index, self._bound(index)) for index in self.lists]

    def _bound(self, index: int) -> float:
        passes = [(i, e) for i, e in enumerate(self.lists[index]) if e.op in _PASSES]
        times: FloatArray = np.cumsum(self.seconds[index][[i for i, _ in passes]])
        first: Instruction = passes[0][1]
        ahead = self.down(index, self.chunk_of[first.start], first.micro_batch)
        bound = ahead + float(times[-1])
        lowest = min(k for k, c in enumerate(self.path) if index in self.by_stage[c.stage])
        bottom = self.path[lowest].start
        for position in range(len(passes) - 1, -1, -1):
            entry = passes[position][1]
            if entry.op is Op.BACKWARD_INPUT and entry.start == bottom:
                rest = self.back(index, lowest, entry.micro_batch)
                return max(bound, ahead + float(times[position]) + rest)
        return bound
