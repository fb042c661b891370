"""What a search has found so far: drafts with their prices, best first."""

from __future__ import annotations

from dataclasses import dataclass, field

from tutti.plan.plan import Plan
from tutti.search.cutting.build_draft import Part
from tutti.search.pricing.simulate_draft import Quick
from tutti.search.strategy.draft import Draft
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.estimate import Estimate


@dataclass(slots=True)
class Found:
    """A draft that was priced by simulation."""

    draft: Draft
    seconds: float
    value: float  # of the objective
    key: object
    whole: tuple[Plan, Estimate] | None = None  # where the whole step was simulated
    parts: tuple[Part, ...] = ()  # that it was made of
    settled: Quick | None = None  # as it came from them


@dataclass(slots=True)
class State:
    """What a search has so far, best first, one entry per strategy."""

    found: list[Found] = field(default_factory=list)
    rejected: int = 0
    skipped: int = 0

    @property
    def best(self) -> Found | None:
        """The fastest so far."""
        return self.found[0] if self.found else None

    def take(self, found: Found) -> None:
        """Keep a draft where its place is; the faster of two of one strategy."""
        known = next((f for f in self.found if f.key == found.key), None)
        if known is not None:
            if known.value <= found.value:
                return
            self.found.remove(known)
        self.found.append(found)
        self.found.sort(key=lambda f: f.value)
        for late in self.found[THRESHOLDS.most_whole :]:
            late.whole = None  # is not needed again, and large
