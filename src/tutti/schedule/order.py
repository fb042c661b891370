"""In which order a stage computes: pure functions from pipeline shapes to lists of actions.

An action is a forward, an input-gradient or a weight-gradient pass of one chunk (a unit range)
for one micro-batch. How far a stage runs ahead says the record of the kind. GPipe, 1F1B and
interleaved 1F1B have fixed orders in which the weight pass follows its input pass at once; the
zero-bubble order is found by a list scheduler that lets weight passes fill the gaps which unequal
stages leave.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from tutti.errors import InputError, hint
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import ChunkPlace, Order, Pipeline, chunks
from tutti.plan.schedules import warm_up_depth


class Pass(IntEnum):
    """The three passes of a chunk."""

    FORWARD = 0
    BACKWARD_INPUT = 1
    BACKWARD_WEIGHT = 2


class Action(NamedTuple):
    """One pass of one chunk for one micro-batch; `chunk` counts along the micro-batch's path."""

    kind: Pass
    chunk: int
    micro_batch: int


def orders(pipeline: Pipeline, kind: ScheduleKind) -> list[list[Action]]:
    """Return each stage's actions in its order."""
    if kind not in _ORDERS:
        raise InputError(f"schedule '{kind}' has no order; {hint(kind, _ORDERS)}")
    depths = [warm_up_depth(pipeline, stage, kind) for stage in range(len(pipeline.stages))]
    return _ORDERS[kind](pipeline, depths)


def _own_chunks(path: list[ChunkPlace], stage: int) -> list[int]:
    return [index for index, chunk in enumerate(path) if chunk.stage == stage]


def _in_turn(pipeline: Pipeline, depths: list[int]) -> list[list[Action]]:
    """Run some forwards ahead, then a backward and a forward in turn, then what is left.

    Where stages have several chunks, micro-batches pass in groups through chunk after chunk; a
    group is at least a round long.
    """
    path, count = chunks(pipeline), pipeline.micro_batches
    num_groups = max(1, count // len(pipeline.stages))
    bounds = [count * g // num_groups for g in range(num_groups + 1)]
    groups = [range(*span) for span in itertools.pairwise(bounds)]
    lists = []
    for stage, ahead in enumerate(depths):
        own = _own_chunks(path, stage)
        forwards = [Action(Pass.FORWARD, chunk, m) for g in groups for chunk in own for m in g]
        backwards = [(chunk, m) for g in groups for chunk in reversed(own) for m in g]
        actions = forwards[:ahead]
        for following, work in enumerate(backwards, ahead):
            actions += (Action(Pass.BACKWARD_INPUT, *work), Action(Pass.BACKWARD_WEIGHT, *work))
            actions += forwards[following : following + 1]
        lists.append(actions)
    return lists


class _StageState:
    """A stage inside the zero-bubble list scheduler."""

    __slots__ = ("actions", "chunk", "depth", "done", "free", "limit", "ready", "times")

    def __init__(self, order: Order, chunk: int, depth: int, limit: int) -> None:
        self.chunk = chunk
        self.times = (order.forward, order.backward_input, order.backward_weight)
        self.depth = depth  # between forward and gradient
        self.limit = limit  # between forward and weights
        self.ready: tuple[deque[int], deque[int], deque[int]] = (deque(), deque(), deque())
        self.done = [0, 0, 0]
        self.actions: list[Action] = []
        self.free = True

    def choose(self) -> Pass | None:
        """Return what to start now: a forward while one may be begun, a gradient, weights.

        The forward first, because the stages behind live on it; the depth keeps it in step with
        the gradients. For equal stages and times this is the ZB-H1 schedule of Qi et al. (2023).
        """
        forward, backward, weight = self.done
        ready_forward, ready_backward, ready_weight = self.ready
        if ready_forward and forward - backward < self.depth and forward - weight < self.limit:
            return Pass.FORWARD
        if ready_backward:
            return Pass.BACKWARD_INPUT
        return Pass.BACKWARD_WEIGHT if ready_weight else None


def _into_gaps(pipeline: Pipeline, depths: list[int]) -> list[list[Action]]:
    """Put weight passes off while no more is held than the deepest stage holds."""
    path = chunks(pipeline)
    states = [
        _StageState(stage.order, _own_chunks(path, s)[0], depths[s], max(depths))
        for s, stage in enumerate(pipeline.stages)
    ]
    states[0].ready[Pass.FORWARD].extend(range(pipeline.micro_batches))
    last = len(states) - 1
    events: list[tuple[float, int, int, int]] = []  # end time, stage, pass, micro-batch
    waiting = [0]
    now = 0.0
    while True:
        for stage in waiting:
            state = states[stage]
            chosen = state.choose() if state.free else None
            if chosen is None:
                continue
            micro_batch = state.ready[chosen].popleft()
            state.done[chosen] += 1  # counts what was started: limits hold from then on
            state.actions.append(Action(chosen, state.chunk, micro_batch))
            state.free = False
            heapq.heappush(events, (now + state.times[chosen], stage, chosen, micro_batch))
        if not events:
            return [state.actions for state in states]
        now = events[0][0]
        touched: set[int] = set()
        while events and events[0][0] == now:
            _, stage, finished, micro_batch = heapq.heappop(events)
            state = states[stage]
            state.free = True
            touched.add(stage)
            if finished == Pass.FORWARD:
                target, kind = (stage + 1, 0) if stage < last else (stage, 1)
                states[target].ready[kind].append(micro_batch)
                touched.add(target)
            elif finished == Pass.BACKWARD_INPUT:
                state.ready[Pass.BACKWARD_WEIGHT].append(micro_batch)
                if stage > 0:
                    states[stage - 1].ready[Pass.BACKWARD_INPUT].append(micro_batch)
                    touched.add(stage - 1)
        waiting = sorted(touched)


# From a pipeline, and how far each of its stages runs ahead, to each stage's actions.
_ORDERS: dict[ScheduleKind, Callable[[Pipeline, list[int]], list[list[Action]]]] = {
    ScheduleKind.GPIPE: _in_turn,
    ScheduleKind.ONE_F_ONE_B: _in_turn,
    ScheduleKind.INTERLEAVED: _in_turn,
    ScheduleKind.ZERO_BUBBLE: _into_gaps,
}
