"""Intervals: wide enough for what was not measured, no wider than unseen rows ask for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.runs import PUBLISHED
from tutti.cost.calibration.fit import unfitted
from tutti.cost.calibration.interval_fit import (
    CHIP,
    DECIDES,
    STACK,
    Off,
    fit_widths,
    held_out_half_widths,
)
from tutti.cost.calibration.intervals import (
    EXPERTS,
    NARROW,
    OTHERS,
    SHARE,
    Known,
    Widths,
    interval,
    shipped_widths,
)
from tutti.cost.calibration.residuals import least_half_width
from tutti.cost.calibration.shipped import Calibration, Range, shipped_calibrations
from tutti.cost.calibration.table import load_runs
from tutti.cost.calibration.validate import sorted_into_stacks

WIDTHS = Widths(
    cluster=0.1, stack=0.2, chip=0.3, narrow=0.15, experts=0.25,
    octave={"hidden": 0.12, "sequence_length": 0.05, OTHERS: 0.04}, pair=0.9,
)  # fmt: skip
INSIDE = {"hidden": 4096.0, "sequence_length": 2048.0, "tp": 4.0, EXPERTS: 0.0, NARROW: 0.0}


def off(judge: str, stack: str, residual: float, **more: Any) -> Off:
    plain = Off(judge, stack, "", (stack,), residual, 0.0, False, False, {})
    return plain._replace(**more)


def calibration(half_width: float | None = 0.08) -> Calibration:
    found = next(c for c in shipped_calibrations() if c.name == "megatron-a100")
    ranges = {
        "hidden": Range(low=2048, high=8192),
        "sequence_length": Range(low=1024, high=4096),
        "tp": Range(low=1, high=8),
        EXPERTS: Range(low=0, high=0),
    }
    return replace(found, ranges=ranges, fit=replace(found.fit, half_width=half_width))


def test_eight_of_ten_further_rows_stay_within_what_rows_say() -> None:
    dice = np.random.default_rng(7)
    held = [
        abs(dice.standard_t(3)) <= (least_half_width(dice.standard_t(3, 14)) or math.inf)
        for _ in range(4000)
    ]
    assert np.mean(held) == pytest.approx(SHARE, abs=0.025)


def test_too_few_rows_tell_nothing() -> None:
    assert least_half_width(np.array([0.1, -0.2, 0.3])) is None
    assert least_half_width(np.array([0.1, -0.2, 0.3, -0.05])) == pytest.approx(0.3)


def test_an_interval_is_as_far_below_as_above_in_ratio() -> None:
    low, high = interval(10.0, 0.2)
    assert low < 10.0 < high
    assert low * high == pytest.approx(100.0)


def test_what_is_less_known_is_wider() -> None:
    known = calibration()
    widths = [WIDTHS.half_width(known, one, INSIDE) for one in Known if one is not Known.NOTHING]
    widths.append(WIDTHS.half_width(None, Known.NOTHING, INSIDE))
    assert widths == pytest.approx([0.08, math.hypot(0.08, 0.1), 0.2, 0.3])


def test_a_calibration_of_too_few_rows_is_worth_no_more_than_another_stack() -> None:
    few = calibration(half_width=None)
    assert WIDTHS.half_width(few, Known.CLUSTER, INSIDE) == pytest.approx(0.2)


@pytest.mark.parametrize("known", [Known.CLUSTER, Known.STACK, Known.CHIP])
def test_intervals_widen_with_the_distance(known: Known) -> None:
    found = [
        WIDTHS.half_width(calibration(), known, INSIDE | {"hidden": hidden})
        for hidden in (8192.0, 16384.0, 32768.0, 65536.0)
    ]
    assert found == sorted(found)
    assert found[3] ** 2 - found[0] ** 2 == pytest.approx(3 * 0.12**2)
    below = WIDTHS.half_width(calibration(), known, INSIDE | {"hidden": 1024.0})
    assert below == pytest.approx(found[1])


def test_kinds_of_work_that_nobody_measured_are_wider() -> None:
    known = calibration()
    routed = WIDTHS.half_width(known, Known.CLUSTER, INSIDE | {EXPERTS: 64.0})
    assert routed == pytest.approx(math.hypot(0.08, 0.25))
    seen = replace(known, ranges={**known.ranges, EXPERTS: Range(low=0, high=256)})
    assert WIDTHS.half_width(seen, Known.CLUSTER, INSIDE | {EXPERTS: 64.0}) == pytest.approx(0.08)
    narrow = WIDTHS.half_width(None, Known.NOTHING, INSIDE | {NARROW: 1.0})
    assert narrow == pytest.approx(math.hypot(0.3, 0.15))


def test_two_plans_are_told_apart_by_more_than_their_ratio_is_off() -> None:
    assert not WIDTHS.apart(1.05, 1.0, 0.1)
    assert not WIDTHS.apart(1.0, 1.05, 0.1)
    assert WIDTHS.apart(1.1, 1.0, 0.1)


def drawn_stacks(count: int, bias: float, spread: float, rows: int = 20) -> list[Off]:
    """Rows of stacks that are each off by something of their own, and by noise."""
    dice = np.random.default_rng(3)
    found = []
    for number in range(count):
        shared = dice.normal(0, bias)
        for residual in shared + dice.normal(0, spread, rows):
            found.append(off(STACK, f"s{number}", float(residual)))
            found.append(off(CHIP, f"s{number}", float(2.0 * residual)))
    return found


def test_widths_are_what_unseen_stacks_are_off_by() -> None:
    judged = drawn_stacks(12, 0.1, 0.05)
    found = fit_widths(judged)
    eighty = 1.2816 * math.hypot(0.1, 0.05)  # a normal's 10–90 %
    assert found.stack == pytest.approx(eighty, rel=0.3)
    assert found.chip == pytest.approx(2 * found.stack, rel=0.15)
    inside = np.abs([one.residual for one in judged]) <= held_out_half_widths(judged)
    assert inside.mean() == pytest.approx(SHARE, abs=0.08)


def test_a_stack_says_nothing_of_its_own_widths() -> None:
    """Were its rows among those that tell, the wild stack's intervals would hold them."""
    judged = drawn_stacks(3, 0.02, 0.02)
    wild = [off(STACK, "wild", 0.9 if i % 2 else -0.9) for i in range(80)]
    widths = held_out_half_widths([*judged, *wild])[-len(wild) :]
    assert widths.max() < 0.2
    assert fit_widths([*judged, *wild]).stack > 0.2


def test_a_distance_that_costs_is_found() -> None:
    dice = np.random.default_rng(5)
    judged = []
    for number in range(4):
        for octaves in (1.0, 2.0):
            for residual in dice.normal(0, 0.15 * math.sqrt(octaves), 40):
                where = {"hidden": octaves, "tp": 0.0}
                judged.append(off("hidden", f"s{number}", float(residual), octaves=where))
    found = fit_widths(judged)
    assert found.octave["hidden"] == pytest.approx(0.192, rel=0.2)
    assert found.octave[OTHERS] > 0, "nothing is known as well beyond as inside"


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the shared data are not here")
def test_the_host_decides_the_shares_that_formulas_say() -> None:
    """Of steps of narrow models, by prices at the priors: no measured time is looked at."""
    table, _, _ = load_runs(PUBLISHED)
    for stack, rows in sorted_into_stacks(table):
        narrow = rows[table.shape.hidden[rows] <= 1024]
        host = [name for name in DECIDES["hidden"] if name in stack.compute]
        if not len(narrow) or not host:
            continue
        plain, runs = unfitted(stack), table.take(narrow)
        seconds = plain.predict(runs)
        for name in host:
            moved = plain.z.copy()
            moved[stack.compute.index(name)] += 0.01
            ratio = stack.value(name, np.array(0.01)) / stack.value(name, np.array(0.0))
            longer = replace(plain, z=moved).predict(runs)
            shares = np.log(longer / seconds) / np.log(ratio)
            told = math.sqrt(np.mean(shares**2))
            assert told == pytest.approx(DECIDES["hidden"][name], abs=0.01), name
        compared = set(host)
    assert compared == set(DECIDES["hidden"])


def test_pairs_of_one_job_share_what_is_common() -> None:
    """A stack that is off by one factor everywhere still tells its plans apart."""
    dice = np.random.default_rng(9)
    judged = []
    for number in range(6):
        shared = dice.normal(0, 0.2)
        for job in range(10):
            for _ in range(2):
                residual = float(shared + dice.normal(0, 0.01))
                choice = (f"s{number}", str(job))
                judged.append(off(STACK, f"s{number}", residual, choice=choice))
    assert fit_widths(judged).pair < 0.3


def test_what_ships_is_sound() -> None:
    shipped = shipped_widths()
    assert shipped.cluster < shipped.stack < 0.35
    assert shipped.octave["hidden"] > 0
    assert 0.2 < shipped.pair < 1.5
    told = [c.fit.half_width for c in shipped_calibrations() if c.fit.half_width is not None]
    assert len(told) >= 6
    for found in shipped_calibrations():
        width = found.fit.half_width
        assert width is None or found.fit.mape_pct / 100 < width < 0.4, found.name
        assert (width is None) == (found.fit.rows < 4), found.name
