"""Schedules: who sends which parts to whom in which round, by position in a team of any size.

Owns the patterns of communication and nothing else: positions 0…n−1, part numbers 0…n−1. Each is
given for one position at a time, so that a rank learns its own moves without listing everybody's.
Only the spreading half is written out; reductions are the same schedules run backwards in time
(an all-gather backwards is a reduce-scatter, a broadcast a reduce, a scatter a gather).
"""

# ruff: noqa: ARG001, ARG005 - all schedules have one signature, whatever they use of it

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tutti.collective.program import Action, Pattern


class PartsMove(NamedTuple):
    """Parts first, first+1, …, first+number−1 (modulo the team's size) go from source to target."""

    source: int
    target: int
    first: int
    number: int
    reduce: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The rounds of one pattern; all functions take the team's size first, then the round."""

    rounds: Callable[[int], int]
    sends: Callable[[int, int, int], list[PartsMove]]  # what leaves a position
    receives: Callable[[int, int, int], list[PartsMove]]  # what reaches a position, by source
    moves: Callable[[int, int], list[PartsMove]]  # all, by source


def _spread(
    *,
    rounds: Callable[[int], int],
    sends: Callable[[int, int, int], list[PartsMove]],
    source: Callable[[int, int, int], int | None],
    senders: Callable[[int, int], Iterable[int]] = lambda n, at: range(n),
) -> Schedule:
    """Return the schedule in which a position hears from one `source` at most in a round."""

    def receives(size: int, at: int, position: int) -> list[PartsMove]:
        heard = source(size, at, position)
        spoken = [] if heard is None else sends(size, at, heard)
        return [move for move in spoken if move.target == position]

    def moves(size: int, at: int) -> list[PartsMove]:
        return [move for position in senders(size, at) for move in sends(size, at, position)]

    return Schedule(rounds=rounds, sends=sends, receives=receives, moves=moves)


def _backwards(schedule: Schedule, *, reduce: bool) -> Schedule:
    """Return the schedule with time and direction reversed."""

    def then(size: int, at: int) -> int:
        return schedule.rounds(size) - 1 - at

    def turned(moves: list[PartsMove]) -> list[PartsMove]:
        return sorted(PartsMove(m.target, m.source, m.first, m.number, reduce) for m in moves)

    return Schedule(
        rounds=schedule.rounds,
        sends=lambda n, at, i: turned(schedule.receives(n, then(n, at), i)),
        receives=lambda n, at, i: turned(schedule.sends(n, then(n, at), i)),
        moves=lambda n, at: turned(schedule.moves(n, then(n, at))),
    )


def _then(one: Schedule, other: Schedule) -> Schedule:
    """Return one schedule followed by another."""

    def pick(size: int, at: int) -> tuple[Schedule, int]:
        done = one.rounds(size)
        return (one, at) if at < done else (other, at - done)

    def sends(size: int, at: int, position: int) -> list[PartsMove]:
        part, now = pick(size, at)
        return part.sends(size, now, position)

    def receives(size: int, at: int, position: int) -> list[PartsMove]:
        part, now = pick(size, at)
        return part.receives(size, now, position)

    def moves(size: int, at: int) -> list[PartsMove]:
        part, now = pick(size, at)
        return part.moves(size, now)

    return Schedule(
        rounds=lambda size: one.rounds(size) + other.rounds(size),
        sends=sends,
        receives=receives,
        moves=moves,
    )


def _levels(size: int) -> int:
    """Return the rounds in which one can reach `size`, doubling each time."""
    return (size - 1).bit_length()


# --- each starts with its own part, all end with all parts ----------------------------------

_RING_GATHER = _spread(
    rounds=lambda n: n - 1,
    sends=lambda n, at, i: [PartsMove(i, (i + 1) % n, (i - at) % n, 1)],
    source=lambda n, at, i: (i - 1) % n,
)

# After round r position i holds parts i … i+2^(r+1)−1 (modulo n): the circulant schedule, which
# needs no power of two and moves no part twice to the same place.
_DOUBLING_GATHER = _spread(
    rounds=_levels,
    sends=lambda n, at, i: [PartsMove(i, (i - (1 << at)) % n, i, min(1 << at, n - (1 << at)))],
    source=lambda n, at, i: (i + (1 << at)) % n,
)

_DIRECT_GATHER = _spread(
    rounds=lambda n: n - 1,
    sends=lambda n, at, i: [PartsMove(i, (i + at + 1) % n, i, 1)],
    source=lambda n, at, i: (i - at - 1) % n,
)

# --- position 0 starts with everything --------------------------------------------------------


def _span(n: int, at: int) -> int:
    """Return how far a binomial tree reaches in a round: half the team first, 1 last."""
    return 1 << (_levels(n) - 1 - at)


def _tree(scatters: bool) -> Schedule:
    """Return the binomial tree; a position's subtree is the run of positions that follow it."""

    def sends(n: int, at: int, i: int) -> list[PartsMove]:
        span = _span(n, at)
        child = i + span
        if i % (2 * span) or child >= n:
            return []
        return [
            PartsMove(i, child, child, min(span, n - child))
            if scatters
            else PartsMove(i, child, 0, n)
        ]

    return _spread(
        rounds=_levels,
        sends=sends,
        source=lambda n, at, i: (
            i - _span(n, at) if i % (2 * _span(n, at)) == _span(n, at) else None
        ),
        senders=lambda n, at: range(0, n - _span(n, at), 2 * _span(n, at)),
    )


_BINARY_BROADCAST = _spread(
    rounds=lambda n: n.bit_length() - 1,
    sends=lambda n, at, i: [
        PartsMove(i, child, 0, n)
        for child in (2 * i + 1, 2 * i + 2)
        if child < n and (i + 1).bit_length() == at + 1
    ],
    source=lambda n, at, i: (i - 1) // 2 if (i + 1).bit_length() == at + 2 else None,
    senders=lambda n, at: range((1 << at) - 1, min((2 << at) - 1, n // 2)),
)

_CHAIN = _spread(
    rounds=lambda n: n - 1,
    sends=lambda n, at, i: [PartsMove(i, i + 1, 0, n)] if i == at else [],
    source=lambda n, at, i: i - 1 if i == at + 1 else None,
    senders=lambda n, at: [at],
)


def _star(scatters: bool) -> Schedule:
    def sends(n: int, at: int, i: int) -> list[PartsMove]:
        if i:
            return []
        return [
            PartsMove(0, to, to, 1) if scatters else PartsMove(0, to, 0, n) for to in range(1, n)
        ]

    return _spread(
        rounds=lambda n: min(1, n - 1),
        sends=sends,
        source=lambda n, at, i: 0 if i else None,
        senders=lambda n, at: [0],
    )


_GATHERS = {
    Pattern.RING: _RING_GATHER,
    Pattern.DOUBLING: _DOUBLING_GATHER,
    Pattern.DIRECT: _DIRECT_GATHER,
    Pattern.NATIVE: _DIRECT_GATHER,
}
_BROADCASTS = {
    Pattern.TREE: _tree(scatters=False),
    Pattern.BINARY: _BINARY_BROADCAST,
    Pattern.RING: _CHAIN,
    Pattern.DIRECT: _star(scatters=False),
    Pattern.NATIVE: _star(scatters=False),
}
_SCATTERS = {
    Pattern.TREE: _tree(scatters=True),
    Pattern.DIRECT: _star(scatters=True),
    Pattern.NATIVE: _star(scatters=True),
}


def _table() -> dict[tuple[Action, Pattern], Schedule]:
    table: dict[tuple[Action, Pattern], Schedule] = {}
    for pattern, gather in _GATHERS.items():
        scatter = _backwards(gather, reduce=True)
        table[Action.ALL_GATHER, pattern] = gather
        table[Action.REDUCE_SCATTER, pattern] = scatter
        table[Action.ALL_REDUCE, pattern] = _then(scatter, gather)
    for pattern, broadcast in _BROADCASTS.items():
        reduce = _backwards(broadcast, reduce=True)
        table[Action.BROADCAST, pattern] = broadcast
        table[Action.REDUCE, pattern] = reduce
        table.setdefault((Action.ALL_REDUCE, pattern), _then(reduce, broadcast))
    for pattern, spread in _SCATTERS.items():
        table[Action.SCATTER, pattern] = spread
        table[Action.GATHER, pattern] = _backwards(spread, reduce=False)
    table[Action.ALL_TO_ALL, Pattern.DIRECT] = _DIRECT_GATHER
    table[Action.ALL_TO_ALL, Pattern.NATIVE] = _DIRECT_GATHER
    return table


SCHEDULES = _table()
