"""Collective programs as a Plan records them: looked up by prices and by `comm`, and written.

The cost model chooses a program for every group and size; the Plan records the choices by use,
operation, kind of group and size, and from then on they are obeyed. Where one entry cannot say what
several groups do (of one kind and size, but over unlike links), it says "auto".
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tutti.collective import Group, Operation
from tutti.collective.builder import algorithms, unmet_need
from tutti.cost.network.group_links import GroupLinks
from tutti.cost.network.program_choice import Choice, Efficiency
from tutti.errors import InputError
from tutti.plan.collectives import AUTO
from tutti.plan.plan import CollectiveChoice, CollectiveUse, Plan
from tutti.units import many


class GroupKind(NamedTuple):
    """What a Plan tells groups apart by; every program runs on all groups of a kind or on none."""

    pools: tuple[str, ...]  # by name
    ranks: int
    islands: int

    @classmethod
    def of(cls, links: GroupLinks) -> GroupKind:
        """Return the kind of a priced group."""
        return cls(tuple(sorted(links.pools)), links.group.size, len(links.group.islands))

    def __str__(self) -> str:
        where = f"{many(self.ranks, 'rank')} in {many(self.islands, 'island')}"
        return f"{where} of {' and '.join(self.pools)}"


class Asked(NamedTuple):
    """A collective that a plan runs, what it was priced by, and the program it got."""

    use: CollectiveUse
    operation: Operation
    num_bytes: float
    links: GroupLinks
    efficiency: Efficiency
    choice: Choice
    channels: int = 1

    @property
    def kind(self) -> GroupKind:
        """The kind of its group."""
        return GroupKind.of(self.links)


class Recorded:
    """The choices of a plan, nearest first."""

    def __init__(self, plan: Plan) -> None:
        self._entries: dict[tuple[str, str], list[CollectiveChoice]] = defaultdict(list)
        for choice in sorted(plan.collectives, key=_nearness):
            self._entries[choice.use, choice.operation].append(choice)

    def entries(
        self, use: CollectiveUse, operation: Operation, kind: GroupKind
    ) -> Iterator[CollectiveChoice]:
        """Yield what is said for a kind of group, of any size."""
        for choice in self._entries.get((use, operation.value), ()):
            if (
                (not choice.pools or tuple(sorted(choice.pools)) == kind.pools)
                and choice.ranks in (None, kind.ranks)
                and choice.islands in (None, kind.islands)
            ):
                yield choice

    def find(
        self, use: CollectiveUse, operation: Operation, kind: GroupKind, num_bytes: float
    ) -> CollectiveChoice | None:
        """Return the choice for a collective; None where the cost model is to decide."""
        for choice in self.entries(use, operation, kind):
            if num_bytes <= _limit(choice):
                return None if choice.algorithm == AUTO else choice
        return None


def require_runnable(choice: CollectiveChoice, group: Group, kind: GroupKind) -> None:
    """Raise, in one line, where a recorded program cannot run on a group."""
    if choice.algorithm == AUTO or not (missing := unmet_need(choice.algorithm, group)):
        return
    here = f"{many(group.size, 'rank')} in {many(len(group.islands), 'island')}"
    possible = ", ".join(algorithms(choice.operation, group))
    raise InputError(
        f"plan: collectives: {choice.use} {choice.operation} among {kind} is "
        f"'{choice.algorithm}', which {missing}; this group is {here}: say {AUTO} or one of "
        f"{possible}, or plan for the cluster as it is"
    )


def _limit(choice: CollectiveChoice) -> float:
    return math.inf if choice.max_bytes is None else choice.max_bytes


def _nearness(choice: CollectiveChoice) -> tuple[bool, int, float]:
    """Those for certain pools first, then for certain groups, then by rising size."""
    form = (choice.ranks is None) + (choice.islands is None)
    return (not choice.pools, form, _limit(choice))


_Program = tuple[str, int, int]  # algorithm, chunks, channels


def written_choices(asked: Iterable[Asked]) -> tuple[CollectiveChoice, ...]:
    """Return the fewest entries that say what was asked: neighbours in size are joined."""
    kinds: dict[tuple[str, str, GroupKind], dict[float, set[_Program]]] = {}
    for one in asked:
        sizes = kinds.setdefault((one.use, one.operation.value, one.kind), defaultdict(set))
        program = (one.choice.algorithm, one.choice.chunks, one.channels)
        sizes[one.num_bytes].add(program)
    return tuple(
        CollectiveChoice(
            use=use,  # type: ignore[arg-type]  # sorting forgets that it is one of a few
            operation=operation,
            pools=kind.pools,
            ranks=kind.ranks,
            islands=kind.islands,
            algorithm=algorithm,
            chunks=chunks,
            channels=channels,
            max_bytes=most,
        )
        for (use, operation, kind), sizes in sorted(kinds.items())
        for (algorithm, chunks, channels), most in _joined(sizes)
    )


def _joined(sizes: dict[float, set[_Program]]) -> Iterator[tuple[_Program, float | None]]:
    """Yield programs by rising size, each with the most bytes that it serves."""
    runs: list[tuple[_Program, float, float]] = []  # with the least and the most bytes asked
    for size, programs in sorted(sizes.items()):
        program = next(iter(programs)) if len(programs) == 1 else (AUTO, 1, 1)
        if runs and runs[-1][0] == program:
            runs[-1] = (program, runs[-1][1], size)
        else:
            runs.append((program, size, size))
    for (program, _, most), (_, least, _) in itertools.pairwise(runs):
        yield program, _between(most, least)
    if runs:
        yield runs[-1][0], None


def _between(low: float, high: float) -> float:
    """Return a size half-way, by ratio, as round as may be: what runs is seldom just as priced."""
    middle = math.sqrt(low * high)
    for digits in range(2, 17):
        rounded = float(f"{middle:.{digits}g}")
        if low <= rounded < high:
            return rounded
    return low
