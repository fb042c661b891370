"""The gradients and brought parameters of one exchange, as the engine holds them during a step.

An exchange is what one class of a bucket's parameters is on a rank: spans with the same holders.
Where nobody else holds a span, gradients stay as the units made them; else they are one vector from
the first weight pass of the bucket on. `taken` bytes may be negative: memory is given back.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from tutti.models.parameters import ParameterClass
from tutti.ownership.buckets import Bucket
from tutti.ownership.ownership import Name, Ownership, Span
from tutti.ownership.shard_overlaps import shared_cuts


@dataclass(slots=True)
class ExchangeState:
    """One exchange of a rank; sizes are elements."""

    units: range
    level: int
    loose: dict[int, int]  # unit → gradients that stay as it makes them
    flat: dict[int, int]  # unit → gradients that go into vectors
    joint: int = 0  # in spans that others hold, too
    kept: int = 0  # of all spans, this rank's own part
    kept_joint: int = 0
    crossing: int = 0  # of the kept ones: summed with other pipelines' at the end of the step
    updated: int = 0  # by the optimizer at a time: of the largest span
    # unit → kept elements of tied weights whose other end lies on other ranks
    tied: dict[int, int] = field(default_factory=dict)
    stays: bool = False  # parameters that another unit uses, too, are never let go
    uses: int = 0  # passes that parameters were brought for
    here: bool = False  # brought parameters are on the chip
    made: set[int] = field(default_factory=set)  # units whose loose gradients are on the chip
    flat_here: bool = False
    reduced: bool = False  # this rank's part of the sums is on the chip
    reductions: list[int] = field(default_factory=list)  # instructions of earlier micro-batches
    fetched: bool = False  # this rank's part of the parameters came from the host

    @property
    def whole(self) -> int:
        """All gradients."""
        return sum(self.loose.values()) + self.total_flat

    @property
    def total_flat(self) -> int:
        """Gradients that go into vectors."""
        return sum(self.flat.values())

    def begin(self) -> None:
        """Forget the step before."""
        self.uses, self.here, self.flat_here, self.reduced = 0, self.stays, False, False
        self.fetched = False
        self.reductions.clear()
        self.made.clear()

    def add(self, unit: int) -> int:
        """Make room for a unit's sums; return what it took."""
        taken = 0
        if unit not in self.made:
            self.made.add(unit)
            taken += self.loose.get(unit, 0)
        if not self.flat_here:
            self.flat_here = True
            taken += self.total_flat
        return taken

    def reduce(self) -> tuple[int, int, int]:
        """Begin to leave this rank its part of the sums; return what is taken and given back.

        And how much of what is taken goes when somebody waits for the sums: it is added to those
        of earlier micro-batches, until then it lies beside them.
        """
        if not self.flat_here:
            return 0, 0, 0
        self.flat_here = False
        was, self.reduced = self.reduced, True
        if self.level == 0:  # summed where they are
            return 0, 0, 0
        alone = self.total_flat - self.joint
        given = self.joint + (alone if was else 0)
        return self.kept_joint, given, self.kept_joint if was else 0

    def forget(self) -> int:
        """Let go of the step's gradients; return how many there were."""
        loose = sum(self.loose.get(unit, 0) for unit in self.made)
        vectors = self.total_flat if self.flat_here else 0
        if self.reduced:
            alone = self.total_flat - self.joint
            vectors += self.total_flat if self.level == 0 else alone + self.kept_joint
        self.made.clear()
        self.flat_here = self.reduced = False
        return loose + vectors

    def fetch(self) -> int:
        """Take this rank's part of the parameters from the host; return how many there are."""
        self.fetched = True
        return self.kept

    def leave(self) -> int:
        """Let what was fetched go, which was gathered; return how many there were."""
        was, self.fetched = self.fetched, False
        return self.kept if was else 0

    def bring(self) -> int:
        """Bring parameters for a pass; return how many take memory for it."""
        self.uses += 1
        was, self.here = self.here, True
        return 0 if was else self.whole

    def passed(self, units: range, *, upwards: bool) -> int:
        """Return how many parameters are let go when a pass over some units ends."""
        if not self.uses or (self.units[-1] if upwards else self.units[0]) not in units:
            return 0
        self.uses -= 1
        if self.uses or self.stays:
            return 0
        self.here = False
        return self.whole


def exchange_states(
    ownership: Ownership,
    buckets: Iterable[Bucket],
    place: tuple[int, int],
    rank: int,
    tied_apart: Container[Name] = (),
) -> Iterator[tuple[ParameterClass, ExchangeState]]:
    """Yield the exchanges of a rank's buckets, each once."""
    seen: set[tuple[int, ParameterClass]] = set()
    for bucket in buckets:
        for kind in ParameterClass:
            start, stop = bucket.span(kind)
            if bucket.rule(kind) is None or (start, kind) in seen:
                continue
            seen.add((start, kind))
            spans = ownership.kept_spans(bucket, kind, place[0])
            held = [span for span in spans if span.is_held_by(rank)]
            state = _state(held, range(start, stop), bucket.level(kind), rank, tied_apart)
            if state.level >= 2 and bucket.several_pipelines:
                cuts = shared_cuts(ownership.by_pipeline(bucket, kind), rank).values()
                state.crossing = sum(cut.stop - cut.start for some in cuts for cut in some)
            yield kind, state


def _state(
    spans: Iterable[Span], units: range, level: int, rank: int, tied_apart: Container[Name]
) -> ExchangeState:
    state = ExchangeState(units, level, {}, {})
    for span in spans:
        alone = len(span.members) == 1
        own = span.own(rank) if level else slice(0, span.size)
        tied = _kept_ends(span, own, tied_apart)
        state.tied |= tied
        target = state.loose if alone and level == 0 and not tied else state.flat
        for block in span.blocks:
            target[block.unit] = target.get(block.unit, 0) + block.size
        kept = own.stop - own.start
        state.kept += kept
        state.updated = max(state.updated, 0 if span.copied else kept)
        if not alone:
            state.joint += span.size
            state.kept_joint += kept
    return state


def _kept_ends(span: Span, own: slice, tied_apart: Container[Name]) -> dict[int, int]:
    """Return how many elements of tied weights a rank keeps of a span, by unit."""
    kept, start = {}, 0
    for block in span.blocks:
        stop = start + block.size
        if (block.unit, block.name) in tied_apart:
            kept[block.unit] = max(0, min(own.stop, stop) - max(own.start, start))
        start = stop
    return kept
