"""Collective programs as a Plan records them: looked up for prices, and written from them.

The cost model chooses a program for every group and size; the Plan records the choices by use,
operation, pools and size, and from then on they are obeyed. Where one entry cannot say what
several groups do (same pools, same size, but they lie differently), it says "auto".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from tutti.collective import Operation
from tutti.plan.collectives import AUTO
from tutti.plan.plan import CollectiveChoice, Plan

Use = Literal["gradients", "parameters", "tied", "boundary", "experts", "scalars"]


class Asked(NamedTuple):
    """A collective that a plan runs, and the program it got."""

    use: Use
    operation: Operation
    pools: tuple[str, ...]
    num_bytes: float
    algorithm: str
    chunks: int


class Recorded:
    """The choices of a plan, nearest first."""

    def __init__(self, plan: Plan) -> None:
        self._entries: dict[tuple[str, str], list[CollectiveChoice]] = defaultdict(list)
        for choice in sorted(plan.collectives, key=_nearness):
            self._entries[choice.use, choice.operation].append(choice)

    def find(
        self, use: Use, operation: Operation, pools: tuple[str, ...], num_bytes: float
    ) -> CollectiveChoice | None:
        """Return the choice for a collective; None where the cost model is to decide."""
        for choice in self._entries.get((use, operation.value), ()):
            here = not choice.pools or sorted(choice.pools) == sorted(pools)
            if here and num_bytes <= _limit(choice):
                return None if choice.algorithm == AUTO else choice
        return None


def _limit(choice: CollectiveChoice) -> float:
    return math.inf if choice.max_bytes is None else choice.max_bytes


def _nearness(choice: CollectiveChoice) -> tuple[bool, float]:
    """Those for certain pools first, then by rising size."""
    return (not choice.pools, _limit(choice))


def written_choices(asked: Iterable[Asked]) -> tuple[CollectiveChoice, ...]:
    """Return the fewest entries that say what was asked: neighbours in size are joined."""
    by_use: dict[tuple[Use, str, tuple[str, ...]], dict[float, set[tuple[str, int]]]] = {}
    for one in asked:
        sizes = by_use.setdefault((one.use, one.operation.value, one.pools), defaultdict(set))
        sizes[one.num_bytes].add((one.algorithm, one.chunks))
    written: list[CollectiveChoice] = []
    for (use, operation, pools), sizes in sorted(by_use.items()):
        runs: list[CollectiveChoice] = []
        for size, programs in sorted(sizes.items()):
            algorithm, chunks = next(iter(programs)) if len(programs) == 1 else (AUTO, 1)
            entry = CollectiveChoice(
                use=use,
                operation=operation,
                pools=pools,
                algorithm=algorithm,
                chunks=chunks,
                max_bytes=size,
            )
            if runs and replace(runs[-1], max_bytes=size) == entry:
                runs.pop()
            runs.append(entry)
        runs[-1] = replace(runs[-1], max_bytes=None)
        written += runs
    return tuple(written)
