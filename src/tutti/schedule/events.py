"""One order of everything that happens in a pipeline, seen from each stage.

The stages' actions are played against each other; whenever an action ends, its Send is written
into its own stage's list and the Receive into the neighbour's *at the same moment*. Each list is
thus a view of one common order, in which every pair of Send and Receive stands side by side: run
strictly in list order, even with sends that block until they are received, it cannot deadlock.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

from tutti.errors import InputError
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Pipeline, chunks
from tutti.schedule.instruction import Op, What
from tutti.schedule.order import Action, Pass, orders


class Move(NamedTuple):
    """A Send or Receive at the boundary before `unit`."""

    op: Op
    what: What
    unit: int
    micro_batch: int


Event = Action | Move


def stage_events(pipeline: Pipeline, kind: ScheduleKind) -> list[list[Event]]:
    """Return each stage's actions with its sends and receives between them."""
    return _Play(pipeline, kind).run()


class _Play:
    """Runs the stages' actions on a common clock of relative times."""

    def __init__(self, pipeline: Pipeline, kind: ScheduleKind) -> None:
        self.path = chunks(pipeline)
        self.todo = [deque(actions) for actions in orders(pipeline, kind)]
        self.total = sum(map(len, self.todo))
        # A chunk takes its part of the stage's time, by units.
        self.times = [
            tuple(
                time * (chunk.stop - chunk.start) / pipeline.stages[chunk.stage].num_units
                for time in (
                    pipeline.stages[chunk.stage].order.forward,
                    pipeline.stages[chunk.stage].order.backward_input,
                    pipeline.stages[chunk.stage].order.backward_weight,
                )
            )
            for chunk in self.path
        ]
        last = len(self.path) - 1
        # The inputs that lie ready; the first chunk's forward needs none.
        self.arrived: set[tuple[int, int, int]] = set()
        self.first, self.last = 0, last
        self.events: list[list[Event]] = [[] for _ in pipeline.stages]
        self.busy = [False] * len(pipeline.stages)

    def run(self) -> list[list[Event]]:
        clock: list[tuple[float, int, Action]] = []
        now, waiting, played = 0.0, list(range(len(self.todo))), 0
        while waiting or clock:
            for stage in waiting:
                action = self._startable(stage)
                if action is not None:
                    self.events[stage].append(action)
                    self.busy[stage] = True
                    end = now + self.times[action.chunk][action.kind]
                    heapq.heappush(clock, (end, stage, action))
            if not clock:
                break
            now, stage, action = heapq.heappop(clock)
            played += 1
            self.busy[stage] = False
            target = self._finish(stage, action)
            waiting = [stage] if target is None else [stage, target]
        if played < self.total:
            raise self._stuck()
        return self.events

    def _startable(self, stage: int) -> Action | None:
        if self.busy[stage] or not self.todo[stage]:
            return None
        action = self.todo[stage][0]
        if self._needs_input(action) and action not in self.arrived:
            return None
        self.arrived.discard(action)
        return self.todo[stage].popleft()

    def _needs_input(self, action: Action) -> bool:
        if action.kind == Pass.FORWARD:
            return action.chunk != self.first
        return action.kind == Pass.BACKWARD_INPUT

    def _finish(self, stage: int, action: Action) -> int | None:
        """Hand the result on; return the stage that it reached, if another."""
        kind, chunk, micro_batch = action
        if kind == Pass.FORWARD and chunk == self.last:
            self.arrived.add((Pass.BACKWARD_INPUT, chunk, micro_batch))  # the loss is its gradient
            return None
        if kind == Pass.FORWARD:
            neighbour, unit, what = chunk + 1, self.path[chunk + 1].start, What.ACTIVATIONS
        elif kind == Pass.BACKWARD_INPUT and chunk > self.first:
            neighbour, unit, what = chunk - 1, self.path[chunk].start, What.GRADIENTS
        else:
            return None
        self.arrived.add((kind, neighbour, micro_batch))
        target = self.path[neighbour].stage
        if target == stage:
            return None
        self.events[stage].append(Move(Op.SEND, what, unit, micro_batch))
        self.events[target].append(Move(Op.RECEIVE, what, unit, micro_batch))
        return target

    def _stuck(self) -> InputError:
        waits = [
            f"stage {stage} at {todo[0].kind.name.lower()} of micro-batch {todo[0].micro_batch}"
            for stage, todo in enumerate(self.todo)
            if todo
        ]
        return InputError(
            f"the schedule's order cannot run: {waits[0]} waits for ever"
            " (warm-up depths must not grow along the pipeline)"
        )
