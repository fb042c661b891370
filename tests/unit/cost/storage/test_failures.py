"""How often to save: the formula against months of failures that are simulated one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.cost.storage.failures import (
    FailureFacts,
    best_interval,
    best_simulated,
    lost_share,
    month_of_failures,
    simulated_share,
)

HOUR = 3600.0
LLAMA_3 = FailureFacts(  # 419 interruptions in 54 days; checkpoints and restarts in minutes
    mean_time_s=54 * 24 * HOUR / 419, stall_s=10.0, safe_s=30.0, restart_s=600.0
)
SMALL = FailureFacts(mean_time_s=24 * HOUR, stall_s=20.0, safe_s=120.0, restart_s=300.0)
SLOW = FailureFacts(mean_time_s=6 * HOUR, stall_s=60.0, safe_s=400.0, restart_s=900.0)


@pytest.mark.parametrize("facts", [LLAMA_3, SMALL, SLOW], ids=["llama-3", "small", "slow"])
def test_the_formula_loses_no_more_than_a_twentieth_beyond_the_best(facts: FailureFacts) -> None:
    """Over months with fixed seeds, against the best of 400 intervals for the same failures."""
    gaps = np.concatenate([month_of_failures(facts, seed) for seed in range(24)])
    formula = best_interval(facts)
    ours = simulated_share(facts, formula.interval_s, gaps)
    best = best_simulated(facts, gaps)
    assert ours <= best.lost_share * 1.05
    assert formula.lost_share == pytest.approx(ours, rel=0.1)


def test_one_month_by_its_seed() -> None:
    gaps = month_of_failures(LLAMA_3, seed=1)
    ours = simulated_share(LLAMA_3, best_interval(LLAMA_3).interval_s, gaps)
    assert ours <= best_simulated(LLAMA_3, gaps).lost_share * 1.05


def _walked(facts: FailureFacts, interval_s: float, gaps: np.ndarray) -> float:
    """The same month, event by event."""
    done = 0.0
    for gap in gaps:
        now, unsaved, saved = facts.restart_s, 0.0, 0.0
        pending: list[tuple[float, float]] = []  # (safe at, work in it)
        while True:
            begins = now + interval_s
            if begins + facts.stall_s > gap:
                break
            unsaved += interval_s
            pending.append((begins + facts.safe_s, unsaved))
            now = begins + facts.stall_s
        saved = max((work for safe, work in pending if safe <= gap), default=0.0)
        done += saved
    return 1.0 - done / float(np.sum(gaps))


@settings(max_examples=40, deadline=None)
@given(
    interval_s=st.floats(60.0, 20_000.0),
    stall_s=st.floats(1.0, 50.0),
    more_s=st.floats(0.0, 500.0),
    seed=st.integers(0, 1000),
)
def test_the_closed_form_of_a_month_is_that_of_its_events(
    interval_s: float, stall_s: float, more_s: float, seed: int
) -> None:
    facts = FailureFacts(
        mean_time_s=5 * HOUR, stall_s=stall_s, safe_s=stall_s + more_s, restart_s=400.0
    )
    gaps = month_of_failures(facts, seed, days=5.0)
    walked = _walked(facts, interval_s, gaps)
    assert simulated_share(facts, interval_s, gaps) == pytest.approx(walked, abs=1e-9)


def test_saves_do_not_overlap_and_fall_between_steps() -> None:
    slow = FailureFacts(mean_time_s=HOUR, stall_s=0.1, safe_s=600.0, restart_s=0.0)
    assert best_interval(slow).interval_s == 600.0
    long_step = FailureFacts(mean_time_s=HOUR, stall_s=0.1, safe_s=1.0, restart_s=0.0, step_s=900.0)
    assert best_interval(long_step).interval_s == 900.0


def test_nothing_is_done_where_restarts_take_longer_than_failures_do() -> None:
    lost = FailureFacts(mean_time_s=60.0, stall_s=10.0, safe_s=20.0, restart_s=600.0)
    assert best_interval(lost).lost_share == 1.0
    assert lost_share(lost, 1.0) == 1.0


def test_a_month_has_its_days_and_its_failures() -> None:
    gaps = month_of_failures(SMALL, seed=3)
    assert float(gaps.sum()) == pytest.approx(30 * 24 * HOUR)
    many = [len(month_of_failures(SMALL, seed)) - 1 for seed in range(200)]
    assert np.mean(many) == pytest.approx(30.0, rel=0.05)
