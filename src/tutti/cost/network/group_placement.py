"""How the tensor and context groups of a replica really lie on islands and nodes.

Copies are laid over chips one after the other, so some of them may straddle islands or nodes that
would hold them whole. The worst copy sets the pace of its replica group: all wait for it. Copies
that begin at the same slot of equal nodes lie alike, so that few of thousands are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import Machine
from tutti.cost.network.closed_forms import Span, rails
from tutti.hardware.node import NodeType
from tutti.hardware.topology import Position
from tutti.plan.plan import Replica


class Touch(NamedTuple):
    """What a group touches, worst first when compared: nodes, islands, its thinnest island."""

    nodes: int
    islands: int
    least: int  # members on the island that holds the fewest of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The worst tensor and context group of a replica; None: as well placed as it can be."""

    tp: Touch | None = None
    cp: Touch | None = None
    first: int = 0  # position of the worst tensor group's first chip among the replica's


ALIGNED = Placement()


def placement_of(replica: Replica, node: NodeType) -> Placement:
    """Return how the worst copy of a replica lies on nodes of one kind."""
    if replica.width == 1:
        return ALIGNED
    tp_groups: list[tuple[Touch, int]] = []
    cp_groups: list[Touch] = []
    tp, cp = replica.tp, replica.cp
    for start in _distinct_starts(replica):
        chips = [replica.chips.at(start + i) for i in range(replica.width)]
        tp_groups += [(_touch(chips[i : i + tp], node), start + i) for i in range(0, cp * tp, tp)]
        cp_groups += [_touch(chips[t::tp], node) for t in range(tp)]
    worst, first = min(tp_groups, key=lambda group: (_badness(group[0]), group[1]))
    ring = min(cp_groups, key=_badness)
    return Placement(
        tp=_unless_best(worst, tp, 1, node), cp=_unless_best(ring, cp, tp, node), first=first
    )


def _badness(touch: Touch) -> tuple[int, int, int]:
    return (-touch.nodes, -touch.islands, touch.least)


def _distinct_starts(replica: Replica) -> Iterator[int]:
    """Positions of the copies that lie differently: by the slot, and by what is left of a range."""
    seen: set[tuple[int, int, int]] = set()
    ends = []
    end = 0
    for chips in replica.chips.ranges:
        end += chips.size
        ends.append((end, chips.width))
    at, low = 0, 0
    for copy in range(replica.count):
        start = copy * replica.width
        while start >= ends[at][0]:
            low, at = ends[at][0], at + 1
        end, width = ends[at]
        key = (at, (start - low) % width, min(end - start, replica.width))
        if key not in seen:
            seen.add(key)
            yield start


def _touch(chips: list[Position], node: NodeType) -> Touch:
    home = {slot: number for number, slots in enumerate(node.islands_or_singles) for slot in slots}
    if not node.islands:  # one bridge for all: the node is the island
        home = dict.fromkeys(home, 0)
    islands = Counter((chip.node, home[chip.slot]) for chip in chips)
    nodes = {chip.node for chip in chips}
    return Touch(len(nodes), len(islands), min(islands.values()))


def _unless_best(touch: Touch, size: int, stride: int, node: NodeType) -> Touch | None:
    """Drop what the aligned formula says as well: as few islands as possible, apart by NICs."""
    per_island = node.largest_island if node.islands else node.num_chips
    inside = max(1, min(size, per_island // stride)) if size * stride > per_island else size
    fewest = -(-size // inside)
    only_nics = touch.islands == touch.nodes
    return None if touch.islands <= fewest and only_nics else touch


def span_of(touch: Touch | None, size: int, machine: Machine, node: NodeType) -> Span | None:
    """Return what the prices of collectives need; None where the aligned formula holds.

    Between islands of one node the way is the bridge, each member over its own; between nodes the
    NICs beside the members. A group that uses both runs at the slower one's pace.
    """
    if touch is None or size == 1:
        return None
    least = np.asarray(float(touch.least))
    ways = []
    if touch.islands > touch.nodes:
        ways.append(least * node.effective_bridge.bandwidth)
    if touch.nodes > 1:
        ways.append(machine.nic * rails(least, machine))
    between = ways[0] if len(ways) == 1 else np.minimum(*ways)
    return Span(least, np.asarray(float(touch.islands)), np.asarray(True), between)
