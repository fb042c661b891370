"""The figures of a step: of ranks, of pools, as numbers and as plain values."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tutti.observe.record import NUM_TIMES, PoolTimes, RankTimes, StepRecord, by_pool

seconds = st.floats(0, 1e6)
times = st.builds(
    RankTimes, step_s=seconds, compute_s=seconds, communication_s=seconds, bubble_s=seconds,
    copy_s=seconds, data_s=seconds, other_s=seconds, peak_bytes=seconds, overrun=seconds,
)  # fmt: skip


def rank(**more: float) -> RankTimes:
    plain = dict.fromkeys(
        ("compute_s", "communication_s", "bubble_s", "copy_s", "data_s", "other_s", "peak_bytes"),
        0.0,
    )
    return RankTimes(step_s=1.0, **{**plain, **more})


def record(**more: object) -> StepRecord:
    return StepRecord(
        step=3, loss=2.5, gradient_norm=1.0, learning_rate=1e-3, tokens=128, seconds=0.5,
        tokens_per_s=256.0, mfu=0.4, hfu=0.5, **more,
    )  # type: ignore[arg-type]  # fmt: skip


@given(own=times)
def test_times_travel_as_numbers(own: RankTimes) -> None:
    assert len(own.values()) == NUM_TIMES
    assert RankTimes.of_values(own.values()) == own


def test_a_pool_is_the_mean_of_its_ranks_and_the_largest_of_its_memory() -> None:
    ranks = [
        rank(compute_s=0.2, bubble_s=0.8, peak_bytes=10, overrun=0.1),
        rank(compute_s=0.9, data_s=0.1, peak_bytes=7),
        rank(compute_s=0.6, bubble_s=0.4, peak_bytes=30),
    ]
    found = by_pool(ranks, ["fast", "slow", "fast"])
    assert set(found) == {"fast", "slow"}
    fast = found["fast"]
    assert (fast.ranks, fast.peak_bytes, fast.overrun) == (2, 30, 0.1)
    assert abs(fast.compute_s - 0.4) < 1e-12
    assert abs(fast.bubble_s - 0.6) < 1e-12
    assert found["slow"].data_s == 0.1


def test_a_record_is_plain_and_leaves_out_what_there_is_not() -> None:
    written = record().to_document()
    assert "predicted_s" not in written
    assert "pools" not in written
    assert json.loads(json.dumps(written)) == written


def test_scalars_name_pools() -> None:
    pools = by_pool([rank(compute_s=0.2)], ["fast"])
    assert isinstance(pools["fast"], PoolTimes)
    found = record(pools=pools, predicted_s=0.4, skipped=True).scalars()
    assert found["fast/compute_s"] == 0.2
    assert (found["predicted_s"], found["skipped"], found["loss"]) == (0.4, 1.0, 2.5)
    assert "step" not in found
    assert all(isinstance(value, float) for value in found.values())
