"""Traffic: how many elements went from which rank to which."""

from __future__ import annotations

import dataclasses
from collections import Counter

from tutti.collective.group import Edge, Group


@dataclasses.dataclass(slots=True)
class Traffic:
    """Elements by (source, target), both ranks."""

    group: Group
    pairs: Counter[tuple[int, int]] = dataclasses.field(default_factory=Counter)

    def add(self, source: int, target: int, elements: int) -> None:
        """Count a message between two seats."""
        if elements:
            self.pairs[self.group.ranks[source], self.group.ranks[target]] += elements

    def edge(self, source: int, target: int) -> Edge:
        """Return what joins two ranks."""
        return self.group.edge(self.group.seat(source), self.group.seat(target))

    def sent(self, rank: int, edge: Edge | None = None) -> int:
        """Return the elements that left a rank, on all edges or one kind of them."""
        return self._total(0, rank, edge)

    def received(self, rank: int, edge: Edge | None = None) -> int:
        """Return the elements that reached a rank, on all edges or one kind of them."""
        return self._total(1, rank, edge)

    def _total(self, end: int, rank: int, edge: Edge | None) -> int:
        return sum(
            elements
            for pair, elements in self.pairs.items()
            if pair[end] == rank and edge in (None, self.edge(*pair))
        )

    def by_edge(self) -> dict[Edge, int]:
        """Return the elements on each kind of edge."""
        elements_of_edge = dict.fromkeys(Edge, 0)
        for pair, elements in self.pairs.items():
            elements_of_edge[self.edge(*pair)] += elements
        return elements_of_edge

    @property
    def between_islands(self) -> int:
        """Return the elements that left an island."""
        elements = self.by_edge()
        return elements[Edge.RAIL] + elements[Edge.CROSS]
