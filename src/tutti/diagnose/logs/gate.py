"""Which lines of a log may matter: those with a word of trouble in them.

A log of gigabytes is mostly progress. One automaton over bytes (Aho and Corasick, 1975) finds every
word at once, whatever their number; numba runs it. Small logs do without numba, whose start takes
longer than they do.

A log may also be trouble from end to end. Lines that differ only in their numbers are of one shape;
of a shape the first lines count, then one in some hundreds. Lines that no signature can match, for
they have none of the texts that one of its patterns needs, are let through as long as they are few;
so are those of ever new shapes that have only texts which are words of trouble themselves.
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


# what ends in a state: a word of trouble; a text that a signature needs; one that is no such word
_WORD, _TEXT, _RARE = 1, 2, 4
_MOST_OF_A_SHAPE = 1 << 15  # lines in a row, if every rank of a large job says one
_MOST_UNKNOWN_OF_A_SHAPE = 64
_MOST_UNKNOWN = 50_000
_ONE_IN = 512
_MOST_SHAPES = 60_000  # beyond them, of lines without a rare text one in some
_ONE_SHAPE_IN = 64
_SHAPE_BYTES = 400
_SHAPES = 1 << 18  # that are told apart; each takes 16 bytes


class Gate:
    """Finds where lines with any of some words are in a block of bytes, whatever their case."""

    def __init__(self, words: Sequence[str], texts: Sequence[str] | None = None) -> None:
        """`texts`: a line without any of them is known to nobody; None: every line may be known."""
        self.words = tuple(sorted({word.lower().encode() for word in words}))
        self._texts = None if texts is None else tuple(sorted({t.lower().encode() for t in texts}))
        # lines that no signature knows; shapes; lines of trouble that were thinned
        self._passed = np.zeros(3, dtype=np.int64)
        self._compiled: Any = None

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
        if self._compiled is None:
            shapes = np.zeros((_SHAPES, 2), dtype=np.uint64)  # of each its hash and its lines
            self._compiled = (
                _scanner(), *_automaton(self.words, self._texts or ()), shapes,
                self._passed, _TEXT | _RARE if self._texts is None else 0,
            )  # fmt: skip
        scan, *tables = self._compiled
        data = np.frombuffer(block, dtype=np.uint8)
        out = np.empty(block.count(b"\n") + 1, dtype=np.int64)
        count = scan(data, *tables, out)
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


def _automaton(
    words: Sequence[bytes], texts: Sequence[bytes]
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Return the next state of each state and byte, and what ends in each state."""
    children: list[dict[int, int]] = [{}]
    ends = [0]
    rare = {text for text in texts if not any(word in text for word in words)}
    kinds = [(text, _TEXT | _RARE if text in rare else _TEXT) for text in texts]
    for word, kind in (*((w, _WORD) for w in words), *kinds):
        state = 0
        for byte in word:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                ends.append(0)
            state = children[state][byte]
        ends[state] |= kind
    table = np.zeros((len(children), 256), dtype=np.int32)
    fallback = [0] * len(children)
    queue: deque[int] = deque()
    for byte, child in children[0].items():
        table[0, byte] = child
        queue.append(child)
    while queue:
        state = queue.popleft()
        ends[state] |= ends[fallback[state]]
        table[state] = table[fallback[state]]
        for byte, child in children[state].items():
            fallback[child] = int(table[fallback[state], byte])
            table[state, byte] = child
            queue.append(child)
    for letter in range(ord("A"), ord("Z") + 1):
        table[:, letter] = table[:, letter + 32]
    return table, np.array(ends, dtype=np.uint8)


@functools.cache
def _thinning() -> Any:
    """Return what says whether a line with a word of trouble is looked at."""
    import numba

    @numba.njit(cache=True, nogil=True)
    def lines_of_shape(data: Any, start: int, end: int, shapes: Any) -> Any:
        """Count a line, and return how many of its shape there were; 0 where there is no room."""
        shape, number = np.uint64(14695981039346656037), False
        for i in range(start, min(end, start + _SHAPE_BYTES)):
            byte = data[i]
            if 48 <= byte <= 57:
                if number:
                    continue
                byte, number = np.uint8(35), True
            else:
                number = False
            shape = (shape ^ np.uint64(byte)) * np.uint64(1099511628211)
        place = np.int64(shape & np.uint64(_SHAPES - 1))
        for _ in range(16):
            if shapes[place, 1] == 0:
                shapes[place, 0] = shape
            if shapes[place, 0] == shape:
                shapes[place, 1] += np.uint64(1)
                return np.int64(shapes[place, 1])
            place = (place + 1) & (_SHAPES - 1)
        return 0

    @numba.njit(cache=True, nogil=True)
    def passes(data: Any, start: int, end: int, shapes: Any, passed: Any, seen: int) -> Any:
        lines = lines_of_shape(data, start, end, shapes)
        if not seen & _TEXT:
            passed[0] += lines <= _MOST_UNKNOWN_OF_A_SHAPE
            return lines <= _MOST_UNKNOWN_OF_A_SHAPE and passed[0] <= _MOST_UNKNOWN
        passed[1] += lines <= 1
        if passed[1] > _MOST_SHAPES and lines <= 1 and not seen & _RARE:
            looked_at = passed[1] % _ONE_SHAPE_IN == 0
        else:
            looked_at = lines <= _MOST_OF_A_SHAPE or lines % _ONE_IN == 0
        passed[2] += not looked_at
        return looked_at

    return passes


@functools.cache
def _scanner() -> Any:
    import numba

    passes = _thinning()

    @numba.njit(cache=True, nogil=True)
    def scan(
        data: Any, table: Any, ends: Any, shapes: Any, passed: Any, always: int, out: Any
    ) -> int:
        state, count, seen, at, start = 0, 0, 0, 0, 0
        for i in range(data.size + 1):
            if i == data.size or data[i] == 10:
                if seen & _WORD and passes(data, start, i, shapes, passed, seen | always):
                    out[count] = at
                    count += 1
                state, seen, start = 0, 0, i + 1
                continue
            if seen == _WORD | _TEXT | _RARE:
                continue
            state = table[state, data[i]]
            if ends[state]:
                if ends[state] & _WORD and not seen & _WORD:
                    at = i
                seen |= ends[state]
        return count

    return scan
