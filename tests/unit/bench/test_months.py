"""The formula for saving beside the best intervals of simulated months."""

from __future__ import annotations

import pytest

from tutti.bench.storage.months import month_rows


def test_single_months_lose_what_no_interval_could_know() -> None:
    for row in month_rows(seed=7, months=6):
        assert row.excess == pytest.approx(0.0, abs=0.05)
        # the grid of intervals that are tried may miss the formula's by a little
        assert -0.01 < row.single_mean <= row.single_worst
        assert row.single_p95 <= row.single_worst
        assert row.best_low_s <= row.best_s * 1.5
        assert row.best_high_s >= row.best_s / 1.5
        assert row.single_worst - row.chance_worst == pytest.approx(0.0, abs=0.15)
