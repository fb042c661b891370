"""How much work a search may do, and what it tells those who wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tutti.search.cutting.build_draft import Grouping, PipelineCopies


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much work a search may do; a larger cluster earns more."""

    instructions: int = 60_000  # simulated, for candidates
    per_chip: int = 300
    most: int = 1_500_000
    exact: int = 1_000  # plans of a space that is searched whole
    candidates: int = 3
    most_candidates: int = 14  # as long as something left promises more
    whole: int = 2  # drafts simulated from the first micro-batch to the last, at least
    chains: int = 4  # per group of pools, schedule and shard level
    alone: int = 3  # candidates for each pool by itself
    smaller: int = 2  # candidates of each smaller question; 0: none is asked
    polished: int = 2
    groupings: tuple[Grouping, ...] | None = None  # arrangements of pools; None: all likely ones
    seeds: tuple[tuple[PipelineCopies, ...], ...] = ()  # likely strategies: those of a warm start
    refined: int = 16  # candidates of every schedule and shard level whose chains are cut exactly
    refined_large: int = 5  # on a large cluster, where it takes long
    wider: int = 2  # times as many of them, of single chains, on a large cluster
    large: int = 256  # chips
    improved: int = 2  # drafts from which small steps lead on
    per_chip_improved: int = 150  # instructions simulated for them, beyond those of `large`
    most_improved: int = 100_000
    last_mile: int = 2_500_000  # instructions for a local search from the best plans
    wide_gap: float = 0.2  # over the bound: here all of them, below far fewer, above more
    widest_more: float = 2.0  # times as many at most
    gap_power: float = 1.75  # of the gap over the wide one, for more work
    narrow_power: float = 1.0  # the same, for less
    least_share: float = 0.1  # of all work, at the narrowest gap; none where nothing can be won
    no_gap: float = 0.002  # over the bound: nothing is won that could be told
    finish: float = 1.0  # times as much for the best plan in the end, where the gap is wide
    large_less: int = 5  # times less of it on a large cluster
    large_widest: float = 6.0  # times as many of these at most: a plan has more fields there

    def budget(self, num_chips: int) -> int:
        """Return the instructions that may be simulated."""
        return min(self.most, self.instructions + self.per_chip * num_chips)

    def improvement(self, num_chips: int) -> int:
        """Return the instructions that small steps may simulate."""
        return min(self.most_improved, self.per_chip_improved * max(0, num_chips - self.large))

    def local_search(self, num_chips: int, seconds: float, bound: float) -> int:
        """Return the instructions that a local search may simulate: more where more can be won."""
        gap = max(0.0, seconds / bound - 1.0) if bound > 0.0 else self.wide_gap
        is_large = num_chips >= self.large
        most = self.last_mile // (self.large_less if is_large else 1)
        widest = self.large_widest if is_large else self.widest_more
        if gap <= self.wide_gap:
            share = max(self.least_share, (gap / self.wide_gap) ** self.narrow_power)
            return int(most * share) if gap > self.no_gap else 0
        return int(most * min(widest, (gap / self.wide_gap) ** self.gap_power))

    def is_wide(self, seconds: float, bound: float) -> bool:
        """Tell whether a step is so far above the bound that further kinds of plans are tried."""
        return 0.0 < bound * (1.0 + self.wide_gap) <= seconds

    def refinement(self, num_chips: int) -> int:
        """Return how many candidates of every schedule and shard level are cut exactly."""
        return min(self.refined, self.refined_large if num_chips >= self.large else self.refined)

    def width(self, num_chips: int) -> int:
        """Return how many times as many single chains are looked at."""
        return self.wider if num_chips >= self.large else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A line for people who wait."""

    doing: str
    best_seconds: float | None = None
    lower_bound_seconds: float | None = None
    simulated: int = 0


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Report nothing."""
    del progress
