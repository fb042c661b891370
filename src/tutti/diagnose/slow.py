"""Which chip is slow: its passes against the plan, its own past and its twins. Pure.

A chip's compute seconds over what the plan expects of it are its ratio. A plan may be wrong about a
kind of chip, and a host may be busy for a moment; so a ratio counts only against what it was before
(its own past) and what its twins (chips of which the plan expects the same) show in the same step.
It is slow when that stays above a bar for some steps on end, and well again when it stays below a
lower one: noise between the two changes nothing.

Where there is no past (a check before a run, the rings of one that is over), twins alone are held
against each other: `slower_than_twins`. Both take what all twins show alike out by `in_common`.
Wires are judged in `slow_wires`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Chip = TypeVar("Chip", bound=Hashable)

SLOW, WELL = 1.25, 1.10  # times as long as before and as its twins
ON_END = 5  # steps that must agree
PAST = 10  # steps whose median is what was before
FIRST = 2  # steps at the start that count for nothing: compiling, fresh memory
APART = 1.1  # times as long as its twins, of medians over many passes
_SPREADS = 5.0  # of the twins' own spread
_LEAST_SPREAD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A chip that became slow, or well again."""

    rank: int
    step: int
    factor: float  # times as long as it should take now; 1: well again
    why: str

    @property
    def slow(self) -> bool:
        """Whether it is slow from now on."""
        return self.factor > 1.0


@dataclass(slots=True)
class _Rank:
    past: list[float] = field(default_factory=list)  # its first ratios, while it was well
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=ON_END))
    slow: bool = False


class SlowRanks:
    """Watches the ranks of one generation, step by step."""

    def __init__(self, expected_s: Sequence[float]) -> None:
        """Take what the plan expects each rank to compute in a step, in seconds."""
        self._expected = [max(seconds, 1e-9) for seconds in expected_s]
        self._ranks = [_Rank() for _ in expected_s]
        self._twins = _twins(self._expected)
        self._steps = 0

    def step(self, number: int, compute_s: Sequence[float]) -> list[Verdict]:
        """Take the compute seconds of every rank in a step; return what changed."""
        self._steps += 1
        if self._steps <= FIRST:
            return []
        ratios = [took / due for took, due in zip(compute_s, self._expected, strict=True)]
        if any(len(rank.past) < PAST for rank in self._ranks):
            for rank, ratio in zip(self._ranks, ratios, strict=True):
                rank.past.append(ratio)
            return []
        own = [
            ratio / statistics.median(rank.past)
            for rank, ratio in zip(self._ranks, ratios, strict=True)
        ]
        verdicts = (self._look(index, number, own) for index in range(len(own)))
        return [verdict for verdict in verdicts if verdict is not None]

    def _look(self, index: int, number: int, own: Sequence[float]) -> Verdict | None:
        rank = self._ranks[index]
        # what slows all of them alike is no chip's: a longer batch, a busy host
        others = [own[twin] for twin in self._twins[index] if not self._ranks[twin].slow]
        rank.recent.append(own[index] / in_common(others))
        if len(rank.recent) < ON_END:
            return None
        factor = statistics.median(rank.recent)
        if not rank.slow and min(rank.recent) > SLOW:
            rank.slow = True
            why = f"computes {factor:.2f} times as long as before for {ON_END} steps"
            why += f"; its {len(others)} twins do not" if others else ""
            return Verdict(rank=index, step=number, factor=factor, why=why)
        if rank.slow and max(rank.recent) < WELL:
            rank.slow = False
            return Verdict(rank=index, step=number, factor=1.0, why="is as quick as before again")
        return None


class Recovery:
    """Something that is slow, and may become well: what it takes now against what it took before.

    A busy host makes single steps longer, never shorter: of what was before the lower quarter
    counts, and of the last few steps the middle one.
    """

    def __init__(self, factor: float) -> None:
        self._bar = (1 + 1 / factor) / 2
        self._seen = 0
        self._before: deque[float] = deque(maxlen=2 * PAST)
        self._recent: deque[float] = deque(maxlen=ON_END)

    def step(self, took: float) -> bool:
        """Take what a step took; tell whether it is well from now on."""
        self._seen += 1
        if self._seen <= FIRST:
            return False
        if len(self._recent) == ON_END:
            self._before.append(self._recent[0])
        self._recent.append(took)
        if len(self._before) < ON_END:
            return False
        slow = sorted(self._before)[len(self._before) // 4]
        return statistics.median(self._recent) < self._bar * slow


def in_common(others: Sequence[float]) -> float:
    """Return by how much all of a chip's twins are slower alike; of one twin nothing is known."""
    return max(1.0, statistics.median(others)) if len(others) >= 2 else 1.0


def slower_than_twins(
    ratios: Mapping[Chip, float], *, bar: float = APART, least: int = 3
) -> dict[Chip, float]:
    """Return those of equal chips that are slower than the others, and how many times.

    `ratios` are medians over many passes: seconds, or seconds over what was expected. Of two
    chips neither is known to be the slow one, so there must be `least` of them.
    """
    if len(ratios) < least:
        return {}
    middle = statistics.median(ratios.values())
    spread = max(deviation(list(ratios.values())), _LEAST_SPREAD * middle)
    return {
        chip: ratio / middle
        for chip, ratio in ratios.items()
        if ratio > bar * middle and ratio > middle + _SPREADS * spread
    }


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation as the median tells it, which outliers do not move."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(v - middle) for v in values)


def _twins(expected_s: Sequence[float]) -> Mapping[int, tuple[int, ...]]:
    """Return for each rank the others of which the plan expects the same."""
    return {
        index: tuple(
            other
            for other, due in enumerate(expected_s)
            if other != index and abs(due - expected) <= 1e-6 * expected
        )
        for index, expected in enumerate(expected_s)
    }
