"""In which order a stage computes: pure functions from pipeline shapes to lists of actions.

An action is a forward, an input-gradient or a weight-gradient pass of one chunk (a unit range)
for one micro-batch. GPipe, 1F1B and interleaved 1F1B have fixed orders in which the weight pass
follows its input pass at once; the zero-bubble order is found by a list scheduler that lets
weight passes fill the gaps which unequal stages leave.
"""

from __future__ import annotations

import heapq
from collections import deque
from enum import IntEnum
from typing import NamedTuple

from tutti.plan.job import ScheduleKind
from tutti.plan.plan import ChunkPlace, Pipeline, chunks


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


def in_flight_limit(pipeline: Pipeline, stage: int) -> int:
    """Return how many micro-batches a stage may hold between forward and backward.

    1F1B's textbook depth, the stages from here to the end, unless the plan says otherwise.
    """
    given = pipeline.stages[stage].order.warm_up
    depth = len(pipeline.stages) - stage if given is None else given
    return min(depth, pipeline.micro_batches)


def orders(pipeline: Pipeline, kind: ScheduleKind) -> list[list[Action]]:
    """Return each stage's actions in its order."""
    if kind is ScheduleKind.ZERO_BUBBLE:
        return _zero_bubble(pipeline)
    path = chunks(pipeline)
    make = {
        ScheduleKind.GPIPE: _gpipe,
        ScheduleKind.ONE_F_ONE_B: _one_f_one_b,
        ScheduleKind.INTERLEAVED: _interleaved,
    }[kind]
    return [make(pipeline, path, stage) for stage in range(len(pipeline.stages))]


def _own_chunks(path: list[ChunkPlace], stage: int) -> list[int]:
    return [index for index, chunk in enumerate(path) if chunk.stage == stage]


def _backward(chunk: int, micro_batch: int) -> list[Action]:
    return [
        Action(Pass.BACKWARD_INPUT, chunk, micro_batch),
        Action(Pass.BACKWARD_WEIGHT, chunk, micro_batch),
    ]


def _alternate(
    forwards: list[Action], backwards: list[tuple[int, int]], ahead: int
) -> list[Action]:
    """Run `ahead` forwards first, then a forward and a backward in turn, then what is left."""
    actions = forwards[:ahead]
    for position, (chunk, micro_batch) in enumerate(backwards):
        actions += _backward(chunk, micro_batch)
        following = ahead + position
        if following < len(forwards):
            actions.append(forwards[following])
    return actions


def _gpipe(pipeline: Pipeline, path: list[ChunkPlace], stage: int) -> list[Action]:
    (chunk,) = _own_chunks(path, stage)
    count = pipeline.micro_batches
    forwards = [Action(Pass.FORWARD, chunk, m) for m in range(count)]
    return _alternate(forwards, [(chunk, m) for m in range(count)], count)


def _one_f_one_b(pipeline: Pipeline, path: list[ChunkPlace], stage: int) -> list[Action]:
    (chunk,) = _own_chunks(path, stage)
    count = pipeline.micro_batches
    forwards = [Action(Pass.FORWARD, chunk, m) for m in range(count)]
    ahead = in_flight_limit(pipeline, stage)
    return _alternate(forwards, [(chunk, m) for m in range(count)], ahead)


def _interleaved(pipeline: Pipeline, path: list[ChunkPlace], stage: int) -> list[Action]:
    """Micro-batches pass in groups through chunk after chunk; a group is at least a round long."""
    own = _own_chunks(path, stage)
    num_stages, count = len(pipeline.stages), pipeline.micro_batches
    num_groups = max(1, count // num_stages)
    bounds = [count * g // num_groups for g in range(num_groups + 1)]
    groups = [range(bounds[g], bounds[g + 1]) for g in range(num_groups)]
    forwards = [Action(Pass.FORWARD, chunk, m) for group in groups for chunk in own for m in group]
    backwards = [(chunk, m) for group in groups for chunk in reversed(own) for m in group]
    longest = max(map(len, groups))
    ahead = (num_stages - stage - 1) * 2 + (len(own) - 1) * longest + 1
    return _alternate(forwards, backwards, min(ahead, len(forwards)))


class _StageState:
    """A stage inside the zero-bubble list scheduler."""

    __slots__ = ("actions", "chunk", "depth", "done", "free", "limit", "ready", "times")

    def __init__(self, pipeline: Pipeline, chunk: int, stage: int) -> None:
        order = pipeline.stages[stage].order
        self.chunk = chunk
        self.times = (order.forward, order.backward_input, order.backward_weight)
        self.depth = in_flight_limit(pipeline, stage)
        # Weight passes may be put off while no more is held than 1F1B's deepest stage holds.
        deepest = max(in_flight_limit(pipeline, s) for s in range(len(pipeline.stages)))
        self.limit = max(deepest, self.depth)
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


def _zero_bubble(pipeline: Pipeline) -> list[list[Action]]:
    path = chunks(pipeline)
    states = [_StageState(pipeline, _own_chunks(path, s)[0], s) for s in range(len(path))]
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
