"""Which sequences of a step a rank computes: the same sequences under every plan."""

from __future__ import annotations

from tutti.plan.plan import Plan
from tutti.ranks.rank_places import Seat


def sequences_before(plan: Plan, seat: Seat, micro_batch: int) -> int:
    """Return how many of a step's sequences come before a rank's first one in a micro-batch."""
    before = sum(p.sequences for p in plan.pipelines[: seat.place.pipeline])
    size = plan.pipelines[seat.place.pipeline].micro_batch
    return before + micro_batch * size + seat.first_sequence


def sample_indices(plan: Plan, seat: Seat, step: int, micro_batch: int) -> range:
    """Return the job-wide numbers of the sequences that a rank computes; steps count from 0."""
    first = step * plan.job.global_batch + sequences_before(plan, seat, micro_batch)
    return range(first, first + seat.replica.sequences)
