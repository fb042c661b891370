"""Which chip is slow: its passes against the plan, its own past and its twins. Pure.

A chip's compute seconds over what the plan expects of it are its ratio. A plan may be wrong about a
kind of chip, and a host may be busy for a moment; so a ratio counts only against what it was before
(its own past) and what its twins (chips of which the plan expects the same) show in the same step.
It is slow when that stays above a bar for some steps on end, and well again when it stays below a
lower one: noise between the two changes nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SLOW, WELL = 1.25, 1.10  # times as long as before and as its twins
ON_END = 5  # steps that must agree
PAST = 10  # steps whose median is what was before
FIRST = 2  # steps at the start that count for nothing: compiling, fresh memory


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
        found = (self._look(index, number, own) for index in range(len(own)))
        return [verdict for verdict in found if verdict is not None]

    def _look(self, index: int, number: int, own: Sequence[float]) -> Verdict | None:
        rank = self._ranks[index]
        # what slows all of them alike is no chip's: a longer batch, a busy host
        others = [own[twin] for twin in self._twins[index] if not self._ranks[twin].slow]
        common = max(1.0, statistics.median(others)) if len(others) >= 2 else 1.0
        rank.recent.append(own[index] / common)
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
