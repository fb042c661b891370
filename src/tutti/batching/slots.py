"""`Slots`: the sequences that have one, as columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence as Row

import numpy as np

from tutti.batching.prefix import Node
from tutti.batching.request import Sequence
from tutti.batching.settings import Settings

STAYS, ENDED, PREEMPTED = 0, 1, 2  # a slot that does not stay is freed when no step has it


class Slots:
    """One row per slot; a free one has the sequence −1 and zeros."""

    def __init__(self, settings: Settings) -> None:
        count, self._ahead = settings.slots, settings.ahead
        self.sequence = np.full(count, -1, np.int64)
        self.order = np.zeros(count)
        self.base = np.zeros(count, np.int32)
        self.most_flights = np.zeros(count, np.int32)  # steps that it may be in
        self.prompt = np.zeros(count, np.int32)
        self.limit = np.zeros(count, np.int32)
        self.goal = np.zeros(count, np.int32)
        self.length = np.zeros(count, np.int32)  # tokens that are known or being sampled
        self.known = np.zeros(count, np.int32)  # tokens whose values are here
        self.computed = np.zeros(count, np.int32)  # tokens that steps were made for
        self.stored = np.zeros(count, np.int32)  # tokens whose steps have come back
        self.in_flight = np.zeros(count, np.int32)  # steps that have not
        self.leaving = np.zeros(count, np.int8)
        self.num_pages = np.zeros(count, np.int32)  # entries in the table
        self.behind = np.zeros(count, np.int32)  # of these, pages that went behind the window
        self.inserted = np.zeros(count, np.int32)  # of these, pages that the tree was told of
        self.forks = np.zeros(count, np.bool_)  # samples wait for its prompt to be computed
        self.table = np.zeros((count, settings.table_width), np.int32)
        self.history = np.zeros((count, settings.max_length), np.int32)
        self.held: list[Sequence | None] = [None] * count
        self.nodes: list[Node | None] = [None] * count  # where the next page goes in the tree
        self._numbers = np.arange(count)
        self._free = list(range(count - 1, -1, -1))
        self._columns = (
            self.order, self.base, self.most_flights, self.prompt, self.limit, self.goal,
            self.length, self.known, self.computed, self.stored, self.in_flight,
            self.leaving, self.num_pages, self.behind, self.inserted, self.forks,
        )  # fmt: skip

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return len(self._free)

    @property
    def settled(self) -> int:
        """Slots that have a sequence."""
        return len(self.held) - len(self._free)

    def in_use(self) -> list[int]:
        """Return the slots that have a sequence and keep it, in the order in which they go."""
        used = np.flatnonzero((self.sequence >= 0) & (self.leaving == STAYS))
        ordered: list[int] = self.by_order(used).tolist()
        return ordered

    def span(self, slots: np.ndarray) -> np.ndarray | slice:
        """Return what columns are indexed by for some slots: a slice if they are the first ones.

        A slice of a column is a view; indexing by numbers copies, at ten times the price.
        """
        count = len(slots)
        same = count and slots[-1] == count - 1 and np.array_equal(slots, self._numbers[:count])
        return slice(0, count) if same else slots

    def by_order(self, slots: np.ndarray) -> np.ndarray:
        """Return slots in the order in which they go."""
        return slots[np.lexsort((self.sequence[slots], self.order[slots]))]

    def place(self, sequence: Sequence, pages: Row[int], computed: int, node: Node | None) -> int:
        """Give a sequence a slot and the pages that have its beginning; return the slot."""
        slot = self._free.pop()
        count = len(sequence.tokens)
        self.sequence[slot], self.order[slot] = sequence.id, sequence.order
        self.prompt[slot], self.base[slot] = len(sequence.request.prompt), sequence.base
        self.most_flights[slot] = 1 if sequence.request.waits else self._ahead
        self.limit[slot], self.goal[slot] = sequence.limit, sequence.goal
        self.length[slot] = self.known[slot] = count
        self.history[slot, :count] = sequence.tokens
        self.computed[slot] = self.stored[slot] = computed
        self.num_pages[slot] = self.inserted[slot] = len(pages)
        self.table[slot, : len(pages)] = pages
        self.forks[slot] = bool(sequence.siblings)
        self.held[slot], self.nodes[slot] = sequence, node
        return slot

    def fork(self, source: int, sequence: Sequence) -> int:
        """Give a sequence a slot that is a copy of another."""
        slot = self._free.pop()
        for column in self._columns:
            column[slot] = column[source]
        self.sequence[slot], self.order[slot] = sequence.id, sequence.order
        self.in_flight[slot], self.forks[slot] = 1, False
        self.table[slot] = self.table[source]
        self.history[slot, : self.known[source]] = self.history[source, : self.known[source]]
        self.held[slot], self.nodes[slot] = sequence, self.nodes[source]
        return slot

    def clear(self, slot: int) -> Sequence:
        """Free a slot; return its sequence with its tokens."""
        sequence = self.held[slot]
        assert sequence is not None
        sequence.tokens = self.history[slot, : self.known[slot]].tolist()
        for column in self._columns:
            column[slot] = 0
        self.sequence[slot] = -1
        self.held[slot] = self.nodes[slot] = None
        self._free.append(slot)
        return sequence

    def pages(self, slot: int) -> np.ndarray:
        """Return the pages that a slot has."""
        pages: np.ndarray = self.table[slot, self.behind[slot] : self.num_pages[slot]].copy()
        return pages
