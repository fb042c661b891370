"""The scan of blocks of a log, compiled: what is known of a line's shape is asked of a table.

Lines of one form differ in digits alone. Eight bytes at a time a line is hashed with its digits
made alike; what the automaton said of the first line of a form holds for all, unless a text with
digits may be in it. So the automaton, byte by byte, runs on new forms alone.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tutti.diagnose.logs.automaton import DIGITS, RARE, TEXT, WORD

SHAPES = 1 << 18  # that are told apart; each takes 16 bytes
FORMS = 1 << 18
_MOST_OF_A_SHAPE = 1 << 15  # lines in a row, if every rank of a large job says one
_MOST_UNKNOWN_OF_A_SHAPE = 64
_MOST_UNKNOWN = 50_000
_ONE_IN = 512
_MOST_SHAPES = 60_000  # beyond them, of lines without a rare text one in some
_ONE_SHAPE_IN = 64
_SHAPE_BYTES = 400
_PROBES = 16  # places at which a shape or form is looked for
_ALL = WORD | TEXT | RARE
PADDING = 16  # line feeds behind a block
_MULTIPLIER, _SEED = 0x9E3779B97F4A7C15, 14695981039346656037
_ONES, _HIGHS, _LOWS = 0x0101010101010101, 0x8080808080808080, 0x7F7F7F7F7F7F7F7F


@functools.cache
def _thinning() -> Any:
    """Return what says whether a line with a word of trouble is looked at."""
    import numba

    @numba.njit(cache=True, nogil=True)
    def place_of_shape(data: Any, start: int, end: int, shapes: Any) -> Any:
        """Return where the lines of a line's shape are counted; -1 where there is no room."""
        shape, number = np.uint64(_SEED), False
        for i in range(start, min(end, start + _SHAPE_BYTES)):
            byte = data[i]
            if 48 <= byte <= 57:
                if number:
                    continue
                byte, number = np.uint8(35), True
            elif number and (97 <= byte <= 102 or 65 <= byte <= 70 or byte == 120):
                continue  # of a hexadecimal number
            else:
                number = False
            shape = (shape ^ np.uint64(byte)) * np.uint64(1099511628211)
        place = np.int64(shape & np.uint64(SHAPES - 1))
        for _ in range(_PROBES):
            if shapes[place, 1] == 0:
                shapes[place, 0] = shape
            if shapes[place, 0] == shape:
                return place
            place = (place + 1) & (SHAPES - 1)
        return np.int64(-1)

    @numba.njit(cache=True, nogil=True)
    def passes(place: int, shapes: Any, passed: Any, seen: int) -> Any:
        lines = np.int64(0)
        if place >= 0:
            shapes[place, 1] += np.uint64(1)
            lines = np.int64(shapes[place, 1])
        if not seen & TEXT:
            passed[0] += lines <= _MOST_UNKNOWN_OF_A_SHAPE
            return lines <= _MOST_UNKNOWN_OF_A_SHAPE and passed[0] <= _MOST_UNKNOWN
        passed[1] += lines <= 1
        if passed[1] > _MOST_SHAPES and lines <= 1 and not seen & RARE:
            looked_at = passed[1] % _ONE_SHAPE_IN == 0
        else:
            looked_at = lines <= _MOST_OF_A_SHAPE or lines % _ONE_IN == 0
        passed[2] += not looked_at
        return looked_at

    return place_of_shape, passes


@functools.cache
def _of_a_line() -> tuple[Any, Any]:
    """Return what hashes a line with its digits made alike, and what an automaton says of it."""
    import numba

    @numba.njit(cache=True, nogil=True)
    def form_of(eights: Any, start: int) -> Any:
        """Return the end of the line that begins at `start`, and its hash."""
        form, at = np.uint64(_SEED), start
        while True:
            eight = eights[at]
            feeds = eight ^ np.uint64(10 * _ONES)
            feeds = (feeds - np.uint64(_ONES)) & ~feeds & np.uint64(_HIGHS)
            if feeds:  # the bytes before the first line feed stay
                first = feeds & (~feeds + np.uint64(1))
                eight &= (first >> np.uint64(7)) - np.uint64(1)
            low = eight & np.uint64(_LOWS)
            digits = (low + np.uint64(0x50 * _ONES)) & ~(low + np.uint64(0x46 * _ONES))
            digits &= ~eight & np.uint64(_HIGHS)
            eight &= ~((digits >> np.uint64(7)) * np.uint64(15))
            form = (form ^ eight) * np.uint64(_MULTIPLIER)
            form ^= form >> np.uint64(32)
            if feeds:
                break
            at += 8
        first >>= np.uint64(7)
        while first > np.uint64(1):
            first >>= np.uint64(8)
            at += 1
        form = (form ^ np.uint64(at - start)) * np.uint64(_MULTIPLIER)
        return at, form ^ (form >> np.uint64(32))

    @numba.njit(cache=True, nogil=True)
    def ending(data: Any, start: int, end: int, classes: Any, table: Any, ends: Any) -> Any:
        """Return what is in a line, and where its first word of trouble ends."""
        state, seen, at = np.int64(0), np.int64(0), start
        for i in range(start, end):
            state = np.int64(table[state, classes[data[i]]])
            if ends[state]:
                if ends[state] & WORD and not seen & WORD:
                    at = i
                seen |= np.int64(ends[state])
                if seen & (_ALL | DIGITS) == _ALL | DIGITS:
                    break
        return seen, at

    return form_of, ending


@functools.cache
def scanner() -> Any:
    """Return the compiled scan."""
    import numba

    place_of_shape, passes = _thinning()
    form_of, ending = _of_a_line()

    @numba.njit(cache=True, nogil=True)
    def known_place(form: Any, forms: Any) -> Any:
        """Return where a form is noted or may be; -1 where there is no room."""
        place = np.int64(form & np.uint64(FORMS - 1))
        for _ in range(_PROBES):
            if forms[place, 1] == 0 or forms[place, 0] == form:
                return place
            place = (place + 1) & (FORMS - 1)
        return np.int64(-1)

    @numba.njit(cache=True, nogil=True)
    def scan(
        data: Any, eights: Any, size: int, exact: Any, alike: Any, forms: Any, shapes: Any,
        passed: Any, always: int, out: Any,
    ) -> int:  # fmt: skip
        count, start = 0, 0
        while start < size:
            end, form = form_of(eights, start)
            noted = known_place(form, forms)
            if noted >= 0 and forms[noted, 1]:  # what is in it; its shape's place; its word
                packed = np.int64(forms[noted, 1])
                seen, place = (packed & 15), ((packed >> 5) & (2 * SHAPES - 1)) - 1
                at = start + (packed >> 25)
            else:
                seen, at = ending(data, start, end, *alike)
                place = np.int64(-1)
                if seen & WORD and not seen & DIGITS:
                    place = place_of_shape(data, start, end, shapes)
                if noted >= 0:
                    packed = 16 | seen | (place + 1) << 5 | (at - start) << 25
                    forms[noted, 0], forms[noted, 1] = form, np.uint64(packed)
            if seen & DIGITS:
                seen, at = ending(data, start, end, *exact)
                if seen & WORD:
                    place = place_of_shape(data, start, end, shapes)
            if seen & WORD and passes(place, shapes, passed, seen | always):
                out[count] = at
                count += 1
            start = end + 1
        return count

    return scan
