"""Ranks that hold the same cells of a tensor, and which elements each of them keeps.

A cell is a part of a tensor that no rank cuts. Its holders are written as runs of equal ranks, so
that 16,384 of them are a few numbers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.models.parameters import Interval, Parameter

IntArray = npt.NDArray[np.int64]


class Slicing(NamedTuple):
    """How the ranks of a holder group slice tensors, position by position."""

    tp: int = 1
    sequence_parallel: bool = False
    spread: bool = False  # experts are shared out whole in this stage
    experts: tuple[int, ...] = ()  # by position in an expert group; empty: positions are tensor's

    @property
    def num_positions(self) -> int:
        """How many ranks hold different parts."""
        return len(self.experts) or self.tp

    def part(self, parameter: Parameter, position: int) -> tuple[Interval, ...]:
        """Return which part of a tensor a position holds."""
        if not self.experts:
            return parameter.part(tp=self.tp, rank=position)
        first = sum(self.experts[:position])
        return parameter.part(experts=(first, first + self.experts[position]))

    def size(self, parameter: Parameter, position: int) -> int:
        """Return how many numbers of a tensor a position holds."""
        return math.prod(stop - start for start, stop in self.part(parameter, position))

    def adds(self, parameter: Parameter, position: int) -> bool:
        """Tell whether a holder's gradient is a part of the sum, not a copy of a neighbour's."""
        if self.tp == 1 or parameter.slice_dim is not None or position == 0:
            return True
        return parameter.is_partial(
            tp=self.tp, sequence_parallel=self.sequence_parallel, spread=self.spread
        )


Positions = tuple[tuple[int, ...], ...]  # of each slicing


class Cell(NamedTuple):
    """A part of a tensor that nobody cuts, with the positions that hold it, by slicing."""

    intervals: tuple[Interval, ...]
    holders: Positions
    adders: Positions

    @property
    def size(self) -> int:
        """How many numbers."""
        return math.prod(stop - start for start, stop in self.intervals)


@functools.lru_cache(maxsize=8192)
def cells(parameter: Parameter, slicings: tuple[Slicing, ...]) -> tuple[Cell, ...]:
    """Cut a tensor wherever a position of any slicing cuts it."""
    held = [
        (k, position, slicing.part(parameter, position))
        for k, slicing in enumerate(slicings)
        for position in range(slicing.num_positions)
    ]
    dims = range(len(parameter.shape))
    edges = [sorted({edge for *_, part in held for edge in part[d]}) for d in dims]
    index = [{edge: i for i, edge in enumerate(along)} for along in edges]
    holders_of_cell: dict[tuple[int, ...], list[list[int]]] = {}
    for k, position, part in held:
        for cell in itertools.product(*(range(*map(index[d].get, part[d])) for d in dims)):  # type: ignore[arg-type]
            holders_of_cell.setdefault(cell, [[] for _ in slicings])[k].append(position)
    return tuple(
        Cell(
            tuple((edges[d][i], edges[d][i + 1]) for d, i in enumerate(cell)),
            tuple(map(tuple, holders)),
            tuple(
                tuple(position for position in positions if slicing.adds(parameter, position))
                for slicing, positions in zip(slicings, holders, strict=True)
            ),
        )
        for cell, holders in sorted(holders_of_cell.items())
    )


class HolderGroup(NamedTuple):
    """Ranks of a stage at `slicing`'s positions, so many copies one after the other."""

    pipeline: int
    stage: int
    first: int  # rank
    copies: int  # of all positions
    slicing: Slicing
    weight: int  # of `per_weight` copies together
    per_weight: int  # context-parallel ranks of one copy of a replica


class Run(NamedTuple):
    """Some positions of a holder group, in rank order, with the weight of each rank."""

    group: HolderGroup
    positions: tuple[int, ...]
    weight: int

    @property
    def num_ranks(self) -> int:
        """How many."""
        return self.group.copies * len(self.positions)

    def rank(self, index: int) -> int:
        """Return one of its ranks."""
        copy, place = divmod(index, len(self.positions))
        return self.group.first + copy * self.group.slicing.num_positions + self.positions[place]

    def ranks(self) -> IntArray:
        """Return all of them."""
        copies = np.arange(self.group.copies) * self.group.slicing.num_positions
        ranks: IntArray = (copies[:, None] + np.asarray(self.positions) + self.group.first).ravel()
        return ranks

    def find(self, rank: int) -> int | None:
        """Return which of its ranks a rank is."""
        copy, position = divmod(rank - self.group.first, self.group.slicing.num_positions)
        if not 0 <= copy < self.group.copies or position not in self.positions:
            return None
        return copy * len(self.positions) + self.positions.index(position)


@dataclass(frozen=True, slots=True)
class Holders:
    """Ranks that hold the same cells, rising, with their weights; no list per rank."""

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, groups: Sequence[HolderGroup], positions: Sequence[tuple[int, ...]]) -> Holders:
        """Return the ranks at some positions of each group."""
        held = [(group, at) for group, at in zip(groups, positions, strict=True) if at]
        common = math.lcm(*(group.per_weight * len(at) for group, at in held))
        weights = [g.weight * common // (g.per_weight * len(at)) for g, at in held]
        if not any(weights):
            weights = [1] * len(held)
        shared = math.gcd(*weights)
        return cls(
            tuple(
                Run(group, at, weight // shared)
                for (group, at), weight in zip(held, weights, strict=True)
            )
        )

    def __len__(self) -> int:
        return sum(run.num_ranks for run in self.runs)

    def ranks(self) -> tuple[int, ...]:
        """Return all of them."""
        return tuple(run.rank(i) for run in self.runs for i in range(run.num_ranks))

    @property
    def total(self) -> int:
        """The sum of all weights."""
        return sum(run.weight * run.num_ranks for run in self.runs)

    def own(self, rank: int, size: int) -> Interval | None:
        """Return the elements that a holder keeps of so many; None: it is no holder."""
        before, total = 0, self.total
        for run in self.runs:
            index = run.find(rank)
            if index is not None:
                low = before + index * run.weight
                return size * low // total, size * (low + run.weight) // total
            before += run.weight * run.num_ranks
        return None

    def intervals(self, size: int) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
        """Yield ranks with the first and the last element that each keeps, as arrays."""
        before, total = 0, self.total
        for run in self.runs:
            kind = np.int64 if size * total < 2**62 else object  # of any size, if it must be
            reached = before + run.weight * np.arange(run.num_ranks + 1, dtype=kind)
            edges = (size * reached // total).astype(np.int64)
            yield run.ranks(), edges[:-1], edges[1:]
            before += run.weight * run.num_ranks

    def bounds(self, size: int) -> tuple[int, ...]:
        """Return where the elements of each holder begin, and where the last one's end."""
        weights = itertools.chain.from_iterable([run.weight] * run.num_ranks for run in self.runs)
        total = self.total
        return tuple(
            size * reached // total for reached in itertools.accumulate(weights, initial=0)
        )

    def keepers(self, size: int, start: int, stop: int) -> Iterator[tuple[int, Interval]]:
        """Yield who keeps the elements from `start` to `stop`, each with its whole interval."""
        before, total = 0, self.total
        for run in self.runs:
            after = before + run.weight * run.num_ranks
            if run.weight and size * after // total > start and size * before // total < stop:
                # the last rank that begins at or before `start`, and a step back for rounding
                index = max(0, (start * total // size - before) // run.weight - 1)
                for i in range(index, run.num_ranks):
                    low = size * (before + i * run.weight) // total
                    high = size * (before + (i + 1) * run.weight) // total
                    if low >= stop:
                        break
                    if low < high and high > start:
                        yield run.rank(i), (low, high)
            before = after
