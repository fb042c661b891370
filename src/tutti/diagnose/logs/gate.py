"""Which lines of a log may matter: those with a word of trouble in them.

A log of gigabytes is mostly progress. One automaton over bytes (Aho and Corasick, 1975) finds every
word at once, whatever their number; numba runs it, once per shape of lines (`scan.py`). Small logs
do without numba, whose start takes longer than they do.

A log may also be trouble from end to end. Lines that differ only in their numbers are of one shape;
of a shape the first lines count, then one in some hundreds. Lines that no signature can match, for
they have none of the texts that one of its patterns needs, are let through as long as they are few;
so are those of ever new shapes that have only texts which are words of trouble themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tutti.diagnose.logs.automaton import RARE, TEXT, exact_and_of_shapes
from tutti.diagnose.logs.scan import FORMS, PADDING, SHAPES, scanner

SMALL_BYTES = 1 << 21  # below it, searching word by word takes less than numba's start


class Gate:
    """Finds where lines with any of some words are in a block of bytes, whatever their case."""

    def __init__(self, words: Sequence[str], texts: Sequence[str] | None = None) -> None:
        """`texts`: a line without any of them is known to nobody; None: every line may be known."""
        self.words = tuple(sorted({word.lower().encode() for word in words}))
        self._texts = None if texts is None else tuple(sorted({t.lower().encode() for t in texts}))
        # lines that no signature knows; shapes; lines of trouble that were thinned
        self._passed = np.zeros(3, dtype=np.int64)
        self._scan: Any = None

    @property
    def thinned(self) -> int:
        """Lines that a signature might know and nobody looked at, of floods of like lines."""
        return int(self._passed[2])

    def positions(self, block: bytes, *, whole_bytes: int) -> list[int]:
        """Return where words end in `block`, ascending, at most one per line.

        `whole_bytes` is the size of all that is read, by which the way of searching is chosen.
        """
        if whole_bytes < SMALL_BYTES:
            return self._searched(block)
        if self._scan is None:
            self._scan = self._made()
        size = len(block)
        data = np.full(size + PADDING, ord("\n"), dtype=np.uint8)
        data[:size] = np.frombuffer(block, dtype=np.uint8)
        eights = np.ndarray(size + PADDING - 8, np.uint64, data.data, strides=(1,))
        out = np.empty(block.count(b"\n") + 1, dtype=np.int64)
        scan, *tables = self._scan
        count = scan(data, eights, size, *tables, out)
        return [int(i) for i in out[:count]]

    def _made(self) -> tuple[Any, ...]:
        """Return the compiled scan and its tables."""
        exact, alike = exact_and_of_shapes(self.words, self._texts or ())
        return (
            scanner(),
            *((one.classes, one.table, one.ends) for one in (exact, alike)),
            np.zeros((FORMS, 2), dtype=np.uint64),  # of each its hash and what is known of it
            np.zeros((SHAPES, 2), dtype=np.uint64),  # of each its hash and its lines
            self._passed,
            TEXT | RARE if self._texts is None else 0,
        )

    def _searched(self, block: bytes) -> list[int]:
        low = block.lower()
        ends: dict[int, int] = {}
        for word in self.words:
            at = low.find(word)
            while at >= 0:
                after = low.find(b"\n", at)
                line = len(low) if after < 0 else after
                ends.setdefault(line, at)
                at = low.find(word, line)
        return [ends[line] for line in sorted(ends)]
