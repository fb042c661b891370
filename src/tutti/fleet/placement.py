"""Placement: which of the free nodes a job is given. Masks in, a mask out.

*Tightest* looks tier by tier, from the leaves up, for a group that holds the whole job, and takes
the one with the least room; where none does, it fills the largest groups, and puts the rest where
it fits most tightly: the fewest groups that there can be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from tutti.fleet.chips import bits, lowest
from tutti.fleet.policy import Placement

Masks = Sequence[int]  # of the groups of a tier
Tiers = Sequence[Masks]  # lowest first
Price = Callable[[int], float]  # of a mask of nodes: how much longer the job takes there


def place(
    kind: Placement,
    free: int,
    count: int,
    tiers: Tiers,
    chance: random.Random,
    price: Price,
    border: int = 0,
) -> int:
    """Return `count` of the free nodes; `border` is the tier whose groups matter most."""
    if kind is Placement.RANDOM:
        picked = 0
        for node in chance.sample(bits(free), count):
            picked |= 1 << node
        return picked
    if kind is Placement.FIRST:
        return lowest(free, count)
    tight = tightest(free, count, tiers, border)
    if kind is Placement.TIGHTEST or count == 1:
        return tight
    return min(dict.fromkeys([tight, *_others(free, count, tiers, border)]), key=price)


def tightest(free: int, count: int, tiers: Tiers, border: int = 0) -> int:
    """Return the nodes of the fewest groups, tier by tier."""
    return _inside(free, count, tiers, len(tiers), border)


def _inside(free: int, count: int, tiers: Tiers, below: int, border: int) -> int:
    """Return nodes out of one group (or all), by the tiers below it."""
    if below == 0:
        return lowest(free, count)
    if count == 1 and below == 1:
        return lowest(_fullest(free, tiers[0]), 1)
    groups = _rooms(free, tiers[below - 1])
    holding = [(room, own) for room, own in groups if room >= count]
    if holding:
        if below - 1 > border:  # the group that needs the fewest below it, then the fullest
            best = min(holding, key=lambda one: (_needed(one[1], count, tiers[below - 2]), one[0]))
        else:
            best = min(holding, key=lambda one: one[0])
        return _inside(best[1], count, tiers, below - 1, border)
    taken = 0
    for room, own in sorted(groups, key=lambda one: -one[0]):
        fitting = [one for one in groups if one[0] >= count and not one[1] & taken]
        if fitting:
            rest = min(fitting, key=lambda one: one[0])[1]
            return taken | _inside(rest, count, tiers, below - 1, border)
        taken |= own
        count -= room
        if count <= 0:
            return taken
    return taken


def _rooms(free: int, groups: Masks) -> list[tuple[int, int]]:
    by_room = []
    for mask in groups:
        own = free & mask
        if own:
            by_room.append((own.bit_count(), own))
    return by_room


def _fullest(free: int, groups: Masks) -> int:
    """Return the free nodes of the group that has the fewest, but one."""
    best, group = free.bit_count() + 1, free
    for mask in groups:
        own = free & mask
        if own and (room := own.bit_count()) < best:
            best, group = room, own
            if room == 1:
                break
    return group


def _needed(free: int, count: int, groups: Masks) -> int:
    """Return in how many groups so many free nodes lie at best."""
    for number, (room, _) in enumerate(sorted(_rooms(free, groups), reverse=True), start=1):
        count -= room
        if count <= 0:
            return number
    return len(groups) + 1


def _others(free: int, count: int, tiers: Tiers, border: int) -> Iterator[int]:
    """Yield tight placements elsewhere: without the group that has most room, and so on."""
    if not tiers:
        return
    left = free
    for _ in range(4):
        rooms = _rooms(left, tiers[0])
        if not rooms:
            return
        left &= ~min(rooms, key=lambda one: abs(one[0] - count))[1]
        if left.bit_count() < count:
            return
        yield tightest(left, count, tiers, border)


def fewest_now(free: int, count: int, groups: Masks) -> int:
    """Return in how many groups a job would lie at best, by what is free."""
    return _needed(free, count, groups)
