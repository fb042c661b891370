"""What a search has found so far: simulated drafts, best first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tutti.search.pricing.simulate_draft import SimulatedDraft
from tutti.search.thresholds import THRESHOLDS


@dataclass(slots=True)
class RankedDrafts:
    """What a search has so far, best first, one entry per strategy."""

    drafts: list[SimulatedDraft] = field(default_factory=list)
    rejected: int = 0
    skipped: int = 0

    @property
    def best(self) -> SimulatedDraft | None:
        """The fastest so far."""
        return self.drafts[0] if self.drafts else None

    def take(self, draft: SimulatedDraft) -> None:
        """Keep a draft where its place is; the faster of two of one strategy."""
        known = next((other for other in self.drafts if other.key == draft.key), None)
        if known is not None:
            if known.value <= draft.value:
                return
            self.drafts.remove(known)
        self.drafts.append(draft)
        self.drafts.sort(key=lambda each: each.value)
        most = THRESHOLDS.most_whole  # whole steps are large, and not needed again behind these
        self.drafts[most:] = [replace(late, whole=None) for late in self.drafts[most:]]
