"""Executes a Schedule against given costs.

These semantics are the contract with the engine:

- Lanes of a rank: compute; copies from the host (Fetch) and to it (Offload), one lane each; on
  the network one channel for collectives inside a pipeline and one for those across pipelines,
  and one per boundary and tensor (unit, what) for Sends and for Receives. Each lane or channel is
  first in, first out, in list order; different ones overlap freely.
- Where the costs say what leaves the node, sends and collectives share the rank's NIC
  (`contention`); what other sharing costs is part of the given seconds.
- An instruction starts when its lane is free and all its `after` entries have ended, and occupies
  its lane for its `seconds`.
- A Send does not wait for its receiver: buffers suffice.
- A Receive starts when it could start and the matching Sends of *all* classes of the sending
  stage have ended; its own seconds follow.
- A collective starts when every participating class could start it, and lasts as long as the
  longest of their seconds; it ends for all at once. Who takes part: `schedule.partners`.
- The step ends when the last instruction has ended.

Orders are fixed, so there is nothing to decide on the way: times are longest paths, and no event
queue is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tutti.cost.plan.simulator_inputs import StepCosts
from tutti.errors import TuttiError
from tutti.schedule.schedule import Schedule
from tutti.simulate.contention import shared_nic, slowed_compute
from tutti.simulate.kernel import Backend, attribute_idle, choose, compiled, execute
from tutti.simulate.program import Program, Track, compile_schedule
from tutti.simulate.result import IDLE_REASONS, IdleReason, SimulationResult

_REASON = np.array(
    [
        IDLE_REASONS.index(
            {
                Track.COMPUTE: IdleReason.BUBBLE,
                Track.COPY_IN: IdleReason.COPY,
                Track.COPY_OUT: IdleReason.COPY,
            }.get(track, IdleReason.COMMUNICATION)
        )
        for track in Track
    ],
    dtype=np.int64,
)


def simulate(
    schedule: Schedule | Program, costs: StepCosts, *, backend: Backend = "auto"
) -> SimulationResult:
    """Return what happens when; give a compiled Program where many costs are tried."""
    program = schedule if isinstance(schedule, Program) else compile_schedule(schedule)
    costs.require_match(program.schedule)
    chosen = choose(backend, program.size)
    times = _execute(program, costs, chosen)
    contended = shared_nic(program, costs, times[0], times[1])
    if contended is not None:
        costs = contended
        times = _execute(program, costs, chosen)
    slowed = slowed_compute(program, costs, times[0], times[1])
    if slowed is not None:
        costs = slowed
        times = _execute(program, costs, chosen)
    idle = _idle(program, times, chosen)
    start, end, binding = times
    return SimulationResult(
        program=program, costs=costs, start=start, end=end, binding=binding, idle=idle
    )


def _execute(program: Program, costs: StepCosts, chosen: str) -> tuple[Any, Any, Any]:
    num_classes, num_meetings = len(costs.classes), len(program.arrivals)
    given = [
        program.offsets,
        program.kind,
        program.channel,
        program.after_offsets,
        program.after,
        program.meeting,
        np.concatenate([c.seconds for c in costs.classes]),
    ]
    state = [
        program.arrivals.copy(),
        np.full(num_meetings, -1.0),
        np.full(num_meetings, -1, dtype=np.int64),
        np.zeros(num_meetings),
        np.full(num_meetings, -1, dtype=np.int64),
        np.full(num_classes, -1, dtype=np.int64),
        np.zeros(program.num_channels),
        np.full(program.num_channels, -1, dtype=np.int64),
        program.offsets[:-1].copy(),
        np.zeros(num_classes, dtype=np.int64),
    ]
    out: list[Any] = [
        np.zeros(program.size),
        np.zeros(program.size),
        np.full(program.size, -1, dtype=np.int64),
    ]
    if chosen == "numba":
        position = state[8]
        done = compiled(execute)(*given, *state, *out)
    else:
        lists = [array.tolist() for array in (*given, *state, *out)]
        position = lists[len(given) + 8]
        done = execute(*lists)
        out = [np.array(values, dtype=a.dtype) for values, a in zip(lists[-3:], out, strict=True)]
    if done < program.size:
        raise _stuck(program, position)
    return out[0], out[1], out[2]


def _stuck(program: Program, position: Any) -> TuttiError:
    for index, rank_class in enumerate(program.schedule.classes):
        place = int(position[index]) - int(program.offsets[index])
        if place < len(rank_class.instructions):
            return TuttiError(
                f"deadlock: {rank_class.name} waits for ever at {rank_class.instructions[place]}"
            )
    return TuttiError("deadlock: a meeting was never complete")


def _idle(program: Program, times: tuple[Any, Any, Any], chosen: str) -> Any:
    start, end, binding = times
    idle = np.zeros((len(program.offsets) - 1, len(IDLE_REASONS)))
    if not program.size:
        return idle
    last = int(np.argmax(end))
    given: list[Any] = [program.offsets, program.track, start, end, binding, _REASON]
    if chosen == "numba":
        compiled(attribute_idle)(*given, last, idle)
        return idle
    rows = idle.tolist()
    plain: Callable[..., None] = attribute_idle
    plain(*[array.tolist() for array in given], last, rows)
    return np.array(rows)
