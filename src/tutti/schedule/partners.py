"""Which classes of ranks an instruction makes wait for each other.

One rule for everyone who runs the lists: the static check, the simulator, the engine. A Send and
its Receive join the two stages of a boundary; a collective joins the holders of its units, in one
pipeline or in all; tied weights join the stages that hold them; the norm joins everybody.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

from tutti.plan.plan import chunks, covers
from tutti.schedule.instruction import COLLECTIVES, Instruction, Op, Scope

if TYPE_CHECKING:
    from tutti.schedule.schedule import Schedule


class Partners:
    """Which classes must reach an instruction together."""

    def __init__(self, schedule: Schedule) -> None:
        self._classes = schedule.classes
        self._plan = schedule.plan
        by_stage: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, c in enumerate(schedule.classes):
            by_stage[c.pipeline, c.stage].append(index)
        self._ends: dict[tuple[int, int], frozenset[int]] = {}
        for p, pipeline in enumerate(schedule.plan.pipelines):
            path = chunks(pipeline)
            for lower, upper in itertools.pairwise(path):
                both = by_stage[p, lower.stage] + by_stage[p, upper.stage]
                self._ends[p, upper.start] = frozenset(both)
        plan = schedule.plan
        last = max(stop for _, _, stage in plan.stages() for _, stop in stage.units) - 1
        self._tied = frozenset(
            index
            for index, c in enumerate(schedule.classes)
            if any(covers(plan.pipelines[c.pipeline].stages[c.stage].units, u) for u in (0, last))
        )
        self._holders: dict[tuple[int, int | None], frozenset[int]] = {}

    def meeting(self, index: int, entry: Instruction) -> tuple[object, frozenset[int]] | None:
        """Return the meeting's key and members; None where no other class takes part.

        One key may come back several times in a list (a level-3 gather before forward and again
        before backward): the n-th time of one class meets the n-th time of the others.
        """
        series = self.series(index, entry)
        return None if series is None else ((series[0], entry.micro_batch), series[1])

    def series(self, index: int, entry: Instruction) -> tuple[object, frozenset[int]] | None:
        """Return the key that a meeting has in common with those of other micro-batches."""
        own = self._classes[index]
        if entry.op in (Op.SEND, Op.RECEIVE):
            return (own.pipeline, "move", entry.what, entry.start), self._ends[
                own.pipeline, entry.start
            ]
        if entry.op not in COLLECTIVES:
            return None
        if entry.op is Op.CLIP_NORM:
            members = frozenset(range(len(self._classes)))
        elif entry.op is Op.SYNC_TIED:
            members = self._tied
        else:
            pipeline = own.pipeline if entry.scope is Scope.PIPELINE else None
            members = self._holding(entry.start, pipeline)
        scope = own.pipeline if entry.scope is Scope.PIPELINE else None
        key = (scope, entry.op, entry.start, entry.stop, entry.what, entry.scope)
        return (key, members) if len(members) > 1 else None

    def _holding(self, unit: int, pipeline: int | None) -> frozenset[int]:
        if (unit, pipeline) not in self._holders:
            self._holders[unit, pipeline] = frozenset(
                index
                for index, c in enumerate(self._classes)
                if pipeline in (None, c.pipeline)
                and covers(self._plan.pipelines[c.pipeline].stages[c.stage].units, unit)
            )
        return self._holders[unit, pipeline]
