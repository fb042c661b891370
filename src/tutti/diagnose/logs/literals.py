"""What a line must contain so that a pattern can match it: short texts, one of which it has. Pure.

Found in the parsed pattern: of a sequence the longest run of plain characters, of alternatives one
each. Of a pattern that has none, None: any line may match it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
_EMPTY = frozenset(("",))
_LONG_ENOUGH, _MOST_TEXTS = 4, 64  # up to where a choice of characters is spelt out
LEAST = 3  # characters; shorter texts stand in nearly every line


@functools.lru_cache(maxsize=8192)
def required_literals(pattern: str) -> frozenset[str] | None:
    """Return texts, one of which is in every line, as lower case, that a pattern matches."""
    try:
        parse: Any = re._parser.parse  # type: ignore[attr-defined]
    except AttributeError:  # another Python than those that are tested
        return None
    best = _best(_candidates(parse(pattern)))
    return best if best and min(map(len, best)) >= LEAST else None


def _best(candidates: Sequence[frozenset[str]]) -> frozenset[str]:
    return max(
        candidates, key=lambda texts: (min(map(len, texts)), -len(texts)), default=frozenset()
    )


def _candidates(sequence: Any) -> list[frozenset[str]]:
    """Return the sets of texts of a sequence, of each of which a line must have one."""
    sets: list[frozenset[str]] = []
    run = _EMPTY
    for op, value in sequence:
        name = str(op)
        following = _characters(name, value)
        short = max(map(len, run)) < _LONG_ENOUGH and len(run) * len(following) <= _MOST_TEXTS
        if following and (len(following) == 1 or short):
            run = frozenset(text + character for text in run for character in following)
        elif first := _repeated(name, value) if short else None:
            sets.append(frozenset(text + more for text in run for more in first))
            run = _EMPTY
        elif name not in {"AT", "ASSERT", "ASSERT_NOT"}:  # those take no characters
            sets += [run, *_of_part(name, value)]
            run = _EMPTY
    return [texts for texts in (*sets, run) if texts != _EMPTY]


def _repeated(name: str, value: Any) -> frozenset[str]:
    """Return how a repetition of one character begins."""
    if name not in _REPEATS or not value[0] or len(value[2]) != 1:
        return frozenset()
    first = _characters(str(value[2][0][0]), value[2][0][1])
    return frozenset(character * value[0] for character in first) if len(first) == 1 else first


def _characters(name: str, value: Any) -> frozenset[str]:
    """Return the characters of which the next one is; none where it may be most of them."""
    if name == "LITERAL":
        return frozenset((chr(value).lower(),))
    if name != "IN":
        return frozenset()
    characters: set[str] = set()
    for op, member in value:
        if str(op) == "LITERAL":
            characters.add(chr(member).lower())
        elif str(op) == "CATEGORY" and str(member) == "CATEGORY_DIGIT":
            characters |= set("0123456789")
        else:
            return frozenset()
    return frozenset(characters)


def _of_part(name: str, value: Any) -> list[frozenset[str]]:
    if name == "SUBPATTERN":
        return _candidates(value[3])
    if name in _REPEATS:
        return _candidates(value[2]) if value[0] > 0 else []
    if name == "ATOMIC_GROUP":
        return _candidates(value)
    if name == "BRANCH":
        each = [_best(_candidates(alternative)) for alternative in value[1]]
        return [frozenset().union(*each)] if all(each) else []
    return []
