"""The cheapest mixture of remedies, held against every mixture."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.search.cutting.test_cut_chain import UNITS, table
from tutti.search.cutting.memory_relief import Remedies, Slot, made_bytes, static_bytes
from tutti.search.cutting.relief_mixture import BUFFERS

BLOCKS = range(1, UNITS - 1)


def cheapest(slot: Slot, start: int, stop: int) -> float:
    """Return the least time of a range, by trying every number of units for every remedy."""
    t, blocks = slot.table, [u for u in range(start, stop) if u in BLOCKS]
    units, flight = range(start, stop), slot.in_flight
    made = made_bytes(slot)  # takes the place of what a unit kept

    def full(u: int) -> float:
        return max(flight * float(t.kept[0, u]), float(made[u]))

    def saving(u: int, kept: float) -> float:
        return min(flight * (float(t.kept[0, u]) - kept), full(u) - float(made[u]))

    held = sum(float(static_bytes(slot)[u]) + full(u) for u in units)
    excess = held - slot.usable_bytes
    plain = float(t.seconds[0, start:stop].sum())
    if excess <= 0:
        return plain
    best = np.inf
    for again, away, states in itertools.product(
        range(len(blocks) + 1), range(len(blocks) + 1), range(len(units) + 1)
    ):
        if again + away > len(blocks) or (away and states):
            continue
        if not ("activations" in slot.offload or not away) or not (
            "optimizer" in slot.offload or not states
        ):
            continue
        first, gone = blocks[:again], blocks[again : again + away]
        on_host = [*(u for u in units if u), *(u for u in units if not u)][:states]
        each = [float(t.optimizer_bytes[u]) for u in sorted(on_host)]
        moved, longest = sum(each), max(each, default=0.0)
        both = itertools.pairwise([0.0, *(float(t.optimizer_bytes[u]) if u in on_host else 0.0
                                          for u in units)])  # fmt: skip
        pair = max(a + b for a, b in both)
        static = sum(float(static_bytes(slot)[u] + made[u]) for u in units)
        if states and static - moved + pair > slot.usable_bytes + 1e-9:
            continue
        copied = sum(flight * float(t.kept[0, u]) for u in gone)
        saved = sum(saving(u, float(t.kept[2, u])) for u in first) + moved
        saved += sum(saving(u, 0.0) for u in gone)
        need = excess
        need += float(t.kept[0, first[0]] - t.kept[2, first[0]]) if first else 0.0
        need += BUFFERS * float(t.kept[0, gone[0]]) if gone else 0.0
        if saved < need - 1e-9 or copied > slot.host_bytes or moved > slot.host_bytes:
            continue
        copy = [float(t.kept[0, u]) / slot.copy_bandwidth for u in gone]
        backward = t.backward_input[0] + t.backward_weight[0]
        hidden = sum(float(t.forward[0, u]) for u in units if not first or u > first[-1])
        if not first and gone:
            hidden = sum(float(t.forward[0, u]) for u in units if u >= gone[0])
        cost = sum(float(t.seconds[2, u] - t.seconds[0, u]) for u in first)
        cost += max(0.0, sum(copy) - hidden) if gone else 0.0
        cost += sum(max(0.0, c - float(backward[u])) for c, u in zip(copy, gone, strict=True))
        if gone and gone[-1] == blocks[-1]:
            cost += sum(copy) / len(copy)
        cost += (moved + longest) / slot.copy_bandwidth / slot.micro_batches
        best = min(best, cost)
    return plain + best


@pytest.mark.parametrize("number", range(24))
def test_no_other_mixture_is_cheaper(number):
    draw = random.Random(number)
    slot = Slot(
        table=table(1.0, kept=draw.choice((1.0, 2.0)), again=draw.choice((0.2, 0.33))),
        in_flight=(flight := draw.choice((1.0, 2.0, 5.0))),
        usable_bytes=draw.uniform(0.75, 1.05) * 9.0 * UNITS + draw.uniform(0.0, 20.0),
        micro_batches=draw.choice((1, 8)) if flight == 1.0 else 8,
        copy_bandwidth=draw.choice((0.8, 2.0, 5.0, 20.0)),
        host_bytes=draw.choice((4.0, 12.0, 100.0)),
        recompute=("none", "full"),
        offload=draw.choice(((), ("activations",), ("optimizer",), ("optimizer", "activations"))),
    )
    sizes = np.array([draw.choice((3.0, 6.0, 9.0)) for _ in range(UNITS)])
    slot = replace(slot, table=replace(slot.table, optimizer_bytes=sizes))
    found = Remedies(slot)
    for start, stop in itertools.combinations(range(UNITS + 1), 2):
        if np.isfinite(found.seconds[start, start + 1 : stop + 1]).all():
            wanted = cheapest(slot, start, stop)
            assert found.seconds[start, stop] == pytest.approx(wanted, rel=1e-9), (start, stop)


def mixed(copy_bandwidth: float) -> Slot:
    """Room for three units of seven; the host takes two."""
    return Slot(
        table=table(1.0),
        in_flight=2.0,
        usable_bytes=9.0 * UNITS + 2.0 * UNITS - 3.0,
        copy_bandwidth=copy_bandwidth,
        host_bytes=4.0,
        offload=("activations",),
    )


def test_units_are_kept_moved_and_recomputed_side_by_side():
    recompute, offload = Remedies(mixed(20.0)).part(0, UNITS)
    again = [u for a, b in recompute.full for u in range(a, b)]
    away = [u for a, b in offload.activations for u in range(a, b)]
    assert again
    assert away
    assert not set(again) & set(away)
    assert set(again) | set(away) < set(BLOCKS)  # some stay


def test_copies_that_cannot_hide_one_by_one_are_spread():
    slot = Slot(
        table=table(1.0, again=0.9),
        in_flight=4.0,
        usable_bytes=9.0 * UNITS + 4.0 * UNITS - 5.0,
        copy_bandwidth=2.5,  # 0.4 s for a copy, 0.33 s for a forward pass
        host_bytes=100.0,
        offload=("activations",),
    )
    _, offload = Remedies(slot).part(0, UNITS)
    assert offload.activations == ((1, 2), (3, 4))
    faster = Slot(
        table=slot.table, in_flight=4.0, usable_bytes=slot.usable_bytes, copy_bandwidth=10.0,
        host_bytes=100.0, offload=("activations",),
    )  # fmt: skip
    _, offload = Remedies(faster).part(0, UNITS)
    assert offload.activations == ((1, 3),)
