"""One order of everything that happens in a pipeline, seen from each stage.

The stages' actions are played against each other; whenever an action ends, its Send is written
into its own stage's list and the Receive into the neighbour's *at the same moment*. Each list is
thus a view of one common order, in which every pair of Send and Receive stands side by side: run
strictly in list order, even with sends that block until they are received, it cannot deadlock.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from tutti.errors import InputError
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import ChunkPlace, Pipeline, chunks
from tutti.schedule.emitter import make_tuple
from tutti.schedule.instruction import Op, What
from tutti.schedule.order import Action, Pass, orders


class BoundaryMove(NamedTuple):
    """A Send or Receive at the boundary before `unit`."""

    op: Op
    what: What
    unit: int
    micro_batch: int


Event = Action | BoundaryMove


def stage_events(pipeline: Pipeline, kind: ScheduleKind) -> list[list[Event]]:
    """Return each stage's actions with its sends and receives between them."""
    return _Play(pipeline, kind).run()


class _Play:
    """Runs the stages' actions on a common clock of relative times."""

    def __init__(self, pipeline: Pipeline, kind: ScheduleKind) -> None:
        path = chunks(pipeline)
        self.todo = orders(pipeline, kind)
        # A chunk takes its part of the stage's time, by units.
        self.times: list[tuple[float, float, float]] = []
        for chunk in path:
            stage = pipeline.stages[chunk.stage]
            part, order = (chunk.stop - chunk.start) / stage.num_units, stage.order
            self.times.append(
                (order.forward * part, order.backward_input * part, order.backward_weight * part)
            )
        self.routes = _routes(path)
        # Which inputs lie ready, by pass, chunk and micro-batch. The first chunk's forward waits
        # for nothing, and a weight pass stands behind its input pass in the order.
        waiting, ready = bytes(pipeline.micro_batches), b"\1" * pipeline.micro_batches
        self.ready = [
            [bytearray(waiting if chunk else ready) for chunk in range(len(path))],
            [bytearray(waiting) for _ in path],
            [bytearray(ready) for _ in path],
        ]
        self.events: list[list[Event]] = [[] for _ in pipeline.stages]

    def run(self) -> list[list[Event]]:
        """Start what can start, let the clock jump to the next end, hand the result on."""
        todo, ready, events = self.todo, self.ready, self.events
        position = [0] * len(todo)
        busy = [False] * len(todo)
        clock: list[tuple[float, int, Action]] = []
        now, played, waiting = 0.0, 0, list(range(len(todo)))
        while True:
            for stage in waiting:
                index = position[stage]
                if busy[stage] or index == len(todo[stage]):
                    continue
                action = todo[stage][index]
                kind, chunk, micro_batch = action
                if ready[kind][chunk][micro_batch]:
                    events[stage].append(action)
                    busy[stage] = True
                    position[stage] = index + 1
                    heapq.heappush(clock, (now + self.times[chunk][kind], stage, action))
            if not clock:
                break
            now, stage, (kind, chunk, micro_batch) = heapq.heappop(clock)
            played += 1
            busy[stage] = False
            waiting = [stage]
            if kind == Pass.BACKWARD_WEIGHT:
                continue
            route = self.routes[kind][chunk]
            if route is None:
                continue
            next_kind, next_chunk, target, what, unit = route
            ready[next_kind][next_chunk][micro_batch] = 1
            if target != stage:
                events[stage].append(make_tuple(BoundaryMove, (Op.SEND, what, unit, micro_batch)))
                events[target].append(
                    make_tuple(BoundaryMove, (Op.RECEIVE, what, unit, micro_batch))
                )
                waiting.append(target)
        if played < sum(map(len, todo)):
            raise self._stuck(position)
        return events

    def _stuck(self, position: list[int]) -> InputError:
        stage, action = next(
            (stage, actions[position[stage]])
            for stage, actions in enumerate(self.todo)
            if position[stage] < len(actions)
        )
        return InputError(
            f"the schedule's order cannot run: stage {stage} waits for ever at "
            f"{action.kind.name.lower()} of micro-batch {action.micro_batch} "
            "(warm-up depths must not grow along the pipeline)"
        )


class _Route(NamedTuple):
    """Where the result of a pass goes."""

    kind: Pass
    chunk: int
    stage: int
    what: What
    unit: int


def _routes(path: list[ChunkPlace]) -> tuple[list[_Route | None], list[_Route | None]]:
    """Return, for forward and input passes of each chunk, where their result goes."""
    last = len(path) - 1
    forward: list[_Route | None] = []
    backward: list[_Route | None] = []
    for index, chunk in enumerate(path):
        if index < last:
            after = path[index + 1]
            forward.append(
                _Route(Pass.FORWARD, index + 1, after.stage, What.ACTIVATIONS, after.start)
            )
        else:  # the loss is at once the last chunk's gradient
            forward.append(_Route(Pass.BACKWARD_INPUT, index, chunk.stage, What.GRADIENTS, 0))
        backward.append(
            _Route(
                Pass.BACKWARD_INPUT, index - 1, path[index - 1].stage, What.GRADIENTS, chunk.start
            )
            if index
            else None
        )
    return forward, backward
