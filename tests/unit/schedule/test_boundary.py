"""Boundaries between unlike stages, held against an array that is really cut and put together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import SEQUENCE_LENGTH, Allocator, replicas
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica, Stage
from tutti.schedule.boundary import (
    Boundary,
    Holder,
    held,
    holders,
    must_join,
    wanted,
)
from tutti.schedule.check import check_boundary

UNITS = ((0, 1),)


@st.composite
def neighbours(draw):
    micro_batch, chips = draw(st.integers(1, 6)), Allocator()
    stages = [
        Stage(units=UNITS, replicas=draw(replicas(UNITS, micro_batch, chips))) for _ in range(2)
    ]
    return micro_batch, *stages


@given(neighbours())
def test_every_rank_gets_exactly_its_part_of_the_tensor(drawn):
    micro_batch, lower, upper = drawn
    wire = Boundary(lower, upper, SEQUENCE_LENGTH)
    assert list(check_boundary(wire)) == []
    tensor = np.arange(micro_batch * SEQUENCE_LENGTH).reshape(micro_batch, SEQUENCE_LENGTH)
    senders = {holder.rank: holder for holder in holders(lower)}
    for target in holders(upper):
        got = np.full_like(tensor, -1)
        for transfer in wire.to_rank(target.rank):
            source = senders[transfer.sender]
            (b0, b1), (s0, s1) = transfer.batch, transfer.sequence
            assert any(
                batch[0] <= b0 < b1 <= batch[1] and part[0] <= s0 < s1 <= part[1]
                for batch, part in held(source, SEQUENCE_LENGTH)
            )
            assert (got[b0:b1, s0:s1] == -1).all(), "a piece arrives twice"
            got[b0:b1, s0:s1] = tensor[b0:b1, s0:s1]
        for batch, part in wanted(target, SEQUENCE_LENGTH):
            place = (slice(*batch), slice(*part))
            assert (got[place] == tensor[place]).all()
            got[place] = -1
        assert (got == -1).all(), "more arrives than was asked for"


@given(neighbours())
def test_both_ends_name_the_same_transfers(drawn):
    _, lower, upper = drawn
    wire = Boundary(lower, upper, SEQUENCE_LENGTH)
    sent = [t for h in holders(lower) for t in wire.from_rank(h.rank)]
    received = [t for h in holders(upper) for t in wire.to_rank(h.rank)]
    assert sorted(sent) == sorted(received)


@given(neighbours())
def test_slices_of_a_tensor_parallel_group_join_to_its_whole_part(drawn):
    _, _, upper = drawn
    for target in holders(upper):
        if must_join(target.replica):
            slices = [
                token
                for tp in range(target.replica.tp)
                for token in row(target._replace(tp=tp), wanted)
            ]
            assert slices == row(target, held)


def row(holder: Holder, which) -> list[tuple[int, int]]:
    """A rank's tokens in the order in which it has them: one sequence after the other."""
    order = {}
    for batch, part in which(holder, SEQUENCE_LENGTH):
        for sequence in range(*batch):
            order.setdefault(sequence, []).extend(range(*part))
    return [(sequence, token) for sequence in sorted(order) for token in order[sequence]]


def test_causal_work_is_balanced_over_context_ranks():
    replica = Replica(chips=ChipSet.of("a/0/0-3"), cp=4)
    work = [
        sum(sum(range(*part)) for _, part in held(Holder(cp, replica, cp, 0, (0, 1)), 64))
        for cp in range(4)
    ]
    assert len(set(work)) == 1


def test_a_byte_crosses_a_boundary_once():
    """One sender, a receiving group of 4 without sequence parallelism: slices, not copies."""
    one = Stage(units=UNITS, replicas=(Replica(chips=ChipSet.of("a/0/0"), sequences=2),))
    four = Stage(units=UNITS, replicas=(Replica(chips=ChipSet.of("a/0/1-4"), tp=4, sequences=2),))
    sent = Boundary(one, four, 64).from_rank(0)
    assert sum((t.batch[1] - t.batch[0]) * (t.sequence[1] - t.sequence[0]) for t in sent) == 128
