"""Leaves: under which group of leaf switches each node of a pool hangs, written in short.

A fabric's lowest tier is made of *leaf groups*: the switches that the same nodes hang on (one leaf,
or one per rail). Pools that name their leaves may share them, and their groups may be unequal;
a pool that names none has leaves of its own, filled in the order of its nodes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tutti.document import Place, shown
from tutti.hardware.fabric import Fabric

_RUN = re.compile(r"(\d{1,7})(?:\s*[*x×]\s*(\d{1,7}))?")
MOST_NODES = 1_000_000
_FORM = "write the leaf of each node in turn, such as '0*64, 1*32' or [0, 0, 1, 1]"


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaf group of each node, in the order of the nodes."""

    numbers: tuple[int, ...] = ()

    document_shape = str

    def __len__(self) -> int:
        return len(self.numbers)

    def __str__(self) -> str:
        runs = [(leaf, len(list(same))) for leaf, same in itertools.groupby(self.numbers)]
        return ", ".join(f"{leaf}*{times}" if times > 1 else str(leaf) for leaf, times in runs)

    @property
    def fullest(self) -> tuple[int, int]:
        """The leaf group with the most nodes, and how many they are."""
        leaf, times = Counter(self.numbers).most_common(1)[0]
        return leaf, times

    def to_document(self) -> str:
        """Return the written form."""
        return str(self)

    @classmethod
    def from_document(cls, value: object, place: Place) -> Leaves:
        """Read '0*64, 1*32', 3 or [0, 0, 1]."""
        parts = value if isinstance(value, list) else [value]
        numbers: list[int] = []
        for part in parts:
            if isinstance(part, bool) or not isinstance(part, (int, str)):
                raise place.value_error(f"is {shown(value)}; {_FORM}")
            for text in str(part).split(","):
                match = _RUN.fullmatch(text.strip())
                if match is None:
                    raise place.value_error(f"is {shown(value)}; {_FORM}")
                times = int(match[2] or 1)
                if len(numbers) + times > MOST_NODES:
                    raise place.value_error(f"names more than {MOST_NODES:,} nodes")
                numbers.extend([int(match[1])] * times)
        return cls(tuple(numbers))


class Placed(Protocol):
    """What of a pool tells where its nodes hang."""

    @property
    def name(self) -> str:
        """The pool's name."""

    @property
    def nodes(self) -> int:
        """How many nodes it has."""

    @property
    def leaves(self) -> Leaves:
        """The leaf group of each node; empty: leaves of its own."""


def group_of(fabric: Fabric, pool: Placed, node: int, tier: int) -> int:
    """Return the number of the tier's group that holds a node.

    Of a pool that names leaves it counts over the whole fabric, else within the pool.
    """
    size = fabric.tiers[tier].nodes
    if size is None or tier == len(fabric.tiers) - 1:
        return 0
    if not len(pool.leaves):
        return node // size
    return pool.leaves.numbers[node] * (fabric.tiers[0].nodes or 1) // size


def named_leaves(fabric: Fabric, pools: Sequence[Placed]) -> list[Leaves]:
    """Return the leaves of all pools, also of those that name none, as they hang today.

    Leaves of their own come after all that are named, and begin with groups of their own in every
    tier. A fabric of one tier has none.
    """
    size = fabric.tiers[0].nodes
    if len(fabric.tiers) == 1 or size is None:
        return [Leaves() for _ in pools]
    whole = math.lcm(*(tier.nodes or 1 for tier in fabric.tiers[:-1])) // size
    free = max((max(pool.leaves.numbers) + 1 for pool in pools if len(pool.leaves)), default=0)
    leaves: list[Leaves] = []
    for pool in pools:
        if len(pool.leaves):
            leaves.append(pool.leaves)
            continue
        first = math.ceil(free / whole) * whole
        leaves.append(Leaves(tuple(first + node // size for node in range(pool.nodes))))
        free = leaves[-1].numbers[-1] + 1
    return leaves


def meeting_tier(
    fabric: Fabric, home: Placed, first: int, away: Placed, second: int, lowest: int = 0
) -> int:
    """Return the index of the lowest tier, from `lowest` up, that joins two nodes."""
    top = len(fabric.tiers) - 1
    if home.name != away.name and not (len(home.leaves) and len(away.leaves)):
        return top
    for tier in range(lowest, top):
        if group_of(fabric, home, first, tier) == group_of(fabric, away, second, tier):
            return tier
    return top


def spanning_tier(fabric: Fabric, pool: Placed) -> int:
    """Return the index of the lowest tier that joins all nodes of a pool."""
    top = len(fabric.tiers) - 1
    for tier in range(top):
        size = fabric.tiers[tier].nodes
        if len(pool.leaves):
            if len({group_of(fabric, pool, node, tier) for node in range(pool.nodes)}) == 1:
                return tier
        elif size is not None and size >= pool.nodes:
            return tier
    return top
