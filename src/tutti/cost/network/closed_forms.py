"""Closed forms of collectives inside one pool: α + bytes ÷ β, by node and across nodes.

Ranks are ordered tensor, context, data, pipeline; a group of `size` ranks lies `stride` apart.
Unlike chips, unequal groups and routes between pools are priced from collective programs instead
(`programs`). "Bytes" is always the whole buffer that every member ends up with or starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.cost.arrays import FloatArray, Machine, Number
from tutti.cost.constants import Constants


class Span(NamedTuple):
    """How a group lies on nodes (islands of native links)."""

    inside: FloatArray  # members per node; of the node with the fewest, where they differ
    nodes: FloatArray
    crosses: npt.NDArray[np.bool_]  # whether it leaves a node
    between: FloatArray  # nominal bytes per second that its members on a node send to others


def aligned_span(size: Number, stride: Number, machine: Machine) -> Span:
    """Return how a group lies whose first rank is the first of a node."""
    per_node = machine.chips_per_node
    crosses = np.multiply(size, stride) > per_node
    inside = np.where(crosses, np.clip(per_node / stride, 1.0, size), size)
    return Span(inside, size / inside, crosses, machine.nic * rails(inside, machine))


def rails(inside: Number, machine: Machine) -> FloatArray:
    """Return the share of a node's NIC bandwidth that a group with `inside` members there drives.

    A group that owns the whole node has rings through every NIC. Members of another group reach
    the NIC beside them; where chips share NICs, a ring enters beside one member and leaves beside
    another, so that only inside · NICs ÷ chips of them send.
    """
    per_chip = np.minimum(1.0, machine.nics / machine.chips_per_node)
    part = np.maximum(1.0, inside * per_chip) / machine.chips_per_node
    share: FloatArray = np.where(inside >= machine.chips_per_node, 1.0, part)
    return share


def _ring_crowding(nodes: Number, stride: Number, machine: Machine) -> Number:
    """Return by how much tiers slow down rings over neighbouring nodes, all of them at once.

    Of a ring's members in a group of nodes one sends out of it; the others' NICs stay below.
    """
    crowding: Number = 1.0
    for reach, over in _groups(stride, machine):
        slowed = over / np.maximum(1.0, reach)
        crowding = np.maximum(crowding, np.where(nodes > reach, slowed, 1.0))
    return crowding


def _exchange_crowding(nodes: Number, stride: Number, machine: Machine) -> Number:
    """Return the same for exchanges: what is not for the own group of nodes leaves it."""
    crowding: Number = 1.0
    for reach, over in _groups(stride, machine):
        inside = np.maximum(1.0, reach)
        leaving = np.maximum(nodes - inside, 0.0) / np.maximum(np.subtract(nodes, 1.0), 1.0)
        crowding = np.maximum(crowding, over * leaving)
    return crowding


def _groups(stride: Number, machine: Machine) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield how many of a collective's nodes lie below each tier, and how much it is outgrown."""
    if not machine.has_tiers:
        return
    apart = np.maximum(1.0, np.divide(stride, machine.chips_per_node))
    yield machine.leaf_nodes / apart, machine.leaf_over
    yield machine.pod_nodes / apart, machine.pod_over


def _latency(span: Span, constants: Constants) -> FloatArray:
    hops: FloatArray = np.where(span.crosses, constants.nic_latency_s * span.nodes, 0.0)
    return constants.link_latency_s + hops


def ring_pass_seconds(
    num_bytes: Number,
    size: Number,
    stride: Number,
    machine: Machine,
    constants: Constants,
    span: Span | None = None,
) -> FloatArray:
    """Return the seconds of an all-gather or reduce-scatter; zero for a group of one.

    `span` says how the group really lies, where it is not aligned with the nodes.
    """
    span = aligned_span(size, stride, machine) if span is None else span
    link = machine.link * constants.link_efficiency
    nic = span.between * constants.nic_efficiency / _ring_crowding(span.nodes, stride, machine)
    bandwidth = np.where(span.crosses, np.minimum(link, nic), link)
    seconds = _latency(span, constants) + num_bytes * (size - 1.0) / size / bandwidth
    result: FloatArray = np.where(np.greater(size, 1), seconds, 0.0)
    return result


def all_reduce_seconds(
    num_bytes: Number,
    size: Number,
    stride: Number,
    machine: Machine,
    constants: Constants,
    span: Span | None = None,
) -> FloatArray:
    """Return the seconds of a hierarchical all-reduce: scatter inside, reduce across, gather."""
    span = aligned_span(size, stride, machine) if span is None else span
    inside, nodes = span.inside, span.nodes
    link = machine.link * constants.link_efficiency
    nic = span.between * constants.nic_efficiency / _ring_crowding(nodes, stride, machine)
    seconds = _latency(span, constants)
    seconds = seconds + 2.0 * num_bytes * (inside - 1.0) / inside / link
    seconds = seconds + 2.0 * num_bytes * (nodes - 1.0) / nodes / nic
    result: FloatArray = np.where(np.greater(size, 1), seconds, 0.0)
    return result


def all_to_all_seconds(
    num_bytes: Number,
    size: Number,
    stride: Number,
    machine: Machine,
    constants: Constants,
    *,
    copies: Number = 1.0,
) -> FloatArray:
    """Return the seconds of an exchange in which each rank holds `num_bytes` for all members.

    What stays in the node goes over its links, the rest over a chip's fair share of the NICs. Where
    a row goes to several members (`copies`), it crosses to each other node once and is passed on
    there: of n nodes, (n − 1)·(1 − (1 − 1/n)^copies) on average.
    """
    span = aligned_span(size, stride, machine)
    inside = np.clip(machine.chips_per_node / stride, 1.0, size)
    link = machine.link * constants.link_efficiency
    nic = machine.nic * constants.nic_efficiency / machine.chips_per_node
    nodes = np.maximum(size / inside, 1.0)
    nic = nic / _exchange_crowding(nodes, stride, machine)
    crossing = (nodes - 1.0) * (1.0 - (1.0 - 1.0 / nodes) ** copies) / copies
    outside = np.where(span.crosses, num_bytes * crossing / nic, 0.0)
    # what another node passed on takes the links, too
    passed = np.where(np.greater(copies, 1.0), 1.0 - 1.0 / size, (inside - 1.0) / size)
    seconds = np.maximum(num_bytes * passed / link, outside)
    result: FloatArray = np.where(np.greater(size, 1), constants.link_latency_s + seconds, 0.0)
    return result
