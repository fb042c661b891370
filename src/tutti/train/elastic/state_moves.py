"""Live moves of training state: who gives which rectangle to whom. Pure.

Every rank says which rectangles it offers and which it wants. What it has itself stays; the rest
comes from ranks that offer it, taken in turn so that no one of them serves all. All ranks work out
the same list from the same words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.ownership.rectangles import Rectangle, difference, intersection

Offers = Mapping[str, Sequence[Rectangle]]  # by key: "weight/3.attention.query.weight"


@dataclass(frozen=True, slots=True)
class RectangleMove:
    """A rectangle on its way from one rank to another; the same rank: a copy in place."""

    key: str
    rectangle: Rectangle
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Missing:
    """A rectangle that nobody offers."""

    key: str
    rectangle: Rectangle
    target: int


def find_moves(
    offers: Sequence[Offers], wants: Sequence[Offers]
) -> tuple[list[RectangleMove], list[Missing]]:
    """Return how every rank gets what it wants, in an order that all share."""
    moves, missing = list[RectangleMove](), list[Missing]()
    holders: dict[str, list[int]] = {}
    for rank, offered in enumerate(offers):
        for key in offered:
            holders.setdefault(key, []).append(rank)
    for target, wanted in enumerate(wants):
        for key in sorted(wanted):
            ranks = holders.get(key, [])
            turn = [r for r in ranks if r == target]  # its own first, then the others in turn
            others = [r for r in ranks if r != target]
            start = target % len(others) if others else 0
            turn += others[start:] + others[:start]
            for left in _apart(wanted[key]):
                for source in turn:
                    left = _take(moves, left, key, source, target, offers[source][key])
                missing += [Missing(key, rest, target) for rest in left]
    return moves, missing


def _apart(wanted: Sequence[Rectangle]) -> list[list[Rectangle]]:
    """Return what each rectangle wants besides those before it.

    A rank may keep a tensor twice, as one that is tied to another of its own: it comes once.
    """
    apart = list[list[Rectangle]]()
    for number, rectangle in enumerate(wanted):
        left = [rectangle]
        for earlier in wanted[:number]:
            left = [part for rest in left for part in _without(rest, earlier)]
        apart.append(left)
    return apart


def _without(rectangle: Rectangle, other: Rectangle) -> Sequence[Rectangle]:
    common = intersection(rectangle, other)
    return [rectangle] if common is None else difference(rectangle, common)


def _take(
    moves: list[RectangleMove],
    left: list[Rectangle],
    key: str,
    source: int,
    target: int,
    offered: Sequence[Rectangle],
) -> list[Rectangle]:
    """Take from one source what it has of what is left; return what is left then."""
    for have in offered:
        after = list[Rectangle]()
        for rest in left:
            common = intersection(rest, have)
            if common is None:
                after.append(rest)
                continue
            moves.append(RectangleMove(key, common, source, target))
            after += difference(rest, common)
        left = after
    return left


def to_words(offers: Offers) -> dict[str, list[list[list[int]]]]:
    """Return offers as JSON can say them."""
    return {
        key: [[list(r.offsets), list(r.sizes)] for r in rectangles]
        for key, rectangles in offers.items()
    }


def from_words(words: Mapping[str, Any]) -> dict[str, list[Rectangle]]:
    """Return what `to_words` said."""
    return {
        key: [Rectangle(tuple(offsets), tuple(sizes)) for offsets, sizes in rectangles]
        for key, rectangles in words.items()
    }
