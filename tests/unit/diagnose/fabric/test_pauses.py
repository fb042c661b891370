"""Detectors of storms, congestion and circular waits, on drawn cases of the queue model."""

from __future__ import annotations

import pytest

from tutti.bench.beds.queue_cases import KINDS, run_case
from tutti.diagnose.fabric.pauses import find_pauses
from tutti.fabric.port_counters import PortCounters, changes


@pytest.mark.parametrize("kind", KINDS)
def test_kind_and_origin_are_named_in_ten_drawn_cases(kind: str) -> None:
    for seed in range(10):
        case = run_case(kind, seed)
        assert case.right, case


def test_cases_are_what_they_say() -> None:
    """Incasts have victims elsewhere; a circle stands though nobody holds it any more."""
    assert sum(bool(run_case("incast", seed).victims) for seed in range(10)) >= 5
    (found,) = run_case("deadlock", 3).findings
    assert found.words().count("waits for") == 3


def test_counters_that_run_backwards_are_left_out_and_named() -> None:
    before = {
        ("a", "b"): PortCounters(rate=1e9, sent_bytes=500, paused_s=1.0),
        ("b", "a"): PortCounters(rate=1e9, sent_bytes=900, paused_s=0.0),
    }
    after = {
        ("a", "b"): PortCounters(rate=1e9, sent_bytes=5e8, paused_s=1.25),
        ("b", "a"): PortCounters(rate=1e9, sent_bytes=10, paused_s=0.0),
        ("c", "a"): PortCounters(rate=1e9),
    }
    (one,), reset = changes(before, after, 1.0)
    assert (one.name, one.paused) == ("a → b", 0.25)
    assert one.used == pytest.approx(0.5, rel=0.01)
    assert reset == ["b → a"]
    assert changes(before, after, 0.0)[0] == []


def test_frames_stand_for_time_where_none_is_counted() -> None:
    before = {("s", "h"): PortCounters(rate=12.5e9)}
    after = {("s", "h"): PortCounters(rate=12.5e9, pause_frames=1500)}
    ((one,), _) = changes(before, after, 1.0)
    assert one.paused == pytest.approx(1500 * 65535 * 64 / 12.5e9)
    (found,) = find_pauses([one], hosts=["h"])
    assert (found.kind, found.origin) == ("storm", ("s → h",))
    assert "h stops s" in found.words()
