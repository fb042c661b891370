"""Finds who keeps which part of tied weights that lie apart, from the Plan's layout."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.models.parameters import ParameterClass
from tutti.ownership.buckets import Bucket, tied_apart
from tutti.ownership.ownership import Name, tied_ends
from tutti.plan.plan import covers
from tutti.ranks.rank_places import Seat, Seats
from tutti.train.state.state import SpanState
from tutti.train.sync.synchronise import Synchronised
from tutti.train.sync.tied_weights import Keeper, TiedEnds, keepers


def make_ties(
    seats: Seats, seat: Seat, buckets: Sequence[Bucket], parameters: Synchronised
) -> TiedEnds | None:
    """Return this rank's part in joining tied weights; None where there is nothing to join."""
    spec = seats.spec
    if not tied_apart(seats.plan):
        return None
    if not any(covers(seat.stage.units, unit) for unit in (0, spec.head_unit)):
        return None
    ends = tied_ends(spec)
    owner = next(end for end in ends if end[0] == seats.plan.tied_owner)
    states: dict[Keeper, SpanState] = {}
    ends_kept = {end: _keepers(seats, seat, buckets, end, parameters, states) for end in ends}
    copies = [ends_kept[end] for end in ends if end != owner]
    return TiedEnds(seat.rank, ends_kept[owner], copies, states)


def _keepers(
    seats: Seats,
    seat: Seat,
    buckets: Sequence[Bucket],
    end: Name,
    parameters: Synchronised,
    states: dict[Keeper, SpanState],
) -> list[Keeper]:
    unit = end[0]
    bucket = next(b for b in buckets if b.start <= unit < b.stop)
    kind, ownership = ParameterClass.DENSE, seats.ownership
    level = bucket.level(kind)
    lines = ownership.by_pipeline(bucket, kind) if level >= 2 else [ownership.spans(bucket, kind)]
    spans = [span for line in lines for span in line]
    where = [seats[rank].place.pipeline for rank in range(seats.num_ranks)]
    width = seats.spec.embedding.dim
    kept = list(keepers(spans, end, level, width, where))
    own = {state.span.blocks: state for state in parameters.all_states()}
    for span in spans:
        if span.is_held_by(seat.rank) and span.blocks in own:
            for keeper in keepers([span], end, level, width, where):
                if keeper.rank == seat.rank:
                    own[span.blocks].make_flat()
                    states[keeper] = own[span.blocks]
    return kept
