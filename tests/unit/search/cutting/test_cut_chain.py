"""The exact cut of a chain against every other cut, and what memory makes of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tutti.search.cutting.cut_chain import best_cut
from tutti.search.cutting.memory_relief import Slot
from tutti.search.pricing.unit_tables import Config, ConfigTable

UNITS = 7


def table(block: float, *, kept: float = 1.0, end: float = 0.5, again: float = 0.3) -> ConfigTable:
    """A table of equal blocks between a cheap embedding and a head."""
    seconds = np.full(UNITS, block)
    seconds[0], seconds[-1] = 0.1 * block, end * block
    third = np.tile(seconds / 3.0, (3, 1))
    recompute = np.zeros((3, UNITS))
    recompute[2, 1:-1] = again * block
    held = np.full((3, UNITS), kept)
    held[2, 1:-1] = 0.1 * kept
    return ConfigTable(
        config=Config("pool"),
        forward=third,
        recompute=recompute,
        backward_input=third,
        backward_weight=third,
        kept=held,
        passing=np.zeros(UNITS),
        dense=np.ones(UNITS),
        expert=np.zeros(UNITS),
        parameter_bytes=np.full(UNITS, 1.0),
        gradient_bytes=np.full(UNITS, 2.0),
        optimizer_bytes=np.full(UNITS, 6.0),
        boundary=0.0,
    )


def slowest(slots: list[Slot], ranges: tuple[tuple[int, int], ...]) -> float:
    return max(
        float(slot.table.seconds[0, a:b].sum()) for slot, (a, b) in zip(slots, ranges, strict=True)
    )


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 2.5), (3.0, 1.0, 1.0), (1.0, 2.0, 4.0)])
def test_no_other_cut_is_faster(speeds):
    slots = [Slot(table=table(speed), in_flight=1.0) for speed in speeds]
    found = best_cut(slots)
    assert found is not None
    every = (
        tuple(itertools.pairwise((0, *inner, UNITS)))
        for inner in itertools.combinations(range(1, UNITS), len(speeds) - 1)
    )
    best = min((slowest(slots, r), sum_of(slots, r)) for r in every)
    assert found.pace == pytest.approx(best[0], rel=1e-9)
    assert sum(found.seconds) == pytest.approx(best[1], rel=1e-9)


def sum_of(slots: list[Slot], ranges: tuple[tuple[int, int], ...]) -> float:
    return sum(
        float(slot.table.seconds[0, a:b].sum()) for slot, (a, b) in zip(slots, ranges, strict=True)
    )


def test_recomputation_only_where_memory_asks_for_it():
    states = 9.0 * UNITS  # nothing is sharded
    plain = Slot(table=table(1.0), in_flight=2.0, usable_bytes=states + 2.0 * UNITS)
    found = best_cut([plain])
    assert found is not None
    assert found.recompute[0].full == ()
    tight = Slot(
        table=table(1.0), in_flight=2.0, usable_bytes=states + 2.0 * UNITS - 1.0, offload=()
    )
    found = best_cut([tight])
    assert found is not None
    # 1 byte short, and 0.9 come back for the block's own backward: two blocks at 1.8 each do.
    assert found.recompute[0].full == ((1, 3),)
    assert found.seconds[0] == pytest.approx(float(tight.table.seconds[0].sum()) + 2 * 0.3)


def test_the_optimizer_goes_to_the_host_when_recomputation_is_not_enough():
    states = 9.0 * UNITS
    slot = Slot(
        table=table(1.0),
        in_flight=1.0,
        usable_bytes=states - 6.0,
        micro_batches=4,
        copy_bandwidth=1.0,
        host_bytes=100.0,
        offload=("optimizer",),
    )
    found = best_cut([slot])
    assert found is not None
    # Of three units: two come and go when the step closes, and six bytes are missing even then.
    assert found.offload[0].optimizer == ((1, 4),)
    moved, longest = 3 * 6.0, 6.0
    plain = float(slot.table.seconds[0].sum())
    assert found.recompute[0].full == ()
    assert found.seconds[0] == pytest.approx(plain + (moved + longest) / 1.0 / 4)


def test_activations_go_to_the_host_where_copies_hide():
    states = 9.0 * UNITS
    slot = Slot(
        table=table(1.0, again=0.9),
        in_flight=4.0,
        usable_bytes=states + 4.0 * UNITS - 1.0,
        copy_bandwidth=1e6,
        host_bytes=100.0,
    )
    found = best_cut([slot])
    assert found is not None
    assert found.offload[0].activations == ((1, 2),)
    assert found.recompute[0].full == ()


def test_what_does_not_fit_anyhow_has_no_cut():
    slot = Slot(table=table(1.0), in_flight=1.0, usable_bytes=3.0, offload=())
    assert best_cut([slot]) is None
    assert best_cut([Slot(table=table(1.0), in_flight=1.0)] * (UNITS + 1)) is None


def test_a_given_cut_is_kept():
    slots = [Slot(table=table(1.0), in_flight=1.0), Slot(table=table(5.0), in_flight=1.0)]
    found = best_cut(slots, [(0, 4), (4, 7)])
    assert found is not None
    assert found.ranges == ((0, 4), (4, 7))


def stage_times(slots: list[Slot], ranges: tuple[tuple[int, int], ...], stages: int) -> list[float]:
    each = [
        float(slot.table.seconds[0, a:b].sum()) for slot, (a, b) in zip(slots, ranges, strict=True)
    ]
    return [sum(each[s::stages]) for s in range(stages)]


def test_units_move_between_stages_until_the_slowest_has_its_least():
    """Ranges of one length would give the slow stage as many units as the fast one."""
    fast, slow = Slot(table=table(1.0), in_flight=1.0, ranges=2), Slot(
        table=table(2.0), in_flight=1.0, ranges=2
    )  # fmt: skip
    slots = [fast, slow, fast, slow]
    found = best_cut(slots)
    assert found is not None
    every = [
        tuple(itertools.pairwise((0, *inner, UNITS)))
        for inner in itertools.combinations(range(1, UNITS), 3)
    ]
    least = min(max(stage_times(slots, ranges, 2)) for ranges in every)
    assert max(stage_times(slots, found.ranges, 2)) == pytest.approx(least, rel=1e-9)
    assert sum(found.seconds) == pytest.approx(sum(stage_times(slots, found.ranges, 2)))


def test_ranges_of_a_stage_share_its_memory():
    """One range may keep much if the other keeps little; each alone would be short of its half."""
    states, kept = 9.0 * UNITS, 2.0 * UNITS
    slot = Slot(table=table(1.0), in_flight=2.0, ranges=2, usable_bytes=states + kept, offload=())
    found = best_cut([slot] * 2, [(0, 2), (2, UNITS)])
    assert found is not None
    assert not any(part.full or part.selective for part in found.recompute)
    less = Slot(
        table=table(1.0), in_flight=2.0, ranges=2, usable_bytes=states + kept - 1.0, offload=()
    )
    found = best_cut([less] * 2, [(0, 2), (2, UNITS)])
    assert found is not None
    assert sum(b - a for part in found.recompute for a, b in part.full) == 2  # of the stage
    assert best_cut([Slot(table=table(1.0), in_flight=2.0, ranges=2, usable_bytes=9.0)] * 2) is None


def test_a_unit_that_ends_a_range_stays_on_the_chip_while_others_can_go():
    slot = Slot(
        table=table(1.0, again=0.9),
        in_flight=4.0,
        ranges=2,
        usable_bytes=9.0 * UNITS + 4.0 * UNITS - 1.0,
        copy_bandwidth=1.5,  # 0.67 s for a copy; a forward pass takes 0.33 s
        host_bytes=100.0,
        offload=("activations",),
    )
    found = best_cut([slot] * 2, [(0, 3), (3, UNITS)])
    assert found is not None
    away = [span for part in found.offload for span in part.activations]
    assert away == [(1, 2)]  # neither unit 2, which ends a range, nor the ends of the model
