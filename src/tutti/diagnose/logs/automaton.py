"""Which of many texts a line has, byte by byte: Aho and Corasick's automaton (1975), as tables.

Letters count whatever their case. A text with digits is asked for twice: the automaton of shapes
takes any digit for any other and says that one may be there; the exact one says whether it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# what ends in a state: a word of trouble; a text that a signature needs; one that is no such word;
# a text with digits, perhaps with others
WORD, TEXT, RARE, DIGITS = 1, 2, 4, 8
_ZERO, _NINE = ord("0"), ord("9")
_TO_ZERO = bytes(_ZERO if _ZERO <= byte <= _NINE else byte for byte in range(256))


@dataclass(frozen=True, slots=True)
class Automaton:
    """Tables: the class of each byte, the next state of each state and class, what ends there."""

    classes: NDArray[np.uint8]
    table: NDArray[np.int32]
    ends: NDArray[np.uint8]


def exact_and_of_shapes(
    words: Sequence[bytes], texts: Sequence[bytes]
) -> tuple[Automaton, Automaton]:
    """Return the automaton of words and texts, and the one that takes all digits for alike."""
    rare = {text for text in texts if not any(word in text for word in words)}
    kinds = [
        *((word, WORD) for word in words),
        *((text, TEXT | RARE if text in rare else TEXT) for text in texts),
    ]
    alike = [(t.translate(_TO_ZERO), DIGITS if _has_digits(t) else kind) for t, kind in kinds]
    return _automaton(kinds), _automaton(alike, digits_alike=True)


def _has_digits(text: bytes) -> bool:
    return any(_ZERO <= byte <= _NINE for byte in text)


def _automaton(kinds: Sequence[tuple[bytes, int]], *, digits_alike: bool = False) -> Automaton:
    bytes_of_texts = sorted({byte for text, _ in kinds for byte in text})
    classes = np.zeros(256, dtype=np.uint8)  # 0: of no text
    for number, byte in enumerate(bytes_of_texts, start=1):
        classes[byte] = number
    for letter in range(ord("A"), ord("Z") + 1):
        classes[letter] = classes[letter + 32]
    if digits_alike:
        classes[_ZERO : _NINE + 1] = classes[_ZERO]
    children, ends = _tree([([int(classes[byte]) for byte in text], kind) for text, kind in kinds])
    table = np.zeros((len(children), len(bytes_of_texts) + 1), dtype=np.int32)
    fallback = [0] * len(children)
    queue: deque[int] = deque()
    for number, child in children[0].items():
        table[0, number] = child
        queue.append(child)
    while queue:
        state = queue.popleft()
        ends[state] |= ends[fallback[state]]
        table[state] = table[fallback[state]]
        for number, child in children[state].items():
            fallback[child] = int(table[fallback[state], number])
            table[state, number] = child
            queue.append(child)
    return Automaton(classes, table, np.array(ends, dtype=np.uint8))


def _tree(texts: Sequence[tuple[list[int], int]]) -> tuple[list[dict[int, int]], list[int]]:
    """Return the children of each node of the tree of texts, and what ends in it."""
    children: list[dict[int, int]] = [{}]
    ends = [0]
    for text, kind in texts:
        state = 0
        for number in text:
            if number not in children[state]:
                children[state][number] = len(children)
                children.append({})
                ends.append(0)
            state = children[state][number]
        ends[state] |= kind
    return children, ends
