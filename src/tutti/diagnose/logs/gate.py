"""Which lines of a log may matter: those with a word of trouble in them.

A log of gigabytes is mostly progress. One automaton over bytes (Aho and Corasick, 1975) finds every
word at once, whatever their number; numba runs it. Small logs do without numba, whose start takes
longer than they do.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL_BYTES = 1 << 21  # below it, searching word by word takes less than numba's start


class Gate:
    """Finds where lines with any of some words are in a block of bytes, whatever their case."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(sorted({word.lower().encode() for word in words}))
        self._compiled: Any = None

    def positions(self, block: bytes, *, whole_bytes: int) -> list[int]:
        """Return where words end in `block`, ascending, at most one per line.

        `whole_bytes` is the size of all that is read, by which the way of searching is chosen.
        """
        if whole_bytes < SMALL_BYTES:
            return self._searched(block)
        if self._compiled is None:
            self._compiled = (_scanner(), *_automaton(self.words))
        scan, table, accepts = self._compiled
        data = np.frombuffer(block, dtype=np.uint8)
        out = np.empty(block.count(b"\n") + 1, dtype=np.int64)
        count = scan(data, table, accepts, out)
        return [int(i) for i in out[:count]]

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


def _automaton(words: Sequence[bytes]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the next state of each state and byte, and which states end a word."""
    children: list[dict[int, int]] = [{}]
    ends = [False]
    for word in words:
        state = 0
        for byte in word:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                ends.append(False)
            state = children[state][byte]
        ends[state] = True
    table = np.zeros((len(children), 256), dtype=np.int32)
    fallback = [0] * len(children)
    queue: deque[int] = deque()
    for byte, child in children[0].items():
        table[0, byte] = child
        queue.append(child)
    while queue:
        state = queue.popleft()
        ends[state] = ends[state] or ends[fallback[state]]
        table[state] = table[fallback[state]]
        for byte, child in children[state].items():
            fallback[child] = int(table[fallback[state], byte])
            table[state, byte] = child
            queue.append(child)
    for letter in range(ord("A"), ord("Z") + 1):
        table[:, letter] = table[:, letter + 32]
    return table, np.array(ends)


@functools.cache
def _scanner() -> Any:
    import numba

    @numba.njit(cache=True, nogil=True)
    def scan(data: Any, table: Any, accepts: Any, out: Any) -> int:
        state, count, seen = 0, 0, False
        for i in range(data.size):
            byte = data[i]
            if byte == 10:
                state, seen = 0, False
                continue
            if seen:
                continue
            state = table[state, byte]
            if accepts[state]:
                out[count] = i
                count += 1
                seen = True
        return count

    return scan
