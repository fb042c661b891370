"""What sharing a NIC costs: collectives that leave the node get what more urgent traffic leaves.

A rank has one way out of its node. Sends between stages go first, for a stage waits for each of
them; then collectives inside a pipeline, which bring parameters of the next pass; then those
across pipelines. Nothing is carried twice: a collective lasts until its own seconds of idle NIC
have passed. The traffic's times come from a run in which nobody shared.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from tutti.cost.plan.simulator_inputs import ClassCosts, FloatArray, StepCosts
from tutti.simulate.program import Program, Track

_TINY = 1e-9  # of a collective's seconds: rounding, not waiting


def shared_nic(
    program: Program, costs: StepCosts, start: FloatArray, end: FloatArray
) -> StepCosts | None:
    """Return costs whose collectives last as long as a shared NIC makes them; None: no change."""
    classes = [
        _class_costs(program, index, given, start, end) for index, given in enumerate(costs.classes)
    ]
    if all(new is old for new, old in zip(classes, costs.classes, strict=True)):
        return None
    return dataclasses.replace(costs, classes=tuple(classes))


def _class_costs(
    program: Program, index: int, given: ClassCosts, start: FloatArray, end: FloatArray
) -> ClassCosts:
    if given.leaves_node is None or not given.leaves_node.any():
        return given
    span = program.span(index)
    track = program.track[span]
    begins, ends = start[span], end[span]
    taken = given.leaves_node & (track == Track.SEND)
    collective = given.leaves_node & (track == Track.COLLECTIVE) & (given.seconds > 0)
    inside = program.inside[span] > 0
    seconds = given.seconds.copy()
    for own in (collective & inside, collective & ~inside):
        if own.any() and taken.any():
            idle = _Idle(begins[taken], ends[taken])
            seconds[own] = idle.seconds(begins[own], given.seconds[own])
        taken = taken | own
    if np.array_equal(seconds, given.seconds):
        return given
    return dataclasses.replace(given, seconds=seconds)


def slowed_compute(
    program: Program, costs: StepCosts, start: FloatArray, end: FloatArray
) -> StepCosts | None:
    """Return costs whose passes last longer where collectives take part of the chip; None: none do.

    The times come from a run in which nothing was slowed.
    """
    classes = [
        _slowed_class(program, index, given, start, end)
        for index, given in enumerate(costs.classes)
    ]
    if all(new is old for new, old in zip(classes, costs.classes, strict=True)):
        return None
    return dataclasses.replace(costs, classes=tuple(classes))


def _slowed_class(
    program: Program, index: int, given: ClassCosts, start: FloatArray, end: FloatArray
) -> ClassCosts:
    if given.overlap_slowdown <= 0:
        return given
    span = program.span(index)
    track, begins, ends = program.track[span], start[span], end[span]
    beside = (track == Track.COLLECTIVE) & (given.seconds > 0)
    passes = (track == Track.COMPUTE) & (given.seconds > 0)
    if not (beside.any() and passes.any()):
        return given
    first, last = _joined(begins[beside], ends[beside])
    marks = np.ravel(np.column_stack([first, last]))
    busy = np.ravel(
        np.column_stack([np.cumsum(last - first) - (last - first), np.cumsum(last - first)])
    )
    overlap = np.interp(ends[passes], marks, busy) - np.interp(begins[passes], marks, busy)
    if not overlap.any():
        return given
    seconds = given.seconds.copy()
    seconds[passes] += given.overlap_slowdown * overlap
    return dataclasses.replace(given, seconds=seconds)


def _joined(begins: FloatArray, ends: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the times during which at least one lasts, as spans that do not touch."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], begins[1:] > ends[:-1]])
    last = np.concatenate([np.flatnonzero(first)[1:] - 1, [len(ends) - 1]])
    return begins[first], ends[last]


class _Idle:
    """When a NIC is free, as one growing function of time."""

    def __init__(self, begins: FloatArray, ends: FloatArray) -> None:
        self._begins, self._ends = _joined(begins, ends)
        lengths = self._ends - self._begins
        self._busy = np.concatenate([[0.0], np.cumsum(lengths)])  # before each busy time
        self._free = self._begins - self._busy[:-1]  # idle seconds before each busy time

    def seconds(self, start: FloatArray, needed: FloatArray) -> FloatArray:
        """Return how long each takes until so many idle seconds have passed.

        They follow each other on one channel: one that ends later makes the next begin later.
        """
        begins, ends, busy = self._begins.tolist(), self._ends.tolist(), self._busy.tolist()
        free = self._free.tolist()
        seconds, at = needed.tolist(), 0.0
        order = np.argsort(start, kind="stable")
        for i in order.tolist():
            wanted = seconds[i]
            at = max(at, float(start[i]))
            before = bisect.bisect_right(begins, at)
            passed = busy[before]
            if before and ends[before - 1] > at:
                passed -= ends[before - 1] - at
            wait = busy[bisect.bisect_left(free, at - passed + wanted)] - passed
            if wait > _TINY * wanted:  # the others keep their seconds to the bit
                seconds[i] = wanted + wait
            at += seconds[i]
        return np.array(seconds)
