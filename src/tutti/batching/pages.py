"""`PagePool`: who has which page of keys and values.

A page is free, used by one or several sequences, or idle: used by nobody and kept by the prefix
tree, least recently used first in line to be given away. Page 0 is never given to anybody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]


class PagePool:
    """Counts users of pages and hands pages out."""

    def __init__(self, pages: int) -> None:
        self.size = pages - 1
        self.users = np.zeros(pages, np.int32)
        self._free = np.arange(pages - 1, 0, -1, dtype=np.int32)  # a stack: small numbers first
        self._top = pages - 1
        self.kept: set[int] = set()  # pages that the prefix tree knows
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.forget: Callable[[int], None] | None = None  # the tree lets a page go

    @property
    def free(self) -> int:
        """How many pages nobody knows."""
        return self._top

    @property
    def available(self) -> int:
        """How many pages can be taken."""
        return self._top + len(self.idle)

    def take(self, count: int) -> Pages:
        """Return pages for one user; idle ones if there are too few that are free."""
        while self._top < count:
            assert self.forget is not None, "no page is left"
            self.forget(next(iter(self.idle)))
        self._top -= count
        pages = self._free[self._top : self._top + count][::-1].copy()
        self.users[pages] = 1
        return pages

    def share(self, pages: Pages) -> None:
        """Count one more user of each page."""
        for page in pages[self.users[pages] == 0].tolist():
            del self.idle[page]
        self.users[pages] += 1

    def release(self, pages: Pages) -> None:
        """Count one user less of each page; the last ones become idle first."""
        self.users[pages] -= 1
        for page in pages[self.users[pages] == 0][::-1].tolist():
            if page in self.kept:
                self.idle[page] = None
            else:
                self._push(page)

    def keep(self, page: int) -> None:
        """Let the prefix tree know a page that is in use."""
        self.kept.add(page)

    def drop(self, page: int) -> None:
        """Let the prefix tree no longer know a page."""
        self.kept.discard(page)
        if self.users[page] == 0:
            del self.idle[page]
            self._push(page)

    def _push(self, page: int) -> None:
        self._free[self._top] = page
        self._top += 1

    def free_pages(self) -> list[int]:
        """Return the pages that nobody knows."""
        return [int(page) for page in self._free[: self._top]]
