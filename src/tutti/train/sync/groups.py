"""Which groups of ranks a Plan's collectives run in, and for what. Pure.

A rank derives its own groups from its seat alone, in an order that all agree on: groups of the
interconnect's own libraries are made one after the other by their members, and two ranks that share
two groups must come to them in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tutti.errors import InputError
from tutti.models.parameters import ParameterClass
from tutti.ownership.buckets import Bucket, make_buckets
from tutti.ownership.shard_overlaps import shared_cuts
from tutti.plan.plan import covers
from tutti.ranks.links import Use
from tutti.ranks.rank_places import Seat, Seats
from tutti.train.state.unit_ranks import joined_units, unit_ranks


class RankGroup(NamedTuple):
    """Ranks that have a collective together; ordered as they are made."""

    ranks: tuple[int, ...]  # rising
    use: Use


def groups_of(seats: Seats, rank: int) -> tuple[RankGroup, ...]:
    """Return the groups that a rank is in, each once, in the order in which they are made."""
    seat = seats[rank]
    groups = {RankGroup(tuple(range(seats.num_ranks)), "scalars")}
    groups |= {
        RankGroup(members.ranks, "block") for members in (seat.tensor, seat.context, seat.experts)
    }
    groups.add(RankGroup(seat.tensor.ranks, "boundary"))
    groups |= set(_synchronised(seats, seat))
    groups |= {
        RankGroup(unit_ranks(seats, unit), "gradients") for unit in joined_units(seats, seat)
    }
    return tuple(sorted(group for group in groups if len(group.ranks) > 1))


def all_groups(seats: Seats) -> tuple[RankGroup, ...]:
    """Return the groups of all ranks."""
    return tuple(sorted({g for rank in range(seats.num_ranks) for g in groups_of(seats, rank)}))


def pools_of(seats: Seats, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the pools that the chips of some ranks come from."""
    return tuple(sorted({seats.map.place(rank).chip.pool for rank in ranks}))


def require_meetings(seats: Seats, rank: int) -> None:
    """Raise if ranks of an expert group would call its collectives different numbers of times.

    Recomputing a layer of experts exchanges its tokens again, so all members do it or none.
    """
    seat = seats[rank]
    blocks = range(1, seats.spec.num_layers + 1)
    sparse = [u for u in seat.units if u in blocks and seats.spec.block(u).moe is not None]
    for member in seat.experts.ranks:
        for unit in sparse:
            again = covers(seats[member].replica.recompute.full, unit)
            if again != covers(seat.replica.recompute.full, unit):
                raise InputError(
                    f"plan: ranks {min(rank, member)} and {max(rank, member)} share an expert "
                    f"group, but only one of them recomputes unit {unit} in full: the tokens it "
                    "exchanges again would meet nobody; recompute it on all replicas or on none"
                )


def _synchronised(seats: Seats, seat: Seat) -> Iterator[RankGroup]:
    """Yield the groups in which gradients are reduced and parameters gathered."""
    for bucket in make_buckets(seats.plan):
        if bucket.start not in seat.units:
            continue
        for kind, rule in bucket.rules():
            if bucket.is_first(kind):
                yield from _of_bucket(seats, seat, bucket, kind, rule.shard_level)


def _of_bucket(
    seats: Seats, seat: Seat, bucket: Bucket, kind: ParameterClass, level: int
) -> Iterator[RankGroup]:
    for span in seats.ownership.kept_spans(bucket, kind, seat.place.pipeline):
        if span.is_held_by(seat.rank):
            yield RankGroup(span.holders, "gradients")
            if level:
                yield RankGroup(span.holders, "parameters")
    if level >= 2 and bucket.several_pipelines:
        for ranks in shared_cuts(seats.ownership.by_pipeline(bucket, kind), seat.rank):
            yield RankGroup(ranks, "gradients")
