"""What becomes of pages that were computed: others may use them, or a window has passed them."""

from __future__ import annotations

import numpy as np

from tutti.batching.pages import PagePool
from tutti.batching.prefix import PrefixTree
from tutti.batching.settings import Settings
from tutti.batching.slots import Slots
from tutti.batching.step import I32


class ComputedPages:
    """Puts full pages into the prefix tree and gives back those that nobody looks at."""

    def __init__(self, settings: Settings, pool: PagePool, tree: PrefixTree, slots: Slots) -> None:
        self._settings, self._pool, self._tree, self._slots = settings, pool, tree, slots

    def file(self, slots: I32) -> None:
        """Tell the tree of full pages, and let go of those behind the window."""
        columns, size = self._slots, self._settings.page_size
        if self._settings.prefix:
            own = columns.span(slots)
            full = np.minimum(columns.stored[own], columns.known[own]) // size
            self._insert(slots, full)
        if self._settings.window is None:
            return
        for slot in slots.tolist():
            last = self._settings.first_seen(int(columns.stored[slot])) // size
            first = int(columns.behind[slot])
            if last > first:
                self._pool.release(columns.table[slot, first:last].copy())
                columns.table[slot, first:last] = 0
                columns.behind[slot] = last

    def _insert(self, slots: I32, full: np.ndarray) -> None:
        """Put the pages of slots that became full into the tree, each slot's in order."""
        columns, size = self._slots, self._settings.page_size
        missing = full - columns.inserted[slots]
        more = (missing > 0).nonzero()[0]
        while len(more):
            slots, missing = slots[more], missing[more]
            index = columns.inserted[slots]
            places = (index * size)[:, None] + np.arange(size)
            keys = columns.history[slots[:, None], places].tobytes()
            pages = columns.table[slots, index].tolist()
            first, width, nodes, insert = 0, 4 * size, columns.nodes, self._tree.insert
            for slot, page in zip(slots.tolist(), pages, strict=True):
                node = nodes[slot]
                if node is not None and node.known:
                    nodes[slot] = insert(node, keys[first : first + width], page)
                else:  # what is below would not be found
                    nodes[slot] = None
                first += width
            columns.inserted[slots] = index + 1
            missing -= 1
            more = (missing > 0).nonzero()[0]
