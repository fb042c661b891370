"""Clocks of several hosts: here one clock under two names, so that the true offset is none."""

from __future__ import annotations

from tests.support.gloo import run_processes
from tutti.train.run.clocks import Offset, clock_offsets

KERNELS = ["one", "two", "one", "three"]


def offsets(rank: int) -> dict[str, Offset]:
    return clock_offsets(rank, KERNELS)


def test_an_offset_is_wrong_by_no_more_than_it_says(tmp_path) -> None:
    found = run_processes(offsets, len(KERNELS), tmp_path)
    assert set(found[0]) == {"one", "two", "three"}
    assert found[0]["one"] == Offset(0.0, 0.0)
    for name in ("two", "three"):
        assert 0 < found[0][name].error_s < 5
        assert abs(found[0][name].seconds) <= found[0][name].error_s + 1e-4
